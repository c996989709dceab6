"""llama.cpp's grammars: each answer that they allow, and no other; and errors in the client's own words."""

import random
import re
from itertools import product

import pytest

from shared.model import gbnf_lark
from shared.process.errors import Invalid
from tests.grammars import gbnf

NUM_DRAWN = 40
TEXTS = ["".join(letters) for length in range(5) for letters in product("abc", repeat=length)]

# A grammar; texts that it allows; texts that it does not
GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "repetitions in repetitions": ('root ::= ("a"*)* ([b-c]+)*', ["", "aaa", "bcb", "abc"], ["ba", "d"]),
    "none at all": ('root ::= "x"{0} "y" ("z" "z"){0,0}', ["y"], ["xy", "yzz"]),
    "counted": ('root ::= "a"{2} "b"{1,} ( "c" | "d" ){0,2}', ["aab", "aabbcd"], ["ab", "aa", "aabccc"]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600\t\"\\" [\]\-\x30-\x32]+', ['Aé😀\t"\\]-01'], ['Aé😀\t"\\3']),
    "brackets": (r'root ::= "\[" [^\]\[]* "\]"', ["[]", "[a-b]"], ["[[]", "[]]"]),
    "names": ('root ::= start | r0 | T_1\nstart ::= "s"\nr0 ::= "r"\nT_1 ::= "t"', ["s", "r", "t"], [""]),
    "the longest is not the right one": ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab"]),
    "what follows is of the same class": (
        'root ::= word "s" rest\nword ::= [a-z]+\nrest ::= "(" root ")" | "."',
        ["cats.", "as(bss.)"],
        ["cat.", "s."],
    ),
    "a word of letters, or a name": (
        'root ::= ("if" [ ] | name "=") root?\nname ::= [a-z]+',
        ["if ", "if=", "ifs=if "],
        ["ifs ", "if"],
    ),
    "left recursion": ('root ::= root "+" root | [0-9]', ["1+2+3", "7"], ["1+", "+1"]),
    "layout": (
        '# none\n\nroot ::= (\n  "a" # a\n  |\n  "b"\n) |\n  "c"\n  | "d"\r\n\r\n',
        ["a", "b", "c", "d"],
        ["ab"],
    ),
    "empty options": ('root ::= "a" (| "b") "" ws\nws ::= | " " ws', ["a", "ab", "a  "], ["b"]),
    "any letter": ("root ::= . .", ["é\n", "ab"], ["a", "abc"]),
    "JSON": (
        r"""root ::= "{" ws (member ("," ws member)*)? "}" ws
member ::= string ":" ws value
value ::= root | "[" ws (value ("," ws value)*)? "]" ws | string | number | ("true" | "null") ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}""",
        ["{}", '{"a": [1, -2.5e+3, "\\"\\u00e9", true], "b":{\n  "c": null}}'],
        ['{"a": 01}', '{"a": "\\x"}', '{"a"}', '{"a": "\n"}'],
    ),
}


@pytest.mark.parametrize("steps", [gbnf_lark.MAX_STEPS, 0], ids=["lexemes", "letters"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_allows_what_its_rules_say(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gbnf_lark, "MAX_STEPS", steps)
    grammar, good, bad = GRAMMARS[name]
    assert gbnf.accepts(grammar, good + bad) == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_a_grammar_by_chance_allows_what_its_rules_say(seed: int) -> None:
    rng = random.Random(seed)
    grammar = gbnf.drawn(rng, num_rules=rng.randint(1, 3), depth=rng.randint(2, 4))
    texts = rng.sample(TEXTS, 20)
    try:
        allowed = gbnf.accepts(grammar, texts)
    except Invalid as error:
        assert "no text matches" in str(error)
        allowed = [False] * len(texts)
    assert allowed == [gbnf.matches(grammar, text) for text in texts], grammar


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a"\nother ::= "b" | missing "c"', "line 2, column 17: there is no rule missing"),
        ('other ::= "a"', "there is no rule root"),
        ('root ::= "a', "line 1, column 10: the text that begins here has no end"),
        ("root ::= [a-z", "line 1, column 10: the class that begins here has no end"),
        ("root ::= [b-a]", "a range of letters ends before it begins"),
        ("root ::= []", "line 1, column 10: no letter is in this class"),
        ('root ::= ("a"\n', "the grammar ends, and \\) is missing"),
        ('root ::= "a" ]', "line 1, column 14: the rule root can't go on with '\\]'"),
        ('\nroot ::= "a"{3,2}', "line 2, column 13: the repetition's end 2 is before its beginning 3"),
        ('root ::= "a"{,2}', "line 1, column 13: expected a repetition"),
        ("root ::= *", "line 1, column 10: there is nothing before it that could be repeated"),
        (r'root ::= "\q"', "line 1, column 11: expected an escape"),
        (r'root ::= "\ud800"', "there is no letter D800"),
        ('root = "a"', "line 1, column 6: expected ::= behind the rule's name root"),
        (f"root ::= {'(' * 70}", "nested more than 64 levels deep"),
        ("root ::= root", "no text matches it"),
        (
            "\n".join(["root ::= a0", *(f"a{n} ::= a{n + 1} a{n + 1}" for n in range(40)), 'a40 ::= "x"']),
            "Too many items \\(limit",
        ),
    ],
)
def test_an_error_is_told_in_the_words_of_the_grammar(grammar: str, words: str) -> None:
    assert re.search(words, gbnf.refusal(grammar))


def test_tokens_are_told_from_their_text() -> None:
    for token in ("<think>", "<[3]>", "!<think>", "!<[3]>"):
        assert gbnf.refusal(f"root ::= ({token}){{1,2}}") == ""
    assert gbnf_lark.gbnf_to_lark("root ::= <a> !<a> !<[3]>", {"<a>": 7}).splitlines()[2] == "r0: (<[7]> <[^7]> <[^3]>)"
    with pytest.raises(Invalid, match="no special token <b>"):
        gbnf_lark.gbnf_to_lark("root ::= <b>", {"<a>": 7})
