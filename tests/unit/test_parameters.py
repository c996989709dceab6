"""Sampling parameters are declared once: a copy of shared/ with one more field and one more row has
the parameter in each API, in the checks, on the wire, in the reference and in the playground."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.gateway.console.pages import setting_of
from services.requests.bodies.parameters import TYPES
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.dialects.llamacpp.schemas import LlamaCompletionBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.responses.schemas import ResponseBody
from shared.model.sampling_params import GROUPS, PARAMETERS, SamplingParams, make_params
from shared.process.errors import Invalid

ROOT = Path(__file__).parents[2]
OF_STAGES = {"bad_words_token_ids", "returns_prompt_token_ids"}  # fields that no client gives

FIELD = """    returns_prompt_token_ids: bool = False  # in the request's first event
"""
ROW = """PARAMETERS = (
    Parameter(
        name="heat",
        description="what a test adds",
        bounds=(0.0, 10.0),
        off=(-1.0, -1.0),
        also="warmth",
        apis={"anthropic": "heat", "responses": "heat", "llamacpp": "warmth", "ollama": "ardour"},
        clamped=(0.0, 10.0),
        control=PlaygroundField("Sampling", "Heat", slider=(0, 5, 0.5)),
    ),
"""
PROGRAM = """
import json
from docs.reference.api import page
from services.gateway.api.llamacpp.answers import generation_settings
from services.gateway.api.openai.beams import check_beams
from services.gateway.console.pages import setting_of
from services.requests.dialects.anthropic.chat import chat_of as chat_of_message
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.dialects.llamacpp.schemas import LlamaCompletionBody
from services.requests.dialects.ollama.schemas import OllamaChatBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.responses.chat import chat_of as chat_of_response
from services.requests.dialects.responses.schemas import ResponseBody
from shared.model.sampling_params import SamplingParams, parameter
from shared.process.errors import Invalid
from shared.wire.messages import GenerateRequest, decode, encode

hello = [{"role": "user", "content": "Hello"}]

def chat(**given):
    return ChatCompletionBody.model_validate({"model": "m", "messages": hello} | given)

def refusal(make):
    try:
        make()
    except Invalid as error:
        return str(error)

llama = LlamaCompletionBody.model_validate({"prompt": "x", "warmth": 12.0})
completion = CompletionBody.model_validate(llama.as_completion("m", ["x"], {}))
message = MessagesBody.model_validate({"max_tokens": 4, "messages": hello, "heat": 2.0})
response = ResponseBody.model_validate({"input": "x", "heat": 2.0})
heated = SamplingParams(heat=3.0)
request = GenerateRequest("a.0", "g", "m", heated, prompt="x")
print(json.dumps({
    "chat": chat(heat=2.0).params().heat, "other name": chat(warmth=2.0).params().heat, "off": chat(heat=-1.0).params().heat,
    "completion": CompletionBody.model_validate({"prompt": "x", "heat": 2.0}).params().heat,
    "message": chat_of_message(message).params().heat, "response": chat_of_response(response, []).params().heat, "llama": completion.params().heat,
    "ollama": OllamaChatBody.model_validate({"options": {"ardour": 2.0}}).sampling()["heat"],
    "out of bounds": refusal(chat(heat=11.0).params), "in the params": refusal(lambda: SamplingParams(heat=11.0)),
    "beams": refusal(lambda: check_beams(request, 1)), "on the wire": decode(GenerateRequest, encode(request)).params.heat,
    "settings": generation_settings(heated, llama)["warmth"], "playground": setting_of(parameter("heat")),
    "reference": [line for line in page().splitlines() if "hat a test adds" in line or "of heat" in line],
}))
"""  # noqa: E501


def test_a_parameter_is_declared_once(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shared", tmp_path / "shared")
    for name in ("services", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    declaration = tmp_path / "shared" / "model" / "sampling_params.py"
    text = declaration.read_text()
    declaration.write_text(text.replace(FIELD, FIELD + "    heat: float = 0.0\n").replace("PARAMETERS = (\n", ROW))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    apis = ("chat", "other name", "completion", "message", "response", "ollama")
    assert {name: found[name] for name in apis} == dict.fromkeys(apis, 2.0)
    assert found["llama"] == 10.0 and found["off"] == 0.0  # clamped, and switched off
    assert found["out of bounds"] == found["in the params"] == "heat must be between 0.0 and 10.0, got 11.0"
    assert found["beams"] == "heat is not available with use_beam_search: leave it out"
    assert found["on the wire"] == found["settings"] == 3.0
    assert found["playground"] == {
        "name": "heat",
        "label": "Heat",
        "hint": "",
        "section": "Sampling",
        "kind": "number",
        "fallback": 0.0,
        "least": -1.0,
        "most": 10.0,
        "min": 0,
        "max": 5,
        "step": 0.5,
    }
    rows = found["reference"]
    assert (
        "| `heat` | number | `0` | from -1 to 10 | What a test adds |" in rows
        and "| `warmth` | number | `0` | from -1 to 10 | What a test adds |" in rows
    )
    assert (
        len([row for row in rows if row.startswith("| `heat` |")]) == 5
    )  # chats, completions, infilling, messages, responses


def test_every_field_that_clients_give_is_declared() -> None:
    owners: tuple[type[Any], ...] = (SamplingParams, *GROUPS.values())
    for owner in owners:
        declared = {each.field_name for each in PARAMETERS if each.owner is owner}
        assert declared == {each.name for each in structs.fields(owner)} - OF_STAGES - (
            GROUPS.keys() if owner is SamplingParams else set()
        )
    assert len({each.name for each in PARAMETERS}) == len(PARAMETERS)


@pytest.mark.parametrize("body", [ChatCompletionBody, CompletionBody, MessagesBody, ResponseBody, LlamaCompletionBody])
def test_every_api_has_its_parameters(
    body: type[ChatCompletionBody | CompletionBody | MessagesBody | ResponseBody | LlamaCompletionBody],
) -> None:
    assert body.sampling_parameters.keys() <= body.model_fields.keys()
    assert all(each.value_type in TYPES for each in PARAMETERS)


def test_all_that_is_wrong_is_named() -> None:
    with pytest.raises(
        Invalid, match=r"^temperature must be .*; bad_words takes strings .*; dry_base must be between 1.0"
    ) as refused:
        make_params({"bad_words": ("",), "dry_base": 0.5, "temperature": -1.0, "top_p": 0.5})
    assert refused.value.param == "temperature"


def test_settings_of_the_playground_name_sections_that_it_has() -> None:
    text = (ROOT / "services" / "gateway" / "console" / "playground" / "modules" / "parameters.js").read_text()
    sections = {setting_of(each)["section"] for each in PARAMETERS if each.control is not None}
    assert all(f'"{section}"' in text for section in sections)
