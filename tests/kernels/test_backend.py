"""The native library's border, contexts and workspaces; and that what a step works in is counted
before the cache takes the rest.
"""

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from services.compute.backends.backend import LargestStep, Workspace, total_bytes
from services.compute.backends.choose import choose_backend
from services.compute.backends.cpu import library as library_module
from services.compute.backends.cpu.backend import CpuBackend
from services.compute.backends.matrix import Dense
from services.compute.backends.torch.backend import TorchBackend
from services.compute.cache import kv_cache
from services.compute.cache.kv_cache import choose_num_blocks
from services.compute.loop.engine import build_engine
from services.compute.models.architectures import read_config
from services.compute.models.decoder import Decoder
from services.compute.weights.loader import load_weights
from services.modeltools.calibration.perplexity import BLOCK_SIZE, whole_windows
from shared.model.files import DEMO_MODEL, open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.kernels.backends import CPU, FLOAT32, native_backend
from tests.kernels.families import Engine

PROMPTS = [[5, 6, 7], list(range(40, 90)), list(range(100, 117))]


def generated(quantization: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers of a model of its own, on a context of its own, to the prompts; and its logits."""
    engine = Engine(DEMO_MODEL, dtype=torch.bfloat16, quantization=quantization)
    outputs = engine.generate(PROMPTS, 16)
    return outputs, [torch.stack(engine.logits[number]) for number in range(len(PROMPTS))]


def test_threads_of_another_level_are_not_counted() -> None:
    """OMP_NUM_THREADS=2,8: two threads a region, and eight in a region within one. The number is
    read when the process begins.
    """
    command = [sys.executable, "-m", "tests.kernels.nested_threads"]
    found = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2,8"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("instruction_set")
def test_two_contexts_in_two_threads_give_the_same_bits() -> None:
    modes = ("none", "w4")
    expected = {mode: generated(mode) for mode in modes}
    found: dict[str, list[tuple[list[list[int]], list[torch.Tensor]]]] = {mode: [] for mode in modes}

    def run(mode: str) -> None:
        for _ in range(3):
            found[mode].append(generated(mode))

    threads = [threading.Thread(target=run, args=(mode,)) for mode in modes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mode, (outputs, logits) in expected.items():
        assert len(found[mode]) == 3
        for each in found[mode]:
            assert each[0] == outputs
            assert all(torch.equal(one, other) for one, other in zip(each[1], logits, strict=True))


@pytest.mark.usefixtures("instruction_set")
def test_a_context_lives_as_long_as_its_layers() -> None:
    layer = native_backend().make_linear(Dense(torch.eye(64).bfloat16()))
    x = torch.arange(128).view(2, 64).bfloat16()
    assert torch.equal(layer(x), x)


class Grown(ctypes.Structure):
    """A structure with a field that the library does not know."""

    _fields_ = [*library_module.Masses._fields_, ("more", ctypes.c_int64)]


@pytest.mark.usefixtures("instruction_set")
def test_a_library_with_other_structures_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(library_module.STRUCTURES, "Masses", Grown)
    assert library_module.open_context() is None
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the native kernels were built from other sources, torch computes instead")


def test_every_structure_is_checked() -> None:
    structures = {
        each for each in vars(library_module).values() if isinstance(each, type) and issubclass(each, ctypes.Structure)
    }
    assert structures == set(library_module.STRUCTURES.values())


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("quantization", ["none", "w8a8", "w4"])
def test_the_largest_step_works_in_what_was_counted(quantization: str) -> None:
    config = read_config(open_model("demo").config)
    backend = native_backend()
    assert backend.context.workspace_bytes() == 0
    model = Decoder(config, load_weights(DEMO_MODEL, config, backend, quantization=quantization), backend)
    counted = total_bytes([model.workspace(512, 64, 512)])
    before = backend.context.workspace_bytes()
    assert 64 * config.vocab_size * 4 < counted - before < 16 << 20  # logits, and attention's buffer
    for length in (512, 128, 1):
        batch = whole_windows(torch.arange(512).view(-1, length) % config.vocab_size)
        kv = [
            backend.make_kv_layer(512, BLOCK_SIZE, config.num_kv_heads, config.head_dim, group=0)
            for _ in range(config.num_layers)
        ]
        hidden = model.forward(batch, model.plan(batch, BLOCK_SIZE), kv)
        backend.row_search.find_largest(model.logits(hidden, batch.logit_rows[:64]), 64)
        assert backend.context.workspace_bytes() == before


def test_models_of_one_backend_work_in_the_same_memory() -> None:
    """Memory that a target and its drafter share counts once; the logits of each are its own."""
    config, backend = read_config(open_model("demo").config), native_backend()
    first, second, other = (
        Decoder(config, load_weights(DEMO_MODEL, config, backend, quantization=each), backend).workspace(512, 64, 512)
        for each in ("none", "none", "w4")
    )
    logits = 64 * config.vocab_size * 4
    assert first.own == second.own == other.own == logits and first.shared == second.shared < other.shared
    assert (
        total_bytes([first, second, other])
        == backend.context.workspace_bytes() + backend.buffers.num_bytes + 3 * logits
    )
    assert total_bytes([]) == 0


def test_the_cache_is_what_remains_beside_a_model_and_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda _: 256 << 20)
    settings = ComputeSettings(speculate="self", kv_cache_share=1.0, num_threads=1, dtype="bfloat16")
    engine = build_engine(settings, open_model("demo"))
    config, backend = read_config(open_model("demo").config), engine.runner.model.backend
    assert isinstance(backend, CpuBackend)
    block_bytes = (
        config.num_layers * settings.block_size * backend.kv_token_bytes(config.num_kv_heads, config.head_dim, group=0)
    )
    taken = (256 << 20) - engine.runner.kv_cache.num_blocks * block_bytes
    held = backend.context.workspace_bytes() + 2 * engine.max_sampled * config.vocab_size * 4
    assert 0 < taken - held < 2 << 20  # the buffers', and less than a block


def test_torch_counts_its_rows() -> None:
    layers = [FLOAT32.make_linear(Dense(torch.zeros(n, 100))) for n in (300, 900)]
    step = LargestStep(layers[:1], [], layers[1], None, None, 64, num_tokens=50, num_logits=10, max_model_len=100)
    assert FLOAT32.workspace(step) == Workspace(50 * 400 * 8, 0)


def test_the_cache_is_what_remains_beside_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(open_model("demo").config)
    block_bytes = config.num_layers * 16 * FLOAT32.kv_token_bytes(config.num_kv_heads, config.head_dim, group=0)
    monkeypatch.setattr(kv_cache, "free_memory", lambda _: 100 * block_bytes)
    settings = ComputeSettings(kv_cache_share=1.0, block_size=16)
    assert choose_num_blocks(settings, [config], FLOAT32, 0) == 100
    assert choose_num_blocks(settings, [config], FLOAT32, 30 * block_bytes) == 70
    with pytest.raises(StartupError, match="one block of it takes"):
        choose_num_blocks(settings, [config], FLOAT32, 200 * block_bytes)
    asked = ComputeSettings(kv_cache_memory=80 * block_bytes, block_size=16)
    assert choose_num_blocks(asked, [config], FLOAT32, 20 * block_bytes) == 80
    for empty in (replace(config, num_layers=0), replace(config, num_kv_heads=0)):  # of ranks that cache nothing
        assert choose_num_blocks(settings, [empty], FLOAT32, 200 * block_bytes) > 1 << 32
    with pytest.raises(StartupError, match="only .*iB are free beside the weights and .*iB to work in"):
        choose_num_blocks(asked, [config], FLOAT32, 21 * block_bytes)


def test_an_engine_counts_its_own_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more tokens in a step there are fewer in the cache."""
    monkeypatch.setattr(kv_cache, "free_memory", lambda _: 256 << 20)
    tokens = {}
    for max_batched_tokens in (256, 8192):
        engine = build_engine(
            ComputeSettings(max_batched_tokens=max_batched_tokens, num_threads=1, dtype="bfloat16"), open_model("demo")
        )
        tokens[max_batched_tokens] = engine.runner.kv_cache.num_blocks
    assert tokens[8192] < tokens[256]


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library_module.VARIABLE, "torch")
    assert isinstance(choose_backend(torch.bfloat16, CPU), TorchBackend)
    monkeypatch.setenv(library_module.VARIABLE, "mmx")
    with pytest.raises(
        StartupError, match="PENSTOCK_KERNELS=mmx: expected one of auto, amx, avx512, avx512vnni, avxvnni, avx2, torch"
    ):
        choose_backend(torch.bfloat16, CPU)


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "source_id", lambda: "0" * 16)
    assert library_module.open_context() is None
