"""Replicas of several cards in the simulator: parts add up, no rank works more than one card would,
and links, launches and waiting cost what they must.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.compute.models.config import ModelConfig
from services.compute.ranks.parallel.share import Share
from services.compute.ranks.parallel.stage import PipelineStage
from services.compute.ranks.place import Placement
from services.operator.cli import main
from services.simulator.hardware import HARDWARE, LINKS, PRECISIONS, Link, Precision
from services.simulator.models import MODELS, DecoderShape, Part, part_of
from services.simulator.replica import ReplicaLimits
from services.simulator.roofline import CardGroup, Roofline, Work, kv_bytes_per_token, kv_tokens, longest, weight_bytes
from services.simulator.table import PUBLISHED, Case, simulate_line, simulate_published
from services.simulator.trace import load_trace
from shared.process.errors import StartupError

ROOT = Path(__file__).parents[2]
FREE = Link(1e30, 0.0, 0.0)
A100 = HARDWARE["a100-80g"]
FAST_HOST = replace(A100, launch_s=0.0)
CONFIGURED = (
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)  # what both shapes have
precisions = st.sampled_from(list(PRECISIONS.values()))


def shape(
    kv_heads: int, queries: int, experts: int, active: int, sizes: tuple[int, int, int, int], is_tied: bool
) -> DecoderShape:
    layers, hidden, intermediate, vocab = sizes
    return DecoderShape(
        layers, hidden, intermediate, kv_heads * queries, kv_heads, 64, vocab, is_tied, experts, min(active, experts)
    )


shapes = st.builds(
    shape,
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from([1, 1, 4, 8]),
    st.integers(1, 3),
    st.tuples(
        st.integers(1, 40),
        st.sampled_from([32, 576, 4096]),
        st.sampled_from([48, 1536, 14_336]),
        st.sampled_from([100, 49_152]),
    ),
    st.booleans(),
)
models = shapes | st.sampled_from(list(MODELS.values()))
links = st.builds(Link, st.floats(1e8, 1e12), st.floats(0, 1e-3), st.floats(0, 1e-3))
sizes = st.integers(1, 9)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Sequences that decode, and some tokens of prompts."""
    rows, context, chunk = draw(st.integers(1, 300)), draw(st.integers(1, 8192)), draw(st.integers(0, 2048))
    pairs = rows * context + chunk * (chunk + 1) // 2
    return Work(rows + chunk, rows * context + chunk, pairs, rows + (chunk > 0))


def parts(model: DecoderShape, group: CardGroup) -> list[Part]:
    return [
        part_of(model, Share(rank, group.tensor), Share(stage, group.pipeline))
        for stage in range(group.pipeline)
        for rank in range(group.tensor)
    ]


@given(models, sizes, sizes)
def test_parts_add_up_to_the_model(model: DecoderShape, tensor: int, pipeline: int) -> None:
    assume(pipeline <= model.num_layers)
    found = parts(model, CardGroup(tensor, pipeline))
    twice = (
        sum(each.num_layers * each.num_kv_heads for each in found) - model.num_layers * model.num_kv_heads
    )  # on more than one rank
    assert twice >= 0
    assert sum(each.num_layers * each.num_heads for each in found) == model.num_layers * model.num_heads
    assert sum(each.head_weights for each in found) == model.head_weights
    assert sum(each.num_layers * (each.attention_weights + each.mlp_weights) for each in found) + found[
        0
    ].head_weights + found[0].embedding_weights == (
        model.num_layers * (model.attention_weights + model.num_experts * model.expert_weights)
        + twice * 2 * model.head_dim * model.hidden_size
        + model.head_weights
        + (0 if model.is_tied else found[0].head_weights)
    )
    assert not any(each.embedding_weights for each in found[1:])


@given(models, precisions, sizes, sizes)
def test_memory_adds_up(model: DecoderShape, precision: Precision, tensor: int, pipeline: int) -> None:
    """On each card weights and KV fit; and with one token more, not on all."""
    group = CardGroup(tensor, pipeline)
    try:
        tokens = kv_tokens(model, A100, precision, group)
    except StartupError:
        assume(False)
    used = [(weight_bytes(each, precision), kv_bytes_per_token(model, each, precision)) for each in parts(model, group)]
    room = A100.memory * 0.94 - 2e9
    assert all(weights + tokens * per_token <= room * (1 + 1e-9) for weights, per_token in used)
    assert any(weights + (tokens + 1) * per_token > room * (1 - 1e-9) for weights, per_token in used)
    copies = sum(each.num_layers * each.num_kv_heads for each in parts(model, group)) / (
        model.num_layers * model.num_kv_heads
    )
    assert sum(per_token for _, per_token in used) == pytest.approx(model.kv_values * precision.kv_bytes * copies)


@given(models, precisions, sizes, works())
def test_no_rank_works_more_than_one_card_would(
    model: DecoderShape, precision: Precision, tensor: int, work: Work
) -> None:
    """With links and launches that cost nothing, a rank more never makes a step longer."""
    longer = Roofline(model, FAST_HOST, precision, CardGroup(tensor, 1, FREE)).seconds(work)
    shorter = Roofline(model, FAST_HOST, precision, CardGroup(tensor + 1, 1, FREE)).seconds(work)
    assert shorter <= longer * (1 + 1e-9) <= Roofline(model, FAST_HOST, precision).seconds(work) * (1 + 2e-9)


@given(models, sizes, sizes, links, works(), st.floats(1, 10))
def test_a_slower_link_never_makes_a_step_shorter(
    model: DecoderShape, tensor: int, pipeline: int, link: Link, work: Work, factor: float
) -> None:
    group = CardGroup(tensor, pipeline, link, link)
    seconds = Roofline(model, A100, group=group).seconds(work)
    for slower in (
        replace(link, base_s=link.base_s * factor + 1e-6),
        replace(link, hop_s=link.hop_s * factor),
        replace(link, bandwidth=link.bandwidth / factor),
    ):
        assert Roofline(model, A100, group=replace(group, link=slower)).seconds(work) >= seconds * (1 - 1e-9)
        assert Roofline(model, A100, group=replace(group, stage_link=slower)).seconds(work) >= seconds * (1 - 1e-9)
    if tensor * pipeline == 1:
        assert seconds == Roofline(model, A100).seconds(work)


@given(models, sizes, sizes, links, works())
def test_with_enough_sequences_the_busiest_stage_never_waits(
    model: DecoderShape, tensor: int, pipeline: int, link: Link, work: Work
) -> None:
    """Then only the way of hidden states may be added. One sequence goes through one stage after the other."""
    cost = Roofline(model, A100, group=CardGroup(tensor, pipeline, link, FREE))
    enough, alone = replace(work, num_sequences=max(work.num_sequences, pipeline)), replace(work, num_sequences=1)
    busiest = pipeline * max(longest(ranks, enough.divided(pipeline)) for ranks in cost.stages)
    assert cost.seconds(enough) == pytest.approx(busiest)
    assert cost.seconds(alone) == pytest.approx(sum(longest(ranks, alone) for ranks in cost.stages))
    slow = Roofline(model, A100, group=CardGroup(tensor, pipeline, link, Link(1e9, 1e-4, 1e-4)))
    assert (
        busiest * (1 - 1e-9)
        <= slow.seconds(enough)
        <= busiest * (1 + 1e-9) + slow.passing_seconds(enough.divided(pipeline))
    )


@given(models, st.integers(2, 9))
def test_stages_are_cut_as_the_engine_cuts_them(model: DecoderShape, pipeline: int) -> None:
    """A mixture's experts are counted by those that one token goes through."""
    assume(pipeline <= model.num_layers)
    mixture = (
        None
        if model.num_experts == 1
        else SimpleNamespace(
            intermediate_size=model.intermediate_size, router=SimpleNamespace(num_active=model.num_active)
        )
    )
    config = SimpleNamespace(**{name: getattr(model, name) for name in CONFIGURED}, moe=mixture)
    for number in range(pipeline):
        stage = Placement(stage=PipelineStage(number, pipeline, None)).stage_of(cast(ModelConfig, config))
        assert stage is not None
        assert len(stage.layers[number]) == part_of(model, Share(), Share(number, pipeline)).num_layers >= 1


def test_the_first_stage_has_fewer_layers() -> None:
    """SmolLM2's head is worth 8 of its 30 layers, so the second stage has 19."""
    assert [part_of(MODELS["smollm2-135m"], Share(), Share(number, 2)).num_layers for number in range(2)] == [11, 19]
    with pytest.raises(StartupError, match="--pipeline-parallel-size 31: the model has 30 layers"):
        kv_tokens(MODELS["smollm2-135m"], A100, group=CardGroup(1, 31))


def test_a_step_that_is_not_recorded_waits_for_its_launches() -> None:
    """Two cards with free links: their 32 layers have 9 launches each, and 4 gathers of 7."""
    model, work = MODELS["llama-3-8b"], Work(1, 100, 100, 1)
    launches_s = (32 * 9 + (32 * 4 + 2) * 7) * A100.launch_s
    assert Roofline(model, A100, group=CardGroup(2, 1, FREE)).seconds(work) == pytest.approx(A100.host_s + launches_s)
    alone, chunk = Roofline(model, replace(A100, launch_s=1e-3)), Work(2, 100, 100, 1)
    assert alone.seconds(work) == Roofline(model, FAST_HOST).seconds(work)
    assert alone.seconds(chunk) == pytest.approx(A100.host_s + 32 * 9 * 1e-3)


def test_a_group_by_hand() -> None:
    """SmolLM2's nine query heads over two ranks: the first has five of them, and both have the
    second of its three KV heads.
    """
    model, link = MODELS["smollm2-135m"], LINKS["nvlink3"]
    first, last = parts(model, CardGroup(2))
    assert (first.num_heads, first.num_kv_heads, last.num_heads, last.num_kv_heads) == (5, 2, 4, 2)
    alone, both = (
        Roofline(model, FAST_HOST, group=CardGroup(2, 1, FREE)),
        Roofline(model, FAST_HOST, group=CardGroup(2, 1, link)),
    )
    columns = 30 * (5 * 64 + 288 + 768 + 288) + 576
    gathers_s = (30 * 4 + 2) * link.latency_s(2) + (100 * columns * 2 + 100 * 24_576 * 4) * link.byte_s
    work = Work(100, 100, 100, 100)
    assert both.seconds(work) - alone.seconds(work) == pytest.approx(gathers_s, rel=1e-6)


def test_one_sequence_gains_nothing_from_stages_and_many_do() -> None:
    model = MODELS["llama-3-8b"]
    one, four = Roofline(model, A100), Roofline(model, A100, group=CardGroup(1, 4, stage_link=FREE))
    alone, crowd = Work(1, 500, 500, 1), Work(512, 512 * 3000, 512 * 3000, 512)
    assert four.seconds(alone) == pytest.approx(one.seconds(alone))
    assert 2 < one.seconds(crowd) / four.seconds(crowd) < 4


def test_experts_are_read_as_they_are_chosen() -> None:
    """Two of eight for one token, and nearly all for 64."""
    model, hardware = MODELS["mixtral-8x7b"], replace(A100, flops=1e30)
    cost = Roofline(model, hardware)
    expert_s = 32 * 2 * model.expert_weights / (0.8 * hardware.bandwidth)
    one = cost.seconds(Work(1, 0, 0, 1))
    assert cost.seconds(Work(64, 0, 0, 1)) - one == pytest.approx((8 * (1 - 0.75**64) - 2) * expert_s, rel=1e-6)


def rows_of(page: str, section: str) -> list[list[str]]:
    """The cells of the tables below a heading of the page."""
    text = page.split(f"\n{section}\n")[1].split("\n#")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_the_page_says_what_the_simulator_says() -> None:
    """One line of a model, and the published batches of one: all of them would take minutes."""
    page = (ROOT / "docs/operate/hardware-tables.md").read_text()
    limits = ReplicaLimits(256, 2048, 16, "paged", 4096)
    case = Case("h100-80g", "w8a8", "int8", CardGroup(1, 1, LINKS["nvlink4"], LINKS["nvlink4"]), 3.0)
    line = simulate_line(MODELS["llama-3-8b"], case, load_trace("synthetic", 1024), limits)
    assert line is not None and line.cells in rows_of(page, "### llama-3-8b")
    published = rows_of(page, "## Beside published figures")
    for each in PUBLISHED:
        if each.batch == 1:
            assert f"{simulate_published(each):,.1f}" in {row[6] for row in published if row[0] == each.model}


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["simulate", "--num-requests", "20"]
    assert (
        main(
            [
                *few,
                "--model",
                "llama-3-70b",
                "--tensor-parallel-size",
                "2",
                "--pipeline-parallel-size",
                "2",
                "--price",
                "2",
            ]
        )
        == 0
    )
    assert "llama-3-70b on 2 x 2 a100-80g" in capsys.readouterr().out
    assert main([*few, "--table", "--model", "llama-3-8b", "--hardware", "rtx4090-24g", "--quantization", "w8a8"]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == ["simulating llama-3-8b on rtx4090-24g, w8a8"]
    lines = told.out.splitlines()
    assert [line.split(" | ")[1] for line in lines if line.startswith("| rtx")] == ["1", "2", "4", "8"]
    for bad, flag in (
        (["--model", "llama-3-70b", "--tensor-parallel-size", "1"], "--model"),
        (["--table", "--tensor-parallel-size", "2"], "--table"),
        (["--table", "--hardware", "abacus"], "--hardware"),
    ):
        assert main([*few, *bad]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"penstock: {flag}")
    for flag, value in (("--tensor-parallel-size", "0"), ("--price", "-1")):
        with pytest.raises(SystemExit):
            main([*few, flag, value])
        assert capsys.readouterr().err.startswith(f"penstock: {flag}: {value!r} is not a ")
