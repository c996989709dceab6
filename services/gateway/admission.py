"""Who may enter: bounds on what is in the pipeline, in requests and in tokens, over all gateways.

Each gateway announces what it has in flight; the others' figures are at most a second old, and a dead gateway's vanish with its lease,
so nothing leaks. What has been admitted is never refused later, however often it is re-queued inside the pipeline.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.metrics import Metrics
from shared.errors import Invalid, Rejected
from shared.messages import GenerateRequest
from shared.settings import GatewaySettings
from shared.stage import Stage

STAGES = ("tokenizer", "compute", "sampler")
BYTES_PER_TOKEN = 4  # of English text, roughly
UNBOUNDED_TOKENS = 512  # assumed of a request that names no max_tokens
RETRY_AFTER_S = 2


class Admission:
    def __init__(self, stage: Stage, settings: GatewaySettings, metrics: Metrics) -> None:
        self.stage = stage
        self.settings = settings
        self.metrics = metrics
        self.num_requests = 0
        self.num_tokens = 0

    def check_model(self, model: str) -> None:
        """Raises Rejected (503) while a stage is missing, Invalid (404) for a model that no compute replica serves."""
        missing = [stage for stage in STAGES if not self.stage.registry.of(stage)]
        if missing:
            self.metrics.rejected.inc()
            raise Rejected(f"not ready: no {' and no '.join(missing)} is alive", status=503, retry_after_s=RETRY_AFTER_S)
        if not self.stage.registry.of("compute", model):
            known = sorted({replica.model or "" for replica in self.stage.registry.of("compute")})
            raise Invalid(f"the model {model!r} does not exist; served: {', '.join(known)}", param="model", code="model_not_found", status=404)

    @contextmanager
    def admit(self, requests: list[GenerateRequest]) -> Iterator[None]:
        """Hold places for the requests. Raises Rejected (429) if there are none."""
        tokens = sum(map(estimate_tokens, requests))
        others = [replica for replica in self.stage.registry.of("gateway") if replica.replica_id != self.stage.replica_id]
        total_requests = self.num_requests + sum(int(replica.load.get("requests_in_flight", 0)) for replica in others)
        total_tokens = self.num_tokens + sum(int(replica.load.get("tokens_in_flight", 0)) for replica in others)
        if total_requests + len(requests) > self.settings.max_requests:
            self.metrics.rejected.inc()
            raise Rejected(f"the server is full: {total_requests} requests of at most {self.settings.max_requests}", status=429, retry_after_s=RETRY_AFTER_S)
        if total_tokens + tokens > self.settings.max_tokens_in_flight:
            self.metrics.rejected.inc()
            raise Rejected(
                f"the server is full: {total_tokens} tokens of at most {self.settings.max_tokens_in_flight}, and this request takes {tokens}",
                status=429,
                retry_after_s=RETRY_AFTER_S,
            )
        self._add(len(requests), tokens)
        try:
            yield
        finally:
            self._add(-len(requests), -tokens)

    def _add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.stage.load["requests_in_flight"] = self.num_requests
        self.stage.load["tokens_in_flight"] = self.num_tokens


def estimate_tokens(request: GenerateRequest) -> int:
    """Prompt and output tokens; the prompt's by its length in bytes, for the gateway has no tokenizer."""
    if request.prompt_token_ids is not None:
        prompt = len(request.prompt_token_ids)
    else:
        text = request.prompt if request.prompt is not None else "".join(message.content for message in request.messages or ())
        prompt = len(text.encode()) // BYTES_PER_TOKEN + 1
    return prompt + (request.params.max_tokens or UNBOUNDED_TOKENS)
