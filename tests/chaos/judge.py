"""The judge: reads a history record by record and says how each request ended.

It knows only the history, whose format history.py describes. An answer is compared with the
reference of the same request: the first whole answer of that name, learned before any fault.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.answers import Answer, Wrong
from tests.chaos.growth import Growth
from tests.chaos.pauses import Pauses
from tests.chaos.specs import RESPONSES
from tests.chaos.tally import Journal, Outcome, Tally

Record = dict[str, Any]

ENDS = ("completed", "incomplete", "failed", "cancelled")  # statuses of a response
CUT_SHORT = ("failed", "cancelled")  # those whose text may have ended anywhere


@dataclass(slots=True)
class Request:
    """One request, as its client has seen it so far."""

    name: str
    kind: str
    is_response: bool  # of the Responses API
    is_background: bool
    expects: str  # "text": the reference's; "refusal"; "clear end": not an internal error; "end": any
    answer: Answer
    known: Answer | None
    journal: Journal
    wrong: Outcome | None = None  # the first thing that was
    is_done: bool = False  # the whole answer is in
    is_resuming: bool = False  # the present connection goes on with what others had
    was_resumed: bool = False
    has_dropped: bool = False  # the client itself let go of a connection: a cancel may be right
    is_taken_over: bool = False  # another connection goes on with it, at the client's wish
    heard_at: float | None = None


@dataclass(slots=True)
class Judge:
    """Reads the records in their order. `tally` holds what it has found."""

    tally: Tally = field(default_factory=Tally)
    pauses: Pauses = field(default_factory=Pauses)
    growth: Growth = field(default_factory=Growth)
    requests: dict[int, Request] = field(default_factory=dict)  # those that have not ended
    known: dict[str, Answer] = field(default_factory=dict)  # references, by the request's name
    run: Record = field(default_factory=dict)  # the first record
    at: float = 0.0  # of the last record
    may_lose: bool = False  # a fault of this round loses what Redis had acknowledged

    def take(self, record: Record) -> Outcome | None:
        """Enter the next record. Returns the outcome, if it ends a request."""
        what, self.at = record["is"], record["t"]
        if what in BY_KIND:
            BY_KIND[what](self, record)
            return None
        if (request := self.requests.get(record["id"])) is None:
            return None  # it has ended, and its connection did not notice
        if what == "end":
            return self._end(record["id"], request, record)
        try:
            self._see(request, what, record)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            request.wrong = request.wrong or Outcome(
                "different", f"what came is no answer: {error!r} in {str(record)[:200]}"
            )
        except Wrong as wrong:
            if request.wrong is None or wrong.kind == "cancelled":  # which is why text is missing
                request.wrong = Outcome(wrong.kind, str(wrong))  # type: ignore[arg-type]
        return None

    def close(self) -> None:
        """The history is over: what has no end hung, and what grew beyond the run's bound is found."""
        for number in list(self.requests):
            self.take({"is": "end", "id": number, "t": self.at, "how": "hung", "why": "the history has no end of it"})
        self.tally.rss_growth_mib = self.growth.by_stage()
        for stage, mib in self.tally.rss_growth_mib.items():
            bound = self.run.get("most_growth_mib", {}).get(stage)
            if bound is not None and mib > bound:
                self.tally.find(f"memory: a {stage} grew by {mib:.0f} MiB")

    def _begin(self, record: Record) -> None:
        body = record["body"] or {}
        journal = Journal(
            f"{record['name']} {'streamed' if record['stream'] else 'whole'} #{record['id']}", record["t"]
        )
        request = Request(
            record["name"],
            record["kind"],
            record["path"] == RESPONSES,
            bool(body.get("background")),
            record["expects"],
            Answer.empty(int(body.get("n") or 1)) if record["expects"] == "text" else Answer.empty(1),
            self.known.get(record["name"]),
            journal,
        )
        if (before := self.requests.get(record["continues"])) is not None:
            request.answer, request.heard_at = deepcopy(before.answer), before.heard_at
            request.journal.response_ids += before.journal.response_ids
            before.is_taken_over = True
            before.journal.note(record["t"], f"#{record['id']} takes it over")
        self.requests[record["id"]] = request

    def _see(self, request: Request, what: str, record: Record) -> None:
        """Judges what came, or what the client did. Raises Wrong."""
        if what == "send":
            self._send(request, record)
        elif what == "reply":
            self._reply(request, record)
        elif what == "event":
            self._event(request, record)
        elif what == "body":
            self._body(request, record["data"])
        elif what in ("break", "drop"):
            request.has_dropped |= what == "drop"
            request.journal.note(record["t"], f"{what}: {record['why']}")
        else:
            raise AssertionError(f"no history: a record is {what!r}")

    def _send(self, request: Request, record: Record) -> None:
        request.journal.note(
            record["t"], f"to {record['to']}" + ("" if record["after"] is None else f", after {record['after']}")
        )
        request.is_resuming = record["after"] is not None
        if not request.is_resuming:
            self.tally.num_retries += len(request.journal.lines) > 1
            request.answer, request.is_done = Answer.empty(len(request.answer.choices)), False

    def _reply(self, request: Request, record: Record) -> None:
        if record["status"] != 200:
            request.journal.note(record["t"], f"{record['status']} {record['why']}")
            if record["status"] == 499:
                check_cancel(request, record["why"])
        elif request.is_resuming:
            request.was_resumed = True
            self.tally.num_resumes += 1

    def _event(self, request: Request, record: Record) -> None:
        data = record["data"]
        if request.is_done:
            raise Wrong("doubled", f"after its end came {str(data)[:100]}")
        if data == "[DONE]":
            request.is_done = True
            return
        is_error = data.get("type") == "error" or "error" in data and not request.is_response
        words = str(data.get("message") or data.get("error")) if is_error else ""
        if is_error:
            request.journal.note(record["t"], f"told: {words}")
            if "cancelled" in words:
                check_cancel(request, words)
            return
        self._hear(request, record["t"])
        had_id = request.answer.response_id
        if request.is_response:
            response = data.get("response") or {}
            if response.get("status") == "cancelled":  # before its text is looked at: it is cut short
                check_cancel(request, "the response was cancelled")
            if response.get("status") in CUT_SHORT and request.wrong is not None and request.wrong.kind == "missing":
                request.wrong = None  # the end of a text that was cut short came before the word that it was
            request.answer.add_event(data, None if response.get("status") in CUT_SHORT else request.known)
            request.answer.response_id = request.answer.response_id or response.get("id")
            if response.get("status") in ENDS:
                self._end_response(request, response)
        else:
            request.answer.add_chunk(data, record["event_id"], request.known)
        if had_id is None and request.answer.response_id is not None:
            request.journal.response_ids.append(request.answer.response_id)
            request.journal.note(record["t"], "first event")

    def _hear(self, request: Request, now: float) -> None:
        if request.heard_at is not None:
            self.tally.longest_pause_s = max(self.tally.longest_pause_s, now - request.heard_at)
            outlasting_s, bound = self.pauses.add(request.heard_at, now), self.run.get("most_pause_s")
            if bound is not None and outlasting_s > bound and request.wrong is None:
                request.wrong = Outcome(
                    "paused",
                    f"silent for {now - request.heard_at:.1f} s, {outlasting_s:.1f} s of them after the last fault "
                    "had ended",
                )
        request.heard_at = now

    def _body(self, request: Request, data: Record) -> None:
        if request.is_response:
            self._end_response(request, data)
        else:
            request.answer.add_whole(data)
            request.is_done = True

    def _end_response(self, request: Request, response: Record) -> None:
        if response["status"] == "cancelled":
            check_cancel(request, "the response was cancelled")
        if response["status"] in CUT_SHORT:
            return  # the client says how it takes that
        if response["background"] != request.is_background:
            raise Wrong("different", f"background is {response['background']}")
        request.answer.add_response(response)
        request.is_done = True

    def _end(self, number: int, request: Request, record: Record) -> Outcome:
        del self.requests[number]
        outcome = self._verdict(request, record["how"], record["why"])
        if outcome.kind == "answered":
            self.known.setdefault(request.name, request.answer)
        request.journal.note(record["t"], f"{record['how']}: {record['why']}")
        self.tally.end(request.kind, outcome, request.journal)
        return outcome

    def _verdict(self, request: Request, how: str, why: str) -> Outcome:
        if how in ("hung", "lost"):
            return Outcome(how, why)  # type: ignore[arg-type]
        if how == "ended":  # what was not asked for its text
            is_wrong = (request.expects == "refusal" and not why.startswith("4")) or (
                request.expects == "clear end" and "internal error" in why
            )
            return Outcome("error" if is_wrong else "ended", why)
        if how == "error" and request.is_taken_over and "resumed elsewhere" in why.lower():
            return Outcome("ended", "resumed elsewhere")
        if (
            request.wrong is not None
            and how != "left"
            and not (self.may_lose and request.wrong.kind in ("cancelled", "paused"))
        ):
            return request.wrong
        if how == "error":
            is_excused = self.may_lose and "internal error" not in why
            return Outcome("excused" if is_excused else "cancelled" if "cancelled" in why else "error", why)
        if how == "done":
            try:
                if not request.is_done:
                    raise Wrong("missing", "the client takes it for whole, and its end never came")
                if request.known is not None:
                    request.answer.compare(request.known, was_resumed=request.was_resumed)
            except Wrong as wrong:
                return Outcome(wrong.kind, str(wrong))  # type: ignore[arg-type]
            return Outcome("answered")
        return Outcome("left" if how == "left" else "ended", why)

    def _begin_run(self, record: Record) -> None:
        self.run = record

    def _round(self, record: Record) -> None:
        if record["at"] == "begin":
            self.may_lose = record["may_lose"]

    def _fault(self, record: Record) -> None:
        if record["at"] == "begin":
            self.tally.faults[record["name"]] += 1
            self.pauses.begin(record["number"], record["name"], record["t"])
        else:
            self.pauses.end(record["number"], record["t"])

    def _memory(self, record: Record) -> None:
        self.growth.add(record["mib"])

    def _finding(self, record: Record) -> None:
        self.tally.find(record["says"])


BY_KIND: dict[str, Callable[[Judge, Record], None]] = {
    "run": Judge._begin_run,
    "round": Judge._round,
    "fault": Judge._fault,
    "memory": Judge._memory,
    "finding": Judge._finding,
    "request": Judge._begin,
}


def check_cancel(request: Request, words: str) -> None:
    """Raises Wrong unless the client itself had gone away: nobody else may cancel its request."""
    if not request.has_dropped:
        raise Wrong("cancelled", f"cancelled by us: {words}")
