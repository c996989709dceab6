"""Prompts of segments that do not all see each other: against transformers under the same mask, and
equal however they are computed.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.reference import kv_row_size, write_kv
from shared.model.files import DEMO_MODEL
from shared.model.segments import HOLE, Layout, Segment, check_segments, layout_of
from shared.process.errors import Invalid
from tests.kernels.backends import CPU, FLOAT32, native_backend
from tests.kernels.families import SIZES, Engine, reference_model
from tests.kernels.slabs import to_slabs

NUM_TOKENS = 12
Prompt = tuple[list[int], tuple[Segment, ...]]
NATIVE = {"dtype": torch.bfloat16}


def prompt_of(trunk: int, modules: Sequence[int], rest: int, *, gap: int = 0, seed: int = 0) -> Prompt:
    """A trunk, modules (by number, each with its tokens and its place), and a rest that sees all.
    Module 3 has a second part, behind a place of 3 tokens, which an argument of 2 fills: it sees
    the first part, and the trunk."""
    rng = Random(trunk)
    texts = [[rng.randrange(2, SIZES["vocab_size"]) for _ in range(trunk)]]
    segments = [Segment(trunk, 0)]
    place = trunk + gap
    for number in modules:
        rng = Random(100 + number)
        size = (5, 16, 33, 12, 70)[number]
        texts.append([rng.randrange(2, SIZES["vocab_size"]) for _ in range(size)])
        segments.append(Segment(size, place + 80 * number, (0,)))
        if number == 3:
            first = len(segments) - 1
            texts += [[7, 8, 9, 10], [11, 12]]
            segments += [
                Segment(4, place + 80 * number + size + 3, (0, first)),
                Segment(2, place + 80 * number + size, (0, first)),
            ]
    rng = Random(1000 + seed)
    texts.append([rng.randrange(2, SIZES["vocab_size"]) for _ in range(rest)])
    segments.append(Segment(rest, place + 400, tuple(range(len(segments)))))
    return [token_id for text in texts for token_id in text], tuple(segments)


PROMPTS = [
    prompt_of(16, [0, 1, 2], 9),
    prompt_of(5, [2, 0], 17, gap=3),
    prompt_of(5, [0, 3], 1, gap=3),
    prompt_of(33, [4], 40),
    prompt_of(1, [3, 1, 4, 0], 16),
    prompt_of(5, [2, 0], 30, gap=3, seed=1),
    prompt_of(16, [2, 1, 0], 3, seed=2),
]


def mask_of(segments: Sequence[Segment], num_tokens: int) -> torch.Tensor:
    """The mask, from the definition: [num_tokens, num_tokens] bool; the last segment goes on."""
    owners = [number for number, segment in enumerate(segments) for _ in range(segment.num_tokens)]
    owners += [len(segments) - 1] * (num_tokens - len(owners))
    sees = torch.tensor([[owner == other or other in segments[owner].sees for other in owners] for owner in owners])
    return sees & torch.ones_like(sees).tril()


def positions_of(segments: Sequence[Segment], num_tokens: int) -> torch.Tensor:
    places = [segment.position + at for segment in segments for at in range(segment.num_tokens)]
    return torch.tensor(places + [places[-1] + 1 + at for at in range(num_tokens - len(places))])


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "olmo2", "smollm3", "demo"])
@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_tokens_and_logits_equal_transformers_under_the_same_mask(name: str, model_impl: str, tmp_path: Path) -> None:
    reference = reference_model(name, tmp_path)
    engine = Engine(DEMO_MODEL if name == "demo" else tmp_path, model_impl=model_impl, max_model_len=1024)
    found = engine.generate(
        [prompt for prompt, _ in PROMPTS], NUM_TOKENS, segments=[segments for _, segments in PROMPTS]
    )
    for number, ((prompt, segments), tokens) in enumerate(zip(PROMPTS, found, strict=True)):
        ids = [*prompt, *tokens[:-1]]
        mask = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(
            ~mask_of(segments, len(ids)), torch.finfo(torch.float32).min
        )
        logits = reference(
            torch.tensor([ids]), attention_mask=mask, position_ids=positions_of(segments, len(ids))[None]
        ).logits[0, len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack(engine.logits[number]), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "how"), [("llama3", {}), ("mistral-window", {}), ("demo", NATIVE), ("demo", {**NATIVE, "kv_group": 32})]
)
def test_the_cache_a_batch_chunks_and_preemption_change_no_bit(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    loaded = Engine(DEMO_MODEL if name == "demo" else tmp_path, **how)

    def bits(engine: Engine, some: Sequence[Prompt]) -> list[torch.Tensor]:
        engine.generate([prompt for prompt, _ in some], NUM_TOKENS, segments=[segments for _, segments in some])
        return [torch.stack(engine.logits[number]) for number in range(len(some))]

    def fresh(**limits: Any) -> Engine:
        return Engine(loaded, **how, **limits)

    alone = [bits(fresh(), [each])[0] for each in PROMPTS]
    engines = [fresh(), fresh(max_batched_tokens=20, max_num_seqs=8), fresh(num_blocks=30, strategy="paged")]
    if not how:
        engines += [fresh(block_size=size, num_blocks=4000 // size) for size in (1, 2, 8)]
    for engine in engines:
        for step in (1, -1, 1):  # the second and third time their prompts are cached
            assert all(
                torch.equal(one, other) for one, other in zip(bits(engine, PROMPTS[::step]), alone[::step], strict=True)
            )
    assert engines[2].scheduler.num_preemptions > 0


def test_modules_are_found_in_new_orders_and_beside_others() -> None:
    engine = Engine(DEMO_MODEL)
    first = prompt_of(20, [4, 2, 0], 9)
    engine.generate([first[0]], 2, segments=[first[1]])
    for modules in ([0, 2, 4], [2, 4], [4], [0, 1, 2]):
        prompt, segments = prompt_of(20, modules, 9)
        before = engine.scheduler.prefixes.num_hits
        engine.generate([prompt], 2, segments=[segments])
        known = 20 + sum(
            segment.num_tokens for number, segment in zip([*modules], segments[1:], strict=False) if number != 1
        )
        found = engine.scheduler.prefixes.num_hits - before
        assert known <= found <= known + 8
    alone = prompt_of(20, [4, 2, 0], 9, gap=1)
    before = engine.scheduler.prefixes.num_hits
    engine.generate([alone[0]], 2, segments=[alone[1]])
    assert engine.scheduler.prefixes.num_hits - before == 20, "in another place they are others"


@pytest.mark.pairwise
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("group", [0, 8, 32])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [16, 32])
def test_native_attention_over_blocks_that_are_tokens_in_part(group: int, window: int | None, block_size: int) -> None:
    """Against the reference over the same cache, in which holes are no numbers; and with every
    other set of rows the same bits.
    """
    heads, lens = Heads(6, 2, 64), [[16, 3, 16, 1, 7, 16, 16], [2, 9, 5], [16] * 70 + [4, 12, 16]]
    # the step's own tokens are in the last two
    lens = [[*(each * block_size // 16 for each in some[:-2]), block_size, block_size] for some in lens]
    contexts, lengths = [len(some) * block_size - 3 for some in lens], [20, 1, 3]
    numbers = iter(torch.randperm(sum(map(len, lens)), generator=torch.Generator().manual_seed(1)).tolist())
    tables = [tuple(next(numbers) for _ in some) for some in lens]
    kv = torch.stack(
        [
            torch.randn(
                sum(map(len, lens)), 2, block_size, 64, generator=torch.Generator().manual_seed(seed)
            ).bfloat16()
            for seed in (2, 3)
        ]
    )
    if group:
        quantized = torch.zeros(*kv.shape[:-1], kv_row_size(64, group), dtype=torch.uint8)
        keys, values = (each.transpose(1, 2).flatten(0, 1) for each in kv)
        write_kv(quantized, keys, values, torch.arange(sum(map(len, lens)) * block_size))
        kv = quantized
    for table, some, context in zip(tables, lens, contexts, strict=True):
        for place, (block, there) in enumerate(zip(table, some, strict=True)):
            kv[:, block, :, min(there, max(0, context - place * block_size)) :] = 0xFF if group else torch.nan
    qkv = torch.randn(sum(lengths), 10 * 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    slots = torch.tensor(
        [
            table[at // block_size] * block_size + at % block_size
            for table, context, length in zip(tables, contexts, lengths, strict=True)
            for at in range(context - length, context)
        ]
    )
    starts = [0, *accumulate(lengths)]
    terms = {"window": window, "norms": (None, None), "eps": 1e-6}

    def inputs(which: Sequence[int]) -> AttentionInputs:
        rows = [row for each in which for row in range(starts[each], starts[each + 1])]
        still = (torch.ones(len(rows), 32), torch.zeros(len(rows), 32))
        return AttentionInputs(
            [lengths[each] for each in which],
            [contexts[each] for each in which],
            [tables[each] for each in which],
            slots[rows],
            (still,),
            [tuple(lens[each]) for each in which],
        )

    attention = native_backend().make_attention(heads)
    cache = to_slabs(kv, 64)
    found = attention(qkv.clone(), cache, attention.plan(inputs([0, 1, 2]), block_size), **terms).clone()
    plain = TorchBackend(torch.bfloat16, CPU).make_attention(heads)
    expected = plain(qkv.clone(), kv.clone(), plain.plan(inputs([0, 1, 2]), block_size), **terms)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    for each in range(3):
        alone = attention(
            qkv[starts[each] : starts[each + 1]].clone(), cache, attention.plan(inputs([each]), block_size), **terms
        )
        assert torch.equal(alone, found[starts[each] : starts[each + 1]])


def test_reference_attention_over_blocks_that_are_tokens_in_part() -> None:
    """Against the same tokens in whole blocks, in which they stand together."""
    heads, lens = Heads(4, 2, 32), [16, 3, 16, 1, 7, 16]
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(2, 6, 2, 16, 32, generator=generator)
    for block, there in enumerate(lens):
        kv[:, block, :, there:] = torch.nan
    together = torch.cat([kv[:, block, :, :there] for block, there in enumerate(lens)], 2)
    whole = torch.zeros(2, 4, 2, 16, 32)
    for block in range(4):
        part = together[:, :, block * 16 : (block + 1) * 16]
        whole[:, block, :, : part.shape[2]] = part
    attention, qkv = FLOAT32.make_attention(heads), torch.randn(1, 8 * 32, generator=generator)
    still, terms = ((torch.ones(1, 16), torch.zeros(1, 16)),), {"window": None, "norms": (None, None), "eps": 1e-6}
    holed = AttentionInputs([1], [6 * 16], [(0, 1, 2, 3, 4, 5)], torch.tensor([6 * 16 - 1]), still, [tuple(lens)])
    plain = AttentionInputs([1], [sum(lens)], [(0, 1, 2, 3)], torch.tensor([sum(lens) - 1]), still)
    found, expected = (
        attention(qkv.clone(), cache, attention.plan(each, 16), **terms)
        for cache, each in ((kv, holed), (whole, plain))
    )
    torch.testing.assert_close(found, expected)


def test_a_layout() -> None:
    layout = Layout((Segment(5, 0), Segment(16, 9, (0,)), Segment(17, 40, (0,)), Segment(3, 60, (0, 1, 2))), 8)
    assert layout.starts == [0, 16, 32, 64] and layout.num_holes == 26
    slots = layout.pad(range(41))
    assert [each for each in slots if each != HOLE] == list(range(41)) and len(slots) == 67
    assert layout.block_lens == [5, 0, 8, 8, 8, 8, 1, 0]
    assert [layout.skip_holes(slot) for slot in (0, 4, 5, 15, 16, 31, 32, 49, 60, 64, 90)] == [
        0,
        4,
        16,
        16,
        16,
        31,
        32,
        64,
        64,
        64,
        90,
    ]
    assert [layout.num_tokens_in(slot) for slot in (0, 5, 9, 16, 32, 33, 49, 64, 70)] == [
        0,
        5,
        5,
        5,
        21,
        22,
        38,
        38,
        44,
    ]
    assert layout.seen_blocks(2) == [0, 1] and layout.seen_blocks(3) == list(range(8))
    assert [layout.chunk_end(first, 70) for first in (0, 3, 16, 40, 64, 66)] == [
        5,
        5,
        32,
        49,
        70,
        70,
    ] and layout.chunk_end(16, 20) == 20


def test_a_prompt_without_segments_is_laid_out_as_one_segment() -> None:
    plain, single, tokens = layout_of((), 8), layout_of((Segment(40, 0),), 8), list(range(40))
    assert plain.pad(tokens) == single.pad(tokens) == tokens and plain.num_holes == single.num_holes == 0
    assert list(plain.starts) == single.starts and plain.num_slots_to_begin(67, 16) == 16
    for slot in (0, 7, 8, 39, 40, 66):
        for layout in (plain, single):
            assert (
                layout.at(slot),
                layout.skip_holes(slot),
                layout.num_tokens_in(slot),
                layout.chunk_end(slot, 70),
            ) == (0, slot, slot, 70)
    hashes = [bytes([number]) for number in range(5)]
    assert [plain.parent(b"root", hashes, block) for block in range(5)] == [
        single.parent(b"root", hashes, block) for block in range(5)
    ]
    blocks = (9, 4, 7, 1, 2)
    assert plain.context(blocks, 8, 32) == single.context(blocks, 8, 32)._replace(block_lens=())


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(0, 0),),
        (Segment(3, -1),),
        (Segment(2, 0),),
        (Segment(1, 0), Segment(2, 1)),
        (Segment(1, 0, (0,)), Segment(2, 1, (0,))),
        (Segment(1, 0), Segment(1, 1, (1,)), Segment(1, 2, (0, 1))),
        (Segment(1, 0), Segment(1, 0), Segment(1, 0, (1, 0))),
        (Segment(1, 0), Segment(1, 0), Segment(1, 0, (0, 0, 1))),
        (Segment(1, 0), Segment(2, 0, (-1, 0))),
    ],
)
def test_segments_that_are_none(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(Invalid):
        check_segments(segments, 3)
