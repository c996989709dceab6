"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import ANYTHING, REFUSED, Body, Table
from services.requests.bodies.fields import MAX_NAME, at_most
from services.requests.bodies.parameters import takes_parameters
from services.requests.dialects.anthropic.blocks import MESSAGES_SCHEMA, SYSTEM_SCHEMA, Json, read_messages, read_system
from services.requests.dialects.openai.schemas import MAX_USER
from shared.model.sampling_params import MAX_STOP_STRINGS, parameter

MAX_TOOLS = 128
MAX_REQUESTS = 50_000  # of a batch


class Metadata(Body):
    user_id: str | None = Field(None, max_length=MAX_USER, description="goes into the log, as a chat's user")


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="disabled: the template is asked for no thoughts; else for thoughts"
    )
    budget_tokens: int | None = Field(
        None, description="accepted; max_tokens is the bound of thoughts and answer together"
    )


class OutputConfig(Body):
    format: Json | None = Field(None, description="a JSON schema (type json_schema, schema) that the answer must match")
    effort: str | None = Field(None, description="a chat's reasoning_effort, for the template")


class CountTokensBody(Body):
    neutral: ClassVar[Table] = {
        "cache_control": ANYTHING,
        "inference_geo": ANYTHING,
        "service_tier": ANYTHING,
        "speed": ("standard",),
        "metadata": ANYTHING,
    }

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    messages: Annotated[list[tuple[int, Json]], PlainValidator(read_messages), WithJsonSchema(MESSAGES_SCHEMA)] = Field(
        description="the conversation; an assistant's message at its end is continued"
    )
    system: Annotated[str | None, PlainValidator(read_system), WithJsonSchema(SYSTEM_SCHEMA)] = Field(
        None, description="the system prompt: a text, or blocks of text"
    )
    tools: Annotated[list[Json] | None, BeforeValidator(at_most(MAX_TOOLS))] = Field(
        None, description="what the model may call; tools that Anthropic's servers run are passed over"
    )
    tool_choice: Json | None = Field(
        None, description="of type auto, any, tool (with name) or none; disable_parallel_tool_use: at most one call"
    )
    thinking: Thinking | None = Field(None, description="whether the model thinks first; see Thinking")
    output_config: OutputConfig | None = Field(
        None, description="what the answer must match, and how hard to think; see OutputConfig"
    )
    thread: Json | None = Field(
        None,
        description=(
            "of type create or continue: refused, no conversation is kept here; Anthropic's packages then send it whole"
        ),
    )
    mcp_servers: list[Any] | None = Field(None, description="refused, unless empty: the client runs its tools itself")


@takes_parameters("anthropic")
class MessagesBody(CountTokensBody):
    neutral: ClassVar[Table] = CountTokensBody.neutral | {
        "compaction": REFUSED
    }  # which asks for a summary instead of an answer

    max_tokens: int = Field(ge=1, description=parameter("max_tokens").description)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(at_most(MAX_STOP_STRINGS))] = Field(
        None, description=parameter("stop").description
    )
    stream: bool = Field(False, description="send the answer as it comes, as Anthropic's events")
    seed: Any = Field(None, description=f"Penstock's own: {parameter('seed').description}")
    metadata: Metadata | None = Field(None, description="user_id")


class BatchRequest(Body):
    custom_id: str = Field(
        pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="names the request in the results; stands once in a batch"
    )
    params: Json = Field(description="the body of a POST /v1/messages; it is looked at when its turn comes")


class MessageBatchBody(Body):
    requests: Annotated[
        list[BatchRequest],
        Field(min_length=1, description=f"at most {MAX_REQUESTS:,}"),
        BeforeValidator(at_most(MAX_REQUESTS)),
    ]
