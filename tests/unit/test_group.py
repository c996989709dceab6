"""Commands of a group as bytes, the settings of its ranks, and the cores of each."""

import json
import logging
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.ranks.group.channel import FRAME, LONGEST, Channel
from services.compute.ranks.group.commands import COMMANDS, PROTOCOL, Loaded, RunStep, _layout, decode, encode
from services.compute.ranks.group.cores import divide, divide_cores, parse_numbers
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.vision.images import ImageRun
from shared.process.errors import Invalid, StartupError
from shared.process.group_settings import split_address
from shared.process.settings import ComputeSettings, UpSettings, load_settings
from shared.process.stage_settings import environment_of
from shared.process.telemetry import JsonFormatter, Values

numbers = st.integers(0, 1 << 40)
names = st.integers(-(1 << 62), 1 << 31)  # of tokens: those of images are below 0
spans = st.tuples(st.integers(0, 600), st.integers(0, 600)).map(lambda ends: range(min(ends), max(ends)))
runs = st.builds(ImageRun, numbers, numbers, st.text(max_size=80), numbers)


def tuples(items: st.SearchStrategy[object], most: int = 8) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=most).map(tuple)


rows = st.builds(
    BatchRow,
    numbers,
    tuples(names),
    numbers,
    tuples(numbers, 20),
    spans,
    numbers,
    numbers,
    tuples(names),
    spans,
    st.integers(-1000, 1000),
    tuples(numbers),
    tuples(runs, 3),
    st.booleans(),
    tuples(tuples(numbers), 3),
)
batches = st.builds(ScheduledBatch, tuples(rows, 5), numbers, tuples(st.tuples(numbers, numbers)))


@given(batches)
def test_a_batch_arrives_as_it_was_sent(batch: ScheduledBatch) -> None:
    arrived = decode(encode(RunStep(0, batch)))
    assert arrived == RunStep(0, batch)
    assert hash(arrived) == hash(RunStep(0, batch)), "a list in the place of a tuple"


def test_a_large_batch_arrives_in_pieces() -> None:
    row = BatchRow(1, tuple(range(2000)), 0, tuple(range(10_000)), range(1999, 2000))
    message = RunStep(0, ScheduledBatch((row,) * 64, 0))
    one, other = socket.socketpair()
    with one, other:
        thread = threading.Thread(target=Channel(one).send, args=(message,))
        thread.start()
        assert Channel(other).receive() == message
        thread.join()
        one.sendall(FRAME.pack(5) + b"hello" + FRAME.pack(LONGEST + 1) + FRAME.pack(3))
        one.close()
        for error in (Invalid, Invalid, EOFError):
            with pytest.raises(error):
                Channel(other).receive()


@given(st.binary(max_size=60))
def test_other_bytes_are_no_message(data: bytes) -> None:
    try:
        message = decode(data)
    except Invalid:
        return
    assert type(message) in COMMANDS


def test_only_what_its_type_says_is_sent() -> None:
    with pytest.raises(TypeError):
        encode(Loaded(object(), ""))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not in tuple"):
        encode(ScheduledBatch((), 0))


def test_the_protocol_follows_the_fields_of_all_that_is_sent() -> None:
    assert "rows: <class 'tuple'>[BatchRow(handle: <class 'int'>, " in _layout(RunStep)
    assert "images: <class 'tuple'>[ImageRun(start: <class 'int'>, " in _layout(RunStep)
    assert _layout(Loaded) != _layout(RunStep) and len(PROTOCOL) == 12


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--rank 1",
            "--rank 1 needs --master HOST:PORT, where rank 0 listens; without these three, rank 0 starts the others "
            "on this host",
        ),
        (
            "--world-size 3 --tensor-parallel-size 2",
            "--world-size 3 is not --tensor-parallel-size 2 times --pipeline-parallel-size 1, which is 2",
        ),
        (
            "--tensor-parallel-size 2 --world-size 2",
            "--world-size 2 needs --master HOST:PORT, where rank 0 listens; without",
        ),
        (
            "--master a:1",
            "--master is for groups: --tensor-parallel-size or --pipeline-parallel-size says of how many ranks",
        ),
        ("--master a:1 --pipeline-parallel-size 2", "--master needs --rank: this process's place, from 0 to 1"),
        (
            "--master a:1 --tensor-parallel-size 2 --pipeline-parallel-size 2 --rank 4",
            "--rank 4: the 4 ranks of the group are 0 to 3",
        ),
        ("--master a --tensor-parallel-size 2 --rank 0", "--master takes HOST:PORT, as in 10.0.0.7:29400, not 'a'"),
        (
            "--shard-weights",
            "--shard-weights needs --tensor-parallel-size of 2 or more: the ranks that keep the weights",
        ),
        (
            "--shard-weights --tensor-parallel-size 2 --pipeline-parallel-size 2",
            "--shard-weights: rank 0 computes alone, so there are no",
        ),
        ("--tensor-parallel-size 0", "--tensor-parallel-size: Input should be greater than or equal to 1, got '0'"),
    ],
)
def test_ranks_that_make_no_sense_are_refused_in_one_line(flags: str, line: str) -> None:
    with pytest.raises(StartupError) as error:
        load_settings(ComputeSettings, flags.split())
    assert str(error.value).startswith(line)


def test_addresses() -> None:
    assert split_address("10.0.0.7:29400") == ("10.0.0.7", 29400)
    assert split_address("[::1]:1") == ("::1", 1)
    for text in ("", "a", "a:", ":1", "a:0", "a:65536", "::1:1", "a:1x", "[]:1"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_address(text)


def test_a_rank_reads_the_settings_of_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ComputeSettings(
        model="m",
        tensor_parallel_size=2,
        kv_cache_memory=1 << 30,
        prefix_caching=False,
        kv_disk="/x,1GiB",
        target_itl_ms=2.5,
    )
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings(ComputeSettings, []) == settings
    up = load_settings(UpSettings, ["--tensor-parallel-size", "2", "--group-timeout-s", "3"])
    assert {"PENSTOCK_TENSOR_PARALLEL_SIZE": "2", "PENSTOCK_GROUP_TIMEOUT_S": "3.0"}.items() <= environment_of(
        up
    ).items()


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 8), st.integers(1, 4))
def test_each_rank_has_cores_of_its_own(cores: set[int], num_ranks: int, num_nodes: int) -> None:
    nodes = [list(range(number, 64, num_nodes)) for number in range(num_nodes)]
    siblings = [[core, core + 32] for core in range(32)]
    found = divide(cores, num_ranks, nodes, siblings)
    assert len(found) == num_ranks
    if len(cores) < num_ranks:
        assert not any(found)
    else:
        assert sorted(core for each in found for core in each) == sorted(cores), "each core is one rank's"
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_ranks_keep_to_a_node_and_to_whole_cores() -> None:
    nodes, siblings = [[0, 1, 4, 5], [2, 3, 6, 7]], [[core, core + 4] for core in range(4)]
    assert divide(set(range(8)), 2, nodes, siblings) == [frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})]
    assert divide(set(range(8)), 4, nodes, siblings) == [frozenset({core, core + 4}) for core in range(4)]
    assert parse_numbers("0-2,8,10-11") == [0, 1, 2, 8, 10, 11] and parse_numbers("") == []
    assert len(divide_cores(1)[0]) >= 1


def test_lines_of_other_ranks_name_them() -> None:
    record = logging.LogRecord("penstock.compute", logging.INFO, "", 0, "%s%s", ("ready", Values(n=1)), None)
    assert json.loads(JsonFormatter(3).format(record))["rank"] == 3
    assert "rank" not in json.loads(JsonFormatter().format(record))
