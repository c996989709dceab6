"""SamplingParams: everything about a request that changes which tokens come out, and its
validation.

A new parameter is added here (the field and its bounds), in decision.py or in compute's
candidates/ (its effect), and in the schemas of services/requests (its name in the API).
"""

import math

from msgspec import field

from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid

MAX_LOGPROBS = 20
# values for one prompt, its tokens times 1 + prompt_logprobs: 2 MB in a message
MAX_PROMPT_LOGPROBS = 1 << 18
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256  # characters
MAX_TOKENS = 1 << 24  # beyond any model: keeps counts within int32
SEEDS = 1 << 64
# below, only the likeliest token has a weight that a float holds: it is greedy decoding
MIN_TEMPERATURE = 1e-3
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0  # of repetition: logits that it multiplies stay finite
MAX_BREAKERS = 32  # dry_sequence_breakers
MAX_BREAKER_LENGTH = 40  # characters

# The smallest and the largest value of each numeric field, by its name in the API. docs/reference/api.md
# is made of it.
BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0.0, 100.0),
    "top_k": (0, MAX_TOKENS),
    "top_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_PENALTY, MAX_PENALTY),
    "logit_bias": (-100.0, 100.0),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (0, SEEDS - 1),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (0, MAX_TOKENS),
    "dry_penalty_last_n": (-1, MAX_TOKENS),
    "top_n_sigma": (0.0, 1000.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
}


class DryParams(WireStruct, frozen=True):
    """DRY ("don't repeat yourself"), as llama.cpp has it: a token that would continue a
    repetition of L earlier tokens, L at least allowed_length, loses multiplier *
    base^(L - allowed_length) of its logit. A repetition does not reach over a breaker."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    penalty_last_n: int = -1  # how many of the last tokens are searched, the prompt's included; -1: all
    sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")

    def __post_init__(self) -> None:
        for name in ("multiplier", "base", "allowed_length", "penalty_last_n"):
            _check(f"dry_{name}", getattr(self, name))
        if len(self.sequence_breakers) > MAX_BREAKERS or any(not 0 < len(text) <= MAX_BREAKER_LENGTH for text in self.sequence_breakers):
            raise Invalid(f"dry_sequence_breakers takes at most {MAX_BREAKERS} strings of 1 to {MAX_BREAKER_LENGTH} characters", param="dry_sequence_breakers")


class ChainParams(WireStruct, frozen=True):
    """llama.cpp's samplers other than top-k, top-p and min-p. A request with any of them is sampled in
    llama.cpp's order, in which temperature comes last (services/compute/candidates/chain.py)."""

    top_n_sigma: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1  # above 0.5: off
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"):
            _check(name, getattr(self, name))

    @property
    def is_on(self) -> bool:
        """Whether any of them has an effect."""
        has_xtc = self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5
        return self.top_n_sigma > 0.0 or self.typical_p < 1.0 or has_xtc or self.dynatemp_range > 0.0


def check_stop(stop: tuple[str, ...]) -> None:
    """Raises Invalid for too many strings, and for one that is empty or too long."""
    if len(stop) > MAX_STOP_STRINGS:
        raise Invalid(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            got = f"one of {len(text)} characters" if text else "an empty one"
            raise Invalid(f"stop takes strings of 1 to {MAX_STOP_LENGTH} characters, got {got}", param="stop")


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
    logit_bias: dict[int, float] = field(default_factory=dict)
    # None: off; 0: of the chosen token only; n: and of the n likeliest
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens after the first
    allowed_token_ids: tuple[int, ...] = ()  # only these are drawn; empty: all
    bad_words: tuple[str, ...] = ()  # the answer must not contain these
    # their tokens, with a space before and without; the tokenizer sets them
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True  # of the text; False: they are written
    dry: DryParams | None = None  # None: off
    chain: ChainParams | None = None  # None: off
    include_stop_str_in_output: bool = False
    returns_prompt_token_ids: bool = False  # in the request's first event

    def __post_init__(self) -> None:
        for name in (
            "max_tokens", "min_tokens", "temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty", "logprobs", "prompt_logprobs", "seed",
            "top_p", "repetition_penalty",
        ):  # fmt: skip
            _check(name, getattr(self, name))
        if self.max_tokens is not None:
            _between("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_stop(self.stop)
        if len(self.stop_token_ids) > MAX_LOGIT_BIAS or any(not 0 <= token < 1 << 31 for token in self.stop_token_ids):
            raise Invalid(f"stop_token_ids takes at most {MAX_LOGIT_BIAS} token ids from 0 to 2^31 - 1", param="stop_token_ids")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise Invalid(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}", param="logit_bias")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < 1 << 31:
                raise Invalid(f"logit_bias names token {token}, which no vocabulary has", param="logit_bias")
            _check("logit_bias", bias)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS or any(not 0 <= token < 1 << 31 for token in self.allowed_token_ids):
            raise Invalid(f"allowed_token_ids takes at most {MAX_ALLOWED_TOKENS} token ids from 0 to 2^31 - 1", param="allowed_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS or any(not 0 < len(word) <= MAX_BAD_WORD_LENGTH for word in self.bad_words):
            raise Invalid(f"bad_words takes at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_LENGTH} characters", param="bad_words")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_p == 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes the row of logits before the candidates are taken (min_tokens
        aside)."""
        return bool(self.logit_bias) or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def _check(name: str, value: float | None) -> None:
    """Raises Invalid for a value beyond the field's bounds."""
    if name in ("logprobs", "prompt_logprobs") and value == -1:  # vLLM's value for it, which its servers refuse by default
        raise Invalid(f"{name} -1, the whole vocabulary, is not available: at most {MAX_LOGPROBS} of each token", param=name)
    _between(name, value, *BOUNDS[name])


def _between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise Invalid(f"{name} must be between {low} and {high}, got {value}", param=name)
