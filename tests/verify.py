"""`make verify SUITE=NAME ARGS="..."`: the programs beside pytest, each with what it proves, how
long it takes and what it needs.

Without a name, it lists them. What a suite needs of Python is installed before it runs, into .venv
or, where it needs other versions than ours, into an environment of its own. This file needs nothing
but Python, so that `make help` can list the suites before anything is installed.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = ".venv"


@dataclass(frozen=True)
class Suite:
    """One program: a module, in the environment `place`, into which pip first installs `packages`."""

    module: str
    proves: str
    takes: str
    needs: str = ""
    packages: tuple[str, ...] = ()
    place: str = OURS
    arguments: tuple[str, ...] = ()


SUITES = {
    "arm": Suite(
        "tests.kernels.arm",
        "the kernels for Arm, over SIMDe and bit by bit in QEMU",
        "8 minutes",
        "QEMU and a cross compiler; it says which",
    ),
    "audit": Suite(
        "tests.audit",
        "licences of installed packages, and no known hole in them",
        "a minute",
        "asks PyPI",
        ("--group", "audit"),
        ".venv-audit",
    ),
    "bad-lines": Suite(
        "tests.chaos.bad_lines", "a batch with 100,000 bad lines costs other clients neither time nor memory", "minutes"
    ),
    "batch-chaos": Suite(
        "tests.chaos.batches", "each line of a batch is answered once while workers and stages are killed", "minutes"
    ),
    "browser": Suite(
        "tests.browser",
        "the playground, in Chromium",
        "minutes",
        "apt install chromium chromium-driver",
        ("--group", "browser"),
    ),
    "chaos": Suite(
        "tests.chaos",
        "each request ends once, with its own text, while everything is killed, stopped and cut off",
        "a minute, or --minutes",
    ),
    "clients": Suite(
        "tests.clients",
        "clients work as docs/start/clients.md says",
        "half an hour",
        "npm and 5 GB; --weekly 15",
        ("--group", "clients"),
        ".venv-clients",
        (f"{OURS}/bin/python",),
    ),
    "compose": Suite(
        "tests.compose.run", "docker-compose.yml, from build to teardown", "a quarter of an hour", "a Docker engine"
    ),
    "cuda-kernels": Suite(
        "tests.kernels.cuda",
        "each kernel of the GPU backend in Triton's interpreter, and compiled for three GPUs",
        "minutes",
        "no GPU",
    ),
    "explore": Suite("tests.explore", "each property test, with new examples", "10 minutes, or --minutes"),
    "fairness": Suite(
        "tests.chaos.fairness", "small requests are at most twice as slow while another tenant floods", "minutes"
    ),
    "failover": Suite(
        "tests.failover",
        "answers stay the same while Redis' primary dies again and again, and a replica that lags takes over",
        "minutes",
    ),
    "grammars": Suite(
        "tests.grammars",
        "answers keep to their JSON schemas and patterns, thousands of them",
        "minutes",
        packages=("--group", "grammars"),
    ),
    "hostile": Suite(
        "tests.hostile",
        "each of 12,000 malformed, hostile and deep requests gets a clear answer, and no process ends",
        "minutes",
    ),
    "kubernetes": Suite(
        "tests.kubernetes",
        "the manifests and the chart are sound and say the same; updates and scaling by their numbers lose nothing",
        "6 minutes",
        "root, helm, kubectl",
        ("--group", "kubernetes"),
    ),
    "lm-eval": Suite(
        "tests.lm_eval",
        "lm-eval finds transformers' loglikelihoods",
        "minutes",
        "",
        ("--no-compile", "--editable", ".[lm-eval]"),
    ),
    "models": Suite(
        "tests.models",
        "each of 143 architectures runs as its case says, with transformers' tokens, or is refused",
        "10 minutes",
    ),
    "more": Suite(
        "pytest",
        "the cases that `make test` leaves out of tests with many, and long tests",
        "half an hour",
        arguments=("-m", "more"),
    ),
    "proxies": Suite(
        "tests.proxies",
        "gateways behind nginx and Caddy, by the files of deploy/proxy",
        "4 minutes",
        "apt install nginx caddy",
    ),
    "redis": Suite(
        "tests.secure_redis",
        "a Redis with TLS only and a user for each stage",
        "a minute",
        "redis-server 7 with TLS, openssl",
    ),
    "speculation": Suite(
        "tests.chaos.speculation",
        "1,000 requests have the same answers with drafts and two kills of compute as without either",
        "minutes",
    ),
    "telemetry": Suite(
        "tests.telemetry", "metrics, traces and alerts tell what happened", "4 minutes", "apt install prometheus"
    ),
    "upgrade": Suite(
        "tests.chaos",
        "no answer is lost or changed while an older version's processes are replaced one by one; --from COMMIT",
        "minutes",
        "the repository's history",
        arguments=("--from", "144cc386"),  # whose messages are the last that differ from today's
    ),
    "wheel": Suite(
        "tests.wheel",
        "pip wheel makes a wheel that answers where there is no compiler",
        "2 minutes",
        "g++",
        ("--group", "wheel"),
    ),
}


def main(name: str, arguments: str) -> int:
    if name not in SUITES:
        print(f"{f'No suite {name!r}. ' if name else ''}make verify SUITE=NAME ARGS='...'\n{listing()}")
        return 2 if name else 0
    suite = SUITES[name]
    python = f"{suite.place}/bin/python"
    if not (ROOT / python).exists():
        run(sys.executable, "-m", "venv", suite.place)
    if suite.packages:
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "pip>=25.1")  # which knows of groups
        run(*pip, *suite.packages)
    return run(python, "-m", suite.module, *suite.arguments, *shlex.split(arguments), check=False)


def run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, cwd=ROOT, check=check).returncode


def listing() -> str:
    """A line for each suite: its name, what it proves, how long it takes, and what it needs installed."""
    return "\n".join(
        f"  {name:12} {each.proves} ({'; '.join(filter(None, (each.takes, each.needs)))})"
        for name, each in SUITES.items()
    )


if __name__ == "__main__":
    sys.exit(main(*(*sys.argv[1:], "", "")[:2]))
