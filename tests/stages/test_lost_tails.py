"""Logs that lose their tails while their requests run, as where a replica of Redis that lagged
takes over: what is lost is computed again, and is the same.
"""

import time

import pytest

from shared.wire.messages import GenerateRequest
from shared.wire.streams import log_key
from tests.stages.line_of_stages import LineOfStages, ask, hurried
from tests.waiting import wait_until

REQUESTS = (
    ask("greedy.0", "The", max_tokens=300, temperature=0.0, ignore_eos=True),
    ask("seeded.0", "Streams", max_tokens=300, temperature=1.0, seed=5, ignore_eos=True, logprobs=2),
    ask("stopped.0", "Redis is", max_tokens=300, temperature=0.9, seed=2, ignore_eos=True, stop=("zqx",)),
)


# ARGV: key, how many entries are left. Returns whether the request has not ended.
CUT = """
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
if #entries == 0 or entries[#entries][2][3] == 'e' then return 0 end
redis.call('DEL', KEYS[1])
for at = 1, math.min(tonumber(ARGV[1]), #entries) do redis.call('XADD', KEYS[1], entries[at][1], unpack(entries[at][2])) end
return 1
"""  # noqa: E501


def cut(line: LineOfStages, request: GenerateRequest, num_left: int) -> bool:
    """Leave so many entries of the log, as if no other had been. False: the request has ended, and it stays whole."""
    return bool(line.client.eval(CUT, 1, log_key(request.request_id), str(num_left)))


@pytest.mark.parametrize("num_left", [0, 20])
def test_what_is_lost_is_computed_again(num_left: int, redis_url: str) -> None:
    with hurried():
        line = LineOfStages(redis_url)
        with line.running():
            expected = line.answer(*REQUESTS)
            for request in REQUESTS:
                line.forget_logs()
                line.submit(request)
                key = log_key(request.request_id)
                wait_until(lambda key=key: line.client.xlen(key) > 25, description="it runs")
                assert cut(line, request, num_left)
                wait_until(
                    lambda request=request: line.has_ended(request.request_id) and line.is_at_rest(),
                    description="it has ended",
                )
                assert line.log(request.request_id) == expected[request.request_id]
            assert line.pending() == 0


def test_a_log_that_is_cut_again_and_again_ends_whole(redis_url: str) -> None:
    with hurried():
        line = LineOfStages(redis_url)
        with line.running():
            expected = line.answer(*REQUESTS)
            line.forget_logs()
            line.submit(*REQUESTS)
            for _ in range(5):
                time.sleep(0.05)
                for request in REQUESTS:
                    cut(line, request, line.client.xlen(log_key(request.request_id)) // 2)
            wait_until(
                lambda: all(line.has_ended(each.request_id) for each in REQUESTS) and line.is_at_rest(),
                description="all have ended",
            )
            assert {each.request_id: line.log(each.request_id) for each in REQUESTS} == expected
