"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.gateway.anthropic.blocks import MESSAGES_SCHEMA, SYSTEM_SCHEMA, Json, read_messages, read_system
from services.gateway.openai.fields import at_most
from services.gateway.openai.neutral import ANYTHING
from services.gateway.openai.schemas import MAX_NAME, MAX_USER, Body
from shared.sampling_params import MAX_STOP_STRINGS

MAX_TOOLS = 128


class Metadata(Body):
    user_id: str | None = Field(None, max_length=MAX_USER)


class CountTokensBody(Body):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cache_control": ANYTHING, "inference_geo": ANYTHING, "service_tier": ("auto", "standard_only"), "speed": ("standard",), "mcp_servers": ([],),
    }  # fmt: skip

    model: str = Field(max_length=MAX_NAME)
    messages: Annotated[list[tuple[int, Json]], PlainValidator(read_messages), WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[str | None, PlainValidator(read_system), WithJsonSchema(SYSTEM_SCHEMA)] = None
    tools: Annotated[list[Json] | None, BeforeValidator(at_most(MAX_TOOLS))] = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(at_most(MAX_STOP_STRINGS))] = None
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = Field(None, description="Penstock's own, as of a chat")
    metadata: Metadata | None = None
