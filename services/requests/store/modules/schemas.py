"""The bodies that make prompt modules, and that use them.

The ideas are those of "Prompt Cache" (Gim et al., MLSys 2024, section 3): modules with fixed
positions, parameters, unions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from services.requests.bodies.body import Body
from services.requests.bodies.fields import MAX_NAME, at, at_most, kind_of
from shared.process.errors import Invalid

MAX_MODULES = 1024  # of one set, members of unions among them
MAX_USED = 256  # in one prompt
MAX_PARAMETERS = 16  # of a module
MAX_ROOM = 1024  # tokens of an argument
MAX_POSITION = 1 << 24
# fields that go with no modules, if they are on, or if they are there
SWITCHES, VALUES = ("echo", "use_beam_search", "add_special_tokens"), ("prompt_logprobs", "truncate_prompt_tokens")
NAME = r"^[A-Za-z0-9_.-]{1,64}$"

Parameter = Annotated[int, Field(ge=1, le=MAX_ROOM)]
Name = Annotated[str, Field(pattern=NAME)]


@dataclass(frozen=True, slots=True)
class ModulePiece:
    """A text of a module, or the room for an argument."""

    text: str = ""
    parameter: str = ""
    room: int = 0  # tokens of an argument


class Module(Body):
    """A text that prompts are put together from."""

    name: Name = Field(description="by which requests name it")
    text: str = Field(
        min_length=1, description="what the model reads; {name} is where the argument of that parameter goes"
    )
    parameters: Annotated[dict[str, Parameter], BeforeValidator(at_most(MAX_PARAMETERS))] = Field(
        {}, description="names of parameters, and how many tokens each one's argument may have"
    )

    @model_validator(mode="after")
    def _has_each_parameter_once(self) -> "Module":
        for name in self.parameters:
            if re.fullmatch(NAME, name) is None:
                raise at(".parameters", "a parameter's name has 1 to 64 letters, digits, dots, dashes and underscores")
            if self.text.count("{" + name + "}") != 1:
                raise at(".text", f"it must hold {{{name}}} once, for parameters names it")
        return self

    def pieces(self) -> list[ModulePiece]:
        """Its texts and the rooms between them, in order."""
        if not self.parameters:
            return [ModulePiece(self.text)]
        split = re.split("(" + "|".join(re.escape("{" + name + "}") for name in self.parameters) + ")", self.text)
        found = [
            ModulePiece(text) if number % 2 == 0 else ModulePiece("", text[1:-1], self.parameters[text[1:-1]])
            for number, text in enumerate(split)
        ]
        return [piece for piece in found if piece.text or piece.parameter]


class Entry(Body):
    """A module, or alternatives, at most one of which a prompt uses. They begin behind the entry before."""

    name: Name | None = Field(None, description="of one module; see Module")
    text: str | None = Field(None, description="of one module")
    parameters: Annotated[dict[str, Parameter], BeforeValidator(at_most(MAX_PARAMETERS))] = Field(
        {}, description="of one module"
    )
    union: Annotated[list[Module] | None, BeforeValidator(at_most(MAX_MODULES))] = Field(
        None, description="modules that begin at the same position: a prompt takes one of them at most"
    )
    position: int | None = Field(
        None,
        ge=0,
        le=MAX_POSITION,
        description="where it begins instead; modules that are used together may overlap then",
    )
    _members: list[Module] = PrivateAttr([])

    @model_validator(mode="after")
    def _is_one(self) -> "Entry":
        if self.union and self.name is None and self.text is None and not self.parameters:
            self._members = self.union
        elif not self.union and self.name is not None and self.text is not None:
            self._members = [Module(name=self.name, text=self.text, parameters=self.parameters)]
        else:
            raise at("", "give name and text of a module, or union with at least one module")
        return self

    @property
    def members(self) -> list[Module]:
        return self._members


class PromptModulesBody(Body):
    """A set of modules."""

    model: str = Field(
        "",
        max_length=MAX_NAME,
        description="a served name, by whose tokenizer they are measured; may be left out if only one is served",
    )
    modules: Annotated[list[Entry], BeforeValidator(at_most(MAX_MODULES)), Field(min_length=1)] = Field(
        description="in the order of their positions; see Entry"
    )

    @model_validator(mode="after")
    def _has_different_names(self) -> "PromptModulesBody":
        names = [module.name for module in self.all_modules()]
        if len(names) > MAX_MODULES:
            raise at(".modules", f"at most {MAX_MODULES} modules, got {len(names)}")
        if doubled := next((name for number, name in enumerate(names) if name in names[:number]), None):
            raise at(".modules", f"two modules are named {doubled}")
        return self

    def all_modules(self) -> Iterator[Module]:
        return (module for entry in self.modules for module in entry.members)


class UsedModule(Body):
    """A module in a prompt."""

    name: Name = Field(description="of a module of the set")
    arguments: Annotated[dict[str, str], BeforeValidator(at_most(MAX_PARAMETERS))] = Field(
        {}, description="texts by parameter; one that is left out is empty"
    )


def also_names(schema: dict[str, Any]) -> None:
    """Say in the API's description that `use` takes names, too."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


def read_use(value: Any) -> Any:
    """Names as objects with names."""
    for number, each in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(each, str | dict):
            raise at(f"[{number}]", f"expected a name, or an object with a name, got {kind_of(each)}")
    return [{"name": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value


class UsedModules(Body):
    """The modules of a prompt."""

    id: str = Field(max_length=64, description="of the set, as POST /v1/prompt_modules answered")
    use: Annotated[
        list[UsedModule], BeforeValidator(read_use), BeforeValidator(at_most(MAX_USED)), Field(min_length=1)
    ] = Field(
        description="names, or objects with a name and arguments; their order says nothing, for each has its place",
        json_schema_extra=also_names,
    )

    @model_validator(mode="after")
    def _uses_each_once(self) -> "UsedModules":
        names = [module.name for module in self.use]
        if doubled := next((name for number, name in enumerate(names) if name in names[:number]), None):
            raise at(".use", f"{doubled[:64]} is used twice")
        return self

    def check_beside(self, body: Body) -> None:
        """Raises Invalid for what prompts with modules don't have."""
        asked = [
            *(name for name in SWITCHES if getattr(body, name, False)),
            *(name for name in VALUES if getattr(body, name, None) is not None),
        ]
        if asked:
            raise Invalid(f"{asked[0]} is not available with prompt_modules", param=asked[0])
