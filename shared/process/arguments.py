"""Command lines: what is wrong with one is said in one line, with what was probably meant; exit
code 2."""

import argparse
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

CHOICE = re.compile(
    r"argument (?P<name>.+?): invalid choice: '?(?P<given>.*?)'? \(choose from (?P<choices>.*)\)", re.DOTALL
)
UNKNOWN = "unrecognized arguments: "
MISSING = "the following arguments are required: "
NULLABLE = re.compile(r"\{(.*),null\}")
TYPES = {"str": "TEXT", "int": "N", "float": "X", "ByteSize": "SIZE", "Path": "PATH", "list[str]": "TEXT"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says each flag's default behind its description, unless that does, or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default, text = action.default, action.help or ""
        if default in (None, "", [], argparse.SUPPRESS) or isinstance(default, bool) or "default:" in text:
            return action.help
        return f"{text} (default: %(default)s)" if action.option_strings else action.help


class CommandLineParser(argparse.ArgumentParser):
    """An argparse parser that takes flags by their whole names only, and is brief about
    mistakes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"penstock: {self._explain(message)}\n")
        sys.exit(2)

    def _explain(self, message: str) -> str:
        if (match := CHOICE.match(message)) is not None:
            name = match["name"].lower() if match["name"].isupper() else match["name"]
            return unknown(name, match["given"], [choice.strip("' ") for choice in match["choices"].split(",")])
        if message.startswith(UNKNOWN):
            first = message.removeprefix(UNKNOWN).split()[0].split("=")[0]
            if first.startswith("-"):
                return f"{unknown('flag', first, list(self._option_string_actions))}; {self.prog} --help lists them"
            return f"{first!r} is one argument too many; {self.prog} --help shows how it is used"
        if message.startswith(MISSING):
            return f"{message.removeprefix(MISSING)} is missing; {self.prog} --help shows how it is used"
        return message.removeprefix("argument ")


def unknown(kind: str, given: str, names: list[str]) -> str:
    """The error that there is no such thing, and which one may have been meant. kind: a word, or
    the flag that takes one of the names."""
    close = get_close_matches(given, names, 1, cutoff=0.7)
    which = f"did you mean {close[0]}?" if close else "" if kind == "flag" else f"it is one of {', '.join(names)}"
    what = f"{kind} {given!r}" if kind.startswith("-") else f"no {kind} {given!r}"
    return f"{what}: {which}" if which else what


def whole_number(text: str) -> int:
    """A whole number, from 0 to what torch takes for a seed."""
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def positive_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0.1 or more")
    return value


def add_setting(parser: Any, *names: str, **options: Any) -> Any:
    """Add an argument as argparse does, for a flag that pydantic-settings made of a field: a type
    in the words of a command line, no default of null."""
    metavar, text = options.get("metavar"), options.get("help")
    if isinstance(metavar, str):
        metavar = NULLABLE.sub(r"\1", metavar)
        options["metavar"] = TYPES.get(metavar, metavar)
    if isinstance(text, str):
        options["help"] = (
            text.removesuffix(" (default: null)").removesuffix(" (default: [])").removesuffix(" (default: )")
        )
    return parser.add_argument(*names, **options)
