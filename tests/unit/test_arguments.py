"""The command line answers a slip with one line, and what was probably meant; and every --help has an example."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.operator.cli import main
from services.simulator.__main__ import simulate


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("statsu", "no command 'statsu': did you mean status?"),
        (
            "launch",
            "no command 'launch': it is one of up, serve, status, chat, batch, pull, models, keys, simulate, "
            "quantize, train-heads, build-kernels, make-model",
        ),
        ("", "COMMAND is missing; penstock --help shows how it is used"),
        ("--verson", "no flag '--verson': did you mean --version?; penstock --help lists them"),
        ("keys add team --rpm -1", "--rpm: '-1' is not a whole number above 0"),
        (
            "keys add team --models ,",
            "--models names no model, so the key would be good for nothing; without it, all are meant",
        ),
        ("serve", "STAGE is missing; penstock serve --help shows how it is used"),
        ("serve samplr", "no stage 'samplr': did you mean sampler?"),
        ("up --prot 9000", "no flag '--prot': did you mean --port?; penstock up --help lists them"),
        ("up --max-num-seq=3", "no flag '--max-num-seq': did you mean --max-num-seqs?; penstock up --help lists them"),
        ("up now", "'now' is one argument too many; penstock up --help shows how it is used"),
        ("chat --temprature 0", "no flag '--temprature': did you mean --temperature?; penstock chat --help lists them"),
        ("chat --zzz", "no flag '--zzz'; penstock chat --help lists them"),
        ("make-model out --shape qwen2.5-0.5", "--shape 'qwen2.5-0.5': did you mean qwen2.5-0.5b?"),
        ("make-model out --seed -1", "--seed: '-1' is not a whole number from 0 to 2^63 - 1"),
        ("quantize demo", "OUT is missing; penstock quantize --help shows how it is used"),
        ("status --watch soon", "--watch: 'soon' is not a number of seconds, 0.1 or more"),
        ("status --data-dir a --redis-url b", "--redis-url: not allowed with argument --data-dir"),
        ("status --data-dir /nowhere", "nothing runs with its data in /nowhere: penstock up starts it"),
    ],
)
def test_a_slip_is_one_line(command: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(command.split())
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    assert code == 2
    assert capsys.readouterr().err == f"penstock: {line}\n"


@pytest.mark.parametrize(
    "command", ["", "up", "serve", "status", "chat", "pull", "models", "quantize", "build-kernels", "make-model"]
)
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"\n  penstock {command}" in shown.partition("\nexample")[2] or "&& penstock build-kernels" in shown
    assert "list[str]" not in shown and ",null}" not in shown, "types in the words of a command line"


def test_simulate_is_as_brief(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate(["--modle", "x"])
    assert (
        capsys.readouterr().err
        == "penstock: no flag '--modle': did you mean --model?; penstock simulate --help lists them\n"
    )


def test_simulate_says_what_a_file_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"fixed_s": 1, "per_token_s": 1}')
    assert main(["simulate", "--hardware", str(tmp_path / "mine.json")]) == 2
    assert capsys.readouterr().err.endswith("(it has no 'per_context_token_s')\n")
    assert main(["simulate", "--model", str(tmp_path)]) == 2
    assert "no checkpoint folder (No such file or directory), and not one of" in capsys.readouterr().err


def test_help_behind_a_stage_is_the_stage_s() -> None:
    command = [sys.executable, "-m", "services.operator.cli", "serve", "sampler", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and ended.stdout.startswith("usage: penstock serve sampler ")
