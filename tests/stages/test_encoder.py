"""The tokenizer stage: one text that can't be encoded is one request's error, and what a replica
died of is claimed alone.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace

from services.tokenizer import service as service_module
from services.tokenizer.encoder import Encoder
from services.tokenizer.service import TokenizerService
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from shared.process.settings import TokenizerSettings
from shared.wire.entries import append_to_group
from shared.wire.messages import ChatMessage, EncodingParams, GenerateRequest, TokenizedRequest, decode
from shared.wire.registry import announce
from shared.wire.streams import DEAD_LETTER, MESSAGE, log_key, prompts, replica_key, requests
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.stages.line_of_stages import FILES, MODEL, LocalStage, ask, ids, replica, text_tokenizer

MakeService = Callable[[str], TokenizerService]
SURROGATE = "half a character: \ud83d"


@pytest.mark.parametrize(
    ("num_tokens", "num_top", "fits"),
    [(12_000, 20, True), (20_000, 20, False), (200_000, 0, True), (300_000, 0, False), (300_000, None, True)],
)
def test_the_logprobs_of_a_prompt_are_bounded(num_tokens: int, num_top: int | None, fits: bool) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=num_top)
    request = GenerateRequest("r.0", None, MODEL, params, prompt_token_ids=np.full(num_tokens, 7, np.int32))
    [found] = Encoder(text_tokenizer(), FILES).encode([request], 300_000)
    if fits:
        assert isinstance(found, TokenizedRequest) and found.params == params
    else:
        assert (
            isinstance(found, Invalid) and found.param == "prompt_logprobs" and "at most 262144 logprobs" in str(found)
        )


class Fragile:
    """The demo's tokenizer, but for the texts that break it, as some break some tokenizers."""

    def __init__(self) -> None:
        self.inner = text_tokenizer()
        self.chat_template = self.inner.chat_template
        self.batches: list[list[str]] = []

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.batches.append(texts)
        if any("breaks it" in text for text in texts):
            raise RuntimeError("unreachable code")
        if any("ends it" in text for text in texts):
            raise SystemExit(9)
        return self.inner(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        if 7 in token_ids:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")
        return self.inner.decode(token_ids, **options)


@pytest.mark.parametrize("is_chat", [False, True])
def test_one_text_among_64_fails_alone(is_chat: bool) -> None:
    encoder = Encoder(Fragile(), FILES)
    for text in (SURROGATE, "this breaks it"):
        texts = [f"number {number}" for number in range(63)]
        texts.insert(40, text)
        asked = [ask(f"r{number}.0", each) for number, each in enumerate(texts)]
        if is_chat:
            asked = [replace(each, prompt=None, messages=(ChatMessage("user", each.prompt or ""),)) for each in asked]
        found = encoder.encode(asked, FILES.max_model_len)
        (failed,) = [number for number, each in enumerate(found) if isinstance(each, Invalid)]
        assert failed == 40 and found[40].param == ("messages" if is_chat else "prompt"), text
        expected = encoder.encode(asked[:40] + asked[41:], FILES.max_model_len)
        assert [each.prompt_token_ids.tolist() for each in found[:40] + found[41:]] == [
            each.prompt_token_ids.tolist() for each in expected
        ], text


def test_a_tokenizer_with_more_tokens_than_the_model_is_the_fault_of_its_files(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer, text = text_tokenizer(), "a hydroelectric power plant"
    largest = max(tokenizer(text)["input_ids"])
    files = dataclasses.replace(FILES, config=FILES.config | {"vocab_size": largest})
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(tokenizer, files)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "tokens outside the model's vocabulary" in line and f"vocab_size={largest}" in line
    for request in (ask("r0.0", text), replace(ask("r1.0", ""), prompt=None, messages=(ChatMessage("user", text),))):
        [found] = encoder.encode([request], 1024)
        assert isinstance(found, Invalid) and found.param is None and found.code == "model_not_supported"
        assert "its tokenizer.json does not fit its config.json" in str(found)
    of_client = GenerateRequest("r2.0", None, MODEL, SamplingParams(), prompt_token_ids=ids(largest))
    [found] = encoder.encode([of_client], 1024)
    assert isinstance(found, Invalid) and found.param == "prompt"
    caplog.clear()
    Encoder(tokenizer, FILES)
    assert not caplog.records


def test_an_echo_that_can_not_be_made_fails_alone() -> None:
    asked = [
        GenerateRequest(f"r{number}.0", None, MODEL, SamplingParams(), prompt_token_ids=ids(5, number), echo=True)
        for number in (6, 7, 8)
    ]
    assert [type(each) for each in Encoder(Fragile(), FILES).encode(asked, 1024)] == [
        TokenizedRequest,
        Invalid,
        TokenizedRequest,
    ]


@pytest.mark.parametrize("text", ["a", "a word ", "\n", "é"])
def test_of_megabytes_a_part_is_encoded(text: str) -> None:
    """The others wait for the tokenizer. What it can know only from the whole, it encodes whole."""
    asked, tokenizer = ask("r.0", text * 1_000_000), Fragile()
    cut = replace(asked, encoding=EncodingParams(truncate_prompt_tokens=7, keeps_beginning=True))
    short = replace(cut, prompt=text * 100)
    [refused, kept, same] = Encoder(tokenizer, FILES).encode([asked, cut, short], 256)
    assert (
        isinstance(refused, Invalid)
        and refused.code == "context_length_exceeded"
        and "maximum context length is 256 tokens" in str(refused)
    )
    assert isinstance(kept, TokenizedRequest) and isinstance(same, TokenizedRequest)
    assert kept.prompt_token_ids.tolist() == same.prompt_token_ids.tolist() and len(kept.prompt_token_ids) == 7
    assert sum(len(each) for batch in tokenizer.batches for each in batch) < 20_000


@pytest.fixture
def make_service(tmp_path: Path, redis_binary: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeService]:
    """Tokenizers of these names on one Redis; their connections are closed at the end."""
    monkeypatch.setattr(service_module, "CLAIM_IDLE_MS", 0)
    monkeypatch.setattr(service_module, "CLAIM_EVERY_S", 0)
    with running_redis(tmp_path / "redis", redis_binary) as url, ExitStack() as at_the_end:

        def make(replica_id: str) -> TokenizerService:
            settings = TokenizerSettings(redis_url=url, replica_id=replica_id)
            service = TokenizerService(
                LocalStage("tokenizer", settings), settings, Encoder(Fragile(), FILES), FILES.max_model_len
            )
            at_the_end.callback(service.stage.transport.close)
            service.reader.ensure_group()
            return service

        yield make


@pytest.fixture
def service(make_service: MakeService) -> TokenizerService:
    return make_service("tokenizer-1")


def put(client: "redis.Redis", *texts: str) -> None:
    pipe = client.pipeline(transaction=True)
    for number, text in enumerate(texts):
        append_to_group(pipe, requests(MODEL), ask(f"r{number}.0", text))
    pipe.execute()


def handed_on(client: "redis.Redis") -> list[str]:
    return [decode(TokenizedRequest, values[MESSAGE]).request_id for _, values in client.xrange(prompts(MODEL).key)]


def test_a_text_that_ends_the_process_takes_no_innocent_along(
    service: TokenizerService, make_service: MakeService
) -> None:
    """Five successors claim one entry at a time, those first that were delivered least often; then
    it is a dead letter, with one clear error.
    """
    client = service.stage.transport.client
    put(client, *(["fine"] * 5), "this ends it", *(["fine"] * 10))
    with pytest.raises(SystemExit):
        service.handle(*service.reader.read(count=64, block_ms=1))
    assert handed_on(client) == []
    for life in range(2, 6):
        heir = make_service(f"tokenizer-{life}")
        with pytest.raises(SystemExit):
            heir.claim()
        assert all(len(batch) == 1 for batch in heir.encoder.tokenizer.batches)
    assert sorted(handed_on(client)) == sorted(f"r{number}.0" for number in range(16) if number != 5)
    make_service("tokenizer-6").claim()
    (end,) = parse_log(client.xrange(log_key("r5.0")))
    assert end.finish_reason == "error" and "could not be handled" in end.error.message
    assert client.xlen(DEAD_LETTER) == 1 and client.xlen(requests(MODEL).key) == 0


def test_the_first_successor_hands_all_innocents_on(service: TokenizerService, make_service: MakeService) -> None:
    client = service.stage.transport.client
    put(client, "fine", "this ends it", "fine", "fine")
    with pytest.raises(SystemExit):
        service.handle(*service.reader.read(count=64, block_ms=1))
    entries: Any = client.xrange(requests(MODEL).key)
    client.xclaim(requests(MODEL).key, "tokenizer", "tokenizer-1", 0, [entries[1][0]])  # it was somebody's death before
    with pytest.raises(SystemExit):
        make_service("tokenizer-2").claim()
    assert sorted(handed_on(client)) == ["r0.0", "r2.0", "r3.0"]


def test_a_request_that_is_not_a_request_is_an_error_for_its_own_client_only(service: TokenizerService) -> None:
    client = service.stage.transport.client
    client.xadd(requests(MODEL).key, {MESSAGE: b"\xff", b"r": b"broken.0\xff", b"g": b"gateway-1"})
    put(client, "fine")
    service.handle(*service.reader.read(count=64, block_ms=1))
    assert handed_on(client) == ["r0.0"] and client.xlen(requests(MODEL).key) == 0
    assert client.xlen("events:gateway-1") == 1


def test_a_compute_replica_counts_before_the_heartbeat_has_seen_it(service: TokenizerService) -> None:
    client = service.stage.transport.client
    assert not service.stage.registry.replicas and service.longest_sequence() == FILES.max_model_len
    compute = replace(replica("compute", "compute-1"), max_model_len=64)
    announce(client, compute)
    client.persist(replica_key("compute", "compute-1"))  # its lease may be shorter than this test
    put(client, "fine")
    service.handle(*service.reader.read(count=64, block_ms=1))
    [(_, values)] = client.xrange(prompts(MODEL).key)
    prompt = decode(TokenizedRequest, values[MESSAGE])
    assert prompt.params.max_tokens == 64 - len(prompt.prompt_token_ids)


@pytest.mark.parametrize(
    ("num_prompt", "asked", "given"),
    [(56, 32_000, 200), (56, 200, 200), (56, 7, 7), (56, None, 200), (255, 32_000, 1), (256, 0, 0)],
)
def test_max_tokens_is_cut_to_the_room_that_the_prompt_leaves(num_prompt: int, asked: int | None, given: int) -> None:
    request = GenerateRequest(
        "r.0", None, MODEL, SamplingParams(max_tokens=asked), prompt_token_ids=np.full(num_prompt, 7, np.int32)
    )
    [found] = Encoder(text_tokenizer(), FILES).encode([request], 256)
    assert isinstance(found, TokenizedRequest) and found.params.max_tokens == given


@pytest.mark.parametrize(
    ("num_prompt", "asked", "wanted"), [(256, 32_000, 257), (256, None, 257), (300, 5, 301), (300, 0, 300)]
)
def test_a_prompt_without_room_for_an_answer_is_refused_with_the_numbers(
    num_prompt: int, asked: int | None, wanted: int
) -> None:
    request = GenerateRequest(
        "r.0", None, MODEL, SamplingParams(max_tokens=asked), prompt_token_ids=np.full(num_prompt, 7, np.int32)
    )
    [found] = Encoder(text_tokenizer(), FILES).encode([request], 256)
    assert isinstance(found, Invalid) and found.code == "context_length_exceeded"
    assert f"maximum context length is 256 tokens. However, you requested {wanted} tokens" in str(found)


def test_a_prompt_that_is_cut_for_an_answer_as_long_as_the_model_keeps_all_but_one_token() -> None:
    request = GenerateRequest(
        "r.0",
        None,
        MODEL,
        SamplingParams(max_tokens=32_000),
        prompt_token_ids=np.arange(2, 302, dtype=np.int32) % 60,
        encoding=EncodingParams(None, None, -1),
    )
    [found] = Encoder(text_tokenizer(), FILES).encode([request], 256)
    assert isinstance(found, TokenizedRequest) and (len(found.prompt_token_ids), found.params.max_tokens) == (255, 1)
