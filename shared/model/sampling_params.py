"""SamplingParams: everything about a request that changes which tokens come out; and PARAMETERS,
which declares each of them once.

A new parameter is a field at the end of its dataclass (its place there is its place on the wire)
and a row of PARAMETERS. The APIs' fields and checks (services/requests/bodies/parameters.py), the
reference (docs/reference/api.py) and the playground's settings follow from the row. Its effect is
in decision.py or in services/compute/candidates/.
"""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import NODEFAULT

from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid

MAX_LOGPROBS = 20
# values for one prompt, its tokens times 1 + prompt_logprobs: 2 MB in a message
MAX_PROMPT_LOGPROBS = 1 << 18
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_TOKENS = 1 << 24  # beyond any model: keeps counts within int32
SEEDS = 1 << 64
# below it, a float holds the weight of the likeliest token only: greedy decoding
MIN_TEMPERATURE = 1e-3
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0  # of repetition: logits that it multiplies stay finite
MAX_BREAKERS = 32  # dry_sequence_breakers
MAX_BREAKER_LENGTH = 40  # characters

Api = Literal["openai", "anthropic", "responses", "llamacpp", "ollama"]


class DryParams(WireStruct, frozen=True):
    """DRY ("don't repeat yourself"), as llama.cpp has it: a token that would continue a
    repetition of L earlier tokens, L at least allowed_length, loses multiplier *
    base^(L - allowed_length) of its logit. A repetition does not reach over a breaker."""

    multiplier: float = 0.0  # 0: off
    base: float = 1.75
    allowed_length: int = 2
    penalty_last_n: int = -1  # number of tokens that are looked at, the prompt's included; -1: all
    sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def is_on(self) -> bool:
        return self.multiplier > 0.0


class ChainParams(WireStruct, frozen=True):
    """llama.cpp's samplers in addition to top-k, top-p and min-p. A request with any of them is
    sampled in llama.cpp's order, in which temperature comes last
    (services/compute/candidates/chain.py)."""

    top_n_sigma: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def is_on(self) -> bool:
        """Whether any of them changes a row."""
        has_xtc = self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
        return self.top_n_sigma > 0.0 or self.typical_p < 1.0 or has_xtc or self.dynatemp_range > 0.0


class SamplingParams(WireStruct, frozen=True):
    """How one sequence is sampled. A temperature below MIN_TEMPERATURE is greedy decoding, and so is
    a top_p of 0: the likeliest token alone reaches that share."""

    # None until the tokenizer sets it to what the model's length leaves; 0: the request ends after its
    # prompt
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # [0, 2^64); the gateway draws one if the request has none
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    # None: off; 0: of the chosen token only; n: of the n likeliest tokens, too
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, except the first
    allowed_token_ids: tuple[int, ...] = ()  # no others are drawn; empty: all
    bad_words: tuple[str, ...] = ()  # that the answer must not hold
    # how the model spells them, with a space before and without; the tokenizer fills them in
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True  # of the text; False: they are written
    dry: DryParams | None = None  # None: off
    chain: ChainParams | None = None  # None: off
    include_stop_str_in_output: bool = False
    returns_prompt_token_ids: bool = False  # in the request's first event

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise Invalid(
                f"min_tokens must be between 0 and max_tokens, {self.max_tokens}, got {self.min_tokens}",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_p == 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes the row of logits before the candidates are taken (min_tokens
        aside)."""
        has_penalty = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0
        return has_penalty or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class PlaygroundField:
    """How the playground lets people set a parameter."""

    section: str  # of the settings, by its title
    label: str
    hint: str = ""
    slider: tuple[float, float, float] | None = None  # lowest, highest, step
    is_json: bool = False  # entered as JSON; by default texts are entered one a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A sampling parameter as clients know it. Its type and its default are those of its field."""

    name: str  # in OpenAI's chats and completions, and in this server's messages to clients
    description: str
    path: str = ""  # of its field in SamplingParams, such as dry.base; empty: its name
    bounds: tuple[float, float] | None = None  # of a number, or of the numbers in a map
    off: tuple[float, float] | None = None  # numbers out of bounds with which clients turn it off: from, to
    max_items: int = 0  # of a list or a map
    max_length: int = 0  # of each text in a list, in characters
    also: str = ""  # llama.cpp's name, where OpenAI's bodies take it, too
    apis: Mapping[Api, str] = field(default_factory=dict)  # the other APIs that have it, and its name there
    clamped: tuple[float, float] | None = None  # llama.cpp and Ollama take other numbers as the nearest of these
    control: PlaygroundField | None = None

    def name_in(self, api: Api) -> str:
        """Its name in the API; empty if the API doesn't have it."""
        return self.name if api == "openai" else self.apis.get(api, "")

    @property
    def owner(self) -> type[Any]:
        """The dataclass that has its field."""
        group, dot, _ = self.path.partition(".")
        return GROUPS[group] if dot else SamplingParams

    @property
    def field_name(self) -> str:
        """The name of its field."""
        return self.path.rpartition(".")[2] or self.name

    @property
    def value_type(self) -> Any:
        return typing.get_type_hints(self.owner)[self.field_name]

    @property
    def default(self) -> Any:
        """The field's default. An empty map stands for a factory."""
        own = next(each for each in msgspec.structs.fields(self.owner) if each.name == self.field_name)
        return {} if own.default is NODEFAULT else own.default

    @property
    def accepted(self) -> tuple[float, float] | None:
        """The bounds of what clients may send: with the numbers that turn it off."""
        if self.bounds is None or self.off is None:
            return self.bounds
        return min(self.bounds[0], self.off[0]), max(self.bounds[1], self.off[1])

    def of(self, params: SamplingParams) -> Any:
        """Its value in the params."""
        group, dot, _ = self.path.partition(".")
        return getattr((getattr(params, group) or GROUPS[group]()) if dot else params, self.field_name)

    def check(self, value: Any) -> None:
        """Raises Invalid for a value out of bounds, and for too many or too long ones."""
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, tuple | dict):
            self._check_items(value)
        elif self.bounds is not None:
            # vLLM's word for all of them, which its servers refuse by default
            if self.name in ("logprobs", "prompt_logprobs") and value == -1:
                reason = f"{self.name} -1, the whole vocabulary, is not available: at most {MAX_LOGPROBS} of each token"
                raise Invalid(reason, param=self.name)
            self._check_bounds(value)

    def _check_bounds(self, value: float) -> None:
        low, high = self.bounds or (-math.inf, math.inf)
        if not (math.isfinite(value) and low <= value <= high):
            raise Invalid(f"{self.name} must be between {low} and {high}, got {value}", param=self.name)

    def _check_items(self, items: tuple[Any, ...] | dict[Any, Any]) -> None:
        kind = "strings" if self.max_length else "tokens" if isinstance(items, dict) else "token ids"
        if len(items) > self.max_items:
            raise Invalid(f"{self.name} takes at most {self.max_items} {kind}, got {len(items)}", param=self.name)
        for item in items:
            if self.max_length and not 0 < len(item) <= self.max_length:
                got = f"one of {len(item)} characters" if item else "an empty one"
                raise Invalid(
                    f"{self.name} takes strings of 1 to {self.max_length} characters, got {got}", param=self.name
                )
            if not self.max_length and not 0 <= item <= MAX_TOKEN_ID:
                raise Invalid(f"{self.name} takes token ids from 0 to 2^31 - 1, got {item}", param=self.name)
        if isinstance(items, dict):
            for value in items.values():
                self._check_bounds(value)


GROUPS: dict[str, type[Any]] = {
    "dry": DryParams,
    "chain": ChainParams,
}  # fields of SamplingParams with parameters of their own

PARAMETERS = (
    Parameter(
        name="max_tokens",
        description="longest answer; cut to what the prompt leaves of the model's length; -1 or -2: as many as fit",
        bounds=(0, MAX_TOKENS),
        also="n_predict",
        apis={
            "anthropic": "max_tokens",
            "responses": "max_output_tokens",
            "llamacpp": "n_predict",
            "ollama": "num_predict",
        },
    ),
    Parameter(
        name="min_tokens",
        description="no end token before so many tokens",
        bounds=(0, MAX_TOKENS),
        apis={"responses": "min_tokens"},
        control=PlaygroundField("Where it ends", "Shortest answer", "In tokens"),
    ),
    Parameter(
        name="temperature",
        description="below 0.001 the likeliest token is taken",
        bounds=(0.0, 100.0),
        apis={
            "anthropic": "temperature",
            "responses": "temperature",
            "llamacpp": "temperature",
            "ollama": "temperature",
        },
        clamped=(0.0, math.inf),
        control=PlaygroundField(
            "Sampling",
            "Temperature",
            "Higher varies more; 0 always takes the likeliest token",
            (0, 2, 0.05),
        ),
    ),
    Parameter(
        name="top_p",
        description="keep the likeliest tokens whose share reaches it; 0: the likeliest one",
        bounds=(0.0, 1.0),
        apis={"anthropic": "top_p", "responses": "top_p", "llamacpp": "top_p", "ollama": "top_p"},
        clamped=(0.0, 1.0),
        control=PlaygroundField(
            "Sampling",
            "Top share",
            "Draw from the likeliest tokens that together reach this share",
            (0.01, 1, 0.01),
        ),
    ),
    Parameter(
        name="top_k",
        description="keep so many of the likeliest tokens; 0 or -1: all",
        bounds=(0, MAX_TOKENS),
        off=(-1, -1),
        apis={"anthropic": "top_k", "responses": "top_k", "llamacpp": "top_k", "ollama": "top_k"},
        clamped=(0, math.inf),
        control=PlaygroundField(
            "Sampling",
            "Top tokens",
            "Draw from so many of the likeliest tokens; 0: from all",
            (0, 200, 1),
        ),
    ),
    Parameter(
        name="min_p",
        description="keep tokens at least so likely, relative to the likeliest",
        bounds=(0.0, 1.0),
        apis={"responses": "min_p", "llamacpp": "min_p", "ollama": "min_p"},
        clamped=(0.0, 1.0),
        control=PlaygroundField("Sampling", "Least likelihood", "Relative to the likeliest token", (0, 1, 0.01)),
    ),
    Parameter(
        name="seed",
        description="the same request with the same seed gets the same answer; left out or -1: a random one is drawn",
        bounds=(0, SEEDS - 1),
        apis={"anthropic": "seed", "responses": "seed", "llamacpp": "seed", "ollama": "seed"},
    ),
    Parameter(
        name="stop",
        description="texts that end the answer; empty ones end none",
        max_items=MAX_STOP_STRINGS,
        max_length=MAX_STOP_LENGTH,
        apis={"anthropic": "stop_sequences", "responses": "stop", "llamacpp": "stop", "ollama": "stop"},
        control=PlaygroundField("Where it ends", "Stop at texts", "One a line"),
    ),
    Parameter(
        name="stop_token_ids",
        description="tokens that end the answer",
        max_items=MAX_STOP_TOKENS,
        apis={"responses": "stop_token_ids"},
        control=PlaygroundField("Where it ends", "Stop at tokens", "[token ids]"),
    ),
    Parameter(
        name="ignore_eos",
        description="the model's end tokens do not end the answer",
        apis={"responses": "ignore_eos", "llamacpp": "ignore_eos"},
        control=PlaygroundField("Where it ends", "Never end by itself", "Go on after the model's own end"),
    ),
    Parameter(
        name="frequency_penalty",
        description="subtracted from a token's logit for each time that the output has it",
        bounds=(-2.0, 2.0),
        apis={"responses": "frequency_penalty", "llamacpp": "frequency_penalty", "ollama": "frequency_penalty"},
        control=PlaygroundField(
            "Penalties and bias",
            "Frequency",
            "Against a token, for each time that the answer has it",
            (-2, 2, 0.05),
        ),
    ),
    Parameter(
        name="presence_penalty",
        description="subtracted from a token's logit once the output has it",
        bounds=(-2.0, 2.0),
        apis={"responses": "presence_penalty", "llamacpp": "presence_penalty", "ollama": "presence_penalty"},
        control=PlaygroundField(
            "Penalties and bias",
            "Presence",
            "Against every token that the answer has",
            (-2, 2, 0.05),
        ),
    ),
    Parameter(
        name="repetition_penalty",
        description="divides logits of tokens that prompt or output have",
        bounds=(MIN_PENALTY, MAX_PENALTY),
        also="repeat_penalty",
        apis={"responses": "repetition_penalty", "llamacpp": "repeat_penalty", "ollama": "repeat_penalty"},
        control=PlaygroundField(
            "Penalties and bias",
            "Repetition",
            "Against tokens of the prompt, too; 1: off",
            (0.5, 2, 0.01),
        ),
    ),
    Parameter(
        name="logit_bias",
        description=f"added to the logits of up to {MAX_LOGIT_BIAS} tokens, by id",
        bounds=(-100.0, 100.0),
        max_items=MAX_LOGIT_BIAS,
        apis={"responses": "logit_bias", "llamacpp": "logit_bias"},
        control=PlaygroundField("Penalties and bias", "Bias of tokens", '{"token id": -100 to 100}'),
    ),
    Parameter(
        name="logprobs",
        description="logprobs of each token, and of so many of the likeliest at each position",
        bounds=(0, MAX_LOGPROBS),
        apis={"llamacpp": "n_probs"},
    ),
    Parameter(
        name="prompt_logprobs",
        description="logprobs of the prompt's tokens, and of so many of the likeliest at each position",
        bounds=(0, MAX_LOGPROBS),
    ),
    Parameter(
        name="allowed_token_ids",
        description="no other tokens are drawn",
        max_items=MAX_ALLOWED_TOKENS,
        control=PlaygroundField("Penalties and bias", "Allowed tokens", "[token ids]: no others are drawn"),
    ),
    Parameter(
        name="bad_words",
        description="texts that the answer must not hold",
        max_items=MAX_BAD_WORDS,
        max_length=MAX_BAD_WORD_LENGTH,
        control=PlaygroundField("Penalties and bias", "Forbidden words", "One a line"),
    ),
    Parameter(
        name="skip_special_tokens",
        description="false: special tokens are spelt out in the text",
        control=PlaygroundField("Tokens and likelihoods", "Hide special tokens", "Leave them out of the text"),
    ),
    Parameter(
        name="include_stop_str_in_output",
        description="the text keeps the stop string, or the stop token's text, at its end",
        control=PlaygroundField("Where it ends", "Keep the stop text", "At the answer's end"),
    ),
    Parameter(
        name="top_n_sigma",
        path="chain.top_n_sigma",
        description="keep logits within so many standard deviations of the largest; 0 or below: off",
        bounds=(0.0, 1000.0),
        off=(-math.inf, 0.0),
        apis={"llamacpp": "top_n_sigma"},
        control=PlaygroundField(
            "llama.cpp's samplers",
            "Top deviations",
            "Within so many standard deviations of the likeliest; 0: off",
            (0, 5, 0.1),
        ),
    ),
    Parameter(
        name="typical_p",
        path="chain.typical_p",
        description="keep tokens whose surprise is nearest to the entropy, up to this share; 1: off",
        bounds=(0.0, 1.0),
        apis={"llamacpp": "typical_p", "ollama": "typical_p"},
        clamped=(0.0, 1.0),
        control=PlaygroundField("llama.cpp's samplers", "Typical share", "1: off", (0.01, 1, 0.01)),
    ),
    Parameter(
        name="xtc_probability",
        path="chain.xtc_probability",
        description="how often, of the tokens above xtc_threshold, only the least likely stays; 0: off",
        bounds=(0.0, 1.0),
        apis={"llamacpp": "xtc_probability"},
        control=PlaygroundField(
            "llama.cpp's samplers",
            "XTC chance",
            "How often the likeliest tokens are left out; 0: off",
            (0, 1, 0.05),
        ),
    ),
    Parameter(
        name="xtc_threshold",
        path="chain.xtc_threshold",
        description="the probability from which xtc_probability takes tokens away; above 0.5: off",
        bounds=(0.0, 1.0),
        apis={"llamacpp": "xtc_threshold"},
        control=PlaygroundField("llama.cpp's samplers", "XTC threshold", slider=(0, 0.5, 0.01)),
    ),
    Parameter(
        name="dynatemp_range",
        path="chain.dynatemp_range",
        description="temperature varies by so much with the row's entropy; 0: off",
        bounds=(0.0, 100.0),
        apis={"llamacpp": "dynatemp_range"},
        control=PlaygroundField("llama.cpp's samplers", "Temperature range", "0: off", (0, 2, 0.05)),
    ),
    Parameter(
        name="dynatemp_exponent",
        path="chain.dynatemp_exponent",
        description="temperature = low + (high - low) * (entropy / largest entropy)^exponent",
        bounds=(0.0, 100.0),
        apis={"llamacpp": "dynatemp_exponent"},
        control=PlaygroundField("llama.cpp's samplers", "Temperature exponent", slider=(0, 4, 0.1)),
    ),
    Parameter(
        name="dry_multiplier",
        path="dry.multiplier",
        description="DRY: a repetition of L tokens costs a logit this much, times base^(L - allowed length); 0: off",
        bounds=(0.0, 100.0),
        apis={"llamacpp": "dry_multiplier"},
        control=PlaygroundField("Repeated phrases (DRY)", "Strength", "0: off", (0, 4, 0.05)),
    ),
    Parameter(
        name="dry_base",
        path="dry.base",
        description="see dry_multiplier",
        bounds=(1.0, 100.0),
        apis={"llamacpp": "dry_base"},
        control=PlaygroundField("Repeated phrases (DRY)", "Growth", "For each further token of a phrase", (1, 4, 0.05)),
    ),
    Parameter(
        name="dry_allowed_length",
        path="dry.allowed_length",
        description="shorter repetitions cost nothing; longer ones count up to 256 tokens beyond it",
        bounds=(0, MAX_TOKENS),
        apis={"llamacpp": "dry_allowed_length"},
        control=PlaygroundField("Repeated phrases (DRY)", "Allowed length", "Of a phrase, in tokens", (0, 20, 1)),
    ),
    Parameter(
        name="dry_penalty_last_n",
        path="dry.penalty_last_n",
        description="number of tokens of prompt and output that are looked at; -1: all",
        bounds=(-1, MAX_TOKENS),
        apis={"llamacpp": "dry_penalty_last_n"},
        control=PlaygroundField("Repeated phrases (DRY)", "Looks back", "So many tokens; -1: to the start"),
    ),
    Parameter(
        name="dry_sequence_breakers",
        path="dry.sequence_breakers",
        description="DRY: texts that end a repetition",
        max_items=MAX_BREAKERS,
        max_length=MAX_BREAKER_LENGTH,
        apis={"llamacpp": "dry_sequence_breakers"},
        control=PlaygroundField("Repeated phrases (DRY)", "Phrases end at", '["\\n", ":"]', is_json=True),
    ),
)


def parameter(name: str) -> Parameter:
    """The parameter of this name."""
    return next(each for each in PARAMETERS if each.name == name)


def parameters_of(api: Api) -> dict[str, Parameter]:
    """The parameters that an API has, by what it calls them."""
    return {name: each for each in PARAMETERS if (name := each.name_in(api))}


def make_params(values: Mapping[str, Any]) -> SamplingParams:
    """The params with these values, by the parameters' names and by those of other fields of
    SamplingParams; None: the default. A group that has no effect is None. Raises Invalid, naming
    all that are wrong."""
    given = {name: value for name, value in values.items() if value is not None}
    own: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    wrong: list[Invalid] = []
    for each in PARAMETERS:
        if each.name not in given:
            continue
        value = given.pop(each.name)
        try:
            each.check(value)
        except Invalid as error:
            wrong.append(error)
        (groups.setdefault(each.path.partition(".")[0], {}) if each.path else own)[each.field_name] = value
    if wrong:
        raise Invalid("; ".join(map(str, wrong)), param=wrong[0].param, code=wrong[0].code)
    made = {name: GROUPS[name](**fields) for name, fields in groups.items()}
    return SamplingParams(**own, **{name: group for name, group in made.items() if group.is_on}, **given)


# The declared fields of each dataclass
_DECLARED = {
    owner: [(each.field_name, each) for each in PARAMETERS if each.owner is owner]
    for owner in (SamplingParams, *GROUPS.values())
}


def _check_fields(params: Any) -> None:
    """Raises Invalid for the first field that is wrong."""
    for name, declared in _DECLARED[type(params)]:
        declared.check(getattr(params, name))
