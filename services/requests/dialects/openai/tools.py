"""The functions that a model may call, and which of them it has to: what the template is told, what
the answer must match, and how it is parsed."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag, model_validator
from pydantic.types import Discriminator

from services.requests.bodies.body import Body
from services.requests.bodies.fields import at_most, kind_of
from services.requests.bodies.ignored import pass_over
from shared.model.constraint import Constraint
from shared.model.parsing.answer import INPUT, Parsing
from shared.model.parsing.forms import HARMONY, call_form
from shared.model.parsing.tagged_calls import TaggedForm
from shared.process.errors import Invalid

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16  # in an answer that has to call

# Of the grammar's engine: JSON as Python writes it, and as models have read it; without it a model
# may go on with white space for ever
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
TAKES_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
}  # a custom tool's function
# Types of tools that a server would run, and without which the answer is to another question:
# others, such as web_search, are added by agents of themselves
OF_THE_CLIENTS_OWN = ("mcp", "mcp_toolset", "file_search")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Body):
    name: str = Field(
        pattern=NAME_PATTERN, description="by which the model calls it: 1 to 128 letters, digits, dots, - and _"
    )
    description: str | None = Field(None, description="told to the model by its template")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema; by default no parameters")
    strict: bool | None = Field(
        None,
        description=(
            "true: a schema that can't be enforced in full is an error, and in some forms calls that the model "
            "chooses match it"
        ),
    )


class Tool(Body):
    type: Literal["function"] = Field(description="tells a function from a custom tool")
    function: Function = Field(description="the function's name and schema")


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"] = Field(description="told to the model")
    definition: str = Field(description="the grammar's text, told to the model")


class CustomFormat(Body):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"] = Field(description="text is any text")
    grammar: CustomGrammar | None = Field(None, description="the grammar that the model is told of")


class Custom(Body):
    name: str = Field(pattern=NAME_PATTERN, description="by which the model calls it")
    description: str | None = Field(None, description="told to the model by its template")
    format: CustomFormat | None = Field(None, description="the model is told of a grammar; it is not held to it")


class CustomTool(Body):
    """A tool that takes a text as it is: for the model, a function with one argument."""

    type: Literal["custom"] = Field(description="tells a custom tool from a function")
    custom: Custom = Field(description="the tool's name and format")

    @property
    def function(self) -> Function:
        grammar = self.custom.format.grammar if self.custom.format is not None else None
        hint = (
            f"The input must match this {grammar.syntax} grammar:\n{grammar.definition}"
            if grammar is not None
            else None
        )
        description = "\n\n".join(text for text in (self.custom.description, hint) if text) or None
        return Function(name=self.custom.name, description=description, parameters=TAKES_TEXT)


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run, and none here: web_search and the like. The model is not
    told of it, and the answer's header names it; those that bring what is the client's own are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str


class FunctionName(Body):
    name: str = Field(max_length=256, description="as in tools")


class NamedTool(Body):
    type: Literal["function", "custom"] = Field(description="the kind of tool")
    function: FunctionName = Field(description="the tool to call; of a custom tool, this field is named custom")

    @model_validator(mode="before")
    @classmethod
    def _by_one_name(cls, value: Any) -> Any:
        """A custom tool is named in a field of its own."""
        if isinstance(value, dict) and value.get("type") == "custom" and "custom" in value:
            return {"function": value["custom"], **{key: each for key, each in value.items() if key != "custom"}}
        return value


class AllowedTools(Body):
    mode: Literal["auto", "required"] = Field(description="whether the model may call one of them, or must")
    tools: Annotated[list[NamedTool], BeforeValidator(at_most(MAX_TOOLS))] = Field(
        description="the tools that it may call, by name"
    )


class AllowedChoice(Body):
    type: Literal["allowed_tools"] = Field(description="tells this choice from a named tool")
    allowed_tools: AllowedTools = Field(description="the part of tools that may be called")


def kind_of_choice(value: Any) -> str:
    if isinstance(value, dict):
        return "allowed" if value.get("type") == "allowed_tools" else "named"
    return "word" if isinstance(value, str) else kind_of(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedChoice, Tag("allowed")],
    Discriminator(
        kind_of_choice,
        custom_error_type="invalid_choice",
        custom_error_message="expected none, auto, required, or an object that names a function",
    ),
]


def kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return (
        "hosted"
        if isinstance(kind, str) and kind not in ("function", "custom")
        else "free"
        if kind == "custom"
        else "own"
    )


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[CustomTool, Tag("free")] | Annotated[HostedTool, Tag("hosted")],
    Discriminator(kind_of_tool),
]
Tools = Annotated[list[AnyTool], BeforeValidator(at_most(MAX_TOOLS))]


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools and choices of a request, resolved."""

    tools: tuple[Tool | CustomTool, ...] = ()  # that the model is told of
    mode: Literal["none", "auto", "required", "named"] = "none"
    callable: tuple[Tool | CustomTool, ...] = ()  # those that it may call
    is_parallel: bool = True
    is_legacy: bool = False  # asked for by functions, the older name of tools

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def tools_json(self) -> str:
        """The tools as JSON, for the template."""
        if not self.tools:
            return ""
        return orjson.dumps(
            [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in self.tools]
        ).decode()

    def parsing(self, tool_calls: str, reasoning: str, *, may_think: bool = True) -> Parsing:
        """How an answer is read, by the names of the model's parsers; empty: it has none."""
        names = [tool.function.name for tool in self.callable]
        if self.mode == "none":
            return Parsing(reasoning)
        customs = [tool.function.name for tool in self.callable if isinstance(tool, CustomTool)]
        max_calls = 0 if self.is_parallel else 1
        if self.is_forced:  # what is not a thought is calls, from its first character on
            form = "calls" if self.mode == "required" else "arguments"
            return Parsing(
                reasoning if may_think or reasoning == HARMONY else "",
                form,
                names,
                max_calls,
                customs=customs,
                is_legacy=self.is_legacy,
            )
        texts = text_parameters(self.callable) if isinstance(call_form(tool_calls), TaggedForm) else ()
        return Parsing(reasoning, tool_calls, names if tool_calls else (), max_calls, texts, customs, self.is_legacy)

    def offered(self, tool_calls: str) -> Constraint | None:
        """The constraint on calls in an answer that may call, in the form of that name, if any of
        the functions is strict. Raises Invalid."""
        if self.mode != "auto" or not any(tool.function.strict for tool in self.callable) or tool_calls not in TAGS:
            return None
        return tags_constraint(TAGS[tool_calls](self.offers()))

    def forced(self) -> Constraint | None:
        """The constraint on an answer that has to call. Raises Invalid."""
        if not self.is_forced:
            return None
        if self.mode == "named":
            [offer] = self.offers()
            return tags_constraint({"type": "tag", "begin": "", "content": tagged(offer, "", "")["content"], "end": ""})
        return tags_constraint(calls_format(self.offers(), is_parallel=self.is_parallel))

    def offers(self) -> list["ToolOffer"]:
        numbers = {tool.function.name: number for number, tool in enumerate(self.tools)}
        return [
            ToolOffer(tool.function.name, schema_of(tool), f"tools[{numbers[tool.function.name]}].function.parameters")
            for tool in self.callable
        ]


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """A function that may be called. param: the field that says what its arguments are."""

    name: str
    schema: dict[str, Any]
    param: str


def tags_constraint(form: dict[str, Any]) -> Constraint:
    return Constraint("structural_tag", json.dumps({"format": form}, ensure_ascii=False), "tools")


def schema_of(tool: Tool | CustomTool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = {"type": "object", **tool.function.parameters} if tool.function.parameters is not None else NO_ARGUMENTS
    return {**schema, "x-guidance": {**SPACING, "lenient": not tool.function.strict}}


def calls_format(offers: Sequence[ToolOffer], *, is_parallel: bool) -> dict[str, Any]:
    """A list of calls, `[{"name": "f", "parameters": {…}}, …]`. A model that has nothing more to
    call may go on with calls: there is a most of them."""
    tags = [tagged(offer, json_head(offer, "parameters"), "}") for offer in offers]
    most = MAX_FORCED_CALLS if is_parallel else 1
    calls = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True, "max_tags": most}
    return {"type": "tag", "begin": "[", "content": calls, "end": "]"}


def tagged(offer: ToolOffer, begin: str, end: str) -> dict[str, Any]:
    """A call between two texts."""
    content = {"type": "json_schema", "json_schema": offer.schema, "function": offer.name, "param": offer.param}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_head(offer: ToolOffer, field: str = "arguments") -> str:
    return f'{{"name": {json.dumps(offer.name)}, "{field}": '


def hermes_tags(offers: Sequence[ToolOffer]) -> dict[str, Any]:
    tags = [tagged(offer, f"<tool_call>\n{json_head(offer)}", "}\n</tool_call>") for offer in offers]
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}


def list_tags(marker: str, offers: Sequence[ToolOffer]) -> dict[str, Any]:
    """A list of calls behind a marker."""
    calls = {
        "type": "tags_with_separator",
        "tags": [tagged(offer, json_head(offer), "}") for offer in offers],
        "separator": ", ",
        "at_least_one": True,
    }
    return {"type": "tag", "begin": f"{marker}[", "content": calls, "end": "]"}


def granite_tags(offers: Sequence[ToolOffer]) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<|tool_call|>"], "tags": [list_tags("<|tool_call|>", offers)]}


def mistral_tags(offers: Sequence[ToolOffer]) -> dict[str, Any]:
    """The tags of both forms: a list, or the name before the arguments."""
    named = [tagged(offer, f"[TOOL_CALLS]{offer.name}[ARGS]", "") for offer in offers]
    return {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "tags": [list_tags("[TOOL_CALLS]", offers), *named]}


# By the name of the form, of those in which a marker says that a call begins, and JSON follows
TAGS: dict[str, Callable[[Sequence[ToolOffer]], dict[str, Any]]] = {
    "hermes": hermes_tags,
    "granite": granite_tags,
    "mistral": mistral_tags,
}


def text_parameters(tools: Sequence[Tool | CustomTool]) -> list[str]:
    """The parameters whose values are texts as they stand, as function.parameter."""
    found = []
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            if isinstance(schema, dict) and schema.get("type") == "string":
                found.append(f"{tool.function.name}.{name}")
    return found


def pass_over_hosted(kinds: Mapping[str, Any]) -> None:
    """Pass over tools that another API's servers run; of each, by its place in the body, its type.
    Raises Invalid for one that brings data or programs of the client's own, and for any with
    --strict-fields."""
    for place, kind in kinds.items():
        if kind in OF_THE_CLIENTS_OWN:
            refuse_server_tool(place, str(kind))
    pass_over(*kinds)


def refuse_server_tool(place: str, kind: str) -> NoReturn:
    reason = (
        f"{place}: this server runs no tools of the type {kind}: give the model functions, and run them in the client"
    )
    raise Invalid(reason, param=place)


def without_hosted(tools: Sequence[Tool | CustomTool | HostedTool]) -> tuple[Tool | CustomTool, ...]:
    """The tools that the client runs. Raises Invalid as pass_over_hosted."""
    pass_over_hosted(
        {f"tools[{number}]": tool.type for number, tool in enumerate(tools) if isinstance(tool, HostedTool)}
    )
    return tuple(tool for tool in tools if not isinstance(tool, HostedTool))


def resolve_calling(
    given: Sequence[Tool | CustomTool | HostedTool] | None, choice: Any, is_parallel: bool | None
) -> Calling:
    """Raises Invalid."""
    tools = without_hosted(given or ())
    by_name = {tool.function.name: tool for tool in tools}
    if len(by_name) < len(tools):
        doubled = next(
            tool.function.name
            for number, tool in enumerate(tools)
            if tool in tools[:number] or by_name[tool.function.name] is not tool
        )
        raise Invalid(f"tools has two functions named {doubled}", param="tools")
    if not tools:
        if choice in (None, "none", "auto"):
            return Calling()
        raise Invalid(
            "tool_choice is for tools: there are none that the client runs, and this server runs none",
            param="tool_choice",
        )
    parallel = is_parallel is not False
    if choice == "none":
        return Calling()
    if choice in (None, "auto"):
        return Calling(tools, "auto", tools, parallel)
    if choice == "required":
        return Calling(tools, "required", tools, parallel)
    if isinstance(choice, NamedTool):
        return Calling(tools, "named", (find(by_name, choice),), parallel)
    assert isinstance(choice, AllowedChoice)
    allowed = tuple(
        {tool.function.name: tool for tool in (find(by_name, each) for each in choice.allowed_tools.tools)}.values()
    )
    if not allowed:
        raise Invalid("tool_choice.allowed_tools allows none: choose none", param="tool_choice")
    return Calling(tools, choice.allowed_tools.mode, allowed, parallel)


def find(by_name: dict[str, Tool | CustomTool], named: NamedTool) -> Tool | CustomTool:
    if named.function.name not in by_name:
        raise Invalid(
            f"tool_choice names the function {named.function.name}, which is not among the tools", param="tool_choice"
        )
    return by_name[named.function.name]
