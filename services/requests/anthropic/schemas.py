"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.requests.anthropic.blocks import MESSAGES_SCHEMA, SYSTEM_SCHEMA, Json, read_messages, read_system
from services.requests.bodies.body import ANYTHING, Body
from services.requests.bodies.fields import at_most
from services.requests.neutral.messages import MAX_NAME
from services.requests.neutral.schemas import MAX_USER
from shared.model.sampling_params import MAX_STOP_STRINGS

MAX_TOOLS = 128
MAX_REQUESTS = 50_000  # of a batch


class Metadata(Body):
    user_id: str | None = Field(None, max_length=MAX_USER)


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, description="accepted; max_tokens is the bound of thoughts and answer together")


class OutputConfig(Body):
    format: Json | None = None
    effort: str | None = None


class CountTokensBody(Body):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cache_control": ANYTHING, "inference_geo": ANYTHING, "service_tier": ANYTHING, "speed": ("standard",), "metadata": ANYTHING,
    }  # fmt: skip

    model: str = Field("", max_length=MAX_NAME, description="by default the one that is served")
    messages: Annotated[list[tuple[int, Json]], PlainValidator(read_messages), WithJsonSchema(MESSAGES_SCHEMA)]
    system: Annotated[str | None, PlainValidator(read_system), WithJsonSchema(SYSTEM_SCHEMA)] = None
    tools: Annotated[list[Json] | None, BeforeValidator(at_most(MAX_TOOLS))] = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(at_most(MAX_STOP_STRINGS))] = None
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = Field(None, description="Penstock's own, as of a chat")
    metadata: Metadata | None = None


class BatchRequest(Body):
    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: Json = Field(description="the body of a POST /v1/messages; it is looked at when its turn comes")


class MessageBatchBody(Body):
    requests: Annotated[list[BatchRequest], Field(min_length=1), BeforeValidator(at_most(MAX_REQUESTS))]
