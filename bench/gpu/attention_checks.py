"""Attention against its definition in torch, and a row's bits alone against those in company."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from bench.gpu.check import BLOCK_SIZE, EPS, Check, name_of, randn, relative_error
from services.compute.backends.backend import Backend
from services.compute.backends.cuda.attention import RANGE, SPLITS
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.torch.attention import AttentionInputs, Heads
from services.compute.backends.torch.reference import Scores, kv_row_size, norm_heads, read_kv, rms_norm, rotary
from services.compute.backends.torch.reference import write_kv as write_reference


def exact_attention(
    heads: Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scores_of: Scores,
    sinks: Tensor | None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """In float64, causal. q: [n, heads, d]; k, v: [n, kv_heads, d]; sinks: [heads]; last_seen: [n],
    the last that each sees. Returns [n, heads * d].
    """
    here = slice(heads.num_before, heads.num_before + heads.num_heads)
    k, v = (each.double().repeat_interleave(heads.sharing, 1)[:, here] for each in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * scores_of.scale
    if scores_of.cap:
        scores = scores_of.cap * torch.tanh(scores / scores_of.cap)
    positions = torch.arange(len(q))
    is_seen = positions[None, :] <= (positions if last_seen is None else last_seen)[:, None]
    if window is not None:
        is_seen &= positions[None, :] > positions[:, None] - window
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hnc,chd->nhd", scores.softmax(-1)[..., : len(k)], v).flatten(1)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    heads: Heads
    contexts: tuple[int, ...]
    last: tuple[int, ...]  # tokens of each that are in the last step
    kv_group: int = 0
    window: int | None = None
    scores: Scores | None = None
    norm: str | None = None  # of q and k: "heads", or "joint"
    has_sinks: bool = False

    def __str__(self) -> str:
        own = self.heads
        elsewhere = f", of {own.num_kv_heads * own.sharing} from {own.num_before} on" if own.per_kv_head else ""
        heads = f"{own.num_heads} / {own.num_kv_heads} heads of {own.head_dim}{elsewhere}"
        more = [
            f"window {self.window}" if self.window else "",
            "cap" if self.scores and self.scores.cap else "",
            f"{self.norm} norm{' after rotation' if own.norms_after_rotation else ''}" if self.norm else "",
        ]
        more += ["sinks"] if self.has_sinks else []
        return ", ".join([heads, f"contexts {list(self.contexts)}", *filter(None, more)])


def check_attention(backend: CudaBackend, case: AttentionCase) -> Check:
    """The prompts in one step, with no number in what is not written yet; then the same in two, the
    second with single tokens among chunks. In float64 over the keys and values that the definition
    writes."""
    dtype, device, heads = backend.dtype, backend.device, case.heads
    dim, num_kv_heads = heads.head_dim, heads.num_kv_heads
    rotary_dim = heads.rotary_dim or dim
    attention = backend.make_attention(heads, case.scores)
    sinks = randn(heads.num_heads, seed=30, scale=2.0) if case.has_sinks else None
    there = sinks.to(device) if sinks is not None else None
    counts = [-(-context // BLOCK_SIZE) for context in case.contexts]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).tolist()
    tables = [tuple(blocks.pop() for _ in range(count)) for count in counts]
    width = heads.num_projected * dim
    prompts = [randn(context, width, seed=10 + number).to(dtype) for number, context in enumerate(case.contexts)]
    norms = [
        (1 + randn(dim * (count if case.norm == "joint" else 1), seed=count, scale=0.1)).to(dtype)
        for count in (heads.num_heads, num_kv_heads + 20)
    ]
    if case.norm == "joint":
        norms[1] = norms[1][: dim * num_kv_heads]
    inv_freq = 1e4 ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim)

    def run(kv: Tensor, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step of (sequence, first, last) tokens. Returns what each gets."""
        positions = torch.cat([torch.arange(first, last) for _, first, last in spans])
        angles = positions[:, None].float() * inv_freq
        slots = [
            tables[number][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for number, first, last in spans
            for at in range(first, last)
        ]
        inputs = AttentionInputs(
            [last - first for _, first, last in spans],
            [last for _, _, last in spans],
            [tables[number] for number, _, _ in spans],
            backend.buffers.fill("slots", slots),
            ((angles.cos().to(device), angles.sin().to(device)),),
        )
        plan = attention.plan(inputs, BLOCK_SIZE)
        backend.buffers.upload()
        qkv = torch.cat([prompts[number][first:last] for number, first, last in spans]).to(device)
        given = (norms[0].to(device), norms[1].to(device)) if case.norm else (None, None)
        out = attention(qkv, kv, plan, window=case.window, norms=given, eps=EPS, sinks=there).clone().cpu()
        return list(torch.split(out, inputs.query_lens))

    caches = [backend.make_kv_layer(sum(counts), BLOCK_SIZE, num_kv_heads, dim, group=case.kv_group) for _ in range(2)]
    for kv in caches:
        kv.fill_(-1 if case.kv_group else torch.nan)  # as float16, the bytes of -1 are NaN
    whole = run(caches[0], [(number, 0, context) for number, context in enumerate(case.contexts)])
    firsts = [
        (number, 0, context - last)
        for number, (context, last) in enumerate(zip(case.contexts, case.last, strict=True))
        if context > last
    ]
    begun = dict(zip([number for number, _, _ in firsts], run(caches[1], firsts), strict=True)) if firsts else {}
    ended = run(
        caches[1],
        [
            (number, context - last, context)
            for number, (context, last) in enumerate(zip(case.contexts, case.last, strict=True))
        ],
    )
    is_same = torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    errors = []
    for number, prompt in enumerate(prompts):
        parts = [begun[number], ended[number]] if number in begun else [ended[number]]
        is_same &= torch.equal(torch.cat(parts), whole[number])
        q, k, v = prompt.view(len(prompt), -1, dim).tensor_split(
            [heads.num_heads, heads.num_heads + num_kv_heads], dim=1
        )
        v = k if heads.kv_projections == 1 else v
        if heads.has_value_norm:
            v = rms_norm(v, None, EPS)
        of_heads = norms if case.norm else [None, None]
        if not heads.norms_after_rotation:
            q, k = norm_heads(q, of_heads[0], EPS), norm_heads(k, of_heads[1], EPS)
        angles = (torch.arange(len(prompt))[:, None].float() * inv_freq)[:, None]
        q, k = (rotary(each, angles.cos(), angles.sin()) for each in (q, k))
        if heads.norms_after_rotation:
            q, k = norm_heads(q, of_heads[0], EPS), norm_heads(k, of_heads[1], EPS)
        row = kv_row_size(dim, case.kv_group) if case.kv_group else dim
        cache = torch.zeros((2, 1, num_kv_heads, len(prompt), row), dtype=torch.uint8 if case.kv_group else dtype)
        write_reference(cache, k, v, torch.arange(len(prompt)))
        k, v = (read_kv(cache[which, 0], dim, dtype).transpose(0, 1) for which in (0, 1))
        errors.append(
            relative_error(whole[number], exact_attention(heads, q, k, v, case.window, attention.scores, sinks))
        )
    bound = 2e-5 if dtype == torch.float32 and not case.kv_group else 6e-3
    types = name_of(dtype) + (f", KV int8 in groups of {case.kv_group}" if case.kv_group else "")
    return Check("attention", types, str(case), max(errors), bound, is_same)


def check_holes(backend: CudaBackend, heads: Heads, lens: tuple[int, ...], last: int, kv_group: int = 0) -> Check:
    """The last tokens of a sequence whose blocks before the last are tokens in part, with no number in
    the holes; and each of them alone. In float64 over the keys and values that the definition
    writes."""
    dtype, device, dim, num_kv_heads = backend.dtype, backend.device, heads.head_dim, heads.num_kv_heads
    attention, context = backend.make_attention(heads), len(lens) * BLOCK_SIZE
    table = tuple(torch.randperm(len(lens), generator=torch.Generator().manual_seed(5)).tolist())
    slots = [table[block] * BLOCK_SIZE + at for block, there in enumerate(lens) for at in range(there)]
    prompt = randn(len(slots), (heads.num_heads + 2 * num_kv_heads) * dim, seed=10).to(dtype)
    kv = backend.make_kv_layer(len(lens), BLOCK_SIZE, num_kv_heads, dim, group=kv_group)
    kv.fill_(-1 if kv_group else torch.nan)

    def run(
        first: int,
        end: int,
        lengths: list[int],
        ends: list[int],
        tables: list[tuple[int, ...]],
        block_lens: list[tuple[int, ...]] | None,
    ) -> Tensor:
        still = (torch.ones(end - first, dim // 2, device=device), torch.zeros(end - first, dim // 2, device=device))
        inputs = AttentionInputs(
            lengths, ends, tables, backend.buffers.fill("slots", slots[first:end]), (still,), block_lens
        )
        plan = attention.plan(inputs, BLOCK_SIZE)
        backend.buffers.upload()
        return attention(prompt[first:end].to(device), kv, plan, window=None, norms=(None, None), eps=EPS).clone().cpu()

    begun = len(slots) - last
    run(
        0, begun, [1] * begun, [1] * begun, [(slot // BLOCK_SIZE,) for slot in slots[:begun]], None
    )  # each writes its own
    found = run(begun, len(slots), [last], [context], [table], [lens])
    alone = [run(begun + at, begun + at + 1, [1], [context - last + at + 1], [table], [lens]) for at in range(last)]
    q, k, v = written(prompt, heads, kv_group, dtype)
    expected = exact_attention(heads, q, k, v, None, attention.scores, None)[begun:]
    bound = 2e-5 if dtype == torch.float32 and not kv_group else 6e-3
    types = name_of(dtype) + (f", KV int8 in groups of {kv_group}" if kv_group else "")
    case = (
        f"{heads.num_heads} / {num_kv_heads} heads of {dim}, {len(lens)} blocks of which "
        f"{sum(each < BLOCK_SIZE for each in lens)} have holes"
    )
    return Check("attention", types, case, relative_error(found, expected), bound, torch.equal(torch.cat(alone), found))


def check_spans(backend: Backend, heads: Heads, window: int | None, kv_group: int = 0) -> Check:
    """Check tokens that see a whole span, an image's, beyond their own position: in one step, and in
    one step for each span and for the tokens between two.
    """
    dtype, device, dim, num_kv_heads = backend.dtype, backend.device, heads.head_dim, heads.num_kv_heads
    attention, spans, context = backend.make_attention(heads), [(5, 21), (40, 105), (105, 110)], 130
    last_seen = list(range(context))
    for first, end in spans:
        last_seen[first:end] = [end - 1] * (end - first)
    prompt = randn(context, (heads.num_heads + 2 * num_kv_heads) * dim, seed=11).to(dtype)
    table = tuple(torch.randperm(-(-context // BLOCK_SIZE), generator=torch.Generator().manual_seed(6)).tolist())
    slots = [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(context)]

    def run(borders: list[int]) -> Tensor:
        kv = backend.make_kv_layer(len(table), BLOCK_SIZE, num_kv_heads, dim, group=kv_group)
        parts = []
        for first, end in pairwise(borders):
            still = (
                torch.ones(end - first, dim // 2, device=device),
                torch.zeros(end - first, dim // 2, device=device),
            )
            inputs = AttentionInputs(
                [end - first],
                [end],
                [table],
                backend.buffers.fill("slots", slots[first:end]),
                (still,),
                None,
                last_seen[first:end],
            )
            plan = attention.plan(inputs, BLOCK_SIZE)
            backend.buffers.upload()
            parts.append(
                attention(prompt[first:end].to(device), kv, plan, window=window, norms=(None, None), eps=EPS)
                .clone()
                .cpu()
            )
        return torch.cat(parts)

    found = run([0, context])
    q, k, v = written(prompt, heads, kv_group, dtype)
    expected = exact_attention(heads, q, k, v, window, Scores.of(dim), None, torch.tensor(last_seen))
    bound = 2e-5 if dtype == torch.float32 and not kv_group else 6e-3
    types = name_of(dtype) + (f", KV int8 in groups of {kv_group}" if kv_group else "")
    case = f"{heads.num_heads} / {num_kv_heads} heads of {dim}, spans that see each other, window {window}"
    is_same = torch.equal(found, run([0, 5, 21, 40, 105, 110, context]))
    return Check("attention", types, case, relative_error(found, expected), bound, is_same)


def written(prompt: Tensor, heads: Heads, kv_group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v as the definition writes them to a cache: [n, heads, d] each. prompt: [n,
    (heads + 2 kv_heads) * d].
    """
    dim, num_kv_heads = heads.head_dim, heads.num_kv_heads
    q, k, v = prompt.view(len(prompt), -1, dim).split_with_sizes([heads.num_heads, num_kv_heads, num_kv_heads], dim=1)
    row = kv_row_size(dim, kv_group) if kv_group else dim
    cache = torch.zeros((2, 1, num_kv_heads, len(prompt), row), dtype=torch.uint8 if kv_group else dtype)
    write_reference(cache, k, v, torch.arange(len(prompt)))
    k, v = (read_kv(cache[which, 0], dim, dtype).transpose(0, 1) for which in (0, 1))
    return q, k, v


WIDE_HEADS = Heads(8, 1, 512, kv_projections=1, has_value_norm=True)
ATTENTIONS = (
    AttentionCase(Heads(5, 2, 64, per_kv_head=3), (5, 40, 100), (1, 9, 1)),
    AttentionCase(Heads(4, 3, 32, per_kv_head=2, num_before=1), (70, 30), (33, 1), kv_group=8, has_sinks=True),
    AttentionCase(Heads(4, 2, 32), (5, 40, 100), (1, 9, 1)),
    AttentionCase(Heads(6, 2, 64, 32), (70, 30), (33, 1), window=20, norm="heads"),
    AttentionCase(Heads(2, 1, 16), (RANGE + 40,), (1,), scores=Scores(0.3, 5.0)),
    AttentionCase(Heads(4, 2, 32), (45, 33), (1, 17), kv_group=32, norm="joint"),
    AttentionCase(Heads(14, 2, 64), (33, 7, 1, 90), (1, 7, 1, 3), kv_group=64),
    AttentionCase(Heads(8, 2, 128), (200, 1), (64, 1), kv_group=8),
    AttentionCase(Heads(4, 4, 96), (130, 40), (1, 40), kv_group=32, window=70),
    AttentionCase(Heads(2, 2, 256), (90,), (1,), norm="heads", scores=Scores(0.1, 50.0)),
    AttentionCase(Heads(4, 2, 64, norms_after_rotation=True), (70, 30), (33, 1), kv_group=8, norm="heads"),
    AttentionCase(Heads(4, 2, 32), tuple(5 + 3 * number for number in range(11)), (1,) * 11),
    AttentionCase(WIDE_HEADS, (70, 30), (33, 1), norm="heads"),
    AttentionCase(WIDE_HEADS, (70, 30), (33, 1), kv_group=64, norm="heads"),
)
ATTENTIONS_ON_DEVICE = (
    AttentionCase(Heads(8, 2, 128), (2 * RANGE + 100, 50), (1, 1)),
    AttentionCase(Heads(3, 1, 64), (2 * RANGE + 1, 2 * RANGE), (2, 1), window=RANGE + 10),
    AttentionCase(Heads(4, 1, 64), (SPLITS * RANGE + 700,), (1,)),
    AttentionCase(Heads(32, 8, 128), tuple(100 + 37 * number for number in range(33)), (1,) * 33),
    AttentionCase(Heads(28, 4, 128), (4000,), (1500,), kv_group=64),
)


def attention_checks(backend: CudaBackend, *, on_device: bool) -> Iterator[partial[Check]]:
    """Cases of a backend, in its dtype. on_device: also what takes the interpreter hours."""
    for case in (*ATTENTIONS, *(ATTENTIONS_ON_DEVICE if on_device else ())):
        yield partial(check_attention, backend, case)
    for group in (0, 8) if backend.dtype != torch.float32 else (0,):
        for last in (1, 40):
            yield partial(check_spans, backend, Heads(8, 2, 64), 50 if last > 1 else None, group)
            yield partial(
                check_holes,
                backend,
                Heads(32, 8, 128),
                (*[16, 3, 16, 1, 7, 16] * (20 if on_device else 1), 16, 16, 16),
                last,
                group,
            )
