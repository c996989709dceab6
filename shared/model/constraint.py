"""Constraint: which texts an answer may be, as the client gives it. shared/model/grammar.py makes a
grammar of it.

The gateway makes one from a request's fields and checks it; compute masks each row of logits with it,
so that no forbidden token is decided.
"""

from typing import Literal

from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag"]

MAX_TEXT = 256 << 10  # characters


class Constraint(WireStruct, frozen=True):
    """The form that an answer must match, from its first character to its last.

    kind and text: json_object: a JSON object, text is empty; json_schema: a schema, as JSON; regex:
    a regular expression; choice: a JSON list of texts; lark: a grammar in Lark's syntax with
    llguidance's extensions (`%json {…}`, `<special token>`); gbnf: one in llama.cpp's EBNF;
    structural_tag: vLLM's object, as JSON.
    """

    kind: Kind
    text: str
    param: str = ""  # the API's field that it comes from, for errors
    # ignore keywords of a JSON schema that can't be enforced; else they are errors
    is_lenient: bool = False
    # the marker that begins a thought; empty: the prompt has begun it; equal to the end: a header
    # instead of a thought
    thought_begin: str = ""
    # the marker after which the constrained answer begins; empty: no thought comes before
    thought_end: str = ""

    def __post_init__(self) -> None:
        check_length(self.text, self.param or self.kind)


def check_length(text: str, param: str) -> None:
    """Raises Invalid for a text that is too long for a constraint."""
    if len(text) > MAX_TEXT:
        raise Invalid(f"{param} takes at most {MAX_TEXT} characters, got {len(text)}", param=param)
