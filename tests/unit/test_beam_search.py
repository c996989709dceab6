"""Beam search is transformers': over models that are nothing but tables, and so say anything, the
same answers in the same order.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from services.gateway.api.openai.beam_search import BeamSearch
from tests.examples import examples

VOCAB = 24


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # sharp enough that answers differ in more than their rounding
    return model


MODELS = [make_model(seed) for seed in range(4)]


@torch.inference_mode()
def search_with(model: Any, prompt: list[int], search: BeamSearch) -> BeamSearch:
    while not search.is_over:
        rows = (
            model(torch.tensor([[*prompt, *beam.token_ids] for beam in search.running])).logits[:, -1].log_softmax(-1)
        )
        values, ids = rows.topk(search.num_candidates, dim=-1)
        search.advance([list(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)])
    return search


@examples(120)
@given(
    model=st.sampled_from(range(len(MODELS))),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 12),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.6]),
    early_stopping=st.sampled_from([False, True, "never"]),
)
def test_the_answers_are_transformers(
    model: int,
    prompt: list[int],
    width: int,
    max_tokens: int,
    eos: set[int],
    length_penalty: float,
    early_stopping: Any,
) -> None:
    config = GenerationConfig(
        num_beams=max(width, 2),
        num_return_sequences=max(width, 2),
        max_new_tokens=max_tokens,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=sorted(eos) or None,
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = MODELS[model].generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), generation_config=config
    )
    search = search_with(
        MODELS[model], prompt, BeamSearch(max(width, 2), max_tokens, tuple(sorted(eos)), length_penalty, early_stopping)
    )
    expected = []
    for sequence, score in zip(
        found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True
    ):
        ends = [at for at, token in enumerate(sequence) if token in eos]
        expected.append((tuple(sequence[: ends[0]] if ends else sequence), score, bool(ends)))
    scores = [each.score for each in search.answers]
    assert scores == pytest.approx([score for _, score, _ in expected], abs=1e-4)
    gaps = [abs(a - b) for a, b in zip(scores, scores[1:], strict=False)]
    if min(gaps, default=1.0) > 1e-4:  # else the order of equals is anybody's
        assert [(each.token_ids, each.is_stopped) for each in search.answers] == [
            (tokens, is_stopped) for tokens, _, is_stopped in expected
        ]


def test_one_beam_is_the_greedy_answer() -> None:
    search = search_with(MODELS[0], [1, 2], BeamSearch(1, 8, ()))
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    greedy = MODELS[0].generate(
        torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2, dtype=torch.int64), generation_config=config
    )
    assert search.answers[0].token_ids == tuple(greedy[0, 2:].tolist())
