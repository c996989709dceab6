"""Fields that clients send and ask nothing by: null anywhere, bookkeeping of their own, and of what is not here the values that ask for what is done anyway.

They are passed over; any other value of such a field is refused. What we sent, a client may send back: an assistant's message with all its fields.
"""

from collections.abc import Mapping
from typing import Any

ANYTHING: tuple[Any, ...] = ("anything",)

OF_REQUESTS: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,), "guided_decoding_backend": ANYTHING, "metadata": ANYTHING, "mirostat": (0,), "mirostat_eta": ANYTHING, "mirostat_tau": ANYTHING,
    "modalities": (["text"],), "prediction": ANYTHING, "safety_identifier": ANYTHING,
    "service_tier": ("auto", "default", "flex", "scale", "priority"), "spaces_between_special_tokens": (True, False),  # of slow tokenizers
    "store": (True, False),
}  # fmt: skip
OF_CHATS: dict[str, tuple[Any, ...]] = OF_REQUESTS | {"echo": (False,), "function_call": ("none", "auto"), "functions": ([],)}
OF_COMPLETIONS: dict[str, tuple[Any, ...]] = OF_REQUESTS | {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "parallel_tool_calls": (True, False), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "verbosity": ("medium",),
}  # fmt: skip
OF_MESSAGES: dict[str, tuple[Any, ...]] = {"annotations": ANYTHING, "parsed": ANYTHING, "provider_specific_fields": ANYTHING}
OF_CALLS: dict[str, tuple[Any, ...]] = {"parsed_arguments": ANYTHING}  # that the openai package's parse() adds, and sends back
OF_PARTS: dict[str, tuple[Any, ...]] = {"annotations": ANYTHING, "cache_control": ANYTHING, "prompt_cache_breakpoint": ANYTHING}


def without_neutral(value: dict[str, Any], fields: Mapping[str, Any], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The body without what asks for nothing. fields: pydantic's, of which null takes the default where there is one."""
    return {key: each for key, each in value.items() if not _asks_nothing(key, each, fields, neutral)}


def _asks_nothing(key: str, value: Any, fields: Mapping[str, Any], neutral: dict[str, tuple[Any, ...]]) -> bool:
    if key in fields:
        return value is None and not fields[key].is_required()
    return value is None or (key in neutral and (neutral[key] is ANYTHING or value in neutral[key]))
