"""The bodies of Ollama's API, and its messages as those of a chat."""

from typing import Annotated, Any, ClassVar

import orjson
from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import ANYTHING, Body, Table
from services.requests.bodies.fields import (
    MAX_INPUTS,
    MAX_NAME,
    MAX_PARTS,
    PROMPT_SCHEMA,
    Prompt,
    at,
    kind_of,
    read_prompt,
)
from services.requests.bodies.ignored import tell_others
from services.requests.dialects.openai.schemas import MAX_MESSAGES
from services.requests.dialects.openai.translate import as_llama_reads
from shared.model.sampling_params import parameters_of
from shared.process.errors import Invalid

Json = dict[str, Any]

MESSAGE_FIELDS = {"role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images"}
MESSAGES_SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"role": {"type": "string"}, "content": {"type": "string"}}},
}

# What a chat calls an option. The others of Ollama's say how a model is loaded and run there, or
# nothing to us: they are passed over, as Ollama does
OPTIONS = {name: each.name for name, each in parameters_of("ollama").items()} | {
    "mirostat": "mirostat",
    "tfs_z": "tfs_z",
}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's own
NAME_HERE = {chat: f"options.{name}" for name, chat in OPTIONS.items()} | {
    "response_format": "format",
    "response_format.json_schema": "format",
    "response_format.json_schema.schema": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
}
ASK_NOTHING = {"num_predict": (0,), "repeat_penalty": (0,), "typical_p": (1, 0), "mirostat": (0,), "tfs_z": (1,)}


def read_messages(value: Any) -> list[Json]:
    """A conversation as a chat's messages. Calls need no ids here: those without get some, and the
    answers of tools follow in their order."""
    if not isinstance(value, list):
        raise at("", f"expected a list of messages, got {kind_of(value)}")
    if len(value) > MAX_MESSAGES:
        raise at("", f"at most {MAX_MESSAGES} messages, got {len(value)}")
    messages: list[Json] = []
    unanswered: dict[str, None] = {}  # in their order
    for number, message in enumerate(value):
        messages.append(_read_message(message, f"[{number}]"))
        for index, call in enumerate(messages[-1].get("tool_calls", ())):
            call.setdefault("id", f"call_{number}_{index}")
            unanswered[call["id"]] = None
        if messages[-1]["role"] == "tool" and unanswered:
            unanswered.pop(messages[-1].setdefault("tool_call_id", next(iter(unanswered))), None)
    return messages


def _read_message(value: Any, path: str) -> Json:
    if not isinstance(value, dict):
        raise at(path, f"expected a message, got {kind_of(value)}")
    value = {key: each for key, each in value.items() if each is not None and each != []}
    tell_others(value, MESSAGE_FIELDS, f"messages{path}")
    for key in ("role", "content", "thinking", "tool_name", "tool_call_id"):
        if not isinstance(value.get(key, ""), str):
            raise at(f"{path}.{key}", f"expected a text, got {kind_of(value[key])}")
    names = {"thinking": "reasoning_content", "tool_name": "name", "tool_call_id": "tool_call_id"}
    message: Json = {"role": value.get("role", ""), "content": value.get("content", "")} | {
        names[key]: value[key] for key in names if value.get(key)
    }
    if "images" in value:
        message["content"] = with_images(message["content"], value["images"], f"{path}.images")
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list) or len(calls) > MAX_PARTS:
        raise at(f"{path}.tool_calls", f"expected at most {MAX_PARTS} calls")
    read = [_read_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message | {"tool_calls": read} if read else message


def with_images(text: str, images: Any, path: str) -> list[Json]:
    """A chat's content: the images, which are base64, then the text."""
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise at(path, "expected a list of images in base64")
    parts = [
        {"type": "image_url", "image_url": {"url": each if each[:5] == "data:" else f"data:image;base64,{each}"}}
        for each in images
    ]
    return [*parts, {"type": "text", "text": text}]


def _read_call(value: Any, path: str) -> Json:
    function = value.get("function") if isinstance(value, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments", {}), dict)
    ):
        raise at(path, "expected a function with a name and arguments")
    call = {
        "type": "function",
        "function": {"name": function["name"], "arguments": orjson.dumps(function.get("arguments", {})).decode()},
    }
    return call | {"id": value["id"]} if isinstance(value.get("id"), str) and value["id"] else call


class OllamaBody(Body):
    """The fields that both endpoints share."""

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    stream: bool = Field(True, description="send the answer as it comes, a JSON object a line")
    options: Json | None = Field(
        None, description="sampling parameters; those that say how Ollama runs a model are passed over"
    )
    format: Json | str | None = Field(None, description="json, or a JSON schema that the answer must match")
    think: bool | str | None = Field(
        None, description="true, false: the template's enable_thinking; a word: a chat's reasoning_effort"
    )
    keep_alive: Any = Field(
        None, description="accepted: models stay in memory. 0 without a prompt is answered as Ollama does"
    )
    logprobs: bool | None = Field(None, description="the logprob of each token of the text")
    top_logprobs: int | None = Field(
        None, description="with logprobs: so many of the likeliest tokens at each position, too"
    )

    @property
    def unloads(self) -> bool:
        return isinstance(self.keep_alive, int | float | str) and str(self.keep_alive) in ("0", "0.0", "0s", "0m", "0h")

    def sampling(self) -> Json:
        """The options, as fields of a chat."""
        tell_others(self.options or {}, OPTIONS, "options")
        given = {name: value for name, value in (self.options or {}).items() if name in OPTIONS and value is not None}
        asked = {
            OPTIONS[name]: value
            for name, value in given.items()
            if name not in ASK_NOTHING or value not in ASK_NOTHING[name]
        }
        asked = {name: as_llama_reads(name, value) for name, value in asked.items()}
        return (
            DEFAULTS | asked | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        )

    def response_format(self) -> Json | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if isinstance(self.format, str):
            raise Invalid("format takes json, or a JSON schema", param="format")
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[Json], PlainValidator(read_messages), WithJsonSchema(MESSAGES_SCHEMA)] = Field(
        default_factory=list, description="the conversation; empty: the answer says that the model is loaded"
    )
    tools: list[Json] | None = Field(None, description="functions that the model may call")


def refuse_suffix(value: Any) -> Any:
    if value:
        raise at("", "this endpoint does not fill in the text between a prompt and a suffix: POST /infill does")
    return value


class OllamaGenerateBody(OllamaBody):
    prompt: str = Field("", description="what the model is asked; empty: the answer says that the model is loaded")
    suffix: Annotated[Any, AfterValidator(refuse_suffix)] = Field(None, description="refused, unless it is empty")
    images: list[str] | None = Field(None, description="images in base64, of models that see; not where raw is true")
    system: str | None = Field(
        None, description="the system's message before the prompt; without effect where raw is true"
    )
    raw: bool = Field(False, description="true: continue the prompt as it is, without the model's template")


def read_texts_to_embed(value: Any) -> list[Prompt]:
    """A text or several; an empty text, or an empty list, is none."""
    return read_prompt(value, MAX_INPUTS) if value else []


class OllamaEmbedBody(Body):
    neutral: ClassVar[Table] = {"keep_alive": ANYTHING, "options": ANYTHING}

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    input: Annotated[list[Prompt], PlainValidator(read_texts_to_embed), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        default_factory=list,
        description="a text, or a list of texts: a vector is made of each; empty: the answer has none",
    )
    dimensions: int | None = Field(
        None, ge=1, description="keep only the first so many numbers, of models that are made for it"
    )
    truncate: bool | None = Field(None, description="false: refuse an input that is too long; else its end is cut off")


class OllamaEmbeddingsBody(Body):
    neutral: ClassVar[Table] = {"keep_alive": ANYTHING, "options": ANYTHING}

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    prompt: str = Field("", description="the text; its end is cut off where it is too long; empty: so is the vector")


class OllamaModelBody(Body):
    neutral: ClassVar[Table] = {"verbose": ANYTHING, "system": ANYTHING, "template": ANYTHING, "options": ANYTHING}

    model: str = Field("", max_length=MAX_NAME, description="a served name; required unless name is given")
    name: str = Field("", max_length=MAX_NAME, description="the older name of model")

    @property
    def wanted(self) -> str:
        """Raises Invalid where neither says it."""
        if not (wanted := self.model or self.name):
            raise Invalid("missing required parameter: model", param="model", code="missing_required_parameter")
        return wanted


class OllamaPullBody(OllamaModelBody):
    neutral: ClassVar[Table] = {"insecure": ANYTHING, "username": ANYTHING, "password": ANYTHING}

    stream: bool = Field(True, description="answer as Ollama's lines of progress; false: one object")
