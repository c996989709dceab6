"""bench/served.py reads streams as they come, whatever pieces they come in."""

import asyncio
import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load import Stream
from bench.served import lengths_of, prose, read, summarize

PIECES = ["Hel", "lo", " Wörld\r\n", "", "!"]


def stream_of(data: bytes, cuts: list[int]) -> Stream:
    """It arrived in pieces, a second apart."""

    async def make() -> Stream:
        return Stream(b"")

    stream = asyncio.run(make())
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    stream.arrivals = [(float(number + 1), data[start:end]) for number, (start, end) in enumerate(pairwise(places))]
    return stream


def response(*, is_chunked: bool, end: bool = True) -> bytes:
    events = [{"choices": [{"text": text}]} for text in PIECES] + [
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    ]
    lines = [f"id: {number}\ndata: {json.dumps(event)}\n\n".encode() for number, event in enumerate(events)] + [
        b"data: [DONE]\n\n"
    ] * end
    if is_chunked:
        body = b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in lines) + b"0\r\n\r\n"
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join(lines)


@given(is_chunked=st.booleans(), cuts=st.lists(st.integers(0, 800), max_size=12))
@settings(deadline=None)
def test_a_stream_reads_the_same_in_any_pieces(is_chunked: bool, cuts: list[int]) -> None:
    data = response(is_chunked=is_chunked)
    stream = stream_of(data, cuts)
    answer = read(stream)
    assert (answer.text, answer.error, answer.num_prompt_tokens, answer.num_output_tokens) == (
        "".join(PIECES),
        "",
        7,
        5,
    )
    assert (
        len(answer.times) == 4
        and answer.times == sorted(answer.times)
        and answer.times[-1] <= answer.ended_at <= stream.arrivals[-1][0]
    )
    first_end = data.index(json.dumps(PIECES[0]).encode()) + len(PIECES[0]) + 2
    seen = 0
    for at, piece in stream.arrivals:
        seen += len(piece)
        if seen > first_end:
            assert at <= answer.times[0] <= at + 1, "the first text's time is when its event was whole"
            break


def test_what_is_no_whole_stream_is_an_error() -> None:
    assert read(stream_of(response(is_chunked=True, end=False), [])).error == "the stream has no end"
    assert "Too Many" in read(stream_of(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", [])).error
    assert read(stream_of(b"", [])).error


def test_a_stream_that_is_cut_in_an_event_is_that_answers_error() -> None:
    data = response(is_chunked=False)
    for cut in range(data.index(b"data:"), len(data) - len(b"data: [DONE]\n\n")):
        assert read(stream_of(data[:cut], [])).error in (
            "the stream ends in the middle of an event",
            "the stream has no end",
        )


def test_prompts_have_their_lengths_and_begin_differently() -> None:
    requests = lengths_of("crowd", 64, seed=0)
    assert all(100 <= each.num_prompt_tokens <= 900 and 30 <= each.num_output_tokens <= 130 for each in requests)
    prompts = prose(requests)
    assert len({prompt[:40] for prompt in prompts}) == 64
    assert requests == lengths_of("crowd", 64, seed=0) != lengths_of("crowd", 64, seed=1)


def test_figures_of_a_run() -> None:
    answer = read(stream_of(response(is_chunked=True), [200, 400]))
    [request] = lengths_of("crowd", 1, seed=0)
    figures = summarize([answer, read(stream_of(b"", []))], [request, request])
    assert figures["requests"] == 2 and figures["errors"] == 1 and figures["output_tokens"] == 5
    assert figures["tpot_p50_ms"] == 1e3 * (answer.times[-1] - answer.times[0]) / 4
