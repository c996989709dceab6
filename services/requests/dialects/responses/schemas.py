"""The body of POST /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import OF_OTHER_SERVERS, REFUSED, Body, Table
from services.requests.bodies.fields import MAX_NAME, at_most
from services.requests.bodies.ignored import tell
from services.requests.bodies.parameters import takes_parameters
from services.requests.dialects.openai.schemas import MAX_USER, description_of
from services.requests.dialects.responses.items import INPUT_SCHEMA, Json, read_input
from shared.model.sampling_params import SamplingParams, parameter

MAX_METADATA = 16
MAX_TOOLS = 128
MAX_ID = 128


LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
)  # of the second, clients send back what they get: the reasoning is in the item as it is
MAX_INCLUDED = 64


def read_include(value: list[str] | None) -> list[str] | None:
    tell(*(f"include[{number}]" for number, each in enumerate(value or ()) if each not in INCLUDED))
    return value


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="accepted; nothing is obfuscated")


class TextOptions(Body):
    format: dict[str, Any] | None = Field(
        None, description="of type text, json_object, or json_schema with name, schema and strict in the same object"
    )
    verbosity: str | None = Field(None, description="for the template")


class ReasoningOptions(Body):
    effort: str | None = Field(
        None, description="a chat's reasoning_effort: for the template; none also sets enable_thinking to false"
    )
    summary: str | None = Field(
        None, max_length=16, description="accepted; a model's reasoning is given whole, never summarized"
    )
    generate_summary: str | None = Field(None, max_length=16, description="the older name of summary")


@takes_parameters("responses")
class ResponseBody(Body):
    neutral: ClassVar[Table] = OF_OTHER_SERVERS | {
        "conversation": REFUSED,
        "modalities": (["text"],),
        "prompt": REFUSED,
    }

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    input: Annotated[list[Json], PlainValidator(read_input), WithJsonSchema(INPUT_SCHEMA)] = Field(
        description="a text, or a list of items"
    )
    instructions: str | None = Field(
        None, description="the system's message; previous_response_id does not bring those of the response before"
    )
    max_output_tokens: int | None = Field(None, ge=-2, description=parameter("max_tokens").description)
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="logprobs of so many of the likeliest tokens at each position"
    )
    include: Annotated[list[str] | None, BeforeValidator(at_most(MAX_INCLUDED)), AfterValidator(read_include)] = Field(
        None, description=f"{LOGPROBS} asks for logprobs"
    )
    metadata: Annotated[
        dict[str, Annotated[str, Field(max_length=512)]] | None, BeforeValidator(at_most(MAX_METADATA))
    ] = Field(None, description=f"up to {MAX_METADATA} pairs of texts, repeated in the response")
    store: bool = Field(True, description="false: what was asked is not kept, so no response can follow this one")
    background: bool = Field(False, description="answer at once, and go on whether or not a client reads; needs store")
    previous_response_id: str | None = Field(
        None, max_length=MAX_ID, description="go on with that response's conversation"
    )
    stream: bool = Field(False, description="send the response as it comes, as typed events")
    stream_options: ResponseStreamOptions | None = Field(None, description="see ResponseStreamOptions")
    text: TextOptions | None = Field(None, description="what the text must match; see TextOptions")
    reasoning: ReasoningOptions | None = Field(None, description="how hard the model thinks; see ReasoningOptions")
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(at_most(MAX_TOOLS))] = Field(
        None, description="functions, custom tools, and namespaces of both; others are passed over"
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto, required, a tool, or allowed_tools; by default auto with tools"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the first items are left out of an input that is too long; disabled: it is refused"
    )
    parallel_tool_calls: Any = Field(None, description="false: at most one call")
    service_tier: Any = Field(None, description="accepted; there is one tier")
    prompt_cache_key: Any = Field(None, description=description_of("prompt_cache_key"))
    safety_identifier: Any = Field(None, description="accepted, and repeated in the response")
    user: str | None = Field(None, max_length=MAX_USER, description=description_of("user"))
    seed: Any = Field(None, description=parameter("seed").description)
    priority: Any = Field(None, description=description_of("priority"))
    deadline_s: Any = Field(None, description=description_of("deadline_s"))
    cache_salt: Any = Field(None, description=description_of("cache_salt"))

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def asked(self, params: SamplingParams) -> Json:
        """The fields of the response's object that repeat the request. params: as they are used,
        with the model maker's own where the request has none.
        """
        text = self.text or TextOptions()
        reasoning = self.reasoning or ReasoningOptions()
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": True if self.parallel_tool_calls is None else self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store,
            "temperature": params.temperature,
            "text": {"format": text.format or {"type": "text"}}
            | ({"verbosity": text.verbosity} if text.verbosity else {}),
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
