"""`penstock status`: replicas, queues, running requests, tokens per second, from Redis alone."""

import time

import redis

from shared.errors import StartupError
from shared.messages import Replica
from shared.registry import look
from shared.settings import StageSettings
from shared.streams import DEAD_LETTER, prompts, requests
from shared.transport import connect, is_temporary

PIPELINE = ("gateway", "tokenizer", "compute", "sampler")
STAGE_ORDER = (*PIPELINE, "jobs")
WATCH_S = 1.5  # between the two looks that make a rate


def show_status(settings: StageSettings) -> None:
    """Print the table. Raises StartupError if Redis is away."""
    client = connect(settings.redis_url)
    try:
        before, started_at = look(client).replicas, time.monotonic()
        time.sleep(WATCH_S)
        after, seconds = look(client).replicas, time.monotonic() - started_at
        models = sorted({replica.model for replica in after if replica.stage == "compute" and replica.model})
        lengths = {key: client.xlen(key) for key in [*(stream(model).key for model in models for stream in (requests, prompts)), DEAD_LETTER]}
    except (redis.RedisError, OSError) as error:
        word = f"Redis does not answer at {settings.redis_url}: is Penstock up?" if is_temporary(error) else "Redis refuses:"
        raise StartupError(f"{word} ({error})") from None
    print(render(before, after, lengths, seconds))


def render(before: tuple[Replica, ...], after: tuple[Replica, ...], lengths: dict[str, int], seconds: float) -> str:
    """The table as text."""
    lines = [f"{'REPLICA':<28} {'STAGE':<10} {'HOST':<16} {'PID':>7} {'UP':>8}  LOAD"]
    for replica in sorted(after, key=lambda each: (STAGE_ORDER.index(each.stage) if each.stage in STAGE_ORDER else 9, each.replica_id)):
        load = compute_load(replica.load) if replica.stage == "compute" else " ".join(f"{name} {value:g}" for name, value in sorted(replica.load.items()))
        up = time.time() - replica.started_at
        lines.append(f"{replica.replica_id:<28} {replica.stage:<10} {replica.host[:16]:<16} {replica.pid:>7} {up:>7.0f}s  {load}")
    missing = [stage for stage in PIPELINE if all(replica.stage != stage for replica in after)]
    if missing:
        lines.append(f"no {', no '.join(missing)} is alive")
    lines.append("")
    lines += [f"{'queue ' + key:<40} {length:>7}" for key, length in lengths.items()]
    running = sum(replica.load.get("running", 0) for replica in after if replica.stage == "compute")
    waiting = sum(replica.load.get("waiting", 0) for replica in after if replica.stage == "compute")
    lines.append(f"{'running sequences':<40} {running:>7g}")
    lines.append(f"{'waiting at compute':<40} {waiting:>7g}")
    earlier = {replica.replica_id: replica.load.get("output_tokens", 0) for replica in before}
    tokens = sum(replica.load.get("output_tokens", 0) - earlier.get(replica.replica_id, 0) for replica in after if replica.stage == "compute")
    lines.append(f"{'output tokens/s':<40} {tokens / seconds:>7.1f}")
    return "\n".join(lines)


def compute_load(load: dict[str, float]) -> str:
    """What a person wants to know of the dozens of numbers that /metrics has."""
    return f"running {load.get('running', 0):g} waiting {load.get('waiting', 0):g} kv {load.get('kv_cache_usage', 0):.0%}"
