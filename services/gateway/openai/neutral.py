"""Fields that are not here, by what becomes of them, and the tables of them. docs/use/chat.md says the rule.

- What asks for nothing, or for what is done anyway, is taken without a word: null or something empty in any field, and the values in the tables.
- Any other value of a field in the tables would change the answer: it is refused by name.
- A field in no table is passed over, and named in the answer's header (ignored.py): clients add fields every month, and few of them change an answer.

What we sent, a client may send back: an assistant's message with all its fields.
"""

from collections.abc import Mapping
from typing import Any

Table = dict[str, tuple[Any, ...]]  # by field, the values that ask for nothing

ANYTHING: tuple[Any, ...] = ("anything",)
REFUSED: tuple[Any, ...] = ()

# Samplers, constraints and adapters of other servers
OF_OTHER_SERVERS: Table = dict.fromkeys(
    (
        "dry_range", "ebnf", "epsilon_cutoff", "eta_cutoff", "grammar", "guidance_scale", "json_schema", "logits_processors", "lora", "lora_path",
        "lora_request", "negative_prompt", "no_repeat_ngram_size", "regex", "repetition_penalty_range", "samplers", "smoothing_factor", "structural_tag",
        "tfs", "thinking_token_budget", "top_a",
    ),
    REFUSED,
) | {"custom_token_bans": REFUSED, "mirostat": (0,), "mirostat_eta": ANYTHING, "mirostat_tau": ANYTHING, "tfs_z": (1,)}  # fmt: skip
OF_REQUESTS: Table = OF_OTHER_SERVERS | {
    "audio": REFUSED, "detokenize": (True,), "guided_decoding_backend": ANYTHING, "images": REFUSED, "metadata": ANYTHING, "modalities": (["text"],),
    "prediction": ANYTHING, "prompt_embeds": REFUSED, "safety_identifier": ANYTHING, "service_tier": ANYTHING,
    "spaces_between_special_tokens": (True, False),  # of slow tokenizers
    "store": (True, False),
}  # fmt: skip
OF_CHATS: Table = OF_REQUESTS | {"echo": (False,), "prompt": REFUSED, "suffix": REFUSED}
OF_COMPLETIONS: Table = OF_REQUESTS | {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "messages": REFUSED, "parallel_tool_calls": (True, False), "suffix": REFUSED,
    "tool_choice": ("none", "auto"), "tools": REFUSED, "verbosity": ("medium",),
}  # fmt: skip
OF_MESSAGES: Table = {
    "annotations": ANYTHING, "audio": REFUSED, "images": REFUSED, "parsed": ANYTHING, "prefix": (False,), "provider_specific_fields": ANYTHING,
}  # fmt: skip
OF_CALLS: Table = {"parsed_arguments": ANYTHING}  # that the openai package's parse() adds, and sends back
OF_PARTS: Table = {"annotations": ANYTHING, "cache_control": ANYTHING, "prompt_cache_breakpoint": ANYTHING}


def without_neutral(value: dict[str, Any], fields: Mapping[str, Any], neutral: Table) -> dict[str, Any]:
    """The body without what asks for nothing. fields: pydantic's, of which null takes the default where there is one."""
    return {key: each for key, each in value.items() if not _asks_nothing(key, each, fields, neutral)}


def _asks_nothing(key: str, value: Any, fields: Mapping[str, Any], neutral: Table) -> bool:
    if key in fields:
        return value is None and not fields[key].is_required()
    return value is None or value in ("", [], {}) or (key in neutral and (neutral[key] is ANYTHING or value in neutral[key]))
