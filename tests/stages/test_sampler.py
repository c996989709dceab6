"""The sampler: taking sequences over costs what their logs cost and no more, and whatever is wrong
with one of them is that one's error.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from msgspec.structs import replace

from bench.takeover import measure
from services.compute.exchange.undecided import FIRST_PATIENCE_S
from services.operator.redis_server import socket_path
from services.sampler import service as service_module
from services.sampler.detokenizer import Detokenizer
from services.sampler.request_state import OTHER_DRAW
from services.sampler.rows import FAILED, LOST, UNKNOWN
from services.sampler.service import SamplerService
from shared.model.decision import DRAW
from shared.model.sampling_params import SamplingParams
from shared.process.clock import Clock
from shared.process.settings import SamplerSettings
from shared.wire.logprobs import PromptLogprobs
from shared.wire.messages import SequenceIntro, StepCandidates, StepDecisions, StepEvents, TokenEvent, decode, encode
from shared.wire.registry import Registry
from shared.wire.streams import DEAD_LETTER, MESSAGE, decisions, events, log_key
from shared.wire.token_log import end_of, end_request, parse_log
from tests.conftest import running_redis
from tests.faulty_redis import FaultyRedis
from tests.stages.line_of_stages import MODEL, LocalStage, ids, replica, sampler_tokenizer

PARAMS = SamplingParams(max_tokens=100, temperature=0.0)
BREAKS = 777  # a token whose text can't be made


class Bench:
    """A sampler whose round trips are counted, and what comes out of it."""

    def __init__(self, url: str, proxy: FaultyRedis) -> None:
        self.client, self.proxy = redis.Redis.from_url(url), proxy
        self.client.flushall()
        settings = SamplerSettings(redis_url=proxy.url, replica_id="sampler-1")
        self.ahead_s = 0.0  # of the real time
        clock = Clock(monotonic=lambda: time.monotonic() + self.ahead_s)
        self.service = SamplerService(LocalStage("sampler", settings), settings, sampler_tokenizer(), clock)
        self.service.stage.transport.run(
            lambda pipe: pipe.ping()
        )  # connected: what is counted from here on is the sampler's own
        self.service.news.send(lambda pipe: pipe.ping())
        self.service.news.receive()
        self.step = 0

    def close(self) -> None:
        self.service.news.close()
        self.service.stage.transport.close()
        self.client.close()

    def answer(
        self, *rows: tuple[int, int, int, int], intros: tuple[SequenceIntro, ...] = ()
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """Rows are (handle, position, likeliest token, token before). Returns (token, is finished)
        by handle and position.
        """
        self.step += 1
        handles, positions, tokens, before = (ids(*column) for column in zip(*rows, strict=True))
        count = len(rows)
        zeros = np.zeros(count, np.float32)
        step = StepCandidates(
            "compute-1",
            self.step,
            intros,
            ids(),
            handles,
            positions,
            np.ones(count, np.int32),
            tokens,
            zeros,
            zeros,
            np.ones(count, np.int32),
            zeros.astype("f8"),
            np.full(count, -1, np.int32),
            zeros,
            before,
        )
        self.proxy.arm()
        self.service.answer(step)
        told: dict[tuple[int, int], tuple[int, int]] = {}
        for _, values in self.client.xrange(decisions("compute-1").key):
            message = decode(StepDecisions, values[MESSAGE])
            if message.step == self.step:
                columns = (message.handles, message.positions, message.token_ids, message.is_finished)
                told |= {
                    (handle, position): (token, end)
                    for handle, position, token, end in zip(*(each.tolist() for each in columns), strict=True)
                }
        return told

    def fill(self, handle: int, *tokens: int) -> None:
        for position, token in enumerate(tokens, 1):
            self.client.xadd(
                log_key(f"r{handle}.0"),
                {MESSAGE: encode(TokenEvent(f"r{handle}.0", position, token, "x"))},
                id=f"{position}-0",
            )

    def log(self, handle: int) -> list[TokenEvent]:
        return parse_log(self.client.xrange(log_key(f"r{handle}.0")))

    def errors(self) -> list[str]:
        sent: Any = self.client.xrange(events("gateway-1").key)
        return [
            end.error.message for _, values in sent if (end := end_of(values)) is not None and end.error is not None
        ]


def intro(
    handle: int, params: SamplingParams = PARAMS, eos: tuple[int, ...] = (), num_decided: int = 0
) -> SequenceIntro:
    return SequenceIntro(
        handle, f"r{handle}.0", "gateway-1", params, eos, 2, ids(40, 41), num_decided_tokens=num_decided
    )


def break_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the text of one token can't be made."""
    add = Detokenizer.add

    def fragile(detokenizer: Detokenizer, token_id: int) -> str:
        if token_id == BREAKS:
            raise RuntimeError("no such text")
        return add(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "add", fragile)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[tuple[str, FaultyRedis]]:
    folder = tmp_path_factory.mktemp("sampler")
    with running_redis(folder, redis_binary) as url, FaultyRedis(socket_path(folder), folder / "proxy.sock") as proxy:
        yield url, proxy


@pytest.fixture
def bench(server: tuple[str, FaultyRedis]) -> Iterator[Bench]:
    bench = Bench(*server)
    yield bench
    bench.close()


def test_a_takeover_is_one_read_for_all_and_one_write(bench: Bench) -> None:
    handles = range(1, service_module.REBUILD_AT_ONCE + 1)
    for handle in handles:
        bench.fill(handle, *range(300, 320))
    told = bench.answer(*((handle, 21, 500, 319) for handle in handles), intros=tuple(map(intro, handles)))
    assert told == {(handle, 21): (500, 0) for handle in handles}
    assert bench.proxy.names.count(b"XRANGE") == len(handles) and bench.proxy.names.count(b"EVAL") == 1, (
        bench.proxy.names
    )
    assert bench.proxy.num_writes == 2, "a read of the logs; the step, with the next read"
    assert all(len(bench.log(handle)) == 21 for handle in handles)


def test_a_sequence_that_is_known_is_not_read_again_when_it_is_introduced_again(bench: Bench) -> None:
    bench.fill(1, 300, 301)
    bench.answer((1, 3, 302, 301), intros=(intro(1),))
    assert bench.answer((1, 3, 302, 301), (1, 4, 303, 302), intros=(intro(1),)) == {(1, 3): (302, 0), (1, 4): (303, 0)}
    assert bench.service.num_rebuilt == 1 and b"XRANGE" not in bench.proxy.names


def test_a_handle_that_names_another_request_now_is_rebuilt(bench: Bench) -> None:
    """Its compute replica has begun a new life under its old name."""
    bench.answer((1, 1, 300, -1), intros=(intro(1),))
    bench.fill(2, 400)
    other = SequenceIntro(1, "r2.0", "gateway-1", PARAMS, (), 2, ids(40, 41))
    assert bench.answer((1, 2, 401, 400), intros=(other,)) == {(1, 2): (401, 0)}
    assert [event.token_id for event in bench.log(2)] == [400, 401] and len(bench.log(1)) == 1


def test_a_sequence_that_is_not_known_is_asked_for(bench: Bench) -> None:
    assert bench.answer((1, 1, 300, -1), (2, 1, 301, -1), intros=(intro(2),)) == {
        (1, 1): (UNKNOWN, 0),
        (2, 1): (301, 0),
    }


def test_candidates_that_were_computed_upon_another_token_than_the_logs_are_passed_over(bench: Bench) -> None:
    bench.answer((1, 1, 300, -1), intros=(intro(1),))
    assert bench.answer((1, 2, 301, 999)) == {}
    assert bench.answer((1, 1, 999, -1)) == {(1, 1): (300, 0)}, "compute is told, and cuts back"
    assert bench.answer((1, 2, 302, 300)) == {(1, 2): (302, 0)}
    assert [event.token_id for event in bench.log(1)] == [300, 302]


def test_what_another_sampler_decided_meanwhile_is_taken_over(bench: Bench) -> None:
    bench.answer((1, 1, 300, -1), intros=(intro(1),))
    bench.client.xadd(log_key("r1.0"), {MESSAGE: encode(TokenEvent("r1.0", 2, 444, " theirs"))}, id="2-0")
    assert bench.answer((1, 2, 301, 300)) == {(1, 2): (444, 0)}
    assert bench.answer((1, 3, 302, 301)) == {}
    assert bench.answer((1, 3, 302, 444)) == {(1, 3): (302, 0)}


def test_rows_of_several_steps_are_decided_in_order_with_one_write(bench: Bench) -> None:
    told = bench.answer(
        (1, 1, 300, -1),
        (2, 1, 400, -1),
        (1, 2, 301, 300),
        (2, 2, 401, 400),
        (1, 3, 302, 301),
        intros=(intro(1), intro(2)),
    )
    assert told == {(1, 1): (300, 0), (2, 1): (400, 0), (1, 2): (301, 0), (2, 2): (401, 0), (1, 3): (302, 0)}
    assert [event.token_id for event in bench.log(1)] == [300, 301, 302] and bench.proxy.num_writes == 2, (
        "a read of the logs, and one write"
    )
    (packed,) = (
        decode(StepEvents, values[MESSAGE]).events for _, values in bench.client.xrange(events("gateway-1").key)
    )
    assert [(event.request_id, event.position) for event in (decode(TokenEvent, each) for each in packed)] == [
        ("r1.0", 1),
        ("r2.0", 1),
        ("r1.0", 2),
        ("r2.0", 2),
        ("r1.0", 3),
    ]


@pytest.mark.parametrize("ender", ["eos", "error", "length"])
def test_nothing_is_decided_beyond_what_ends_a_sequence_in_the_same_message(
    ender: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ender == "error":
        break_text(monkeypatch)
    params = SamplingParams(max_tokens=2, temperature=0.0) if ender == "length" else PARAMS
    token = {"eos": 7, "error": BREAKS, "length": 301}[ender]
    told = bench.answer(
        (1, 1, 300, -1),
        (1, 2, token, 300),
        (1, 3, 302, token),
        (2, 1, 400, -1),
        intros=(intro(1, params, eos=(7,)), intro(2)),
    )
    assert told == {(1, 1): (300, 0), (1, 2): (FAILED if ender == "error" else token, 1), (2, 1): (400, 0)}
    assert [event.token_id for event in bench.log(1)] == ([300, None] if ender == "error" else [300, token])
    assert [key for key in bench.service.states if key[1] == 1] == []


def test_all_rows_of_a_sequence_that_has_ended_are_answered_at_once(bench: Bench) -> None:
    """Another replica has finished it; compute asks for what it holds back."""
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for position, token in enumerate((300, 301, 302), 1):
        bench.client.xadd(
            log_key("r1.0"), {MESSAGE: encode(TokenEvent("r1.0", position, token, "x"))}, id=f"{position}-0"
        )
    bench.client.xadd(
        log_key("r1.0"),
        {MESSAGE: encode(TokenEvent("r1.0", 4, 303, "x", finish_reason="length")), b"e": b"1"},
        id="4-0",
    )
    told = bench.answer((1, 2, 301, 300), (1, 3, 302, 301), (1, 4, 303, 302), intros=(intro(1, params),))
    assert told == {(1, 2): (301, 0), (1, 3): (302, 0), (1, 4): (303, 1)}
    assert bench.service.states == {}


def test_what_was_computed_upon_another_history_is_passed_over(bench: Bench) -> None:
    """The token right before a row is the log's by chance; the one before that is not."""
    bench.fill(1, 300, 555, 302)
    told = bench.answer((1, 2, 301, 300), (1, 3, 302, 301), (1, 4, 303, 302), intros=(intro(1),))
    assert told == {(1, 2): (555, 0), (1, 3): (302, 0)} and len(bench.log(1)) == 3


@pytest.mark.parametrize("num_logged", [1, 2, 3])
def test_rows_behind_those_that_the_log_holds_are_decided_in_the_same_message(num_logged: int, bench: Bench) -> None:
    """As compute asks a sampler that takes a sequence over: for all that it has not heard of, decided or not."""
    tokens = (300, 301, 302, 303, 304)
    bench.fill(1, *tokens[:num_logged])
    rows = [
        (1, position, token, before)
        for position, (token, before) in enumerate(zip(tokens, (-1, *tokens), strict=False), 1)
    ]
    assert bench.answer(*rows, intros=(intro(1),)) == {
        (1, position): (token, 0) for position, token in enumerate(tokens, 1)
    }
    assert [event.token_id for event in bench.log(1)] == list(tokens)


@pytest.mark.parametrize("theirs", [301, 555])
def test_what_follows_a_row_that_was_decided_elsewhere_is_decided_anew(theirs: int, bench: Bench) -> None:
    """Another sampler has written position 2 meanwhile, the same token or another. What was
    computed on the other is not to be.
    """
    bench.answer((1, 1, 300, -1), (2, 1, 400, -1), intros=(intro(1), intro(2)))
    bench.client.xadd(log_key("r1.0"), {MESSAGE: encode(TokenEvent("r1.0", 2, theirs, "x"))}, id="2-0")
    told = bench.answer((1, 2, 301, 300), (2, 2, 401, 400), (1, 3, 302, 301), (1, 4, 303, 302))
    follows = {(1, 3): (302, 0), (1, 4): (303, 0)} if theirs == 301 else {}
    assert told == {(1, 2): (theirs, 0), (2, 2): (401, 0)} | follows
    assert [event.token_id for event in bench.log(1)] == [300, theirs] + ([302, 303] if theirs == 301 else [])
    position = len(bench.log(1)) + 1
    assert bench.answer((1, position, 310, bench.log(1)[-1].token_id or 0)) == {(1, position): (310, 0)}, (
        "and it goes on"
    )


@pytest.mark.parametrize("is_introduced_again", [False, True])
def test_the_surplus_rows_of_a_sequence_that_has_ended_change_nothing(is_introduced_again: bool, bench: Bench) -> None:
    assert bench.answer(
        (1, 1, 300, -1), intros=(intro(1, SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(300,))),)
    ) == {(1, 1): (300, 1)}
    whole = bench.client.xrange(log_key("r1.0"))
    surplus = bench.answer((1, 2, 301, 300), (1, 3, 302, 301), intros=(intro(1),) if is_introduced_again else ())
    assert all(end == is_introduced_again for _, end in surplus.values())
    assert bench.client.xrange(log_key("r1.0")) == whole
    assert bench.errors() == [] and bench.client.xlen(DEAD_LETTER) == 0


def test_a_log_with_a_gap_ends_its_request_with_one_error_and_no_other(bench: Bench) -> None:
    for handle in (1, 2):
        bench.fill(handle, 300, 301, 302)
    bench.client.xdel(log_key("r1.0"), "2-0")
    told = bench.answer((1, 4, 303, 302), (2, 4, 303, 302), intros=(intro(1), intro(2)))
    assert told == {(1, 4): (FAILED, 1), (2, 4): (303, 0)}
    (error,) = bench.errors()
    assert "lost a part of this request's tokens" in error
    bench.answer((1, 4, 303, 302))
    assert bench.client.xrevrange(log_key("r1.0"), count=1)[0][0] == b"3-1"


def test_a_log_that_has_lost_its_end_while_it_ran_is_to_be_computed_again(bench: Bench) -> None:
    """Redis came back from a power loss, and this sampler knows more than the log."""
    for position in (1, 2, 3):
        bench.answer((1, position, 300 + position, 299 + position if position > 1 else -1), intros=(intro(1),))
    bench.client.delete(log_key("r1.0"))
    bench.fill(1, 301)
    assert bench.answer((1, 4, 304, 303), (1, 5, 305, 304)) == {(1, 4): (LOST, 0)}
    assert bench.answer((1, 4, 304, 303)) == {(1, 4): (UNKNOWN, 0)}
    assert bench.answer((1, 4, 304, 303), intros=(intro(1, num_decided=3),)) == {(1, 4): (LOST, 0)}
    assert bench.answer((2, 2, 302, 301), intros=(replace(intro(2), request_id="r1.0"),)) == {(2, 2): (302, 0)}, (
        "which begins as another sequence"
    )
    assert bench.errors() == [] and [event.position for event in bench.log(1)] == [1, 2]


def test_a_log_with_fewer_tokens_than_compute_was_told_is_to_be_computed_again(bench: Bench) -> None:
    """Redis has lost a log's tail, and the sampler that wrote it has died too: what is left looks whole."""
    bench.fill(1, 50, 51)
    assert bench.answer((1, 5, 54, 53), intros=(intro(1, num_decided=4),)) == {(1, 5): (LOST, 0)}
    assert bench.errors() == [] and len(bench.log(1)) == 2


@pytest.mark.parametrize("draw", [None, "gumbel-0"])
def test_a_log_that_another_rule_began_is_not_drawn_on_in_silence(draw: str | None, bench: Bench) -> None:
    """Its request ends with one error that says so. A greedy one goes on: any rule takes the same
    tokens; and so does one that the present rule began.
    """
    first = TokenEvent("r1.0", 1, 300, "x", draw=draw)
    hot = SamplingParams(max_tokens=100, temperature=1.0)
    for handle, (params, begun_by) in enumerate([(hot, draw), (PARAMS, draw), (hot, DRAW)], 1):
        bench.client.xadd(
            log_key(f"r{handle}.0"),
            {MESSAGE: encode(replace(first, request_id=f"r{handle}.0", draw=begun_by))},
            id="1-0",
        )
        told = bench.answer((handle, 2, 301, 300), intros=(intro(handle, params),))
        assert told == {(handle, 2): (FAILED, 1) if params is hot and begun_by == draw else (301, 0)}
    assert bench.errors() == [OTHER_DRAW]
    assert [bench.log(handle)[-1].finish_reason for handle in (1, 2, 3)] == ["error", None, None]
    assert bench.answer((4, 1, 300, -1), intros=(intro(4),)) == {(4, 1): (300, 0)}
    assert bench.answer((4, 2, 301, 300)) == {(4, 2): (301, 0)}
    assert [event.draw for event in bench.log(4)] == [DRAW, None]


def test_a_text_that_can_not_be_made_is_its_requests_error_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    break_text(monkeypatch)
    told = bench.answer((1, 1, 300, -1), (2, 1, BREAKS, -1), (3, 1, 302, -1), intros=(intro(1), intro(2), intro(3)))
    assert told == {(1, 1): (300, 0), (2, 1): (FAILED, 1), (3, 1): (302, 0)}
    assert bench.errors() == ["the text of the answer could not be made: no such text"]
    bench.fill(4, 300, BREAKS)
    told = bench.answer((4, 3, 303, BREAKS), (1, 2, 301, 300), intros=(intro(4),))
    assert told == {(4, 3): (FAILED, 1), (1, 2): (301, 0)}, "and nor can it be made again from the log"


def test_the_logprobs_of_a_prompt_are_in_the_log_with_its_first_token_and_nowhere_else(bench: Bench) -> None:
    asked = PromptLogprobs(ids(40, 41), np.array([-1.5], "f4"), ids(2), ids(42), np.array([-0.5], "f4"))
    bench.answer((1, 1, 300, -1), intros=(replace(intro(1), prompt_logprobs=asked),))
    [first] = bench.log(1)
    assert first.prompt_logprobs is not None and first.prompt_logprobs.texts == tuple(
        sampler_tokenizer().decode([each]) for each in (40, 41, 42)
    )
    assert first.prompt_logprobs.logprobs.tolist() == [-1.5] and first.prompt_logprobs.top_token_ids.tolist() == [42]
    assert all(state.intro.prompt_logprobs is None for state in bench.service.states.values()), (
        "they are in memory no longer than they must be"
    )
    again = replace(intro(1), handle=2, prompt_logprobs=asked)  # compute was killed before it heard of the token
    assert bench.answer((2, 1, 999, -1), (2, 2, 301, 300), intros=(again,)) == {(2, 1): (300, 0), (2, 2): (301, 0)}
    assert [event.prompt_logprobs is not None for event in bench.log(1)] == [True, False]


def test_a_request_for_no_token_ends_once_whoever_is_asked(bench: Bench) -> None:
    params = SamplingParams(max_tokens=0, temperature=0.0)
    asked = replace(intro(1, params), echo_text="the prompt")
    assert bench.answer((1, 1, 300, -1), intros=(asked,)) == {(1, 1): (FAILED, 1)}
    [end] = bench.log(1)
    assert (end.position, end.token_id, end.text, end.finish_reason, end.error) == (
        0,
        None,
        "the prompt",
        "length",
        None,
    )
    whole = bench.client.xrange(log_key("r1.0"))
    assert bench.answer((2, 1, 300, -1), intros=(replace(asked, handle=2),)) == {(2, 1): (FAILED, 1)}
    assert bench.client.xrange(log_key("r1.0")) == whole and bench.errors() == [] and bench.service.states == {}
    bench.service.stage.transport.run(lambda pipe: end_request(pipe, MODEL, "r3.0", None))
    assert bench.answer((3, 1, 300, -1), intros=(intro(3, params),)) == {(3, 1): (FAILED, 1)}
    assert [event.finish_reason for event in bench.log(3)] == ["cancelled"], "a cancel that came first stays"


def test_a_takeover_of_many_long_logs_keeps_computes_patience(
    server: tuple[str, FaultyRedis], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready requests are answered while the others are being read: python -m bench.takeover has the real sizes."""
    assert service_module.ANSWER_EVERY_S < FIRST_PATIENCE_S / 2
    monkeypatch.setattr(service_module, "ANSWER_EVERY_S", 0.0)
    found = measure(server[0], service_module.REBUILD_AT_ONCE, 300)
    assert found.answers == service_module.REBUILD_AT_ONCE, "one for each, as soon as it is ready"


def test_rows_that_run_ahead_of_a_logged_one_are_decided_with_it(bench: Bench) -> None:
    """Asked again after a takeover: the log holds the first row, and the others follow from it."""
    bench.fill(1, 300)
    told = bench.answer((1, 1, 300, -1), (1, 2, 500, 300), (1, 3, 501, 500), intros=(intro(1),))
    assert told == {(1, 1): (300, 0), (1, 2): (500, 0), (1, 3): (501, 0)}
    assert [event.token_id for event in bench.log(1)] == [300, 500, 501]


def test_what_a_replica_has_left_behind_is_forgotten_before_what_a_silent_one_has(bench: Bench) -> None:
    """And if it comes back, it is asked for an introduction, and goes on."""
    service, stage = bench.service, bench.service.stage
    assert isinstance(stage, LocalStage)
    bench.answer((1, 1, 50, -1), intros=(intro(1),))
    stage.live = Registry((replica("compute", "compute-1"),))
    bench.ahead_s = service_module.FORGET_GONE_AFTER_S + 1
    service.forget_untouched()
    assert len(service.states) == 1, "it lives"
    stage.live = Registry((replica("compute", "compute-2"),))
    service.forget_untouched()
    assert not service.states
    assert bench.answer((1, 2, 51, 50)) == {(1, 2): (UNKNOWN, 0)}
    assert bench.answer((1, 2, 51, 50), intros=(intro(1, num_decided=1),)) == {(1, 2): (51, 0)}
