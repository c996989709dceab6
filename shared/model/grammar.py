"""A Constraint as a grammar of the llguidance library, within bounds; and the vocabulary that its
masks are over.

The gateway tries a grammar in a process that can be killed, before a request is admitted; compute
compiles it with the model's vocabulary. Both by the same rules and limits: the library counts its
own work, so a grammar that is too complex is an error and never a stall.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from shared.model.constraint import Constraint
from shared.model.gbnf_lark import gbnf_to_lark
from shared.model.structural_tag import structural_tag_grammar, thought_grammar
from shared.process.errors import Invalid

# Between two parts of a JSON text: a space, or a line's end and an indentation. With more to choose
# from, small models go on with white space until their answer is cut off
MAX_INDENTATION = 40  # characters
MAX_REASON = 400  # characters of the library's word against a grammar
TRIED_BYTES = 3
MAX_SPECIAL_TOKENS = 256
_SPECIAL_TOKEN = re.compile(r"<[^<>\s\[\]\"'/]{1,64}>")
NO_SPECIAL_TOKENS: Mapping[str, int] = {}

JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"(?: |\r?\n[ \t]{{0,{MAX_INDENTATION}}})",
    "json_allow_general_unicode_escapes": True,
}
LENIENT_OPTIONS = {"lenient": True, "coerce_one_of": True}

# A unit of the lexer's fuel is up to a microsecond and 200 bytes. A repetition is work without
# length: `(a{1000}){1000}` would burn any amount. Of 623 schemas of jsonschemabench none burns more
# than INITIAL_FUEL
INITIAL_FUEL = 100_000
FUEL_PER_CHARACTER = 2


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens as the grammars' library knows them."""

    tokenizer: LLTokenizer
    special_tokens: Mapping[str, int]  # by text: tokens that no text spells
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of the tokenizer.json in a checkpoint's folder: some 6 µs a token. vocab_size:
    of the model's logits.

    Raises Invalid: 501 for a tokenizer whose tokens' bytes the library does not know, or a model
    without end tokens, whose answers could not end; 503 if the file can't be read now.
    """
    if not eos_token_ids:
        raise _unsupported("it has no end tokens")
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        added = json.loads(text).get("added_tokens") or []
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except OSError as error:
        raise Invalid(
            f"the model's tokenizer can't be read: {error.strerror}", code="tokenizer_unreadable", status=503
        ) from None
    except Exception as error:  # bare ones, from Rust
        raise _unsupported(str(error)) from None
    return Vocabulary(
        tokenizer, {each["content"]: each["id"] for each in added if each.get("special")}, vocab_size, eos_token_ids
    )


def limits_of(constraint: Constraint) -> LLParserLimits:
    """The limits of what the library may spend on the grammar. A mask takes at most a tenth of a
    second, most a hundredth of a millisecond."""
    return LLParserLimits(
        max_items_in_row=4000,  # a thousand optional properties of one object
        initial_lexer_fuel=INITIAL_FUEL + FUEL_PER_CHARACTER * len(constraint.text),
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def compile_grammar(constraint: Constraint, vocabulary: Vocabulary) -> LLMatcher:
    """The grammar, at its beginning. Raises Invalid (400) for one that does not compile, is too
    complex, or matches no text."""
    matcher = LLMatcher(
        vocabulary.tokenizer, _grammar(constraint, vocabulary.special_tokens), log_level=0, limits=limits_of(constraint)
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # what is too complex at its very beginning is refused now
    if matcher.is_error():
        raise _refused(constraint, _reason_of(matcher))
    return matcher


def check_grammar(constraint: Constraint) -> None:
    """Raises Invalid (400) for a grammar that no vocabulary could make work, or that is too complex
    from its beginning."""
    grammar = _grammar(constraint, None)
    is_error, reasons = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits_of(constraint))
    if is_error:
        raise _refused(constraint, reasons[0])
    try_grammar(constraint, grammar)


class ByteVocabulary:
    """A token for each byte, an end, and what the grammar calls special tokens: in the form of
    llguidance's TokenizerWrapper."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [bytes([each]) for each in range(256)] + [b"<end>", *(token.encode() for token in special_tokens)]
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=[self.eos_token_id])


def try_grammar(constraint: Constraint, grammar: str) -> None:
    """Compile it for a vocabulary of bytes, and go a few bytes: the library builds a lexer only as
    far as it is asked to, and it is then that a repetition costs. Raises Invalid for a grammar that
    is too complex, or matches no text."""
    vocabulary = ByteVocabulary(sorted({*_SPECIAL_TOKEN.findall(grammar)} - {"<end>"})[:MAX_SPECIAL_TOKENS])
    matcher = LLMatcher(vocabulary.tokenizer(), grammar, log_level=0, limits=limits_of(constraint))
    if matcher.is_error():
        return  # it names tokens, and only the model's vocabulary tells whether they are there
    for _ in range(TRIED_BYTES):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(constraint, _reason_of(matcher))
        allowed = next(
            (8 * at + (each & -each).bit_length() - 1 for at, each in enumerate(mask) if each), vocabulary.eos_token_id
        )
        if allowed >= vocabulary.eos_token_id:
            return
        matcher.consume_token(allowed)


def _reason_of(matcher: LLMatcher) -> str:
    reason = matcher.get_error()
    return "no text matches it" if reason.startswith("NoExtension") else reason


def _grammar(constraint: Constraint, special_tokens: Mapping[str, int] | None) -> str:
    """The constraint in the library's own form. special_tokens: None where no vocabulary is
    known."""
    try:
        grammar = _MAKERS[constraint.kind](constraint, special_tokens)
        return (
            _after_thought(grammar, constraint, special_tokens or NO_SPECIAL_TOKENS)
            if constraint.thought_end
            else grammar
        )
    except Invalid as error:
        raise _refused(constraint, str(error)) from None
    except ValueError as error:
        raise _refused(constraint, str(error)) from None
    except RecursionError:
        raise _refused(constraint, "it is nested too deeply") from None


def _json_object(_: Constraint, __: Mapping[str, int] | None) -> str:
    return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)  # type: ignore[arg-type]


def _json_schema(constraint: Constraint, _: Mapping[str, int] | None) -> str:
    schema = json.loads(constraint.text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Invalid("it matches nothing" if schema is False else "a JSON schema is an object")
    options = JSON_OPTIONS | (LENIENT_OPTIONS if constraint.is_lenient else {})
    own = schema.get("x-guidance")
    # a pattern, ours too, would override it
    if isinstance(own, dict) and "whitespace_flexible" in own:
        del options["whitespace_pattern"]
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=options)  # type: ignore[arg-type]


def _regex(constraint: Constraint, _: Mapping[str, int] | None) -> str:
    return LLMatcher.grammar_from_regex(constraint.text)


def _choice(constraint: Constraint, _: Mapping[str, int] | None) -> str:
    choices = json.loads(constraint.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise Invalid("it takes a list of texts, at least one")
    alternatives = " | ".join(json.dumps(each, ensure_ascii=False) for each in dict.fromkeys(choices))
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}\n")


def _lark(constraint: Constraint, _: Mapping[str, int] | None) -> str:
    return LLMatcher.grammar_from_lark(constraint.text)


def _gbnf(constraint: Constraint, special_tokens: Mapping[str, int] | None) -> str:
    return LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.text, special_tokens))


def _structural_tag(constraint: Constraint, special_tokens: Mapping[str, int] | None) -> str:
    return structural_tag_grammar(
        json.loads(constraint.text),
        special_tokens=NO_SPECIAL_TOKENS if special_tokens is None else special_tokens,
        make_regex=partial(regex_to_lark, use_ascii=""),
        json_options=JSON_OPTIONS,
    )


def _after_thought(grammar: str, constraint: Constraint, special_tokens: Mapping[str, int]) -> str:
    """The grammar behind a thought, which is any text between its markers. One that is not begun
    yet may be left out."""
    answer, *others = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    before = thought_grammar(constraint.thought_begin, constraint.thought_end, "answer", special_tokens)
    return json.dumps(
        {"grammars": [{"name": "thought", "lark_grammar": before}, {**answer, "name": "answer"}, *others]}
    )


_MAKERS = {
    "json_object": _json_object,
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
    "gbnf": _gbnf,
    "structural_tag": _structural_tag,
}


def _refused(constraint: Constraint, reason: str) -> Invalid:
    reason = " ".join(reason.replace("<non-verbose/>", "").partition("; try avoiding")[0].split())
    reason = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "…"
    code = "invalid_json_schema" if constraint.kind == "json_schema" else "invalid_grammar"
    return Invalid(
        f"{constraint.param or constraint.kind}: this can't be made a grammar: {reason}",
        param=constraint.param or None,
        code=code,
    )


def _unsupported(reason: str) -> Invalid:
    return Invalid(f"this model's answers can't be constrained: {reason}", code="constraints_unsupported", status=501)
