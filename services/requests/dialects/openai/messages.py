"""The messages of a conversation, as clients send them and as they got them from us."""

import json
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from services.requests.bodies.body import OF_CALLS, OF_MESSAGES, Body
from services.requests.bodies.content import CONTENT_SCHEMA, read_content
from services.requests.bodies.fields import CONTENT_SCHEMA as TEXT_SCHEMA
from services.requests.bodies.fields import MAX_NAME, at, at_most, join_parts, kind_of
from shared.model.json_text import TooDeep, check_text
from shared.model.parsing.answer import INPUT
from shared.wire.messages import ChatMessage, ContentPart, ToolCall

MAX_TOOL_CALLS = 128


def read_arguments(value: Any) -> str:
    """Read arguments as text. Some clients send an object, which becomes its JSON."""
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    if not isinstance(value, str):
        raise PydanticCustomError(
            "string_type", "{reason}", {"reason": f"expected a JSON object as text, got {kind_of(value)}"}
        )
    try:
        check_text(value)
    except TooDeep as error:
        raise at("", str(error)) from None
    return value


class FunctionCall(Body):
    neutral = OF_CALLS

    name: str = Field(max_length=MAX_NAME, description="the function")
    arguments: Annotated[str, PlainValidator(read_arguments), WithJsonSchema({"type": "string"})] = Field(
        "{}", description="JSON as text; an object is taken, too"
    )


class CustomCall(Body):
    name: str = Field(max_length=MAX_NAME, description="the tool")
    input: str = Field(description="the text that it was given")


class ToolCallBody(Body):
    id: str = Field("", max_length=MAX_NAME, description="names the call; a tool's answer repeats it as tool_call_id")
    type: Literal["function", "custom"] = Field("function", description="which of the next two fields holds the call")
    function: FunctionCall | None = Field(None, description="required where type is function")
    custom: CustomCall | None = Field(None, description="required where type is custom")
    index: int | None = Field(None, description="the call's number in a stream; accepted")

    @model_validator(mode="after")
    def _has_its_own(self) -> "ToolCallBody":
        if (self.function if self.type == "function" else self.custom) is None:
            raise PydanticCustomError("missing", "Field required", {"at": f".{self.type}"})
        return self

    def to_wire(self) -> ToolCall:
        """Make the message of the pipeline. For the model a custom tool is a function with one
        argument."""
        if self.type == "custom" and self.custom is not None:
            return ToolCall(self.id, self.custom.name, json.dumps({INPUT: self.custom.input}, ensure_ascii=False))
        assert self.function is not None
        return ToolCall(self.id, self.function.name, self.function.arguments)


class Prediction(Body):
    type: Literal["content"]
    content: Annotated[str, BeforeValidator(join_parts), WithJsonSchema(TEXT_SCHEMA)] = Field(
        description="a text, or parts of type text"
    )


class Message(Body):
    neutral = OF_MESSAGES

    role: str = Field(
        min_length=1,
        max_length=64,
        description="system, user, assistant, tool; others as the model's template takes them",
    )
    content: Annotated[str | None, PlainValidator(read_content), WithJsonSchema(CONTENT_SCHEMA)] = Field(
        None, description="a text, or parts of type text and, of models that see, image_url"
    )
    name: str | None = Field(None, max_length=MAX_NAME, description="the speaker")
    tool_calls: Annotated[list[ToolCallBody] | None, BeforeValidator(at_most(MAX_TOOL_CALLS))] = Field(
        None, description="the assistant's calls"
    )
    function_call: FunctionCall | None = Field(
        None, description="the older form of one tool call; its answer is a message of the role function"
    )
    tool_call_id: str | None = Field(None, max_length=MAX_NAME, description="in a tool's answer: the id of the call")
    reasoning_content: str | None = Field(None, description="the assistant's thoughts before the content")
    reasoning: str | None = Field(None, description="reasoning_content by another name")
    refusal: str | None = Field(None, description="the assistant's refusal instead of an answer")

    @model_validator(mode="after")
    def _has_something_to_say(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError(
                "at",
                "{reason}",
                {"at": ".tool_calls", "reason": f"only an assistant calls functions, not the role {self.role}"},
            )
        if self.content is None and not (
            self.tool_calls
            or self.function_call
            or self.refusal is not None
            or self.reasoning_content
            or self.reasoning
        ):
            raise PydanticCustomError("missing", "Field required", {"at": ".content"})
        return self

    def to_wire(self, parts: tuple[ContentPart, ...] = ()) -> ChatMessage:
        """Make the message of the pipeline. parts: of the content, if there are images."""
        calls = tuple(call.to_wire() for call in self.tool_calls or ())
        if self.function_call is not None:
            calls += (
                ToolCall(
                    f"call_{self.function_call.name}"[:MAX_NAME], self.function_call.name, self.function_call.arguments
                ),
            )
        content = self.content if self.content is not None else self.refusal or ""
        role, call_id = self.role, self.tool_call_id
        if role == "function":
            role, call_id = "tool", f"call_{self.name}"[:MAX_NAME]  # as the call above
        return ChatMessage(
            role, str(content), self.name, calls, call_id, self.reasoning_content or self.reasoning, parts
        )
