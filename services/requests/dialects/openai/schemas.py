"""The bodies that clients send, as pydantic models. bodies/body.py says which other fields are
passed over and which are refused; bounds are SamplingParams'.

What may be long is checked by fields.py: a body of any shape takes time linear in its size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from msgspec import structs
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema, model_validator

from services.requests.bodies.body import OF_CHATS, OF_COMPLETIONS, Body
from services.requests.bodies.fields import (
    MAX_NAME,
    MAX_SEQUENCES,
    PROMPT_SCHEMA,
    Prompt,
    at,
    at_most,
    read_prompt,
    read_stop,
)
from services.requests.bodies.parameters import given_values, params_of, takes_parameters
from services.requests.dialects.openai.constrain import StructuredOutputs, constraint_of
from services.requests.dialects.openai.intent import BeamOptions, ChatIntent, Intent
from services.requests.dialects.openai.messages import Message, Prediction
from services.requests.dialects.openai.tools import (
    MAX_TOOLS,
    Calling,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    resolve_calling,
)
from services.requests.store.modules.schemas import UsedModules
from services.requests.store.record import ResponseRecord
from shared.model.constraint import Constraint
from shared.model.sampling_params import MAX_STOP_STRINGS, MAX_TOKENS, SamplingParams, parameter
from shared.process.errors import Invalid
from shared.wire.messages import ChatOptions, EncodingParams, GenerateRequest, SchedulingParams

MAX_MESSAGES = 4096
MAX_USER = 4096
MAX_DOCUMENTS = 1024
MAX_TEMPLATE = 64 << 10  # characters
MAX_TEMPLATE_KWARGS = 64 << 10  # bytes of JSON
# what chat_template_kwargs can't set: fields of their own, and what renders them
OF_CONVERSATIONS = (
    "messages",
    "conversation",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)

MAX_ECHO = 64 << 10  # characters
MAX_PRIORITY = 100
MAX_DEADLINE_S = 86_400.0
MAX_RESUME_S = 60.0


class StreamOptions(Body):
    """More that a client can ask for in its stream."""

    include_usage: bool = Field(False, description="a last chunk with usage; the others say null")
    continuous_usage_stats: bool = Field(False, description="usage so far, in each chunk")
    include_position: bool = Field(False, description="an `id:` line with each event, the position to resume after")
    include_obfuscation: bool = Field(True, description="taken, and nothing is added either way")
    resume_within_s: float = Field(
        0.0,
        ge=0,
        le=MAX_RESUME_S,
        description=(
            "seconds that the response goes on after its client disconnects; then, unless resumed, it is cancelled"
        ),
    )


@takes_parameters("openai")
class GenerateBody(Body):
    """The fields that both endpoints share, with the sampling parameters."""

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    n: int = Field(1, ge=1, le=MAX_SEQUENCES, description="answers to each prompt; prompts times n is bounded, too")
    stream: bool = Field(False, description="send the answer as it comes, as server-sent events")
    stream_options: StreamOptions | None = Field(None, description="for streams; see StreamOptions")
    max_tokens: int | None = Field(None, ge=-2, description=parameter("max_tokens").description)
    n_predict: int | None = Field(None, ge=-2, description="llama.cpp's name of max_tokens")
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description=parameter("seed").description)
    stop: Annotated[str | list[str] | None, BeforeValidator(read_stop(MAX_STOP_STRINGS))] = Field(
        None, description=parameter("stop").description
    )
    response_format: dict[str, Any] | None = Field(
        None, description="OpenAI's: of type text, json_object or json_schema; or vLLM's, of type structural_tag"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's: one of json, regex, choice, grammar, json_object, structural_tag"
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="vLLM's older name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="vLLM's older name of structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="vLLM's older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="vLLM's older name of structured_outputs.grammar")
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar")
    json_schema: dict[str, Any] | None = Field(None, description="llama.cpp's name of structured_outputs.json")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_SEQUENCES,
        description="sequences to draw, the n likeliest of which are answers; of a beam search, its width",
    )
    use_beam_search: bool = Field(
        False,
        description="search with best_of beams; takes no other sampling parameters, no tools, no grammar, no stream",
    )
    length_penalty: float | None = Field(
        None, ge=-10.0, le=10.0, description="for a beam search: scores are divided by length to this power"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="for a beam search: when to stop looking for answers, as in transformers"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="keep the prompt's last so many tokens; -1: as many as fit"
    )
    add_special_tokens: bool | None = Field(
        None, description="add a BOS and the like; by default for prompts, not for chats, whose template brings its own"
    )
    parse_special_tokens: bool | None = Field(
        None, description="read special tokens that are spelt in texts as tokens; by default in prompts, not in chats"
    )
    return_token_ids: bool = Field(False, description="token_ids in each choice or chunk, and prompt_token_ids once")
    return_tokens_as_token_ids: bool = Field(False, description="logprobs name a token token_id:<id>")
    prompt_logprobs: int | None = Field(None, description=parameter("prompt_logprobs").description)
    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="smaller is sooner; batch work takes 1 and above"
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=MAX_DEADLINE_S,
        description="seconds within which the request must begin; else it fails with deadline_exceeded",
    )
    timings_per_token: bool = Field(
        False, description="llama.cpp's: the answer and each chunk have timings; not of batches"
    )
    cache_salt: str = Field(
        "", min_length=1, max_length=256, description="only requests with the same salt share cached prefixes"
    )
    prompt_cache_key: str = Field(
        "", max_length=256, description="the same as cache_salt; with both, requests with the same pair share"
    )
    prompt_modules: UsedModules | None = Field(
        None, description="modules at the beginning of the prompt, or of the first user's message; see UsedModules"
    )
    user: str | None = Field(None, max_length=MAX_USER, description="goes into the log, to help find abuse")

    @model_validator(mode="after")
    def _by_one_name(self) -> "GenerateBody":
        """Set what other servers call otherwise by the name that it has here, and -1 as they mean
        it."""
        if self.seed == -1:
            self.seed = None
        for name, each in self.sampling_parameters.items():
            given = getattr(self, each.also) if each.also else None
            if given is not None and getattr(self, name) not in (None, given):
                raise at(f".{each.also}", f"it differs from {name}: give one")
            if given is not None:
                setattr(self, name, given)
        return self

    def sampling_params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The parameters, checked. Fields left out or null take their defaults. The seed is set for
        each choice later."""
        if self.prompt_modules is not None:
            self.prompt_modules.check_beside(self)
        if self.stream_options is not None and not self.stream:
            raise Invalid("stream_options is for streams: set stream to true", param="stream_options")
        self._check_choices()
        if given_values(self).get("allowed_token_ids") == []:
            raise Invalid(
                "allowed_token_ids is empty, so no token is allowed: name some, or leave it out",
                param="allowed_token_ids",
            )
        if logprobs is None and self.num_sequences > self.n:
            logprobs = 0  # the best are chosen by them
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        # the tokenizer cuts what is too much
        return params_of(
            self,
            max_tokens=None if max_tokens is None or max_tokens < 0 else min(max_tokens, MAX_TOKENS),
            seed=None,
            stop=tuple(filter(None, stops)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            returns_prompt_token_ids=self.return_token_ids,
        )

    def _intent(
        self,
        requests: Sequence[GenerateRequest],
        constraint: Constraint | None,
        *,
        has_logprobs: bool,
        **of_record: Any,
    ) -> Intent:
        """The intent, without the parts that only a chat or a completion has. of_record: more of the
        record's fields."""
        options = self.stream_options or StreamOptions()
        salt = "\0".join((self.cache_salt, self.prompt_cache_key)) if self.prompt_cache_key else self.cache_salt
        scheduling = SchedulingParams(self.priority, cache_salt=salt)
        encoding = EncodingParams(
            self.add_special_tokens, self.parse_special_tokens, checked_truncation(self.truncate_prompt_tokens)
        )
        picks = not self.use_beam_search and self.num_sequences > self.n
        num_all = len(requests) * (self.best_of or self.n)
        if num_all > MAX_SEQUENCES:
            raise Invalid(
                f"at most {MAX_SEQUENCES} prompts times n (or best_of) in one request, got {num_all}", param="n"
            )
        return Intent(
            record=ResponseRecord(
                "",
                "",
                self.model,
                0,
                len(requests),
                1 if self.use_beam_search else self.num_sequences,
                options.include_usage,
                "",
                num_best=self.n if picks else None,
                hides_logprobs=picks and not has_logprobs,
                has_continuous_usage=options.include_usage and options.continuous_usage_stats,
                num_prompt_logprobs=self.prompt_logprobs,
                has_token_ids=self.return_token_ids,
                names_tokens_by_id=self.return_tokens_as_token_ids,
                resume_within_s=options.resume_within_s,
                **of_record,
            ),
            requests=tuple(structs.replace(each, scheduling=scheduling, encoding=encoding) for each in requests),
            given=frozenset(given_values(self)),
            seed=self.seed % (1 << 64) if self.seed is not None else None,
            constraint=constraint,
            deadline_s=self.deadline_s,
            modules=self.prompt_modules,
            beams=self._beams(),
            stream=self.stream,
            has_positions=options.include_position,
            has_timings=self.timings_per_token,
            user=self.user,
            num_answers=self.n,
        )

    def _beams(self) -> BeamOptions | None:
        if not self.use_beam_search:
            return None
        length_penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamOptions(self.best_of or self.n, length_penalty, self.early_stopping or False)

    def constraint(self) -> Constraint | None:
        """The constraint that the answer must match. Raises Invalid."""
        guided = {
            name: getattr(self, name)
            for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema")
        }
        guided["grammar"] = self.grammar or None
        return constraint_of(self.response_format, self.structured_outputs, guided)

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt: more than n where the best of them are wanted."""
        return self.n if self.best_of is None or self.use_beam_search else self.best_of

    def _check_choices(self) -> None:
        """Raises Invalid where n, best_of, streams and beams don't go together."""
        if self.best_of is not None and self.best_of < self.n:
            raise Invalid(f"best_of must be at least n, which is {self.n}, got {self.best_of}", param="best_of")
        if self.stream and self.use_beam_search:
            raise Invalid("a beam search can't be streamed: its answer is not known before its end", param="stream")
        if self.stream and self.num_sequences > self.n:
            raise Invalid(
                "with best_of above n there is no stream: the best are not known before their end", param="stream"
            )
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) not in (None, False, 1.0) and not self.use_beam_search:
                raise Invalid(f"{name} is for beam searches: set use_beam_search to true", param=name)


def read_function_call(value: Any) -> Any:
    """Read a function_call as a tool_choice."""
    if value in (None, "none", "auto"):
        return value
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return NamedTool(type="function", function=FunctionName(name=value["name"]))
    raise at("", "expected none, auto, or an object with the name of a function")


def description_of(name: str) -> str:
    """GenerateBody's description of a field, for the bodies of other APIs that have the same one."""
    return GenerateBody.model_fields[name].description or ""


class ChatCompletionBody(GenerateBody):
    neutral = OF_CHATS

    messages: Annotated[
        list[Message],
        FailFast(),
        Field(min_length=1, max_length=MAX_MESSAGES, description="the conversation; see Message"),
    ]
    echo: bool = Field(
        False,
        description=(
            "the answer begins with the last message, if that is the assistant's, as with continue_final_message"
        ),
    )
    max_completion_tokens: int | None = Field(None, ge=-2, description="max_tokens by its newer name")
    logprobs: bool | None = Field(None, description="the logprob of each token of the text")
    top_logprobs: int | None = Field(
        None, description="with logprobs: so many of the likeliest tokens at each position, too"
    )
    tools: Tools | None = Field(
        None, description=f"up to {MAX_TOOLS} functions and custom tools that the model may call"
    )
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required, a function, or allowed_tools; by default auto with tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    functions: Annotated[list[Function] | None, BeforeValidator(at_most(MAX_TOOLS))] = Field(
        None, description="the older name of tools"
    )
    function_call: Annotated[Any, AfterValidator(read_function_call)] = Field(
        None, description="the older name of tool_choice"
    )
    prediction: Prediction | None = Field(
        None, description="the answer as it is expected, such as a file with changes: what holds of it comes faster"
    )
    include_reasoning: bool = Field(True, description="false: the answer leaves out the model's thoughts")
    reasoning_effort: str | None = Field(
        None,
        pattern=r"^[a-z]{0,16}$",
        description="a variable of the template; none also sets enable_thinking to false",
    )
    verbosity: str | None = Field(None, pattern=r"^[a-z]{0,16}$", description="a variable of the template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="further variables of the template")
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE, description="instead of the model's own, where the operator allows it"
    )
    documents: Annotated[list[dict[str, Any]] | None, BeforeValidator(at_most(MAX_DOCUMENTS))] = Field(
        None, description="a variable of the template"
    )
    add_generation_prompt: bool = Field(True, description="the prompt ends as if an answer followed")
    continue_final_message: bool = Field(False, description="the last message is not over: the answer goes on with it")

    def calling(self) -> Calling:
        """Raises Invalid."""
        if not self.functions:
            if isinstance(self.function_call, NamedTool):
                raise Invalid("function_call is for functions: there are none", param="function_call")
            return resolve_calling(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.tools or self.tool_choice is not None:
            raise Invalid("functions is the older name of tools: give one of them", param="functions")
        tools = [Tool(type="function", function=function) for function in self.functions]
        return replace(resolve_calling(tools, self.function_call, False), is_legacy=True)

    @property
    def may_think(self) -> bool:
        """Whether the request leaves it to the model."""
        kwargs = self.chat_template_kwargs or {}
        return (
            self.reasoning_effort != "none"
            and kwargs.get("enable_thinking") is not False
            and kwargs.get("thinking") is not False
        )

    def chat_options(
        self, calling: Calling, *, may_bring_template: bool, begins_with_call: bool = False
    ) -> ChatOptions:
        """The template's arguments besides the messages. begins_with_call: the answer has no room
        for a thought. Raises Invalid."""
        if self.chat_template is not None and not may_bring_template:
            raise no_template()
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise Invalid(
                "continue_final_message and add_generation_prompt exclude each other: set one of them to false",
                param="continue_final_message",
            )
        kwargs: dict[str, Any] = {
            "reasoning_effort": self.reasoning_effort or None,
            "verbosity": self.verbosity or None,
        }
        if self.reasoning_effort == "none" or begins_with_call:
            kwargs |= {"enable_thinking": False, "thinking": False}
        kwargs |= self.chat_template_kwargs or {}
        if reserved := next((name for name in kwargs if name in OF_CONVERSATIONS), None):
            raise Invalid(
                f"chat_template_kwargs can't set {reserved}: leave it out", param=f"chat_template_kwargs.{reserved}"
            )
        packed = orjson.dumps(
            {
                name: value
                for name, value in kwargs.items()
                if value is not None or name in (self.chat_template_kwargs or {})
            }
        ).decode()
        if len(packed) > MAX_TEMPLATE_KWARGS:
            raise Invalid(
                f"chat_template_kwargs takes at most {MAX_TEMPLATE_KWARGS} bytes of JSON, got {len(packed)}",
                param="chat_template_kwargs",
            )
        return ChatOptions(
            calling.tools_json,
            orjson.dumps(self.documents).decode() if self.documents else "",
            packed if packed != "{}" else "",
            self.chat_template or "",
            self.add_generation_prompt and not self.continue_final_message,
            self.continue_final_message,
        )

    @property
    def echoed(self) -> str:
        """The text that the answer begins with. Raises Invalid for too much."""
        last = self.messages[-1]
        text = last.to_wire().content if self.echo and last.role == "assistant" else ""
        if len(text) > MAX_ECHO:
            raise Invalid(f"echo repeats at most {MAX_ECHO} characters, got {len(text)}", param="echo")
        return text

    def intent(self) -> Intent:
        """The body as one checked value. Raises Invalid."""
        calling, params, echoed = self.calling(), self.params(), self.echoed
        if self.use_beam_search and self.echo:
            raise Invalid("echo is not available with use_beam_search: leave it out", param="echo")
        options = self.chat_options(calling, may_bring_template=True)
        prediction = self.prediction.content if self.prediction is not None else ""
        made = self._intent(
            [GenerateRequest("", None, "", params, chat=options, prediction=prediction)],
            calling.forced() or self.constraint(),
            has_logprobs=bool(self.logprobs),
            has_reasoning=self.include_reasoning,
            echoed=echoed,
        )
        unthinking = (
            self.chat_options(calling, may_bring_template=True, begins_with_call=True) if calling.is_forced else options
        )
        given = made.given if self.max_completion_tokens is None else made.given | {"max_tokens"}
        return replace(made, given=given, chat=ChatIntent(self.messages, calling, self.may_think, unthinking))

    def params(self) -> SamplingParams:
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise Invalid("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        if self.use_beam_search and self.calling().mode != "none":
            raise Invalid("tools is not available with use_beam_search: leave it out", param="tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise Invalid("top_logprobs is for logprobs: set logprobs to true", param="top_logprobs")
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if max_tokens == 0 and self.n_predict != 0:  # which asks for the prompt to be cached
            raise Invalid("max_tokens must be at least 1, got 0", param="max_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=self.prompt_logprobs)


def no_template() -> Invalid:
    """The refusal of a chat's own template."""
    reason = (
        "chat_template is not allowed here: leave it out, or ask the operator to start with "
        "--trust-request-chat-template"
    )
    return Invalid(reason, param="chat_template")


def checked_truncation(num_tokens: int | None) -> int | None:
    """Raises Invalid for 0."""
    if num_tokens == 0:
        raise Invalid(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit, got 0", param="truncate_prompt_tokens"
        )
    return num_tokens


class CompletionBody(GenerateBody):
    neutral = OF_COMPLETIONS

    prompt: Annotated[list[Prompt], PlainValidator(read_prompt), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="a text, token ids, or lists of them"
    )
    suffix: str | None = Field(
        None,
        description=(
            "the text behind the gap that the answer fills, for models with tokens for infilling; not in batches"
        ),
    )
    logprobs: int | None = Field(
        None, description="logprobs of each token, and of so many of the likeliest at each position"
    )
    echo: bool = Field(
        False, description="begin with the prompt; with logprobs, with its logprobs; max_tokens may then be 0"
    )

    def params(self) -> SamplingParams:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise Invalid(
                "max_tokens may be 0 only with echo or prompt_logprobs: else there is nothing to answer",
                param="max_tokens",
            )
        of_prompt = max(
            (each for each in (self.prompt_logprobs, self.num_echo_logprobs) if each is not None), default=None
        )
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self.sampling_params(max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=of_prompt)

    @property
    def num_echo_logprobs(self) -> int | None:
        """Logprobs of each echoed token, in addition to its own."""
        return self.logprobs if self.echo else None

    def intent(self) -> Intent:
        """The body as one checked value. Raises Invalid."""
        if self.use_beam_search and self.echo:
            raise Invalid("echo is not available with use_beam_search: leave it out", param="echo")
        draft = GenerateRequest("", None, "", self.params(), echo=self.echo)
        requests = [with_prompt(draft, prompt) for prompt in self.prompt]
        made = self._intent(
            requests,
            self.constraint(),
            has_logprobs=self.logprobs is not None,
            num_echo_logprobs=self.num_echo_logprobs,
        )
        return replace(made, suffix=self.suffix or "")


def with_prompt(request: GenerateRequest, prompt: Prompt) -> GenerateRequest:
    """The request, to go on with this prompt."""
    if isinstance(prompt, str):
        return structs.replace(request, prompt=prompt, prompt_token_ids=None)
    return structs.replace(request, prompt=None, prompt_token_ids=prompt)
