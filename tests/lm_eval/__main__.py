"""Do lm-eval's `local-completions`, asking a pipeline of ours, and its own `hf` model find the same
loglikelihoods on the same weights?

    python -m tests.lm_eval [--model FOLDER] [--tolerance 0.0001]

Needs `pip install -e '.[dev,lm-eval]'`. The tasks are beside this file: choices, each scored as a
continuation, and texts scored whole, some of them longer than one window. Both sides compute in
float32. Prints a line a task; the last line is JSON. Exit code 1 if any loglikelihood differs by
more than the tolerance, or one side takes another continuation for the greedy one.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared.model.files import DEMO_MODEL
from tests.conftest import running_redis
from tests.deployment import Deployment

TASKS = ("penstock_choice", "penstock_text")
FOLDER = Path(__file__).parent / "tasks"
MAX_LENGTH = 512  # of a window; of the API client's own, lm-eval keeps two tokens free


def evaluate(model: str, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """Each task's answers to all of its requests, in order: (loglikelihood, whether it is greedy),
    or of a whole text the former.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.chdir(FOLDER)  # where the tasks look for their data
    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )
    return {task: [response for sample in found["samples"][task] for response in sample["resps"]] for task in TASKS}


def numbers(responses: list[Any]) -> list[tuple[float, str]]:
    """Each response's loglikelihood, and what else it says."""
    flat = [each[0] if isinstance(each, list) else each for each in responses]
    return [(float(each[0]), str(each[1])) if isinstance(each, tuple | list) else (float(each), "") for each in flat]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a checkpoint folder")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="of a loglikelihood, relative to it, or absolute where it is below 1",
    )
    options = parser.parse_args()
    model = str(Path(options.model).resolve())
    expected = evaluate("hf", {"pretrained": model, "dtype": "float32", "device": "cpu", "max_length": MAX_LENGTH})
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder) / "redis", None) as url:
        deployment = Deployment(url, Path(folder), programs={})
        try:
            os.chdir(Path(__file__).parents[2])
            deployment.start_all(dtype="float32", num_threads=0, model=model, served_model_name="evaluated")
            found = evaluate(
                "local-completions",
                {
                    "model": "evaluated",
                    "base_url": deployment.url() + "/v1/completions",
                    "tokenizer": model,
                    "tokenizer_backend": "huggingface",
                    "max_length": MAX_LENGTH + 2,
                    "num_concurrent": 2,
                    "max_retries": 3,
                },
            )
        finally:
            deployment.stop()
    report: dict[str, Any] = {"model": options.model}
    for task in TASKS:
        pairs = list(zip(numbers(found[task]), numbers(expected[task]), strict=True))
        largest = max(abs(ours[0] - theirs[0]) / max(1.0, abs(theirs[0])) for ours, theirs in pairs)
        report[task] = {
            "num_requests": len(pairs),
            "largest_difference": largest,
            "same_greedy": all(ours[1] == theirs[1] for ours, theirs in pairs),
        }
        print(f"{task}: {report[task]}")
    is_same = all(
        report[task]["largest_difference"] <= options.tolerance and report[task]["same_greedy"] for task in TASKS
    )
    print(json.dumps(report | {"is_same": is_same}))
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
