"""Deltas of an answer, as hypothesis draws them, and by hand."""

from hypothesis import strategies as st

from services.requests.text.answers.answer import Call, CallDelta, Delta
from services.requests.text.answers.choice import Usage

USAGE = Usage(num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=4)

text = st.text(max_size=4)


def content(said: str) -> Delta:
    return Delta(content=said, kinds=["content"])


def reasoning(said: str) -> Delta:
    return Delta(reasoning=said, kinds=["reasoning"])


def call(name: str, parts: list[str]) -> list[Delta]:
    """The deltas of a function call: its beginning, then its arguments."""
    made = Call(f"call_{name}", name, [])
    return [
        Delta(calls=[part], kinds=["calls"])
        for part in (CallDelta(0, made, is_new=True), *(CallDelta(0, made, each) for each in parts))
    ]


def end(reason: str, stop: str | int | None = None) -> Delta:
    return Delta(finish_reason=reason, stop_reason=stop)


deltas = st.one_of(
    st.builds(lambda said: [content(said)], text),
    st.builds(lambda said: [reasoning(said)], text),
    st.builds(call, st.sampled_from("fg"), st.lists(text)),
)
chats = st.lists(deltas, max_size=8).map(lambda found: [delta for part in found for delta in part])


def begun(chat: list[Delta]) -> list[Call]:
    """The calls that a chat begins."""
    return [part.call for delta in chat for part in delta.calls if part.is_new]


def last_arguments(chat: list[Delta]) -> str:
    """Arguments of a chat's last call."""
    said = ""
    for part in (part for delta in chat for part in delta.calls):
        said = ("" if part.is_new else said) + part.arguments
    return said
