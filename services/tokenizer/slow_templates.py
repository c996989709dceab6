"""Conversations that bring a chat template of their own, and those with which the model's template
is slow: rendered by threads outside the loop.

Only the tenant that sent such a conversation waits for it: tenants take turns, and none has all the
workers. A conversation that waits too long, or is one too many, gets an error that says so.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.pending import PendingPrompt
from shared.process.errors import Invalid
from shared.wire.entries import Delivery
from shared.wire.messages import GenerateRequest

NUM_WORKERS = 2
MAX_OF_TENANT = 64  # waiting conversations
MAX_WAITING = 256  # of all tenants
WAIT_S = 10.0

Render = Callable[[GenerateRequest, ChatTemplate], PendingPrompt]


@dataclass(frozen=True, slots=True)
class Running:
    delivery: Delivery
    tenant: str
    template: ChatTemplate
    rendering: Future[PendingPrompt]


class SlowTemplates:
    """Conversations that are rendered outside the loop. Only the loop calls the methods."""

    def __init__(self, tokenizer: Any, render: Render, clock: Callable[[], float]) -> None:
        """tokenizer: of transformers; render: safe in threads, each with a ChatTemplate of its
        own; clock: s, goes forward only."""
        self._tokenizer = tokenizer
        self._render = render
        self._clock = clock
        self._free: list[ChatTemplate] = []
        self._running: list[Running] = []
        # by tenant, the next one first; each with the time since when it waits
        self._waiting: OrderedDict[str, deque[tuple[Delivery, float]]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "slow-template")
        self.entry_ids: list[bytes] = []  # of all requests here, waiting or running

    @property
    def is_empty(self) -> bool:
        return not self._running and not self._waiting

    def hold(self, delivery: Delivery) -> Invalid | None:
        """Queue a conversation for rendering. Returns the error if it is refused."""
        tenant = tenant_of(delivery.message)
        if len(self._waiting.get(tenant, ())) >= MAX_OF_TENANT:
            return _refused(
                f"{MAX_OF_TENANT} conversations whose chat template takes long wait already: send fewer at once", 429
            )
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            return _refused("too many conversations wait whose chat template takes long", 503)
        if not self._free and not self._running:
            self._free = [ChatTemplate(self._tokenizer) for _ in range(NUM_WORKERS)]
        self._waiting.setdefault(tenant, deque()).append((delivery, self._clock()))
        self._begin()
        return None

    def done(self) -> list[tuple[Delivery, PendingPrompt]]:
        """Requests that were rendered since the last call, or that waited too long."""
        ready: list[tuple[Delivery, PendingPrompt]] = []
        for each in [each for each in self._running if each.rendering.done()]:
            self._running.remove(each)
            self._free.append(each.template)
            prepared = each.rendering.result()
            assert not prepared.is_slow, "only a quick template says so"
            ready.append((each.delivery, prepared))
        self._begin()
        late = self._clock() - WAIT_S
        for tenant, questions in list(self._waiting.items()):
            while questions and questions[0][1] < late:
                delivery, _ = questions.popleft()
                error = _refused(f"a conversation whose chat template takes long has waited for {WAIT_S:g} s", 503)
                ready.append((delivery, PendingPrompt(delivery.message, error=error)))
            if not questions:
                del self._waiting[tenant]
        self._list_entries()
        return ready

    def _begin(self) -> None:
        """Free workers to the tenants whose turn it is."""
        while self._free and (tenant := self._next()) is not None:
            questions = self._waiting.pop(tenant)
            delivery, _ = questions.popleft()
            if questions:
                self._waiting[tenant] = questions
            template = self._free.pop()
            self._running.append(
                Running(delivery, tenant, template, self._threads.submit(self._render, delivery.message, template))
            )
        self._list_entries()

    def _next(self) -> str | None:
        num_running = Counter(each.tenant for each in self._running)
        return next((each for each in self._waiting if num_running[each] < max(1, NUM_WORKERS - 1)), None)

    def _list_entries(self) -> None:
        waiting = [delivery.entry_id for questions in self._waiting.values() for delivery, _ in questions]
        self.entry_ids = [*(each.delivery.entry_id for each in self._running), *waiting]


def tenant_of(request: GenerateRequest) -> str:
    """The request's tenant, as far as its salt tells: a gateway with keys puts the tenant before
    what the client gave."""
    tenant, separator, _ = request.scheduling.cache_salt.partition("\0")
    return tenant if separator else ""


def brings_template(request: GenerateRequest) -> bool:
    return request.messages is not None and bool(request.chat.chat_template)


def _refused(reason: str, status: int) -> Invalid:
    return Invalid(reason, param="messages", code="chat_templates_busy", status=status)
