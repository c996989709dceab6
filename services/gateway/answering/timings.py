"""llama.cpp's `timings`: how long prompt and answer took."""

from typing import Any

from services.gateway.telemetry.measured import ResponseMeter
from services.gateway.telemetry.timeline import between
from services.requests.text.answers.choice import Choice


def timings(choice: Choice, measured: ResponseMeter) -> dict[str, Any]:
    """The times of one sequence, as far as it is: ms, and tokens/s. `cache_n` tokens of the prompt were not
    computed."""
    timeline = measured.timelines[choice.index]
    num_prompt = choice.num_prompt_tokens - choice.num_cached_tokens
    decode_s = (
        timeline.decode_s
        if choice.finish_reason is not None
        else between(timeline.first_token_at, measured.clock.wall())
    )
    fields: dict[str, Any] = {"cache_n": choice.num_cached_tokens}
    for name, count, seconds in (
        ("prompt", num_prompt, timeline.prefill_s),
        ("predicted", choice.num_output_tokens, decode_s),
    ):
        elapsed = seconds or 0.0
        fields |= {
            f"{name}_n": count,
            f"{name}_ms": elapsed * 1e3,
            f"{name}_per_token_ms": elapsed * 1e3 / count if count else 0.0,
            f"{name}_per_second": count / elapsed if elapsed else 0.0,
        }
    return fields
