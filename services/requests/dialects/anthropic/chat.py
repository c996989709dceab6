"""The chat that a request of Anthropic's API is."""

from services.requests.bodies.fields import shortened
from services.requests.bodies.ignored import pass_over
from services.requests.bodies.parameters import given_values
from services.requests.dialects.anthropic.blocks import Json
from services.requests.dialects.anthropic.errors import NO_THREADS
from services.requests.dialects.anthropic.schemas import CountTokensBody, MessagesBody, OutputConfig
from services.requests.dialects.openai.schemas import ChatCompletionBody
from services.requests.dialects.openai.tools import pass_over_hosted, refuse_server_tool
from services.requests.dialects.openai.translate import make_chat, thinking_kwargs
from shared.model.sampling_params import parameters_of
from shared.process.errors import Invalid

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
NAME_HERE = {each.name: name for name, each in parameters_of("anthropic").items()} | {
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id",
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
    "tool_choice.function": "tool_choice",
}


def chat_of(body: CountTokensBody) -> ChatCompletionBody:
    """Raises Invalid, in Anthropic's terms."""
    _refuse_what_is_kept_elsewhere(body)
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    choice = body.tool_choice or {}
    config = body.output_config or OutputConfig()
    tools, places = _chat_tools(body.tools or [])
    given: Json = {
        "model": body.model,
        "messages": [*system, *(message for _, message in body.messages)],
        "tools": tools,
        "tool_choice": _chat_tool_choice(choice, body.tools or []),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "chat_template_kwargs": thinking_kwargs(body.thinking.type != "disabled") if body.thinking else None,
        "reasoning_effort": config.effort,
        "response_format": _chat_format(config.format),
    }
    if body.messages[-1][1]["role"] == "assistant":  # the answer is to go on with it
        given |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        given |= given_values(body) | {
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "user": body.metadata.user_id if body.metadata else None,
        }

    def place_of(number: int) -> str:
        return "system" if number < len(system) else f"messages[{body.messages[number - len(system)][0]}]"

    return make_chat(given, NAME_HERE, place_of, places.__getitem__)


def _refuse_what_is_kept_elsewhere(body: CountTokensBody) -> None:
    """Refuse a conversation that the server is to hold, and tools that it is to fetch: the answer
    would be to another question.
    """
    if body.thread is not None and "type" not in body.thread:
        pass_over("thread")
    elif body.thread is not None:
        raise Invalid(
            "thread: this server keeps no conversations: send all messages, without thread",
            param="thread",
            code=NO_THREADS,
        )
    if body.mcp_servers:
        refuse_server_tool("mcp_servers", "mcp")


def _chat_tools(tools: list[Json]) -> tuple[list[Json], list[str]]:
    """The tools that the client runs, and where each stands; those that Anthropic's servers run are
    passed over. Raises Invalid with --strict-fields."""
    pass_over_hosted({f"tools[{number}]": tool.get("type") for number, tool in enumerate(tools) if is_hosted(tool)})
    kept = [(f"tools[{number}]", tool) for number, tool in enumerate(tools) if not is_hosted(tool)]
    for place, tool in kept:
        pass_over(
            *(
                f"{place}.{shortened(key)}"
                for key, value in tool.items()
                if key not in TOOL_FIELDS and value is not None
            )
        )
    return [_chat_tool(tool) for _, tool in kept], [place for place, _ in kept]


def is_hosted(tool: Json) -> bool:
    return tool.get("type") not in (None, "custom")


def _chat_tool(tool: Json) -> Json:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _chat_tool_choice(choice: Json, tools: list[Json]) -> str | Json | None:
    if not choice:
        return None
    if choice.get("type") == "tool":
        if hosted := next((tool for tool in tools if is_hosted(tool) and tool.get("name") == choice.get("name")), None):
            raise Invalid(
                f"tool_choice: this server runs no tools of its own, such as {shortened(hosted.get('type'))}",
                param="tool_choice.name",
            )
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in TOOL_CHOICES:
        raise Invalid("tool_choice.type: expected auto, any, tool or none", param="tool_choice.type")
    return TOOL_CHOICES[choice["type"]]


def _chat_format(form: Json | None) -> Json | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
