"""`make verify SUITE=clients`: Penstock through the clients that applications use, each as
docs/start/clients.md or its own documentation has it. A line a client, with its version and how
many calls it made; exit code 1 if one fails or can't be installed.

`python -m tests.clients .venv/bin/python` starts the servers with the interpreter that is given.
--only openai codex: these clients. --upgrade: the
newest releases of those that have a folder of their own. --weekly: those, too, that take gigabytes
or a quarter of an hour. --record: keep the forms of
the requests in tests/clients/recorded.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.clients.install import ROOT, NotInstalledError, Npm, check_node
from tests.clients.recorder import Recorder, recording
from tests.clients.server import NAMED_HOST, free_port, scripted_server, server
from tests.clients.table import CLIENTS, Client
from tests.clients.tasks import AGENTS, SECRET, make_script

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True, slots=True)
class Result:
    client: str
    version: str
    num_calls: int
    outcome: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.client:<16} {self.version:<12} {self.num_calls:>5} calls {self.seconds:>6.0f} s  {self.outcome}"


def check(client: Client, version: str, gateway: str, folder: Path) -> tuple[Result, Recorder]:
    """Run the client's check in a process and a folder of its own, with its time limit; and see
    what the gateway refused.
    """
    began_at = time.monotonic()
    with recording(gateway) as (url, recorder):
        command = [sys.executable, "-m", "tests.clients.table", client.name, url]
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
        )
        try:
            outcome = "passed" if process.wait(client.timeout_s) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            outcome = f"FAILED: not done after {client.timeout_s:g} s"
        finally:
            end_group(process)
    if outcome == "passed" and not recorder.calls:
        outcome = "FAILED: it called nothing"
    if outcome == "passed" and len(recorder.refused) != client.num_refused:
        refused = ", ".join(f"{call.method} {call.path} {call.status}" for call in recorder.refused)
        outcome = f"FAILED: {len(recorder.refused)} calls were refused in place of {client.num_refused}: {refused}"
    return Result(client.name, version, len(recorder.calls), outcome, time.monotonic() - began_at), recorder


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """The check, and whatever it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def install(chosen: list[Client], *, upgrade: bool) -> tuple[dict[str, str], list[Result]]:
    """The versions of those that are there now, by name, and the others as failures."""
    versions: dict[str, str] = {}
    failures: list[Result] = []
    for client in chosen:
        try:
            versions[client.name] = client.package.install(upgrade=upgrade)
        except NotInstalledError as error:
            failures.append(Result(client.name, "-", 0, f"FAILED: not installed: {error}"))
    return versions, failures


def record(client: Client, version: str, recorder: Recorder) -> None:
    """One call a line."""
    RECORDED.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(each, separators=(",", ":")) for each in recorder.forms())
    (RECORDED / f"{client.name}.json").write_text(
        f'{{"client": "{client.package.package}", "version": "{version}", "calls": [\n{lines}\n]}}\n'
    )


def main(options: argparse.Namespace) -> int:
    by_name = {client.name: client for client in CLIENTS}
    if unknown := set(options.only or ()) - set(by_name):
        raise SystemExit(f"there is no client {', '.join(sorted(unknown))}, only {', '.join(by_name)}")
    chosen = (
        [by_name[name] for name in options.only]
        if options.only
        else [each for each in CLIENTS if options.weekly or not each.is_weekly]
    )
    if any(isinstance(client.package, Npm) for client in chosen):
        check_node()
    versions, results = install(chosen, upgrade=options.upgrade)
    for failure in results:
        print(failure, flush=True)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clients-")))
        os.environ["PAGE_PORT"] = str(free_port())
        os.environ[SECRET] = f"word-{secrets.token_hex(4)}"
        folders = {name: work / name for name in versions}
        for folder in folders.values():
            folder.mkdir()
        urls: dict[str, str] = {}
        for model in {by_name[name].model for name in versions}:
            if model == "scripted":
                script = work / "script.json"
                script.write_text(make_script({name: folder for name, folder in folders.items() if name in AGENTS}))
                urls[model] = stack.enter_context(scripted_server(options.python, script))
            else:
                urls[model] = stack.enter_context(
                    server(options.python, f"http://{NAMED_HOST}:{os.environ['PAGE_PORT']}")
                )
        for name, version in versions.items():
            client = by_name[name]
            result, recorder = check(client, version, urls[client.model], folders[name])
            print(result, flush=True)
            results.append(result)
            if options.record and client.is_recorded:
                record(client, version, recorder)
    print("\n" + "\n".join(map(str, results)))
    return 0 if all(result.outcome == "passed" for result in results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make verify SUITE=clients")
    parser.add_argument("python", type=Path, help="the interpreter that has Penstock installed")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these clients")
    parser.add_argument("--upgrade", action="store_true", help="newest releases of what is installed in .clients")
    parser.add_argument("--weekly", action="store_true", help="those, too, that take long to install")
    parser.add_argument("--record", action="store_true", help="keep the requests' forms in tests/clients/recorded")
    os.environ |= {
        "NO_PROXY": "127.0.0.1,localhost",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # the internet is not needed
    sys.exit(main(parser.parse_args()))
