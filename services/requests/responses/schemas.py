"""The body of POST /v1/responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import OF_OTHER_SERVERS, REFUSED, Body, Table
from services.requests.bodies.fields import at_most
from services.requests.bodies.ignored import tell
from services.requests.neutral.messages import MAX_NAME
from services.requests.neutral.schemas import MAX_USER
from services.requests.responses.items import INPUT_SCHEMA, Json, read_input
from shared.model.sampling_params import SamplingParams

MAX_METADATA = 16
MAX_TOOLS = 128
MAX_ID = 128


LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # of the second, clients send back what they get: the reasoning is in the item as it is
MAX_INCLUDED = 64


def read_include(value: list[str] | None) -> list[str] | None:
    tell(*(f"include[{number}]" for number, each in enumerate(value or ()) if each not in INCLUDED))
    return value


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="accepted; nothing is obfuscated")


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = Field(None, max_length=16, description="accepted; a model's reasoning is given whole, never summarized")
    generate_summary: str | None = Field(None, max_length=16)


class ResponseBody(Body):
    neutral: ClassVar[Table] = OF_OTHER_SERVERS | {"conversation": REFUSED, "modalities": (["text"],), "prompt": REFUSED}

    model: str = Field("", max_length=MAX_NAME, description="by default the one that is served")
    input: Annotated[list[Json], PlainValidator(read_input), WithJsonSchema(INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Any = None
    top_p: Any = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[str] | None, BeforeValidator(at_most(MAX_INCLUDED)), AfterValidator(read_include)] = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]] | None, BeforeValidator(at_most(MAX_METADATA))] = None
    store: bool = True
    background: bool = False
    previous_response_id: str | None = Field(None, max_length=MAX_ID)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(at_most(MAX_TOOLS))] = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto: of what is too long, the first items are left out; else it is refused")
    parallel_tool_calls: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    user: str | None = Field(None, max_length=MAX_USER)
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    min_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    priority: Any = None
    deadline_s: Any = None
    cache_salt: Any = None

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def asked(self, params: SamplingParams) -> Json:
        """The fields of the response's object that repeat the request. params: as they are used, with the model maker's own where the request has none."""
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
            "text": {"format": text.format or {"type": "text"}} | ({"verbosity": text.verbosity} if text.verbosity else {}),
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }
