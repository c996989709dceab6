"""The prefix cache's second tier: a file of blocks, whoever writes to it, and whatever becomes of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.compute.cache.block_manager import BlockManager
from services.compute.cache.kv_cache import KVCache
from services.compute.cache.kv_store import ENTRY, PAGE, WAYS, KVStore
from services.compute.cache.kv_tier import READ_AT_ONCE, KVTier
from services.compute.cache.stored_cache import StoredCache
from services.compute.models.architectures import read_config
from shared.model.segments import Layout, Segment
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.examples import examples
from tests.kernels.backends import FLOAT32, native_backend
from tests.kernels.families import CONFIGS
from tests.kernels.store_blocks import BLOCK, SIZE, block_of, name_of, read, write
from tests.unit.sequences import make_sequence
from tests.waiting import wait_until


def test_blocks_are_there_again_in_another_process_and_after_a_restart(tmp_path: Path) -> None:
    store = KVStore(tmp_path / "kv", SIZE, BLOCK)
    assert store.num_blocks == 4 * WAYS and read(store, 1) is None and not store.has(name_of(1))
    assert write(store, 1) and not write(store, 1) and store.has(name_of(1))
    other = KVStore(tmp_path / "kv", SIZE, BLOCK)
    assert read(other, 1) == block_of(1) and write(other, 2) and read(store, 2) == block_of(2)
    store.close()
    assert read(KVStore(tmp_path / "kv", SIZE, BLOCK), 1) == block_of(1)
    assert store.path.stat().st_mode & 0o777 == 0o600 and store.path.parent.stat().st_mode & 0o777 == 0o700
    assert store.path.stat().st_size <= SIZE + PAGE


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = KVStore(tmp_path, PAGE + WAYS * (BLOCK + ENTRY.size), BLOCK)  # one set
    for number in range(WAYS):
        assert write(store, number)
    name, checksum, _ = ENTRY.unpack(os.pread(store._file, ENTRY.size, PAGE))
    store._write_entry(0, name, checksum, 1)  # used long ago
    assert read(store, 0) == block_of(0)  # and now again
    assert write(store, WAYS) and read(store, 1) is None
    assert all(read(store, number) == block_of(number) for number in (0, *range(2, WAYS + 1)))


@examples(60)
@given(data=st.data())
def test_whatever_becomes_of_the_file_a_block_is_right_or_not_there(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    store = KVStore(folder, SIZE, BLOCK)
    written: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        number, what = (
            data.draw(st.integers(0, 99)),
            data.draw(st.sampled_from(["write", "write", "read", "flip", "cut", "open again"])),
        )
        if what == "write":
            write(store, number)
            written.add(number)
        elif what == "flip":
            at = data.draw(st.integers(PAGE, store.path.stat().st_size or PAGE))
            os.pwrite(store._file, bytes([data.draw(st.integers(0, 255))]), at)
        elif what == "cut":
            os.ftruncate(store._file, data.draw(st.integers(PAGE, SIZE)))
        elif what == "open again":
            store.close()
            store = KVStore(folder, SIZE, BLOCK)
        found = read(store, number)
        assert found is None or (number in written and found == block_of(number))
    store.close()


def test_a_file_of_another_size_or_form_is_emptied(tmp_path: Path) -> None:
    store = KVStore(tmp_path, SIZE, BLOCK)
    write(store, 1)
    larger = KVStore(tmp_path, 2 * SIZE, BLOCK)
    assert read(larger, 1) is None and write(larger, 1)
    other = KVStore(tmp_path, SIZE, 2 * BLOCK)  # blocks of another size have a file of their own
    assert other.path != larger.path and read(larger, 1) == block_of(1)
    larger.path.write_bytes(b"something else")
    again = KVStore(tmp_path, 2 * SIZE, BLOCK)
    assert read(again, 1) is None and write(again, 1) and read(again, 1) == block_of(1)


def test_a_place_that_can_t_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="--kv-disk: .*file is not a folder"):
        KVStore(tmp_path / "file", SIZE, BLOCK)
    with pytest.raises(StartupError, match="hold not even one set of 16 blocks"):
        KVStore(tmp_path, PAGE + 5 * BLOCK, BLOCK)
    for value in ("/tmp/kv", "/tmp/kv,", ",4GiB", "/tmp/kv,much", "/tmp/kv,0"):
        with pytest.raises(ValueError, match="it takes FOLDER,SIZE"):
            ComputeSettings(kv_disk=value)


WRITER = """
import sys, random
from pathlib import Path
from tests.kernels.store_blocks import BLOCK, SIZE, KVStore, block_of, read, write
store, rng = KVStore(Path(sys.argv[1]), SIZE, BLOCK), random.Random(int(sys.argv[2]))
found = 0
for _ in range(1200):
    number = rng.randrange(120)
    block = read(store, number)
    assert block in (None, block_of(number)), number
    found += block is not None
    write(store, number)
print(found)
"""


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    found = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0] and min(found) > 40


def make_tier(folder: Path, group: int = 0, *, num_blocks: int = 24) -> KVTier:
    backend, config = (
        native_backend(),
        read_config(CONFIGS["llama-heads"].to_dict() | {"architectures": ["LlamaForCausalLM"]}),
    )
    cache = KVCache(config, backend, num_blocks=num_blocks, block_size=16, group=group)
    return KVTier(
        StoredCache(KVStore(folder, 1 << 24, sum(cache.block_bytes)), cache),
        BlockManager(num_blocks, 16, fingerprint="f"),
    )


def stored(tier: KVTier) -> StoredCache:
    assert isinstance(tier.stored, StoredCache)
    return tier.stored


def fill(tier: KVTier, tokens: list[int], seed: int) -> list[torch.Tensor]:
    """As if a sequence of these tokens had been computed: random keys and values in its whole blocks. Returns these."""
    sequence = make_sequence(0, tokens, 1)
    assert tier.blocks.grow(sequence, len(tokens))
    generator = torch.Generator().manual_seed(seed)
    for layer in stored(tier).kv_cache.layers:
        part = layer[:, sequence.kv.block_table]
        layer[:, sequence.kv.block_table] = torch.randint(
            0, 200, part.view(torch.uint8).shape, generator=generator, dtype=torch.uint8
        ).view(part.dtype)
    sequence.kv.num_computed = len(tokens)
    tier.blocks.commit(sequence)
    tier.save()
    kept = [layer[:, sequence.kv.block_table[: len(tokens) // 16]].clone() for layer in stored(tier).kv_cache.layers]
    tier.blocks.free(sequence)
    return kept


@pytest.mark.parametrize("group", [0, 32])
def test_a_restarted_replica_finds_its_blocks_byte_for_byte(group: int, tmp_path: Path) -> None:
    tokens = list(range(100, 100 + 16 * 11 + 5))
    tier = make_tier(tmp_path, group)
    kept = fill(tier, tokens, seed=1)
    tier.close()
    assert tier.stored.num_written == 11 and not tier.stored.num_dropped
    again = make_tier(tmp_path, group)
    same, other, salted = (
        make_sequence(1, tokens, 1),
        make_sequence(2, [*tokens[:40], *range(30)], 1),
        make_sequence(3, tokens, 1, cache_salt="s"),
    )
    wait_until(lambda: again.restore([same, other, salted], None), description="all is read, in steps of 20 ms")
    assert all(each.kv.is_restored for each in (same, other, salted))
    found = again.blocks.match(same)
    assert len(found) == 11 and len(again.blocks.match(other)) == 2 and again.blocks.match(salted) == []
    for layer, blocks in zip(stored(again).kv_cache.layers, kept, strict=True):
        assert torch.equal(layer[:, found].view(torch.uint8), blocks.view(torch.uint8))
    assert again.num_tokens_read == 11 * 16
    another = BlockManager(24, 16, fingerprint="another model")
    assert not any(
        stored(again).store.has(name) for names in another.missing(make_sequence(4, tokens, 1)) for name in names
    )


def test_a_sequence_never_reads_more_than_there_is_room_for(tmp_path: Path) -> None:
    """Nor does it push out the beginning that it has found."""
    tokens = list(range(16 * 20))
    tier = make_tier(tmp_path)
    fill(tier, tokens, seed=1)
    tier.close()
    small = make_tier(tmp_path, num_blocks=12)
    sequence = make_sequence(1, [*tokens, 7], 1)
    wait_until(lambda: small.restore([sequence], None), description="all is read, in steps of 20 ms")
    assert len(small.blocks.match(sequence)) == 12 and small.blocks.missing(sequence) == []


def test_reading_is_bounded_and_given_up_where_computing_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(16 * 20 + 1))
    tier = make_tier(tmp_path)
    fill(tier, tokens, seed=1)
    tier.close()
    slow = make_tier(tmp_path)
    monkeypatch.setattr("services.compute.cache.kv_tier.READ_BUDGET_S", 0.0)
    sequence = make_sequence(1, tokens, 1)
    assert not slow.restore([sequence], None) and len(slow.blocks.match(sequence)) == READ_AT_ONCE
    assert (
        not slow.restore([sequence], None) and slow.restore([sequence], None) and len(slow.blocks.match(sequence)) == 20
    )
    fast = make_sequence(2, list(range(50, 90)), 1)
    assert slow.restore([fast], 1e-9) and slow._num_passed_over == 1


def test_a_full_disk_ends_the_tier_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.compute.cache.kv_store.os.pwrite", fail)
    fill(tier, list(range(100)), seed=1)
    wait_until(lambda: tier.stored.is_broken, description="the disk is known to be full")
    assert tier.stored.num_written == 0
    sequence = make_sequence(1, list(range(500, 600)), 1)
    assert tier.restore([sequence], None) and sequence.kv.is_restored
    fill(tier, list(range(200, 300)), seed=2)
    tier.close()


def test_blocks_of_any_layout_come_back(tmp_path: Path) -> None:
    config = read_config(CONFIGS["llama-heads"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    for backend in (FLOAT32, native_backend()):
        cache = KVCache(config, backend, num_blocks=6, block_size=16)
        for layer in cache.layers:
            layer.copy_(torch.randn(layer.shape))
        before = [layer.clone() for layer in cache.layers]
        data = cache.read_blocks([4, 1])
        assert data.shape == (2, sum(cache.block_bytes)) and data.dtype == np.uint8
        cache.write_blocks([0, 5], data)
        for layer, old in zip(cache.layers, before, strict=True):
            assert torch.equal(layer[:, [0, 5]], old[:, [4, 1]]) and torch.equal(
                layer[:, [1, 2, 3, 4]], old[:, [1, 2, 3, 4]]
            )


def test_what_the_file_lacks_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many segments a prompt has, and however slow the file is."""
    tier = make_tier(tmp_path, num_blocks=80)
    asked: list[bytes] = []
    monkeypatch.setattr(stored(tier).store, "read", lambda name, _: asked.append(name))
    monkeypatch.setattr("services.compute.cache.kv_tier.READ_BUDGET_S", 0.0)
    layout = Layout(
        (Segment(16, 0), *(Segment(16, 16 * each, (0,)) for each in range(1, 60)), Segment(2, 9000, tuple(range(60)))),
        16,
    )
    slots = layout.pad(list(range(60 * 16 + 2)))
    sequence = make_sequence(1, slots, 1, layout=layout)
    num_calls = 1
    while not tier.restore([sequence], None):
        num_calls += 1
    assert num_calls <= 61 and len(asked) == len(set(asked)) == 60
    tier.close()


def test_blocks_that_are_cached_behind_a_gap_are_not_read_again(tmp_path: Path) -> None:
    """Their names must not stand twice in the cache."""
    tier = make_tier(tmp_path, num_blocks=6)
    tokens = list(range(16 * 4 + 1))
    fill(tier, tokens, seed=1)
    blocks, sequence = tier.blocks, make_sequence(1, tokens, 1)
    for number in (0, 2):
        for _ in range(blocks.num_free_blocks - len(blocks.evictable)):
            blocks._take()
        blocks.evictable.move_to_end(blocks.cached_blocks[blocks._hash(sequence, number)], last=False)
        blocks._release(blocks._take())  # evicted
    [names] = blocks.missing(sequence)
    assert names == [blocks._hash(sequence, number) for number in (0, 2)]
    tier.close()
    again = KVTier(StoredCache(stored(tier).store, stored(tier).kv_cache), blocks)
    wait_until(lambda: again.restore([sequence], None), description="they are read")
    assert len(blocks.match(sequence)) == 4 and len(set(blocks.cached_blocks.values())) == len(blocks.cached_blocks)
    again.close()
