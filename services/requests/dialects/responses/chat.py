"""The chat that a response is inside. What a chat can't do is refused by this API's name of it."""

from services.requests.bodies.parameters import given_values
from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.dialects.openai.translate import make_chat
from services.requests.dialects.responses.items import Json, messages_of
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.dialects.responses.tools import chat_choice, chat_tools
from shared.model.sampling_params import parameters_of
from shared.process.errors import Invalid

# Fields of a chat that this API takes under the same name, in addition to sampling parameters
SAME = (
    "model", "parallel_tool_calls", "service_tier", "prompt_cache_key", "safety_identifier", "user", "priority",
    "deadline_s", "cache_salt",
)  # fmt: skip
NAME_HERE = {each.name: name for name, each in parameters_of("responses").items()} | {
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "messages": "input",
    "tools[].function": "tools[]",
    "tools[].custom": "tools[]",
    "tools[].custom.format.grammar": "tools[].format",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.allowed_tools.tools[].function": "tool_choice.tools[]",
}


def chat_of(body: ResponseBody, before: list[Json], *, num_dropped: int = 0) -> ChatCompletionBody:
    """The chat that this is, after the items of the conversation before, without the first
    num_dropped of both. Raises Invalid, in this API's terms."""
    if body.background and not body.store:
        raise Invalid(
            "a background response is read later, so it must be stored: background needs store", param="store"
        )
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools = chat_tools(body.tools or [])
    messages, begins = messages_of([*before, *body.input][num_dropped:])
    given: Json = {name: getattr(body, name) for name in SAME} | given_values(body)
    given |= {
        "messages": [*system, *messages],
        "stream": body.stream,
        "logprobs": body.has_logprobs,
        "top_logprobs": body.top_logprobs if body.has_logprobs else None,
        "tools": tools.tools,
        "tool_choice": chat_choice(body.tool_choice),
        "response_format": _chat_format(body.text.format) if body.text else None,
        "verbosity": body.text.verbosity if body.text else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    own = [number + num_dropped - len(before) for number in begins]
    return make_chat(given, NAME_HERE, lambda number: _place_of(number, own, len(system)), tools.places.__getitem__)


def _place_of(number: int, begins: list[int], num_system: int) -> str:
    """Name the place that a message of the chat came from. begins: the number of the input's item
    for each message after the system's; negative: it was there before."""
    if number < num_system:
        return "instructions"
    item = begins[number - num_system]
    return f"input[{item}]" if item >= 0 else "previous_response_id"


def _nested(value: Json, field: str) -> Json:
    """Nest the other fields in one of the type's name, as a chat has them."""
    return {
        "type": value.get("type"),
        field: {key: each for key, each in value.items() if key != "type" and each is not None},
    }


def _chat_format(form: Json | None) -> Json | None:
    """A schema lies flat here."""
    return _nested(form, "json_schema") if form is not None and form.get("type") == "json_schema" else form
