"""How a model is sampled when the client does not say it: as its makers say."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from services.operator import model_store
from services.operator.model_store import pull
from services.requests.bodies.parse import parse
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from services.requests.prepare import with_model_defaults
from shared.model.files import DEMO_MODEL, open_model
from shared.model.gguf.config import make_generation_config
from shared.model.gguf.reader import read_head
from shared.model.sampling_params import MAX_TOKENS, SamplingParams
from shared.process.errors import StartupError
from shared.wire.replica import Replica

FILES = open_model("demo")


class Registry:
    def of(self, stage: str, model: str) -> list[Replica]:
        return [
            Replica(
                stage, "r", "here", 1, 0.0, model=model, sampling={"temperature": 0.2, "top_p": 0.9, "max_tokens": 1024}
            )
        ]


class Context:
    registry = Registry()


def params_of(schema: type[GenerateBody], **asked: object) -> SamplingParams:
    body = parse(schema, json.dumps({"model": "m", **asked}).encode())
    assert isinstance(body, CompletionBody | ChatCompletionBody)
    return with_model_defaults(Context(), body.intent(), "m")  # type: ignore[arg-type]  # what it looks at of a context


def sampled(**asked: object) -> tuple[float, float]:
    params = params_of(CompletionBody, prompt="x", **asked)
    return params.temperature, params.top_p


def test_what_a_request_does_not_say_is_as_the_model_s_makers_say() -> None:
    assert sampled() == (0.2, 0.9)
    assert sampled(temperature=1.0) == (1.0, 0.9)
    assert sampled(temperature=0, top_p=0.5) == (0.0, 0.5)
    assert sampled(use_beam_search=True) == (1.0, 1.0)


def test_an_answer_is_as_long_as_the_model_s_makers_say_unless_the_request_does() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert params_of(ChatCompletionBody, messages=messages).max_tokens == 1024
    assert params_of(ChatCompletionBody, messages=messages, min_tokens=2000).max_tokens == 2000
    for name in ("max_tokens", "max_completion_tokens"):
        assert params_of(ChatCompletionBody, messages=messages, **{name: 5000}).max_tokens == 5000
    assert params_of(CompletionBody, prompt="x").max_tokens == 16, "OpenAI's default of completions"


def test_generation_config_says_how_to_sample() -> None:
    asked = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "do_sample": True, "eos_token_id": 1, "min_p": None}
    assert replace(FILES, generation_config=asked).sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 0}
    assert FILES.sampling == {}
    for longest, sampling in ((512, {"max_tokens": 512}), (0, {}), ("many", {}), (1 << 40, {"max_tokens": MAX_TOKENS})):
        assert replace(FILES, generation_config={"max_new_tokens": longest}).sampling == sampling
    for wrong, word in (({"temperature": "hot"}, "temperature is 'hot'"), ({"top_p": 3.0}, "top_p must be")):
        with pytest.raises(StartupError, match=word):
            _ = replace(FILES, generation_config=wrong).sampling


def test_a_gguf_file_s_metadata_says_how_to_sample(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "made.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.25)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFReader(tmp_path / "made.gguf").get_field("general.sampling.temp") is not None
    found = make_generation_config(read_head(tmp_path / "made.gguf"))
    assert (found["temperature"], found["top_k"]) == (0.25, 20)


def test_the_default_model_is_sampled_as_its_makers_recommend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was fetched before this was known."""
    monkeypatch.setattr(model_store, "PULLED_MODELS", tmp_path)
    place = tmp_path / model_store.DEFAULT_MODEL
    place.mkdir()
    (place / "model.gguf").write_bytes(b"")
    assert pull(model_store.DEFAULT_MODEL) == place
    assert json.loads((place / "generation_config.json").read_text()) == {
        "temperature": 0.2,
        "top_p": 0.9,
        "max_new_tokens": 1024,
    }
    assert (place / "chat_template.jinja").read_text() == model_store.SMOLLM2_TEMPLATE
    (place / "generation_config.json").write_text('{"temperature": 0.7}')
    pull(model_store.DEFAULT_MODEL)
    assert json.loads((place / "generation_config.json").read_text()) == {"temperature": 0.7}, (
        "what its user wrote stays"
    )
    assert not (DEMO_MODEL / "generation_config.json").read_text().count("temperature")
