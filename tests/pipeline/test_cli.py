"""The `penstock` command as a user runs it: up, chat, status, Ctrl-C, and what it says when something is wrong."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.model.files import DEMO_MODEL, open_model
from tests.deployment import free_port
from tests.forge import refused
from tests.kernels.families import CONFIGS
from tests.kernels.gguf_files import Kind, Writer
from tests.pipeline.up import COMMAND, Up, run, run_forked
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(tmp_path_factory.mktemp("up"), "--samplers", "2")
    yield started
    started.end()


def test_up_serves_and_status_shows_every_replica(up: Up) -> None:
    assert up.ask() == 200
    stages = ["gateway", "tokenizer", "compute", "sampler", "sampler", "jobs"]

    def whole_status() -> Any:
        """Once everybody is there, the last of them being the worker of batches, and has announced
        what came of the request.
        """
        shown = json.loads(run("status", "--redis-url", f"unix://{up.data_dir}/redis.sock", "--json").stdout)
        replicas = {replica["stage"]: replica for replica in shown["replicas"]}
        if [replica["stage"] for replica in shown["replicas"]] != stages or not replicas["gateway"]["ttft_s"]:
            return None
        is_at_rest = not any(shown["queues"].values()) and replicas["compute"]["running"] == 0
        return (shown, replicas) if is_at_rest and replicas["compute"]["tokens_per_s"] is not None else None

    shown, replicas = wait_until(whole_status, description="a status that shows all of it", timeout_s=120)
    assert (
        shown["missing"] == []
        and shown["dead_letters"] == 0
        and shown["queues"].keys() == {"requests:penstock-demo", "prompts:penstock-demo"}
    )
    assert replicas["compute"]["model"] == "penstock-demo" and replicas["compute"]["waiting"] == 0
    assert 0 <= replicas["compute"]["kv_cache_usage"] <= 1
    status = run("status", "--data-dir", str(up.data_dir))
    assert status.returncode == 0, status.stderr
    lines = status.stdout.splitlines()
    assert lines[0].split() == [
        "STAGE",
        "MODEL",
        "RUNNING",
        "WAITING",
        "TOKENS/S",
        "TTFT",
        "KV",
        "UP",
        "REPLICA",
        "HOST",
        "PID",
    ]
    assert [line.split()[0] for line in lines[1:7]] == stages


def test_a_piped_question_has_the_answer_alone(up: Up) -> None:
    chat = run("chat", "--url", up.url, "--temperature", "0", text="What is\nPenstock?\n")
    assert chat.returncode == 0 and chat.stderr == "", chat.stderr
    assert chat.stdout.startswith("Penstock is a server for large language models.") and chat.stdout.endswith(".\n")


def test_a_chat_goes_on_when_its_gateway_is_killed(up: Up) -> None:
    """All that it printed is what the token log holds: nothing lost, nothing doubled."""
    command = [*COMMAND, "chat", "--url", up.url, "--temperature", "100", "--max-tokens", "120", "--seed", "0", "Go."]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdout is not None and chat.stderr is not None
        printed = chat.stdout.read(40)
        [gateway] = [child for child in up.children() if "services.gateway" in child.cmdline()]
        gateway.kill()
        printed += chat.stdout.read()
        errors = chat.stderr.read()
    assert chat.returncode == 0, errors
    response_id = re.findall(r"response_id=(chatcmpl-\w+)", up.log.read_text())[-1]
    wait_until(
        lambda: up.ask() == 200,
        description="there is a gateway, should the answer have been over before it was killed",
        timeout_s=120,
    )
    whole = httpx.get(f"{up.url}/v1/streams/{response_id}", timeout=60, trust_env=False)
    assert whole.status_code == 200
    data = [line.removeprefix("data: ") for line in whole.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in data for choice in json.loads(chunk)["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert printed.decode().removesuffix("\n") == text.removesuffix("\n") and len(text) > 200


def test_a_second_up_on_the_same_data_is_one_line(up: Up) -> None:
    second = run("up", "--model", "demo", "--port", str(free_port()), "--data-dir", str(up.data_dir))
    assert second.returncode == 2
    assert second.stderr.startswith("penstock: another penstock up uses") and len(second.stderr.splitlines()) == 1


def test_any_process_that_dies_is_replaced(up: Up) -> None:
    before = up.children()
    for child in before:
        with contextlib.suppress(psutil.NoSuchProcess):  # some end with their parent
            child.kill()
    wait_until(lambda: up.ask() == 200, description="it answers again", timeout_s=120)
    old = {child.pid for child in before}
    wait_until(
        lambda: len({child.pid for child in up.children()} - old) == len(old), description="each has a successor"
    )


def test_ctrl_c_stops_everything_cleanly(up: Up) -> None:
    children = up.children()
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.process.wait(120) == 0
    wait_until(lambda: not any(child.is_running() for child in children), description="no process is left")
    assert "Traceback" not in up.log.read_text().split("stopping")[-1]


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 64)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "several").mkdir()
    for name in ("a", "b"):
        (tmp_path / "several" / f"{name}.gguf").write_bytes(b"GGUF")
    cases = [
        (["up", "--model", str(tmp_path / "broken.gguf")], "more than it has room for"),
        (["up", "--model", str(tmp_path / "empty.gguf")], "empty.gguf: the file is empty"),
        (["up", "--model", __file__], "is not a GGUF file"),
        (["up", "--model", str(tmp_path / "several")], "holds 2 GGUF models: name one of them"),
        (["pull", "nope"], "no model 'nope'"),
        (["up", "--model", "./nope"], "no folder './nope'"),
        (["up", "--port", "99999"], "--port"),
        (["up", "--max-num-seqs", "many"], "--max-num-seqs"),
        (["chat", "--url", "http://127.0.0.1:1", "Hi"], "no server at"),
        (["status", "--redis-url", f"unix://{tmp_path}/none.sock"], "Redis does not answer"),
        (["chat"], "there is no question"),
    ]
    for number, (arguments, message) in enumerate(cases):
        code, said = run_forked(tmp_path / f"{number}.log", *arguments)
        assert code == 2, (arguments, said)
        assert message in said and "Traceback" not in said and len(said.strip().splitlines()) == 1, said
    said = refused("services.compute", tmp_path, model=str(tmp_path / "broken.gguf"))
    assert "more than it has room for" in said and len(said.strip().splitlines()) == 1, said
    result = run("serve", "compute", "--dtype", "float8")
    assert result.returncode == 2 and "--dtype" in result.stderr and len(result.stderr.strip().splitlines()) == 1, (
        result.stderr
    )


@pytest.mark.more  # unit/test_start.py is not
def test_a_stage_that_can_not_run_ends_the_launcher_and_its_line_is_the_only_one(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "own")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | own))
    result = run(
        "up",
        "--model",
        str(folder),
        "--port",
        str(free_port()),
        "--data-dir",
        str(tmp_path / "data"),
        "--log-level",
        "error",
    )
    assert result.returncode == 2
    message = f"penstock: {folder}/tokenizer_config.json: auto_map names code in the checkpoint, and that is never run"
    assert [line for line in result.stderr.splitlines() if "loading weights" not in line] == [message], result.stderr


def test_what_is_wrong_with_a_gguf_file_is_said_of_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    path = Writer(AutoModelForCausalLM.from_config(CONFIGS["llama3"]), tmp_path / "small.gguf").write(Kind.F16)
    (open_model(str(path)).folder / "tokenizer.json").write_text("{}")
    for stage in ("tokenizer", "sampler"):
        (folder := tmp_path / stage).mkdir()
        said = refused(f"services.{stage}", folder, model=str(path))
        assert said.startswith(f"penstock: {path}: the tokenizer can't be loaded: ")
        assert str(tmp_path / "cache") not in said and len(said.splitlines()) == 1, said


def test_a_log_file_has_lines_and_no_bars(up: Up) -> None:
    logged = up.log.read_bytes()
    assert b"\r" not in logged and logged.index(b"loading the model") < logged.index(b"model loaded")


def test_pulling_from_a_hub_that_can_not_be_reached_is_one_line_and_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run("pull", "owner/name", HF_ENDPOINT="http://127.0.0.1:9", HOME=str(tmp_path))
    assert (
        result.returncode == 2 and time.monotonic() - began < 20
    )  # with its pauses between tries, the hub's client would take longer still
    assert (
        result.stderr.startswith("penstock: owner/name can't be fetched from the hub: ")
        and len(result.stderr.splitlines()) == 1
    ), result.stderr


def test_help_teaches(tmp_path: Path) -> None:
    assert "penstock up --model" in run("--help").stdout
    _, up_help = run_forked(tmp_path / "help", "up", "--help")
    assert "--max-num-seqs" in up_help and "tokens in one step" in up_help


def test_make_model_writes_a_checkpoint_with_a_text_for_every_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    made = run("make-model", str(tmp_path), "--shape", "tiny")
    assert made.returncode == 0 and "\r" not in made.stderr, made.stderr
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 2048
