"""The prefix cache's file behind a whole pipeline: it outlives its process, another replica reads
it, and no byte of an answer depends on it.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import Deployment
from tests.waiting import wait_until

TEXT = " ".join(f"word {number % 37} of {number}." for number in range(40))


def ask(deployment: Deployment, question: str, seed: int) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were found."""
    body = {
        "model": "penstock-demo",
        "prompt": f"{TEXT} {question}",
        "max_tokens": 30,
        "seed": seed,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    reply = deployment.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_ready(deployment: Deployment, compute: str) -> None:
    """Until the gateway, too, knows of it."""
    deployment.wait_live(compute)
    wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")


@pytest.mark.more
@pytest.mark.parametrize(
    ("sizes", "num_files"),
    [((1, 1), 1), ((2, 1), 2), ((3, 1), 2), ((1, 2), 2), ((2, 2), 4)],
    ids=lambda each: f"{each[0]} ranks, {each[1]} stages" if isinstance(each, tuple) else "",
)
def test_a_killed_replica_s_prefixes_are_found_again_and_broken_ones_are_computed(
    deployment: Deployment, tmp_path: Path, sizes: tuple[int, int], num_files: int
) -> None:
    """Each rank of a group keeps its part; if one lacks a block, all compute it."""
    place, questions = tmp_path / "kv", [f"Question {number}?" for number in range(4)]
    settings = {"kv_disk": f"{place},64MiB", "tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    deployment.start_all(**settings)
    [first] = [name for name in deployment.processes if name.startswith("compute")]
    expected = [ask(deployment, question, seed)[0] for seed, question in enumerate(questions)]
    num_tokens = ask(deployment, questions[0], 0)[1]
    assert num_tokens > 200
    rng = random.Random(1)
    for turn in range(3):
        deployment.kill(first)
        files = sorted(place.iterdir())
        assert len(files) == num_files
        if turn:
            with files[-1].open("r+b") as opened:
                for _ in range(2000):
                    opened.seek(rng.randrange(os.path.getsize(files[-1])))
                    opened.write(rng.randbytes(1))
        if turn == 2:
            os.truncate(files[0], os.path.getsize(files[0]) // 2)
        first = deployment.start("compute", f"compute-again-{turn}", **settings)
        wait_ready(deployment, first)
        answers = [ask(deployment, question, seed) for seed, question in enumerate(questions)]
        assert [text for text, _ in answers] == expected
        assert turn or answers[0][1] >= num_tokens // 16 * 16  # from the file: whole blocks


def test_a_replica_reads_what_another_wrote(deployment: Deployment, tmp_path: Path) -> None:
    settings = {"kv_disk": f"{tmp_path / 'kv'},64MiB"}
    deployment.start_all(**settings)
    [writer] = [name for name in deployment.processes if name.startswith("compute")]
    text, _ = ask(deployment, "What?", 3)
    reader = deployment.start("compute", "compute-reader", **settings)
    deployment.wait_live(reader)
    deployment.kill(writer)
    wait_ready(deployment, reader)
    again, num_cached = ask(deployment, "What?", 3)
    assert again == text and num_cached > 200

    def num_read() -> float:
        lines = [
            line
            for line in deployment.get("/metrics").text.splitlines()
            if line.startswith("penstock_kv_disk_tokens_total") and "reader" in line
        ]
        return sum(float(line.split()[-1]) for line in lines)

    wait_until(lambda: num_read() > 200, description="the tokens that were read are counted")
