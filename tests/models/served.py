"""A tiny checkpoint behind the real pipeline: two requests at once, their prompts in chunks, and compute killed
in the middle of both answers."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.models.blueprints import Blueprint
from tests.models.compare import PROMPTS, greedy, write_checkpoint

NUM_TOKENS = 40
NUM_BEFORE = 5  # tokens of each answer, before compute is killed


def serve(name: str, blueprint: Blueprint, folder: Path, redis_binary: Path | None = None) -> list[bool]:
    """Whether each answer has the tokens of transformers' `generate`. Raises AssertionError if it does not start."""
    config, checkpoint = blueprint.config(), folder / name
    model_class = blueprint.model_class(config)
    checkpoint.mkdir()
    write_checkpoint(name, model_class, config, checkpoint)
    reference = model_class.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS[1:]]
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_batched_tokens": 24,
        "max_model_len": 256,
        "kv_cache_memory": "24MiB",
    }
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        try:
            deployment.start_all(model=checkpoint, **options)
            [compute] = [each for each in deployment.processes if each.startswith("compute")]
            begun = [threading.Event() for _ in expected]
            with ThreadPoolExecutor() as pool:
                answers = [
                    pool.submit(answer, deployment, name, prompt, event)
                    for prompt, event in zip(PROMPTS[1:], begun, strict=True)
                ]
                assert all(event.wait(120) for event in begun), deployment.logs()
                assert not any(each.done() for each in answers), "killed in the middle"
                deployment.kill(compute)
                deployment.start("compute", "compute-next", model=checkpoint, **options)
                return [each.result() == tokens for each, tokens in zip(answers, expected, strict=True)]
        finally:
            deployment.stop()


def answer(deployment: Deployment, model: str, prompt: list[int], begun: threading.Event) -> list[int]:
    """The tokens of an answer; begun: is set when the first have come."""
    body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    tokens: list[int] = []
    with httpx.stream(
        "POST", deployment.url() + "/v1/completions", json=body, timeout=240, trust_env=False
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    tokens += choice.get("token_ids") or []
            if len(tokens) >= NUM_BEFORE:
                begun.set()
    return tokens
