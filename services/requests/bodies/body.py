"""Body: what all bodies have in common. What would change the answer and is not here is refused by
name; what else is unknown is passed over, and named.

- What asks for nothing, or for what is done anyway, is taken without a word: null or something
  empty in any field, and the values in the tables.
- Any other value of a field in the tables would change the answer: it is refused by name.
- An integer may be written as 5.0.
- A field in no table is passed over, and named in the answer's header (ignored.py): clients add
  fields every month, and few of them change an answer.

What we sent, a client may send back: an assistant's message with all its fields.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from services.requests.bodies.fields import WORD, shortened, whole_items
from services.requests.bodies.ignored import MAX_NAMES, collecting, tell, tell_below
from shared.model.sampling_params import Parameter

Table = dict[str, tuple[Any, ...]]  # by field, the values that ask for nothing

ANYTHING: tuple[Any, ...] = ("anything",)
REFUSED: tuple[Any, ...] = ()

# What llama.cpp's own endpoints and OpenAI's take alike. Not in it are samplers, repeat_last_n,
# min_keep, n_indent, t_max_predict_ms: its clients send them with every request, so they are passed
# over, and named
OF_LLAMA_CPP: Table = {
    "cache_prompt": ANYTHING,
    "grammar_lazy": (False,),
    "id_slot": ANYTHING,
    "lora": REFUSED,
    "mirostat": (0,),
    "mirostat_eta": ANYTHING,
    "mirostat_tau": ANYTHING,
    "n_cache_reuse": ANYTHING,
    "n_keep": ANYTHING,
    "post_sampling_probs": (False,),
    "tfs_z": (1,),
}
# Samplers, constraints and adapters of other servers
OF_OTHER_SERVERS: Table = (
    dict.fromkeys(
        (
            "dry_range",
            "ebnf",
            "epsilon_cutoff",
            "eta_cutoff",
            "grammar",
            "guidance_scale",
            "guided_whitespace_pattern",
            "json_schema",
            "kv_transfer_params",
            "logits_processors",
            "logprob_token_ids",
            "lora_path",
            "lora_request",
            "negative_prompt",
            "no_repeat_ngram_size",
            "regex",
            "repetition_detection",
            "repetition_penalty_range",
            "smoothing_factor",
            "structural_tag",
            "tfs",
            "thinking_token_budget",
            "top_a",
            "vllm_xargs",
        ),
        REFUSED,
    )
    | OF_LLAMA_CPP
    | {
        "custom_token_bans": REFUSED,
        "n_probs": (0,),
        "parse_tool_calls": (True,),
        "reasoning_budget_tokens": (-1,),
        "reasoning_format": ("auto", "deepseek"),
        "thinking_budget_tokens": (-1,),
        "thinking_forced_open": (False,),
        "truncation_side": ("left",),  # truncate_prompt_tokens keeps the end
    }
)
OF_REQUESTS: Table = {
    name: values for name, values in OF_OTHER_SERVERS.items() if name not in ("grammar", "json_schema")
} | {
    "audio": REFUSED,
    "detokenize": (True,),
    "guided_decoding_backend": ANYTHING,
    "images": REFUSED,
    "metadata": ANYTHING,
    "modalities": (["text"],),
    "prediction": ANYTHING,
    "prompt_embeds": REFUSED,
    "safety_identifier": ANYTHING,
    "service_tier": ANYTHING,
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers
    "store": (True, False),
}
OF_CHATS: Table = {name: values for name, values in OF_REQUESTS.items() if name != "prediction"} | {
    "prompt": REFUSED,
    "suffix": REFUSED,
}
OF_COMPLETIONS: Table = OF_REQUESTS | {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "messages": REFUSED,
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "tools": REFUSED,
    "verbosity": ("medium",),
}
OF_MESSAGES: Table = {
    "annotations": ANYTHING,
    "audio": REFUSED,
    "images": REFUSED,
    "parsed": ANYTHING,
    "prefix": (False,),
    "provider_specific_fields": ANYTHING,
}
OF_CALLS: Table = {"parsed_arguments": ANYTHING}  # that the openai package's parse() adds, and sends back

MAX_UNKNOWN = 8  # of the refused fields of an object, so many are named
OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")  # pydantic's errors: one end each


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[
        dict[str, tuple[Any, ...]]
    ] = {}  # fields that are not here, and which values of them ask for nothing; any other is refused
    sampling_parameters: ClassVar[
        dict[str, Parameter]
    ] = {}  # its parameters, by their names here; parameters.py sets them
    integers: ClassVar[dict[str, tuple[float, float]]] = {}  # fields that take one, or several: the least, the largest

    _passed_over: tuple[str, ...] = PrivateAttr(())  # of this object
    _is_worth_a_look: bool = PrivateAttr(False)  # something was passed over in it or below; mostly nothing was

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = {name: each for name, each in cls.model_fields.items() if takes_integers(each.annotation)}
        cls.integers = {name: range_of(each.metadata) for name, each in fields.items()}

    @model_validator(mode="wrap")
    @classmethod
    def _name_what_is_wrong(cls, value: Any, handler: ModelWrapValidatorHandler["Body"]) -> Any:
        """The refused fields together with all other errors: a body of a million of them is a few
        errors."""
        if not isinstance(value, dict):
            return handler(value)
        value = without_neutral(value, cls.model_fields, cls.neutral)
        value |= {name: whole_items(value[name]) for name in cls.integers.keys() & value.keys()}
        unknown = [key for key in value if key not in cls.model_fields]
        refused = [key for key in unknown if key in cls.neutral]
        known = {key: each for key, each in value.items() if key in cls.model_fields} if unknown else value
        with collecting() as names:
            tell(*(key for key in unknown if key not in cls.neutral))
            try:
                body = handler(known)
            except ValidationError as error:
                raise cls._wrong(refused, error) from None
            if refused:
                raise cls._wrong(refused)
        if names.names or names.are_below:
            body._passed_over, body._is_worth_a_look = tuple(names), True
            tell_below()
        return body

    @classmethod
    def _wrong(cls, refused: list[str], error: ValidationError | None = None) -> ValidationError:
        others = error.errors(include_url=False) if error is not None else []
        errors = [*map(_refused, refused[:MAX_UNKNOWN]), *(_again(each, cls._ranged(each)) for each in others)]
        return ValidationError.from_exception_data(cls.__name__, errors)

    @classmethod
    def _ranged(cls, error: Any) -> str:
        """The words of an error; of an integer out of its range, the whole range."""
        kind, value = error["type"], error["input"]
        is_beyond = kind in OUT_OF_RANGE or (kind == "int_type" and isinstance(value, float) and abs(value) >= WORD)
        field = error["loc"][0] if is_beyond else ""
        if field not in cls.integers:
            return str(error["msg"])
        own = cls.sampling_parameters.get(field)
        least, largest = own.accepted if own is not None and own.accepted is not None else cls.integers[field]
        return (
            f"expected an integer from {least} to {largest}"
            if math.isfinite(largest - least)
            else "expected an integer of 64 bits"
        )

    @property
    def passed_over(self) -> list[str]:
        """The fields that ask for what is not done, in it and below it, by their paths; not many
        more than are told."""
        return list(islice(self._all_passed_over(""), MAX_NAMES + 1)) if self._is_worth_a_look else []

    def _all_passed_over(self, path: str) -> Iterator[str]:
        yield from (path + name for name in self._passed_over)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                yield from value._all_passed_over(f"{path}{name}.")
            elif isinstance(value, list):
                for index, each in enumerate(value):
                    if not isinstance(each, BaseModel):
                        break  # a list of texts or numbers, which may be long
                    if isinstance(each, Body):
                        yield from each._all_passed_over(f"{path}{name}[{index}].")


def _refused(key: str) -> InitErrorDetails:
    return InitErrorDetails(
        type=PydanticCustomError("extra_forbidden", "unknown field", {"at": f".{shortened(key)}"}), loc=(), input=None
    )


def _again(error: Any, reason: str) -> InitErrorDetails:
    """An error that was raised, to be raised once more, with these words."""
    told = {"reason": reason, "at": str(error.get("ctx", {}).get("at", ""))}
    return InitErrorDetails(type=PydanticCustomError(error["type"], "{reason}", told), loc=error["loc"], input=None)


def range_of(metadata: list[Any]) -> tuple[float, float]:
    """The least and the largest integer of a field, by pydantic's metadata; infinite where it has no bound."""
    least, largest = -math.inf, math.inf
    for each in metadata:
        least = getattr(each, "ge", getattr(each, "gt", least - 1) + 1)
        largest = getattr(each, "le", getattr(each, "lt", largest + 1) - 1)
    return least, largest


def takes_integers(annotation: Any) -> bool:
    """Whether a field of this type takes an integer, or several, and no other number."""
    kinds = set(kinds_of(annotation))
    return int in kinds and float not in kinds


def kinds_of(annotation: Any) -> Iterator[Any]:
    """The types that one is made of: of unions, lists, maps and literals those within."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from kinds_of(get_args(annotation)[0])
    elif origin in (Union, UnionType, list, dict):
        for each in get_args(annotation)[origin is dict :]:
            yield from kinds_of(each)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    else:
        yield annotation


def without_neutral(value: dict[str, Any], fields: Mapping[str, Any], neutral: Table) -> dict[str, Any]:
    """The body without fields that ask for nothing. fields: pydantic's; null stands for a field's
    default, if there is one."""
    return {key: each for key, each in value.items() if not _asks_nothing(key, each, fields, neutral)}


def _asks_nothing(key: str, value: Any, fields: Mapping[str, Any], neutral: Table) -> bool:
    if key in fields:
        return value is None and not fields[key].is_required()
    return (
        value is None
        or value in ("", [], {})
        or (key in neutral and (neutral[key] is ANYTHING or value in neutral[key]))
    )
