"""The chat that a request of Anthropic's API is."""

from services.gateway.anthropic.blocks import Json
from services.gateway.anthropic.schemas import CountTokensBody, MessagesBody, OutputConfig
from services.gateway.openai.fields import shortened
from services.gateway.openai.schemas import ChatCompletionBody
from services.gateway.translate import make_chat, thinking_kwargs
from shared.errors import Invalid

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
NAME_HERE = {
    "stop": "stop_sequences", "response_format": "output_config.format", "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort", "chat_template_kwargs": "thinking", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "user": "metadata.user_id", "tools[].function": "tools[]", "tools[].function.parameters": "tools[].input_schema",
    "tool_choice.function": "tool_choice",
}  # fmt: skip


def chat_of(body: CountTokensBody) -> ChatCompletionBody:
    """Raises Invalid, in Anthropic's terms."""
    system = [] if body.system is None else [{"role": "system", "content": body.system}]
    choice = body.tool_choice or {}
    config = body.output_config or OutputConfig()
    given: Json = {
        "model": body.model,
        "messages": [*system, *(message for _, message in body.messages)],
        "tools": [_chat_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())],
        "tool_choice": _chat_tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "chat_template_kwargs": thinking_kwargs(body.thinking.type != "disabled") if body.thinking else None,
        "reasoning_effort": config.effort,
        "response_format": _chat_format(config.format),
    }
    if body.messages[-1][1]["role"] == "assistant":  # the answer is to go on with it
        given |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        given |= {
            "max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "stream": body.stream, "temperature": body.temperature, "top_p": body.top_p,
            "top_k": body.top_k, "seed": body.seed, "user": body.metadata.user_id if body.metadata else None,
        }  # fmt: skip
    return make_chat(given, NAME_HERE, lambda number: "system" if number < len(system) else f"messages[{body.messages[number - len(system)][0]}]")


def _chat_tool(tool: Json, path: str) -> Json:
    if tool.get("type", "custom") != "custom":
        raise Invalid(f"{path}.type: tools that the server would run are not supported, only custom ones", param=f"{path}.type")
    if unknown := next((key for key, value in tool.items() if key not in TOOL_FIELDS and value is not None), None):
        raise Invalid(f"unknown or unsupported field: {path}.{shortened(unknown)}", param=f"{path}.{shortened(unknown)}", code="unknown_parameter")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _chat_tool_choice(choice: Json) -> str | Json | None:
    if not choice:
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") not in TOOL_CHOICES:
        raise Invalid("tool_choice.type: expected auto, any, tool or none", param="tool_choice.type")
    return TOOL_CHOICES[choice["type"]]


def _chat_format(form: Json | None) -> Json | None:
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
