"""The forms of a model's calls and thoughts, read off what its chat template writes for a turn with known calls
and a known thought. A form is taken if its parser reads the same calls back."""

import json
import re
from collections.abc import Callable

from services.tokenizer.template_features import knows
from shared.model.json_text import read_json
from shared.model.parsing.answer import AnswerParser, Parsing
from shared.model.parsing.blocks import Call
from shared.model.parsing.forms import FORMS, OTHERS, REASONING, Form, encode, reads_calls, thought_marks
from shared.model.parsing.json_calls import CALL_ID, CallForm, call_of
from shared.model.parsing.reasoning import Marks
from shared.model.parsing.tagged_calls import TaggedForm
from shared.wire.messages import ChatMessage, ChatOptions, ToolCall

CALLS: list[Call] = [("get_zebra", {"kappa": "violet", "lambda": 42}), ("set_quagga", {"kappa": "indigo", "lambda": 7})]
CALL_IDS = ("zb1cd2ef3", "qg4hi5jk6")  # nine letters and digits: some templates take no others
THOUGHT, ANSWERS = "umber dusk", ("alpha", "omega")
TAG = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]|[^<\[\s]+")
OPEN_TAG = re.compile(r"(?:<[^<>]{0,63}|\[/?[A-Z_]{0,63})\Z")
SEPARATORS = " \t\r\n[],"
MAX_RENDERED = 256 << 10  # characters of a conversation
MAX_TURN = 4096  # characters; a template that writes more around two calls is none to learn from


Render = Callable[[tuple[ChatMessage, ...], ChatOptions], str | None]
ASKED = ChatMessage("user", "Look.")
PARAMETERS = {"type": "object", "properties": {"kappa": {"type": "string"}, "lambda": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": PARAMETERS}}
    for name, _ in CALLS
]
WITH_TOOLS = ChatOptions(tools=json.dumps(TOOLS), add_generation_prompt=False)
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")


def probe(template: str, with_tools: str, render: Render) -> dict[str, str]:
    """The forms of calls and thoughts; those that the template does not show are left out. with_tools: the template of
    conversations with tools; render: None for a conversation that the template refuses."""
    answers = [render((ASKED, ChatMessage("assistant", answer)), WITH_TOOLS) for answer in ANSWERS]
    if answers[0] is None or answers[1] is None:
        return {}
    plain, forms = (answers[0], answers[1]), {}
    if knows(with_tools, "tool_calls"):
        for number in (len(CALLS), 1):  # some templates refuse several calls in a turn
            called = ChatMessage("assistant", "", None, tuple(map(as_message, CALL_IDS[:number], CALLS)))
            rendered = render((ASKED, called), WITH_TOOLS)
            form = form_of_calls(turn_of(rendered, plain), number) if rendered is not None else ""
            if form:
                forms["tool_calls"] = form
                break
    if any(knows(template, field) for field in THOUGHT_FIELDS):
        rendered = render((ASKED, ChatMessage("assistant", ANSWERS[1], reasoning=THOUGHT)), WITH_TOOLS)
        if form := form_of_thoughts(rendered, plain) if rendered is not None else "":
            forms["reasoning"] = form
    return forms


def as_message(call_id: str, call: Call) -> ToolCall:
    return ToolCall(call_id, call[0], json.dumps(call[1]))


def turn_of(rendered: str, answers: tuple[str, str]) -> str:
    """The assistant's part of a conversation. answers: the same conversation, with ANSWERS for that part."""
    head, tail = common_prefix(*answers), common_prefix(answers[0][::-1], answers[1][::-1])[::-1]
    begin = len(common_prefix(rendered, head))
    if begin < len(head) and (tag := OPEN_TAG.search(rendered, max(0, begin - 64), begin)) is not None:
        begin = tag.start()
    turn = rendered[begin:]
    end = len(turn) - len(common_prefix(turn[::-1], tail[1:][::-1]))
    return turn[:end] + turn[end : turn.find(">", end) + 1] if OPEN_TAG.search(turn[:end]) else turn[:end]


def common_prefix(one: str, other: str) -> str:
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def form_of_calls(turn: str, num_calls: int) -> str:
    """The form of the first of CALLS in a turn: its name, or a new one as JSON; empty: none that can be read."""
    if len(turn) > MAX_TURN:
        return ""
    for name in (*FORMS, *OTHERS):
        if reads(name, turn, num_calls):
            return name
    form = derive(turn, num_calls)
    name = encode(form) if form is not None else ""
    return name if reads_calls(name) and reads(name, turn, num_calls) else ""


def reads(name: str, turn: str, num_calls: int) -> bool:
    """Whether a form's parser finds these calls, and no content but marks of the turn's end."""
    functions = [function for function, _ in CALLS]
    parser = AnswerParser(Parsing("", name, functions, texts=[f"{function}.kappa" for function in functions]))
    calls: list[list[str]] = []
    for piece in (*parser.feed(turn), *parser.finish()):
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
        elif piece.text.strip() and (not calls or re.fullmatch(r"(?:\s*<[^/][^<>]*>)*\s*", piece.text) is None):
            return False
    try:
        return [(function, read_json(arguments)) for function, arguments in calls] == CALLS[:num_calls]
    except ValueError:  # cut off, or what the parser takes for an object by its beginning
        return False


def derive(turn: str, num_calls: int) -> Form | None:
    """A form whose marks are those of the turn."""
    for number, call_id in enumerate(CALL_IDS[:num_calls]):
        turn = turn.replace(call_id, CALL_ID).replace(f"{CALLS[number][0]}:{number}", CALLS[number][0])
    names = [turn.find(name) for name, _ in CALLS[:num_calls]]
    if min(names) < 0:
        return None
    spans = [find_object(turn, at, call) for at, call in zip(names, CALLS, strict=False)]
    if None not in spans:
        return json_form(turn, names, [span for span in spans if span is not None])
    return tagged_form(turn, names) if num_calls > 1 else None


def find_object(turn: str, name: int, call: Call) -> tuple[int, int] | None:
    """Where a call's JSON begins and ends: an object with its name, or its arguments behind the name."""
    for brace in re.finditer(r"\{", turn):
        try:
            value, end = json.JSONDecoder().raw_decode(turn, brace.start())
        except (ValueError, RecursionError):
            continue
        if (brace.start() > name and value == call[1]) or (
            brace.start() < name
            and (as_call := call_of(turn[brace.start() : end])) is not None
            and as_call[0] == call[0]
        ):
            return brace.start(), end
    return None


def json_form(turn: str, names: list[int], spans: list[tuple[int, int]]) -> CallForm | None:
    """spans: of each call's object."""
    has_names_first = names[0] < spans[0][0]
    before = turn[: names[0] if has_names_first else spans[0][0]]
    first, end = tags(before), tags(turn[spans[-1][1] :])
    if not first:
        return None
    if len(spans) == 1:
        return CallForm((before.strip(SEPARATORS),), tuple(end[:1]), has_names_first=has_names_first)
    between = tags(turn[spans[0][1] : names[1] if has_names_first else spans[1][0]])
    again = first[len(first) - len(common_prefix_of(first[::-1], between[::-1])) :]  # what is before every call
    starts = tuple(dict.fromkeys((first[0], again[0]) if again else (before.strip(SEPARATORS),)))
    starts = tuple(start for start in starts if not start.startswith("{"))
    skipped = tuple(dict.fromkeys((*again[:1], *between[: len(between) - len(again)])))
    name_end = turn[names[0] + len(CALLS[0][0]) : spans[0][0]] if has_names_first else ""
    return CallForm(
        starts,
        tuple(mark for mark in end if mark not in skipped)[:1],
        skipped,
        has_names_first=has_names_first,
        before_name="".join(again[1:]) if has_names_first else "",
        behind_name=" ".join(name_end.split()),
    )


def tagged_form(turn: str, names: list[int]) -> TaggedForm | None:
    """The marks around the name, the names of arguments and their values."""
    gaps, last_value = gaps_of_call(turn, names), str(CALLS[1][1]["lambda"])
    last = turn.rfind(last_value, names[1])
    if gaps is None or last < 0:
        return None
    to_key, key_end, to_next_key, other_key_end, to_next_call = gaps
    key_begin = common_suffix_of_tags(to_key, to_next_key)
    value_end = to_next_key[: len(to_next_key) - len(key_begin)].strip()
    values_end, call_ends = tags(value_end), tags(to_next_call)
    if not key_begin or not value_end or call_ends[: len(values_end)] != values_end:
        return None
    ends = tags(turn[last + len(last_value) :])
    marks = marks_of_calls(tags(turn[: names[0]]), call_ends[len(values_end) :], ends[len(values_end) :])
    if marks is None:
        return None
    start, name_begin, call_end, end = marks
    return TaggedForm(
        start,
        name_begin,
        to_key[: len(to_key) - len(key_begin)].strip(),
        key_begin,
        tuple(dict.fromkeys(mark.strip() for mark in (key_end, other_key_end))),
        value_end,
        call_end,
        end,
        has_lines=key_end.endswith("\n"),
    )


def gaps_of_call(turn: str, names: list[int]) -> list[str] | None:
    """The texts behind the first call's name, and behind each name and value of its arguments, up to the next one
    of these and, at last, to the second call's name."""
    name, arguments = CALLS[0]
    gaps, end = [], names[0] + len(name)
    for text in (str(word) for argument in arguments.items() for word in argument):
        place = turn.find(text, end)
        if place < 0:
            return None
        gaps.append(turn[end:place])
        end = place + len(text)
    return [*gaps, turn[end : names[1]]]


def marks_of_calls(before: list[str], between: list[str], behind: list[str]) -> tuple[str, str, str, str] | None:
    """The mark that begins a block of calls, those before a call's name and behind its arguments, and the block's end.
    before, between, behind: the tags before the first name, between two calls, and behind the last one."""
    if before and between[-len(before) :] == before:  # every call stands in a block of its own
        ends = between[: -len(before)]
        start, name_begin, call_end, end = before[:1], before[1:], ends[:-1], ends[-1:]
    else:
        name_begin = before[len(before) - len(common_prefix_of(before[::-1], between[::-1])) :]
        call_end = between[: len(between) - len(name_begin)]
        start, end = before[: len(before) - len(name_begin)], behind[len(call_end) :]
    return (start[0], "".join(name_begin), "".join(call_end), end[0]) if start and end else None


def tags(text: str) -> list[str]:
    return TAG.findall(text.strip(SEPARATORS))


def common_prefix_of(one: list[str], other: list[str]) -> list[str]:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def common_suffix_of_tags(one: str, other: str) -> str:
    """The longest common end of two texts that begins with a tag."""
    suffix = common_prefix(one[::-1], other[::-1])[::-1]
    begin = re.search(r"<|\[", suffix)
    return suffix[begin.start() :] if begin is not None else ""


def form_of_thoughts(rendered: str, answers: tuple[str, str]) -> str:
    """The form of THOUGHT before the second of ANSWERS: its name, or a new one as JSON; empty: the template drops
    a thought, or has no marks around it."""
    thought = rendered.rfind(THOUGHT)
    answer = rendered.find(ANSWERS[1], thought)
    if thought < 0 or answer < 0:
        return ""
    before, behind = rendered[:thought].rstrip(), rendered[thought + len(THOUGHT) : answer].strip()
    for name, marks in REASONING.items():
        if before.endswith(marks.starts) and behind.startswith(marks.ends):
            return "qwen3" if name == "deepseek_r1" else name
    head = common_prefix(*answers)
    start = re.search(r"(?:<[^<>]+>|\[[A-Z_]+\])\w*\Z", before)
    if start is None or not behind or start.end() <= len(common_prefix(before, head).rstrip()):
        return ""
    name = encode(Marks((start[0],), (behind,)))
    return name if thought_marks(name) is not None else ""
