"""The pipeline without its gateway, in one process: each stage a service of its own in a thread, on a real Redis."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import redis
from tokenizers import Tokenizer

from services.compute.candidates import matcher
from services.compute.exchange import inbox
from services.compute.intake import admit
from services.compute.loop import service as compute_service
from services.compute.loop.engine import Engine, build_engine
from services.compute.loop.service import ComputeService
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.policy import StepPolicy
from services.compute.sequence.batch import ScheduledBatch
from services.sampler import service as sampler_service
from services.sampler.detokenizer import load_tokenizer
from services.sampler.service import SamplerService
from services.tokenizer import service as tokenizer_service
from services.tokenizer.encoder import Encoder
from services.tokenizer.service import TokenizerService
from shared.model.files import DEMO_MODEL, open_model
from shared.model.sampling_params import SamplingParams
from shared.process.settings import ComputeSettings, SamplerSettings, TokenizerSettings
from shared.process.stage_settings import StageSettings
from shared.wire import line
from shared.wire.entries import append_to_group
from shared.wire.messages import GenerateRequest
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import inflight_key, log_key, prompts, requests
from shared.wire.transport import Transport
from tests.waiting import wait_until

MODEL = "penstock-demo"
REPLY_TIMEOUT_S = 1.0  # of stages that are hurried, or behind a proxy
FILES = open_model("demo")


@cache
def sampler_tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@cache
def text_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL)


class LocalStage(Stage):
    """A stage in a thread: no signals, no heartbeat; who is alive is what the test says. `url` is its way to Redis."""

    def __init__(self, name: str, settings: StageSettings, *, url: str = "", max_model_len: int | None = None) -> None:
        super().__init__(name, settings, model=MODEL, max_model_len=max_model_len)
        if url:
            self.transport = Transport(url, self.stopping, REPLY_TIMEOUT_S)
        self.live = Registry()

    @property
    def registry(self) -> Registry:
        """As of a look just now."""
        return replace(self.live, looked_at=time.monotonic())

    def catch_signals(self) -> None:
        pass

    def join(self, *, is_needed: bool = True) -> None:
        assert is_needed
        self.transport.wait_until_up(self.settings.redis_timeout_s)

    def leave(self) -> None:
        super().leave()
        self._heartbeat.transport.close()


def crowd(line: "LineOfStages", monkeypatch: pytest.MonkeyPatch, share: float = 0.2, seed: int = 3) -> None:
    """From now on a sequence loses its blocks before so many of the steps."""
    scheduler, rng = line.compute.scheduler, random.Random(seed)
    schedule = scheduler.schedule

    def crowded(policy: StepPolicy) -> ScheduledBatch | None:
        if len(scheduler.running) > 1 and rng.random() < share:
            scheduler._preempt(rng.choice(list(scheduler.running.values())), NewStep())
        return schedule(policy)

    monkeypatch.setattr(scheduler, "schedule", crowded)


def replica(stage: str, replica_id: str) -> Replica:
    return Replica(stage, replica_id, "here", 1, 0.0, MODEL)


@contextmanager
def hurried() -> Iterator[None]:
    """Waits of seconds become tenths: what a test shows with them is not how long they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admit, "CLAIM_IDLE_MS", 100)
        patch.setattr(compute_service, "UPKEEP_EVERY_S", 0.05)
        patch.setattr(compute_service, "IDLE_WAIT_S", 0.02)
        patch.setattr(inbox, "STANDING_MS", 50)
        patch.setattr(line, "REPLY_TIMEOUT_S", REPLY_TIMEOUT_S)
        patch.setattr(tokenizer_service, "CLAIM_IDLE_MS", 100)
        patch.setattr(tokenizer_service, "CLAIM_EVERY_S", 0.05)
        patch.setattr(tokenizer_service, "BLOCK_MS", 20)
        patch.setattr(sampler_service, "BLOCK_MS", 20)
        yield


@dataclass
class LineOfStages:
    """Tokenizer, compute and sampler. `urls` says by stage which way each goes to Redis, for those
    that do not go straight.
    """

    redis_url: str
    urls: dict[str, str] = field(default_factory=dict)
    failures: list[BaseException] = field(default_factory=list)
    engine: Engine | None = None  # of the demo; None: one is made

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.redis_url)
        tokenizer = TokenizerSettings(redis_url=self.redis_url, replica_id="tokenizer-1")
        sampler = SamplerSettings(redis_url=self.redis_url, replica_id="sampler-1", drain_s=0)
        compute = ComputeSettings(
            redis_url=self.redis_url,
            replica_id="compute-1",
            dtype="bfloat16",
            kv_cache_memory="64MiB",
            num_threads=1,
            prefix_caching=False,
            max_num_seqs=8,
            publish_interval_ms=10,
        )
        engine = self.engine or build_engine(compute, FILES)
        stages = [
            self._stage("tokenizer", tokenizer),
            self._stage("compute", compute, engine),
            self._stage("sampler", sampler),
        ]
        for stage in stages:
            stage.live = Registry(tuple(replica(each.name, each.replica_id) for each in stages))
        self.tokenizer = TokenizerService(stages[0], tokenizer, Encoder(text_tokenizer(), FILES), FILES.max_model_len)
        self.compute = ComputeService(stages[1], compute, engine)
        self.sampler = SamplerService(stages[2], sampler, sampler_tokenizer())

    def _stage(self, name: str, settings: StageSettings, engine: Engine | None = None) -> LocalStage:
        return LocalStage(
            name, settings, url=self.urls.get(name, ""), max_model_len=engine.max_model_len if engine else None
        )

    @contextmanager
    def running(self) -> Iterator["LineOfStages"]:
        """While the services run in threads; at the end nothing of them is left, connections neither."""
        services: list[TokenizerService | ComputeService | SamplerService] = [
            self.tokenizer,
            self.compute,
            self.sampler,
        ]
        threads = [threading.Thread(target=self._guard, args=(each.run,)) for each in services]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for each in services:
                each.stage.stopping.set()
            for thread in threads:
                thread.join(120)
            for each in services:
                each.stage.transport.close()
            self.client.close()
        assert not self.failures, self.failures

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # a thread's failure is the test's
            self.failures.append(error)

    def submit(self, *asked: GenerateRequest) -> None:
        """As a gateway does: counted, and into the stream."""
        with self.client.pipeline(transaction=True) as pipe:
            for request in asked:
                tokens = request.params.max_tokens or 0
                pipe.hset(inflight_key(MODEL), request.request_id, str(tokens))
                pipe.hincrby(inflight_key(MODEL), "", tokens)
                append_to_group(pipe, requests(MODEL), request)
            pipe.execute()

    def log(self, request_id: str) -> Any:
        return self.client.xrange(log_key(request_id))

    def has_ended(self, request_id: str) -> bool:
        last: Any = self.client.xrevrange(log_key(request_id), count=1)
        return bool(last) and b"e" in last[0][1]

    def is_at_rest(self) -> bool:
        """Nothing is queued, pending, active, or on its way."""
        group_streams = (requests(MODEL), prompts(MODEL))
        is_empty = all(not self.client.xlen(each.key) for each in group_streams) and not self.client.xlen(
            self.sampler.reader.stream.key
        )
        return is_empty and not self.compute.active and not self.failures

    def pending(self) -> int:
        found: list[Any] = [self.client.xpending(each.key, each.group) for each in (requests(MODEL), prompts(MODEL))]
        return sum(int(each["pending"]) for each in found)

    def answer(self, *asked: GenerateRequest, timeout_s: float = 60.0) -> dict[str, Any]:
        """The logs of these requests once all have ended and nothing moves any more."""
        self.submit(*asked)

        def is_done() -> bool:
            assert not self.failures, self.failures
            return all(self.has_ended(each.request_id) for each in asked) and self.is_at_rest()

        wait_until(is_done, description="every request has ended and the streams are empty", timeout_s=timeout_s)
        return {each.request_id: self.log(each.request_id) for each in asked}

    def forget_logs(self) -> None:
        keys: Any = [key for pattern in ("log:*", "attempts:*", "events:*") for key in self.client.keys(pattern)]
        if keys:
            self.client.delete(*keys)


def ask(request_id: str, prompt: str, **params: Any) -> GenerateRequest:
    return GenerateRequest(request_id, "gateway-1", MODEL, SamplingParams(**params), prompt=prompt)


def ids(*values: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(values, np.int32)


def delay_masks(monkeypatch: pytest.MonkeyPatch, seconds: float, *, is_slow: bool) -> None:
    """Nobody waits for a mask, and each takes so long; is_slow: all are filled before their rows run."""
    fill = matcher.Filling._fill

    def slowly(filling: matcher.Filling, turn: matcher.MatcherPath, rows: Any) -> int:
        time.sleep(seconds)
        return fill(filling, turn, rows)

    monkeypatch.setattr(compute_service, "MASK_BUDGET_S", 0.0)
    monkeypatch.setattr(matcher.Filling, "_fill", slowly)
    if is_slow:
        monkeypatch.setattr(matcher, "SLOW_S", -1.0)
