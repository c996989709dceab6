"""Inbox: two standing reads. Redis answers one as soon as there are decisions, offers or control
messages, the other as soon as there are prompts."""

from dataclasses import dataclass

from shared.wire.entries import DeadLetter, Delivery, DirectReader, GroupReader
from shared.wire.line import RedisConnection, wait_for_any
from shared.wire.messages import Control, Offer, StepDecisions

STANDING_MS = 1000  # how long Redis holds a standing read before it is asked again
MAX_TAKEN = 64  # prompts in a reply: more would hold up the steps of those that run


@dataclass(slots=True)
class News:
    """Messages of the first read."""

    control: list[Control]
    decisions: list[StepDecisions]
    offers: list[Offer]


class Inbox:
    """A line for each read: for news, and for prompts. All methods raise what redis-py raises."""

    def __init__(
        self,
        news: RedisConnection,
        requests: RedisConnection,
        prompts: GroupReader,
        decisions: DirectReader,
        control: DirectReader,
        offered: DirectReader,
    ) -> None:
        self.news = news
        self.requests = requests
        self.prompts = prompts
        self.decisions = decisions
        self.control = control
        self.offered = offered

    def ask(self, num_prompts: int) -> None:
        """Leave the reads standing, the second for up to num_prompts prompts."""
        if not self.news.num_awaited:
            last_ids = {reader.stream.key: reader.last_id for reader in (self.decisions, self.control, self.offered)}
            self.news.send(lambda pipe: pipe.xread(last_ids, block=STANDING_MS))
        if num_prompts > 0 and not self.requests.num_awaited:
            self.requests.send(
                lambda pipe: self.prompts.queue_read(pipe, count=min(num_prompts, MAX_TAKEN), block_ms=STANDING_MS)
            )

    def wait(self, wait_s: float, *, for_decisions: bool) -> None:
        """Wait for the first reply: of the first read if decisions are awaited, else of any."""
        wait_for_any([self.news] if for_decisions else [self.news, self.requests], wait_s)

    def take_news(self) -> News | None:
        """Take the messages that have come; None while Redis holds the read."""
        if not self.news.has_reply():
            return None
        reply = self.news.receive()[-1]
        return News(self.control.take(reply), self.decisions.take(reply), self.offered.take(reply))

    def take_prompts(self) -> tuple[list[Delivery], list[DeadLetter]]:
        """Prompts that have come, and entries that can't be decoded."""
        return self.prompts.take(self.requests.receive()[-1]) if self.requests.has_reply() else ([], [])

    def close(self) -> None:
        """Hang up; the next `ask` connects again."""
        self.news.close()
        self.requests.close()
