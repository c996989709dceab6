"""Does the judge see in a history alone what went wrong? Short histories, written by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.check import judged
from tests.chaos.growth import grown
from tests.chaos.pauses import Pauses
from tests.chaos.specs import COMPLETIONS, RESPONSES

TOKENS = ["Water", " is", " held", "."]
RUN = {"t": 0.0, "is": "run", "seed": 1, "arguments": "", "most_pause_s": None, "most_growth_mib": {}}


def request(
    number: int, *, expects: str = "text", path: str = COMPLETIONS, continues: int | None = None
) -> list[dict[str, Any]]:
    body = {"prompt": "x"} if expects == "text" else None
    fields = {
        "name": "greedy/1",
        "kind": "greedy",
        "path": path,
        "body": body,
        "stream": True,
        "expects": expects,
        "continues": continues,
    }
    return [{"t": 1.0, "is": "request", "id": number, **fields}, *send(number, None)]


def send(number: int, after: str | None) -> list[dict[str, Any]]:
    return [
        {"t": 1.1, "is": "send", "id": number, "to": "gateway-1", "after": after},
        {"t": 1.2, "is": "reply", "id": number, "status": 200, "why": ""},
    ]


def event(number: int, position: int, at: float = 2.0) -> dict[str, Any]:
    piece = {"index": 0, "text": TOKENS[position - 1], "finish_reason": "stop" if position == len(TOKENS) else None}
    return {
        "t": at,
        "is": "event",
        "id": number,
        "event_id": str(position),
        "data": {"id": f"cmpl-{number}", "choices": [piece]},
    }


def told(number: int, words: str) -> dict[str, Any]:
    return {"t": 3.0, "is": "event", "id": number, "event_id": None, "data": {"error": {"message": words}}}


def end(number: int, how: str = "done", why: str = "") -> dict[str, Any]:
    return {"t": 9.0, "is": "end", "id": number, "how": how, "why": why}


def whole(number: int, *positions: int) -> list[dict[str, Any]]:
    done = {"t": 3.0, "is": "event", "id": number, "event_id": None, "data": "[DONE]"}
    return [*request(number), *(event(number, position) for position in positions), done, end(number)]


REFERENCE = whole(1, 1, 2, 3, 4)


def outcomes(folder: Path, *records: dict[str, Any], run: dict[str, Any] = RUN) -> list[tuple[str, str]]:
    """The judge's findings in this history after the reference, read from its file."""
    path = folder / "history.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [run, *REFERENCE, *records]))
    found = judged(path).tally.outcomes
    found["greedy", "answered"] -= 1
    return sorted((+found).elements())


def kinds(folder: Path, *records: dict[str, Any], run: dict[str, Any] = RUN) -> list[str]:
    return [kind for _, kind in outcomes(folder, *records, run=run)]


def test_an_answer_in_pieces_over_two_connections_is_the_reference(tmp_path: Path) -> None:
    cut = {"t": 2.5, "is": "break", "id": 2, "why": "cut"}
    done = {"t": 3.0, "is": "event", "id": 2, "event_id": None, "data": "[DONE]"}
    assert kinds(
        tmp_path, *request(2), event(2, 1), event(2, 2), cut, *send(2, "2"), event(2, 3), event(2, 4), done, end(2)
    ) == ["answered"]


@pytest.mark.parametrize(
    ("positions", "kind"), [((1, 2, 2, 3, 4), "doubled"), ((1, 3, 4), "missing"), ((1, 2, 3), "missing")]
)
def test_a_token_that_comes_twice_or_never_is_found_in_the_history(
    tmp_path: Path, positions: tuple[int, ...], kind: str
) -> None:
    assert kinds(tmp_path, *whole(2, *positions)) == [kind]


def test_a_request_without_an_end_hung(tmp_path: Path) -> None:
    assert kinds(tmp_path, *request(2), event(2, 1)) == ["hung"]


def test_a_request_that_its_client_gave_up_is_lost(tmp_path: Path) -> None:
    assert kinds(tmp_path, *request(2), end(2, "lost")) == ["lost"]


def test_a_cancel_is_ours_unless_the_client_let_go(tmp_path: Path) -> None:
    words = "the request was cancelled"
    assert kinds(tmp_path, *request(2), event(2, 1), told(2, words), end(2, "error", words)) == ["cancelled"]
    dropped = {"t": 2.5, "is": "drop", "id": 2, "why": "it says nothing"}
    again = [
        *send(2, None),
        *(event(2, position) for position in (1, 2, 3, 4)),
        {"t": 3.0, "is": "event", "id": 2, "event_id": None, "data": "[DONE]"},
    ]
    assert kinds(tmp_path, *request(2), event(2, 1), dropped, told(2, words), *again, end(2)) == ["answered"]


def test_a_cancelled_response_is_cancelled_by_us(tmp_path: Path) -> None:
    response: dict[str, Any] = {"id": "resp_1", "status": "cancelled", "output": [], "error": None}
    body = {"t": 3.0, "is": "body", "id": 2, "data": response}
    assert kinds(tmp_path, *request(2, path=RESPONSES), body, end(2, "error", "cancelled: None")) == ["cancelled"]
    data = {"type": "response.cancelled", "sequence_number": 0, "response": response}
    event = {"t": 3.0, "is": "event", "id": 2, "event_id": None, "data": data}
    assert kinds(tmp_path, *request(2, path=RESPONSES), event, end(2, "error", "cancelled: None")) == ["cancelled"]


def test_an_error_is_excused_only_where_a_fault_may_lose_data(tmp_path: Path) -> None:
    losing = {"t": 0.5, "is": "round", "number": 1, "at": "begin", "may_lose": True}
    assert kinds(tmp_path, *request(2), end(2, "error", "404 its record is gone")) == ["error"]
    assert kinds(tmp_path, losing, *request(2), end(2, "error", "404 its record is gone")) == ["excused"]
    assert kinds(tmp_path, losing, *request(2), end(2, "error", "internal error")) == ["error"]


def test_a_response_that_failed_because_its_data_was_lost_is_judged_by_its_error(tmp_path: Path) -> None:
    losing = {"t": 0.5, "is": "round", "number": 1, "at": "begin", "may_lose": True}
    response = {
        "id": "resp_2",
        "status": "failed",
        "output": [],
        "background": False,
        "error": {"message": "0 are left of 47"},
    }
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_2", "status": "in_progress"}}
    failed = {"type": "response.failed", "sequence_number": 1, "response": response}
    records = [{"t": 3.0, "is": "event", "id": 2, "event_id": None, "data": event} for event in (created, failed)]
    assert kinds(
        tmp_path, losing, *request(2, path=RESPONSES), *records, end(2, "error", "failed: 0 are left of 47")
    ) == ["excused"]
    assert kinds(tmp_path, *request(2, path=RESPONSES), *records, end(2, "error", "failed: 0 are left of 47")) == [
        "error"
    ]


def test_the_end_of_a_connection_that_was_taken_over_is_no_error(tmp_path: Path) -> None:
    second = [*request(3, continues=2)[:1], *send(3, "2"), event(3, 3), event(3, 4)]
    done = {"t": 4.0, "is": "event", "id": 3, "event_id": None, "data": "[DONE]"}
    first = [told(2, "resumed elsewhere"), end(2, "error", "resumed elsewhere")]
    assert kinds(tmp_path, *request(2), event(2, 1), event(2, 2), *second, *first, done, end(3)) == [
        "answered",
        "ended",
    ]


@pytest.mark.parametrize(
    ("expects", "words", "kind"),
    [
        ("refusal", "400 no such field", "ended"),
        ("refusal", "200", "error"),
        ("clear end", "500 internal error", "error"),
        ("end", "410 gone", "ended"),
    ],
)
def test_what_was_not_asked_for_its_text_is_judged_by_its_end(
    tmp_path: Path, expects: str, words: str, kind: str
) -> None:
    assert kinds(tmp_path, *request(2, expects=expects), end(2, "ended", words)) == [kind]


def test_a_stream_that_stays_silent_after_its_fault_is_found_if_a_bound_is_given(tmp_path: Path) -> None:
    fault = {"is": "fault", "number": 1, "name": "cut-sampler", "says": ""}
    spans = [{**fault, "t": 2.5, "at": "begin"}, {**fault, "t": 4.0, "at": "end"}]
    done = {"t": 40.0, "is": "event", "id": 2, "event_id": None, "data": "[DONE]"}
    records = [*request(2), event(2, 1), *spans, *(event(2, position, 34.0) for position in (2, 3, 4)), done, end(2)]
    assert kinds(tmp_path, *records) == ["answered"]
    assert kinds(tmp_path, *records, run=RUN | {"most_pause_s": 31.0}) == ["answered"]
    assert kinds(tmp_path, *records, run=RUN | {"most_pause_s": 29.0}) == ["paused"]


def test_a_pause_belongs_to_the_faults_that_touch_it() -> None:
    pauses = Pauses()
    pauses.begin(1, "kill-sampler", 10.0)
    pauses.end(1, 10.0)
    pauses.begin(2, "stop-redis", 20.0)
    assert pauses.add(11.0, 16.0) == 5.0  # it began in the aftermath of the kill
    assert pauses.add(19.0, 24.0) == 0.0  # Redis still stands
    pauses.end(2, 26.0)
    assert pauses.add(25.0, 29.0) == 3.0
    assert pauses.add(50.0, 57.0) == 7.0  # nothing else can be blamed
    assert pauses.add(150.0, 152.0) == 2.0
    assert {name: each.pause_s for name, each in pauses.longest.items()} == {
        "kill-sampler": 5.0,
        "stop-redis": 7.0,
        "no fault": 2.0,
    }


def test_memory_that_grows_after_the_warm_up_is_found(tmp_path: Path) -> None:
    samples = [{"t": float(at), "is": "memory", "mib": {"gateway 7": 100.0 + 10 * max(0, at - 5)}} for at in range(20)]
    path = tmp_path / "history.jsonl"
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in [RUN | {"most_growth_mib": {"gateway": 50}}, *samples])
    )
    assert judged(path).tally.wrong == ["memory: a gateway grew by 120 MiB"]
    assert grown([50.0, 80.0, 100.0, 99.0, 102.0, 98.0, 100.0, 103.0]) == 3.0


def test_the_checker_is_a_program_that_needs_the_history_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [RUN, *REFERENCE, *whole(2, 1, 2, 2, 3, 4)]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.check", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["requests"]["doubled"] == 1
    path.write_text('{"is": "event"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.check", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "line 1" in done.stderr
