"""Stop strings and detokenization: nothing leaks, nothing is lost, whatever the token borders."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.sampler.detokenizer import MAX_PENDING, Detokenizer, load_tokenizer
from services.sampler.request_state import RequestState, StopMatcher
from shared.model.files import DEMO_MODEL
from shared.model.sampling_params import SamplingParams
from shared.model.token_table import TokenTable
from shared.process.clock import Clock
from shared.wire.logprobs import TokenLogprob
from shared.wire.messages import SequenceIntro, TokenEvent

TOKENIZER: Tokenizer = load_tokenizer(DEMO_MODEL)


@given(
    text=st.text("abc", max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_are_found_across_any_borders(text: str, cuts: list[int], stops: list[str]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher, released, matched = StopMatcher(tuple(stops)), "", None
    for start, end in zip(borders, borders[1:], strict=False):
        part, matched = matcher.feed(text[start:end])
        released += part
        assert not any(
            released.endswith(stop[:1]) and stop in text and text.startswith(released[:-1] + stop)
            for stop in stops
            if len(stop) == 1
        )
        if matched:
            break
    if matched is None:
        assert released + matcher.flush() == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(released + matched)
        assert not any(stop in released for stop in stops)


@given(st.text(max_size=60))
def test_incremental_text_is_the_whole_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(TOKENIZER, [5, 6])
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(5, 260), max_size=60))
def test_any_bytes_are_bounded_work_and_no_exception(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    for token_id in ids:
        assert "\ufffd" not in (piece := detokenizer.add(token_id)) or len(piece) >= 1
        assert len(detokenizer._pending) < MAX_PENDING
    detokenizer.flush()


def test_single_tokens_have_their_bytes() -> None:
    table = TokenTable(TOKENIZER)
    assert table.describe(40) == ("D", b"D")
    pieces = [table.describe(token_id)[1] for token_id in TOKENIZER.encode("ñ🙂").ids]
    assert b"".join(pieces) == "ñ🙂".encode()


def test_single_tokens_of_a_sentencepiece_vocabulary_have_their_bytes() -> None:
    """A metaspace is a space, a byte token is its byte, and what spells one without being one is text."""
    vocabulary = {"<unk>": 0, "<0xF0>": 1, "<0x0A>": 2, "▁the": 3, "the": 4, "<0xZZ>": 5, "水": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>"])
    table = TokenTable(tokenizer)
    expected = [
        ("<unk>", b"<unk>"),
        ("bytes:\\xf0", b"\xf0"),
        ("\n", b"\n"),
        (" the", b" the"),
        ("the", b"the"),
        ("<0xZZ>", b"<0xZZ>"),
        ("水", "水".encode()),
    ]
    assert [table.describe(token_id) for token_id in range(7)] == expected


def begin(params: SamplingParams, **intro: object) -> RequestState:
    values: dict[str, object] = {
        "handle": 1,
        "request_id": "r",
        "gateway_id": "g",
        "eos_token_ids": (1,),
        "num_prompt_tokens": 3,
    }
    return RequestState.begin(
        SequenceIntro(params=params, prompt_tail=np.array([40], np.int32), **(values | intro)),  # type: ignore[arg-type]
        TOKENIZER,
        Clock(),
    )


@given(
    st.lists(st.sampled_from(TOKENIZER.encode("a token stops here, or there. ñ🙂").ids), min_size=1, max_size=30),
    st.integers(0, 30),
)
def test_a_state_rebuilt_from_the_log_is_the_state_that_was_lost(ids: list[int], lost_after: int) -> None:
    params = SamplingParams(max_tokens=len(ids), stop=("stops h", "🙂🙂"), logprobs=0)

    def events(state: RequestState, tokens: list[int]) -> list[TokenEvent]:
        made = []
        for token_id in tokens:
            if not state.is_finished:
                made.append(state.append(token_id, TokenLogprob(str(token_id), b"", -float(token_id))))
        return made

    expected = events(begin(params), ids)
    logged = expected[:lost_after]
    rebuilt = begin(params)
    for event in logged:
        rebuilt.replay(event)
    assert logged + (events(rebuilt, ids[len(logged) :])) == expected
    assert expected[-1].finish_reason in ("stop", "length")


def test_the_end_of_an_answer() -> None:
    state = begin(SamplingParams(max_tokens=5), echo_text="prompt ")
    first = state.append(40, None)
    assert (first.text, first.position, first.finish_reason) == ("prompt D", 1, None)
    last = state.append(1, None)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", None)
    stopped = begin(SamplingParams(max_tokens=5, stop_token_ids=(41,))).append(41, None)
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", 41)
    assert begin(SamplingParams(max_tokens=1)).append(40, None).finish_reason == "length"


def test_an_offset_is_where_the_token_begins_in_the_returned_text() -> None:
    """Single tokens of a character have texts of their own, which do not add up to it."""
    ids = TOKENIZER.encode("a 🙂!").ids
    state = begin(SamplingParams(max_tokens=len(ids), logprobs=0), echo_text="echo")
    events = [state.append(token_id, TokenLogprob("\ufffd", b"", -1.0)) for token_id in ids]
    assert "".join(event.text for event in events) == "echoa 🙂!"
    found = [each.text_offset for event in events for each in event.logprobs or ()]
    assert found == [4, 5, 6, 6, 6, 6, 7]


def test_offsets_count_bytes_that_became_no_character() -> None:
    ids = [*TOKENIZER.encode("a 🙂").ids[:-1], *TOKENIZER.encode("b 🙂").ids]
    table, state = TokenTable(TOKENIZER), begin(SamplingParams(max_tokens=len(ids), logprobs=0))
    events = [state.append(token_id, TokenLogprob(*table.describe(token_id), -1.0)) for token_id in ids]
    assert "".join(event.text for event in events) == "a \ufffdb 🙂"
    assert [each.text_offset for event in events for each in event.logprobs or ()] == [0, 1, 2, 2, 2, 3, 4, 5, 5, 5, 5]


def test_what_ends_an_answer_may_be_in_its_text() -> None:
    """A stop string, across tokens; a stop token; an end token, whose text is special. Each has its
    logprob, and a state that is rebuilt says the same.
    """
    ids = TOKENIZER.encode("a token stops here").ids
    shown = SamplingParams(max_tokens=99, stop=("n st",), include_stop_str_in_output=True, logprobs=0)
    hidden = SamplingParams(max_tokens=99, stop=("n st",), logprobs=0)

    def text_of(params: SamplingParams, tokens: list[int], rebuilt_after: int = 99) -> tuple[str, list[bool]]:
        state = begin(params)
        made: list[TokenEvent] = []
        for number, token_id in enumerate(tokens):
            if number == rebuilt_after:
                state = begin(params)
                for event in made:
                    state.replay(event)
            if not state.is_finished:
                made.append(state.append(token_id, TokenLogprob("x", b"x", -1.0)))
        assert made[-1].finish_reason == "stop"
        return "".join(event.text for event in made), [entry.is_end for event in made for entry in event.logprobs or ()]

    for rebuilt_after in (99, 1, 3):
        assert (
            text_of(shown, ids, rebuilt_after)[0] == "a token st" and text_of(hidden, ids, rebuilt_after)[0] == "a toke"
        )
    by_token = SamplingParams(max_tokens=99, stop_token_ids=(ids[1],), logprobs=0)
    assert text_of(by_token, ids) == (TOKENIZER.decode(ids[:1]), [False, True])
    with_it = SamplingParams(max_tokens=99, stop_token_ids=(ids[1],), logprobs=0, include_stop_str_in_output=True)
    assert text_of(with_it, ids) == (TOKENIZER.decode(ids[:2]), [False, False])
    assert text_of(SamplingParams(max_tokens=99, logprobs=0, include_stop_str_in_output=True), [ids[0], 1])[
        0
    ] == TOKENIZER.decode(ids[:1])
    spelled = SamplingParams(max_tokens=99, logprobs=0, include_stop_str_in_output=True, skip_special_tokens=False)
    assert (
        text_of(spelled, [ids[0], 1])[0]
        == TOKENIZER.decode([ids[0], 1], skip_special_tokens=False)
        != TOKENIZER.decode(ids[:1])
    )
