"""The messages of a conversation, as clients send them and as they got them from us."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.openai.body import Body
from services.gateway.openai.fields import CONTENT_SCHEMA, at_most, join_parts, kind_of
from services.gateway.openai.neutral import OF_CALLS, OF_MESSAGES
from shared.messages import ChatMessage, ToolCall

MAX_TOOL_CALLS = 128
MAX_NAME = 256  # characters of a model's, a speaker's or a function's name, or of an id


def read_arguments(value: Any) -> str:
    """As text: of what some clients send as an object, its JSON."""
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "{reason}", {"reason": f"expected a JSON object as text, got {kind_of(value)}"})
    return value


class FunctionCall(Body):
    neutral = OF_CALLS

    name: str = Field(max_length=MAX_NAME)
    arguments: Annotated[str, PlainValidator(read_arguments), WithJsonSchema({"type": "string"})] = "{}"


class ToolCallBody(Body):
    id: str = Field("", max_length=MAX_NAME)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="of a call that was put together from a stream")


class Message(Body):
    neutral = OF_MESSAGES

    role: str = Field(min_length=1, max_length=64)
    content: Annotated[str | None, BeforeValidator(join_parts), WithJsonSchema(CONTENT_SCHEMA)] = None
    name: str | None = Field(None, max_length=MAX_NAME)
    tool_calls: Annotated[list[ToolCallBody] | None, BeforeValidator(at_most(MAX_TOOL_CALLS))] = None
    tool_call_id: str | None = Field(None, max_length=MAX_NAME)
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same by another name")
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_something_to_say(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("at", "{reason}", {"at": ".tool_calls", "reason": f"only an assistant calls functions, not the role {self.role}"})
        if self.content is None and not (self.tool_calls or self.refusal is not None or self.reasoning_content or self.reasoning):
            raise PydanticCustomError("missing", "Field required", {"at": ".content"})
        return self

    def to_wire(self) -> ChatMessage:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        content = self.content if self.content is not None else self.refusal or ""
        return ChatMessage(self.role, content, self.name, calls, self.tool_call_id, self.reasoning_content or self.reasoning)
