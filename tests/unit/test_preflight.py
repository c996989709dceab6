"""Checks of penstock up before it starts anything."""

import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.operator import preflight
from services.operator.preflight import check_device, check_keys, check_memory, check_ports, weights_bytes
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.host_memory import GIB, size_text
from shared.process.settings import UpSettings
from tests.deployment import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on; beside the one below it one can listen, and nobody else does meanwhile."""
    while True:
        below = free_port()
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", below + 1))
            except OSError:
                continue
            listener.listen()
            yield below + 1
            return


def test_a_port_that_is_taken_is_named(taken: int) -> None:
    for settings, message in (
        (UpSettings(port=taken), f"can't listen on 127.0.0.1:{taken}: Address already in use. Another one with --port"),
        (UpSettings(port=taken - 1, gateways=2), f"can't listen on 127.0.0.1:{taken}"),
        (UpSettings(port=0), "--port 0: penstock up has to know"),
        (UpSettings(port=65_535, gateways=2), "--port 65535: there is no room for 2 gateways"),
        (UpSettings(port=9000, gateways=2, redis_port=9001), "--redis-port 9001 is a gateway's, too"),
        (UpSettings(host="nowhere.invalid", port=9000), "can't listen on nowhere.invalid:9000"),
    ):
        with pytest.raises(StartupError, match=re.escape(message)):
            check_ports(settings)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", list)
    check_device(UpSettings())
    with pytest.raises(StartupError, match="there is no CUDA device here"):
        check_device(UpSettings(device="cuda"))
    with pytest.raises(StartupError, match="--quantization fp8 runs on a GPU only"):
        check_device(UpSettings(quantization="fp8"))
    with pytest.raises(StartupError, match="--tensor-parallel-size 2: not with --dtype float32 on a CPU"):
        check_device(UpSettings(dtype="float32", tensor_parallel_size=2))
    monkeypatch.setattr(preflight, "gpu_memory", lambda: [80 << 30])
    check_device(UpSettings(quantization="fp8"))


def test_weights_are_counted_as_they_will_be_held(tmp_path: Path) -> None:
    demo = open_model("demo")
    stored = (DEMO_MODEL / "model.safetensors").stat().st_size
    assert weights_bytes(demo, UpSettings()) == pytest.approx(stored, rel=0.01)  # bfloat16, as the file has them
    assert weights_bytes(demo, UpSettings(dtype="float32")) == 2 * weights_bytes(demo, UpSettings())
    assert weights_bytes(demo, UpSettings(quantization="w4")) == weights_bytes(demo, UpSettings()) // 4
    broken = shutil.copytree(DEMO_MODEL, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    assert weights_bytes(open_model(str(broken)), UpSettings()) == 0, "compute says what is wrong with it"


def test_what_can_not_fit_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_memory", list)
    monkeypatch.setattr(preflight, "free_host_memory", lambda: GIB)
    demo = open_model("demo")
    check_memory(UpSettings(kv_cache_memory="900MiB"), [demo])
    with pytest.raises(
        StartupError,
        match=(
            r"penstock-demo: at least 7 MiB for the weights and 2 GiB for the KV cache .*, and 1 GiB are free on "
            r"this machine"
        ),
    ):
        check_memory(UpSettings(kv_cache_memory="2GiB"), [demo])
    monkeypatch.setattr(preflight, "free_host_memory", lambda: 1 << 20)
    with pytest.raises(StartupError, match="--quantization w8a8 or w4, or a smaller model"):
        check_memory(UpSettings(), [demo])
    monkeypatch.setattr(preflight, "gpu_memory", lambda: [80 * GIB])
    check_memory(UpSettings(), [demo])


def test_sizes_are_written_in_units_that_suit_them() -> None:
    sizes = (0, 10, 1023, 1024, 32 << 10, 7_300_000, 3 << 29, GIB << 10)
    assert [size_text(size) for size in sizes] == [
        "0 bytes",
        "10 bytes",
        "1023 bytes",
        "1 KiB",
        "32 KiB",
        "6.96 MiB",
        "1.5 GiB",
        "1024 GiB",
    ]


def test_a_broken_file_of_keys_is_told_before_anything_starts(tmp_path: Path) -> None:
    settings = UpSettings(keys_file=tmp_path / "keys.json")
    check_keys(settings)
    settings.keys_file.write_text("{")
    with pytest.raises(StartupError, match="keys.json is no file of keys"):
        check_keys(settings)
    check_keys(UpSettings(keys_file=settings.keys_file, auth=False))


def test_an_address_that_is_not_here_is_no_matter_of_ports() -> None:
    with pytest.raises(StartupError, match=r"can't listen on 192\.0\.2\.1:\d+: .*\. Another one with --host"):
        check_ports(UpSettings(host="192.0.2.1"))
