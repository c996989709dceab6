"""Scripts: the Lua that Redis runs. Each is a file of shared/wire/scripts/, and begins with what it does
and what its KEYS and ARGV are. It takes the functions of a library, a file of the same folder, in with a
line `-- include: NAME`.

More than a few arguments are one table, by name, as `table` packs it; a script unpacks it with cmsgpack.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any

import msgpack
import redis
from redis.exceptions import NoScriptError, ResponseError

FOLDER = Path(__file__).parent / "scripts"
INCLUDE = re.compile(r"-- include: (\w+)")
COMMENT = re.compile(r"\s*--.*")


@dataclass(frozen=True, slots=True)
class Script:
    """A script as Redis gets it. Its name stands in errors."""

    name: str
    text: str
    digest: str  # SHA1 of the text, by which Redis knows it

    def call(self, client: Any, keys: Sequence[str], *arguments: Any) -> Any:
        """Run it, or queue it if the client is a pipeline. Raises what the client does."""
        try:
            return client.eval(self.text, len(keys), *keys, *arguments)
        except ResponseError as error:
            raise in_script(error, self.name) from None

    async def run(self, client: "redis.asyncio.Redis", keys: Sequence[str], *arguments: Any) -> Any:
        """Run it by its digest, or whole if Redis does not know it. Raises what the client does."""
        call: Any = client
        try:
            try:
                return await call.evalsha(self.digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return await call.eval(self.text, len(keys), *keys, *arguments)
        except ResponseError as error:
            raise in_script(error, self.name) from None


@cache
def load_script(name: str) -> Script:
    """The script of that name. Lines keep their numbers, so that an error's line is that of the file: a
    library stands in the line that includes it."""
    lines = (FOLDER / f"{name}.lua").read_text(encoding="utf-8").split("\n")
    text = "\n".join([f"-- {name}", *(compact(library(line) or line) for line in lines[1:])])
    return Script(name, text, sha1(text.encode()).hexdigest())


def library(line: str) -> str:
    """The text of the library that the line includes; empty: it includes none."""
    match = INCLUDE.fullmatch(line)
    return (FOLDER / f"{match[1]}.lua").read_text(encoding="utf-8") if match else ""


def compact(text: str) -> str:
    """Lua without comments, in one line."""
    return " ".join(code for line in text.split("\n") if (code := COMMENT.sub("", line)))


def table(**values: Any) -> bytes:
    """The one argument of a script that takes several, by name; None: nil."""
    return packed(values)


def packed(value: Any) -> bytes:
    """A value for cmsgpack, which knows msgpack's old raw type only: it holds bytes and text alike."""
    encoded: bytes = msgpack.packb(value, use_bin_type=False)
    return encoded


def name_of(text: str) -> str:
    """The name of the script of that text."""
    return text.partition("\n")[0].removeprefix("-- ")


def in_script(error: ResponseError, name: str) -> ResponseError:
    """The error, with the script's name."""
    error.args = (f"{error} (in {name}.lua)",)
    return error
