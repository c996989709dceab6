"""Every message between processes, and its bytes: `encode` and `decode`.

A message is a WireStruct. On the wire it is a msgpack array
`[tag, version, field, …]` in the order of its fields; arrays travel as raw little-endian bytes. A
field is only ever appended, with a default: an older message then decodes with the default.
`decode` checks the type of every field, and its errors name the field. docs/understand/protocol.md
says which stage sends which message.
"""

from __future__ import annotations

import typing
from typing import Any, Literal, TypeVar

import numpy as np
from msgspec import Raw, field

from shared.model.arrays import Float32Array, Float64Array, Int32Array, UInt8Array
from shared.model.constraint import Constraint
from shared.model.dry_breakers import unpack_breakers
from shared.model.sampling_params import SamplingParams
from shared.model.segments import Segment, check_segments
from shared.model.vision.images import MAX_IMAGES, Image, PromptImage
from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid
from shared.wire.codec import from_bytes, packer, to_bytes
from shared.wire.logprobs import PromptLogprobs, TokenLogprob
from shared.wire.replica import Replica
from shared.wire.views import ComputeView

FinishReason = Literal["stop", "length", "cancelled", "error"]
Task = Literal["generate", "tokenize", "detokenize", "describe", "render"]


class ToolCall(WireStruct, frozen=True):
    """A call of a function, in an assistant's message."""

    call_id: str
    name: str
    # JSON, an object; the model's own text where the call is incomplete or invalid
    arguments: str


class ContentPart(WireStruct, frozen=True):
    """A part of a message with images: a text, or an image."""

    text: str = ""
    image: Image | None = None


class ChatMessage(WireStruct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str  # if it has images, only its texts
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of a tool's answer: the call that it answers
    reasoning: str | None = None  # the assistant's thoughts before the content
    parts: tuple[ContentPart, ...] = ()  # instead of the content, where there are images


class ChatOptions(WireStruct, frozen=True):
    """Further inputs of a chat template; an empty text is not given to it."""

    tools: str = ""  # JSON, a list in OpenAI's form
    documents: str = ""  # JSON, a list of objects
    template_kwargs: str = ""  # JSON, an object: further variables of the template
    chat_template: str = ""  # instead of the model's own
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class SchedulingParams(WireStruct, frozen=True):
    """Scheduling of a request."""

    priority: int = 0  # smaller is sooner
    deadline_at: float = 0.0  # wall clock, s: a request that has not begun by then fails; 0: no deadline
    group_id: str = ""  # requests of one group and one prompt are its choices, and share its KV
    cache_salt: str = ""  # only requests of one salt share cached prefixes
    tenant_id: str = ""  # the owner: tenants share compute's places


class EmbeddingParams(WireStruct, frozen=True):
    """Parameters by which a prompt's hidden states become one vector."""

    # the mean of all tokens, the last, or the first; empty: what the model was trained for
    pooling: Literal["", "mean", "last", "cls"] = ""
    dimensions: int | None = None  # keep only the first so many numbers, if the model was trained for that
    is_normalized: bool = True  # scale to length 1

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise Invalid(f"dimensions must be at least 1, got {self.dimensions}", param="dimensions")


class EncodingParams(WireStruct, frozen=True):
    """How a prompt becomes tokens."""

    # a BOS and the like; None: yes for a plain prompt, no for a conversation, whose template writes
    # its own
    add_special_tokens: bool | None = None
    # special tokens that are spelt in the text; None: yes for a plain prompt; in a conversation they
    # are text
    parse_special_tokens: bool | None = None
    # keep the last so many tokens; -1: as many as fit with max_tokens
    truncate_prompt_tokens: int | None = None
    # for the task "tokenize": return the tokens' texts in the vocabulary, too
    return_token_strs: bool = False
    # truncate at the end instead, but keep the special tokens there
    keeps_beginning: bool = False


class ModulePart(WireStruct, frozen=True):
    """A part of a prompt module: the tokens of a text, or an argument."""

    position: int  # of its first token, counted from the first module's
    token_ids: Int32Array  # empty for an argument
    parameter: str = ""  # an argument's name
    argument: str = ""  # its text
    max_tokens: int = 0  # of an argument


class PromptModule(WireStruct, frozen=True):
    """A module of a prompt: a text with arguments, whose keys and values prompts share."""

    name: str
    end: int  # the position after it, counted from the first module's
    parts: tuple[ModulePart, ...]


class GenerateRequest(WireStruct, frozen=True):
    """A request for one continuation, one embedding, or an answer of the tokenizer. Exactly one of
    messages, prompt and prompt_token_ids is set; none for the task "describe"."""

    request_id: str
    gateway_id: str | None  # the gateway that gets the events; None: only the log gets them
    model: str
    params: SamplingParams
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    prompt_token_ids: Int32Array | None = None
    echo: bool = False
    created_at: float = 0.0  # wall clock, s
    scheduling: SchedulingParams = SchedulingParams()
    constraint: Constraint | None = None  # the form that the answer must match
    chat: ChatOptions = ChatOptions()
    encoding: EncodingParams = EncodingParams()
    # all tasks but generate end with the tokenizer's answer: JSON, in the text of their one event
    task: Task = "generate"
    embedding: EmbeddingParams | None = None  # if set, the answer is the prompt's embedding
    traceparent: str = ""  # W3C: the trace that the request's spans join; empty: none
    # for an embedding: a second text after the prompt; the model's tokenizer joins the two
    pair: str | None = None
    prediction: str = ""  # the answer that the client expects; empty: none
    # at the beginning of the prompt, or of the first user message
    modules: tuple[PromptModule, ...] = ()


class EncodeImage(WireStruct, frozen=True):
    """A request to an encoder for the embeddings of an image."""

    response_id: str  # the response whose image it is
    image: Image


class TokenizedRequest(WireStruct, frozen=True):
    """A request with its prompt as token ids, checked against the model; params.max_tokens is set."""

    request_id: str
    gateway_id: str | None
    model: str
    params: SamplingParams
    prompt_token_ids: Int32Array
    eos_token_ids: tuple[int, ...]  # empty with ignore_eos
    echo_text: str | None = None
    created_at: float = 0.0
    scheduling: SchedulingParams = SchedulingParams()
    # where each prompt token begins in echo_text; empty if not requested
    echo_offsets: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    constraint: Constraint | None = None
    # DRY's breakers as tokens, packed by shared/model/dry_breakers.py
    dry_breakers: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    embedding: EmbeddingParams | None = None
    traceparent: str = ""
    tokenized_at: float = 0.0  # wall clock, s
    # the answer that the client expects; empty: none
    prediction_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    segments: tuple[Segment, ...] = ()  # of the prompt; empty: each token sees all before it
    images: tuple[PromptImage, ...] = ()  # in the order of the prompt
    image_token_id: int = 0  # the placeholder of their tokens

    def __post_init__(self) -> None:
        check_segments(self.segments, len(self.prompt_token_ids))
        if len(self.images) > MAX_IMAGES or any(image.num_tokens < 1 for image in self.images):
            raise Invalid("TokenizedRequest: more images than a prompt may have, or one without a token")
        if not len(self.prompt_token_ids) or int(self.prompt_token_ids.min()) < 0 or self.params.max_tokens is None:
            raise Invalid("TokenizedRequest: without a prompt, with a negative token id, or without max_tokens")
        unpack_breakers(self.dry_breakers)


class SequenceIntro(WireStruct, frozen=True):
    """The facts about a sequence that a sampler needs; they come with its first candidates."""

    handle: int  # the sequence's number at its compute replica
    request_id: str
    gateway_id: str | None
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    prompt_tail: Int32Array  # the last prompt tokens: they seed the detokenizer
    echo_text: str | None = None
    num_cached_tokens: int = 0
    # output tokens that were decided, as compute knows: a log with fewer has lost some
    num_decided_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # if requested, and not in the log yet
    prompt_token_ids: Int32Array | None = None  # the same
    traceparent: str = ""
    tokenized_at: float = 0.0  # wall clock, s
    scheduled_at: float = 0.0  # the same, by the compute replica that introduces it
    fingerprint: str = ""  # of that replica
    # as TokenizedRequest has them
    prediction_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))


class StepCandidates(WireStruct, frozen=True):
    """One step's undecided rows for one sampler. Row r has counts[r] candidates, by falling logit,
    ties by token id."""

    compute_id: str
    step: int
    intros: tuple[SequenceIntro, ...]
    forget: Int32Array  # handles whose sequences ended, or moved, without a decision of this sampler
    handles: Int32Array  # [R]
    positions: Int32Array  # [R] num_output_tokens after this decision; 1 is the first token
    counts: Int32Array  # [R]
    token_ids: Int32Array  # [sum(counts)]
    logits: Float32Array  # [sum(counts)]
    logsumexp: Float32Array  # [R] over the whole row at temperature 1; 0 without logprobs
    num_kept: Int32Array  # [R] of the candidates, how many take part in the draw; 1: greedy
    # [R] of the tokens beyond the candidates that take part, the sum of exp((logit - largest) /
    # temperature); 0: none does
    tail_mass: Float64Array
    tail_token_ids: Int32Array  # [R] the one of them that is drawn, or -1
    tail_logits: Float32Array  # [R]
    # [R] the token that the row was computed on; -1: none. Empty: unknown
    previous_token_ids: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    # [R] below 0: the request's own. Empty: the request's own in all rows
    temperatures: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        count = len(self.handles)
        columns = (
            self.positions,
            self.counts,
            self.logsumexp,
            self.num_kept,
            self.tail_mass,
            self.tail_token_ids,
            self.tail_logits,
        )
        if any(len(column) != count for column in columns) or any(
            len(each) not in (0, count) for each in (self.previous_token_ids, self.temperatures)
        ):
            raise Invalid("StepCandidates: columns of different lengths")
        if count and (self.counts.min() < 1 or self.positions.min() < 1):
            raise Invalid("StepCandidates: a row without candidates, or before the first position")
        if count and ((self.num_kept < 1) | (self.num_kept > self.counts)).any():
            raise Invalid("StepCandidates: a row with more candidates than it lists, or none")
        if not len(self.token_ids) == len(self.logits) == int(self.counts.sum()):
            raise Invalid("StepCandidates: not as many candidates as the rows say")


class StepDecisions(WireStruct, frozen=True):
    """The tokens decided for rows of one step. The log already holds them."""

    sampler_id: str
    step: int
    handles: Int32Array
    positions: Int32Array
    # -1: the sequence ended without a token; -2: the sampler does not know the sequence; -3: its log
    # lacks earlier tokens
    token_ids: Int32Array
    is_finished: UInt8Array  # 1: the sequence has ended, whatever the reason

    def __post_init__(self) -> None:
        if any(len(each) != len(self.handles) for each in (self.positions, self.token_ids, self.is_finished)):
            raise Invalid("StepDecisions: columns of different lengths")


class RequestError(WireStruct, frozen=True):
    """Why a request failed, in the API's terms."""

    message: str
    status: int = 500
    param: str | None = None
    code: str | None = None


class TokenEvent(WireStruct, frozen=True):
    """One entry of the token log: a token was decided, or the request ended without one."""

    request_id: str
    position: int  # num_output_tokens so far, this one included
    token_id: int | None
    text: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    # of the tokens whose text this event releases; this token's own is the last
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    error: RequestError | None = None
    # this token's own logprob while its text is held back; for replay, never for the client
    withheld: TokenLogprob | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with the request's first event, if it asked
    prompt_token_ids: Int32Array | None = None  # the same
    embedding: Float32Array | None = None  # of the prompt; in the request's one event
    draw: str | None = None  # with the first token, the name of the rule that drew it
    # of the compute replica that made it, if another made the event before
    fingerprint: str = ""
    # with the last event, if the request had a prediction: how many of its tokens were accepted, and
    # how many were rejected
    prediction_tokens: tuple[int, ...] = ()


class Moments(WireStruct, frozen=True):
    """When and where the stages worked on a request: s on the wall clock of the process that did the
    work, 0 if none did. They go with a request's first and last event. No log has them:
    a log has the same bytes whenever its tokens were decided."""

    request_id: str
    position: int  # the event's; up to 1 it is the first
    tokenized_at: float
    scheduled_at: float  # when the compute replica that has it now began its prompt
    decided_at: float  # the event's token
    compute_id: str
    sampler_id: str = ""  # empty if no sampler decided it


class StepEvents(WireStruct, frozen=True):
    """The encoded TokenEvents of one step for one gateway."""

    events: tuple[bytes, ...]
    moments: tuple[Moments, ...] = ()  # of the requests that begin or end with them


class Control(WireStruct, frozen=True):
    """A command to every replica: cancel requests, send a response's events to another gateway, or
    read the registry again."""

    action: Literal["cancel", "attach", "refresh"]
    request_ids: tuple[str, ...] = ()
    gateway_id: str | None = None
    # of the response's reader: 0 for the gateway that submitted it, one more with each resumption
    generation: int = 0


class Offer(WireStruct, frozen=True):
    """Tells a compute replica that a prompt in its group's stream was delivered to it."""

    entry_id: str  # in the stream of prompts


TAGS: dict[type, tuple[str, int]] = {
    GenerateRequest: ("generate", 1),
    TokenizedRequest: ("tokenized", 1),
    StepCandidates: ("candidates", 2),
    StepDecisions: ("decisions", 1),
    TokenEvent: ("token", 1),
    StepEvents: ("events", 1),
    Control: ("control", 1),
    Offer: ("offer", 1),
    EncodeImage: ("encode", 1),
    Replica: ("replica", 1),
    ComputeView: ("view", 1),
}

M = TypeVar("M")
FIXARRAY = 0x90  # msgpack's first byte of an array of up to 15 values, plus their number


def encode(message: Any) -> bytes:
    """The message as bytes."""
    return to_bytes([*TAGS[type(message)], *_values(message)])


def decode(message_type: type[M], data: bytes) -> M:
    """The message in `data`. Raises Invalid, naming the field, if it is not one of that type."""
    tag, version = TAGS[message_type]
    count = data[0] - FIXARRAY if data and FIXARRAY <= data[0] < FIXARRAY + 16 else int.from_bytes(data[1:3])
    head = _array_header(count) + to_bytes(tag)
    if count < 2 or len(data) <= len(head) or not data.startswith(head):
        raise Invalid(f"not a {tag} message")
    if data[len(head)] > version:
        raise Invalid(f"{tag}: version {data[len(head)]} is newer than {version}")
    return from_bytes(message_type, _array_header(count - 2) + data[len(head) + 1 :], tag)


def decode_record(record_type: type[M], data: bytes) -> M:
    """The record in `data`, a map of its fields. Raises Invalid, naming the field, if it is not one
    of that type, or has further fields."""
    name = record_type.__name__
    record = from_bytes(record_type, data, name)
    further = from_bytes(dict[str, Raw], data, name).keys() - record_type.__annotations__.keys()
    if further:
        raise Invalid(f"{name}: unknown fields {', '.join(sorted(further))}")
    return record


def _values(message: Any) -> list[Any]:
    return packer(typing.cast(typing.Hashable, type(message)))(message)


def _array_header(count: int) -> bytes:
    """The bytes with which msgpack begins an array of so many values."""
    return bytes([FIXARRAY + count]) if count < 16 else b"\xdc" + count.to_bytes(2)
