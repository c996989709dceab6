"""Models on the modules of the transformers library, over our scheduler, blocks and cache: against
the library's own generation, in any company.
"""

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from services.compute.backends.choose import choose_backend
from services.compute.loop.engine import build_engine
from services.compute.models.config import Packed
from services.compute.models.transformers_attention import (
    ANSWERS,
    ATTENTION,
    PassingCache,
    Unsupported,
    masked_attention,
    register,
)
from services.compute.models.transformers_model import TransformersModel, load_transformers_model
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.weights.library_modules import load_library_modules
from shared.model.files import DEMO_MODEL, open_model
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from tests.forge import refused
from tests.kernels.backends import FLOAT32
from tests.kernels.families import CONFIGS, SIZES, Engine, assert_greedy, reference_model
from tests.kernels.test_models import NUM_TOKENS, prompts

GPT: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
HEADS: dict[str, Any] = SIZES | {"num_key_value_heads": 4}
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXED_LAYERS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}

RAGGED: dict[str, PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(**GPT),  # learned positions
    "gpt-bigcode": transformers.GPTBigCodeConfig(**GPT),  # one KV head
    "gpt-neox": transformers.GPTNeoXConfig(**HEADS),
    "opt": transformers.OPTConfig(**HEADS, ffn_dim=112, word_embed_proj_dim=64),
    "phi": transformers.PhiConfig(**SIZES),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=1.0),
    "cohere2-window": transformers.Cohere2Config(**SIZES, **MIXED_LAYERS, head_dim=16, logit_scale=1.0),
    "starcoder2-window": transformers.Starcoder2Config(**SIZES, sliding_window=24),
    "stablelm": transformers.StableLmConfig(**SIZES),
    "glm4": transformers.Glm4Config(**SIZES, head_dim=16),
    "exaone4": transformers.Exaone4Config(**SIZES, **MIXED_LAYERS),
    "gemma2-caps": transformers.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=24, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gpt-oss-sinks": transformers.GptOssConfig(**SIZES, **MOE, head_dim=16, sliding_window=24),
    "deepseek3": transformers.DeepseekV3Config(
        **HEADS,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),  # keys of 24 dimensions, values of 16
    "gemma4-sizes": transformers.Gemma4UnifiedTextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        per_layer_config={"02": {"head_dim": 32}},
        use_bidirectional_attention=None,
    ),  # layers whose heads differ
    "granite4-attention": transformers.GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["attention"] * 3,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=48,
        position_embedding_type="rope",
    ),  # of a class that may have a state
}
ONE_BY_ONE: dict[str, PretrainedConfig] = {
    "llama4-chunks": transformers.Llama4TextConfig(
        **SIZES | MOE | {"num_experts_per_tok": 1, "num_hidden_layers": 4},
        head_dim=16,
        intermediate_size_mlp=112,
        attention_chunk_size=24,
        attn_scale=0.1,
        floor_scale=8,
    ),  # its fourth layer does not rotate, and asks the cache for positions
    "gptj": transformers.GPTJConfig(**GPT, rotary_dim=8),
    "falcon": transformers.FalconConfig(**HEADS),
    "bloom-alibi": transformers.BloomConfig(
        vocab_size=512, hidden_size=64, n_layer=3, n_head=4, eos_token_id=1, bos_token_id=1
    ),
    "mpt-alibi": transformers.MptConfig(vocab_size=512, d_model=64, n_heads=4, n_layers=3, max_seq_len=512),
}
# one by one, with states of each sequence
RECURRENT: dict[str, PretrainedConfig] = {
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=32,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    "lfm2": transformers.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),  # which has windows of convolutions, and no recurrent state
    "jamba": transformers.JambaConfig(
        **SIZES, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False
    ),  # whose code forgets the recurrent state where several tokens follow it
    "mamba2": transformers.Mamba2Config(
        vocab_size=512, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=16, n_groups=1
    ),  # which has no keys and values
}
ALL = RAGGED | ONE_BY_ONE | RECURRENT


def make(name: str, folder: Path) -> transformers.PreTrainedModel:
    return reference_model(name, folder, config=ALL[name])


def run_on_library(folder: Path, **options: Any) -> Engine:
    return Engine(folder, model_impl="transformers", **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALL)
def test_greedy_output_and_logits_equal_the_library(name: str, tmp_path: Path) -> None:
    reference = make(name, tmp_path)
    some = prompts(5, SIZES["vocab_size"])
    engine = run_on_library(tmp_path)
    is_ragged = name in RAGGED or (name == "gptj" and reference._supports_attention_backend)  # since transformers 5.24
    assert engine.runner.model.implementation == f"transformers ({'ragged' if is_ragged else 'one by one'})"
    assert_greedy(engine, reference, some, NUM_TOKENS)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ALL)
def test_company_chunks_preemption_and_prefixes_change_no_token(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    some, long = prompts(5, SIZES["vocab_size"]), prompts(10, SIZES["vocab_size"])[9]
    some += [long, long[:70] + some[1], long[:50]]
    loaded = run_on_library(tmp_path)
    alone = [Engine(loaded).generate([prompt], 12)[0] for prompt in some]
    assert Engine(loaded).generate(some, 12) == alone
    assert Engine(loaded, max_num_seqs=4, max_batched_tokens=20).generate(some, 12) == alone
    cramped = Engine(loaded, block_size=3, num_blocks=36, strategy="paged")
    assert cramped.generate(some, 12) == alone
    assert cramped.scheduler.num_preemptions > 0
    assert (cramped.scheduler.prefixes.num_hits > 0) == (name not in RECURRENT)


@pytest.mark.parametrize(
    ("name", "model_impl"), [*((name, "transformers") for name in RECURRENT), ("qwen3.5", "native")]
)
def test_states_follow_their_sequences(name: str, model_impl: str, tmp_path: Path) -> None:
    """Through choices of a prompt, rows that are taken back, and cancelled requests; all slots are free again."""
    reference = make(name, tmp_path)
    prompt, other = prompts(10, SIZES["vocab_size"])[8:]
    engine = Engine(tmp_path, max_batched_tokens=24, model_impl=model_impl)
    model, scheduler = engine.runner.model, engine.scheduler
    assert not isinstance(model, TransformersModel) or model.continues_chunks == (name != "jamba")
    [expected] = engine.generate([prompt], 8)
    assert_greedy(engine, reference, [prompt], 8)
    choices = engine.generate([prompt] * 3, 8, group_id="choices")
    assert choices[0] == expected and len({choice[0] for choice in choices}) == 3
    taken, ended = (
        Sequence(Request(number, str(number), SamplingParams(max_tokens=8)), Tokens(list(ids)))
        for number, ids in ((10, prompt), (11, other))
    )
    for each in (taken, ended):
        scheduler.add(each)
    num_taken_back = 0
    while not taken.is_finished:
        batch = scheduler.schedule()
        assert batch is not None
        logits = engine.runner.forward(batch)
        for key, row in zip(batch.sampled, logits, strict=True):
            sequence = scheduler.get(key.handle)
            if sequence is taken and sequence.tokens.num_output == 3 and not num_taken_back:
                scheduler.take_back(sequence.prefix())
                # in our own layers only what the log holds is computed again
                assert sequence.kv.num_computed == (len(sequence.tokens) - 1 if model_impl == "native" else 0)
                num_taken_back += 1
                continue
            scheduler.append(sequence, int(row.argmax()))
        if not ended.is_finished and ended.has_begun and batch.num_decodes:
            scheduler.finish(ended)
        if taken.tokens.num_output == 8:
            scheduler.finish(taken, is_complete=True)
    assert taken.tokens.ids[len(prompt) :] == expected and num_taken_back == 1
    assert scheduler.block_manager.slots is not None
    assert not isinstance(model, TransformersModel) or len(model.sequence_states) <= 3
    assert len(scheduler.block_manager.slots.free) == scheduler.max_num_seqs


@pytest.mark.parametrize("name", RECURRENT)
def test_a_sequence_that_comes_in_the_same_chunks_has_the_same_bits_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Alone, in a batch, and in other blocks; what other chunks do is the library's own affair."""
    make(name, tmp_path)
    some = prompts(5, SIZES["vocab_size"])
    loaded = run_on_library(tmp_path, dtype=torch.bfloat16)
    together = Engine(loaded, max_batched_tokens=sum(map(len, some)))
    tokens = together.generate(some, 12)
    elsewhere = Engine(loaded, max_batched_tokens=sum(map(len, some)), block_size=3)
    assert elsewhere.generate(some, 12) == tokens
    for number, prompt in enumerate(some):
        alone = Engine(loaded)
        assert alone.generate([prompt], 12) == [tokens[number]]
        for other in (alone.logits[0], elsewhere.logits[number]):
            assert torch.equal(torch.stack(other), torch.stack(together.logits[number]))


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_states_take_memory_before_the_cache_and_bound_the_places(
    model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("qwen3.5", tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    files = open_model(str(tmp_path), weights=True)
    model = Engine(tmp_path, model_impl=model_impl).runner.model
    free = model.state_bytes * 200

    def build(**options: Any) -> Any:
        settings = {"dtype": "float32", "num_threads": 1, "max_model_len": 64, "model_impl": model_impl}
        settings |= {"max_batched_tokens": 16}  # a step takes less than the states
        return build_engine(ComputeSettings(**settings, **options), files)

    for module in ("loop.engine", "cache.kv_cache"):
        monkeypatch.setattr(f"services.compute.{module}.free_memory", lambda _: free)
    engine = build()
    assert engine.scheduler.max_num_seqs == 25  # half of a quarter
    assert engine.scheduler.run_ahead == 0 and not engine.scheduler.block_manager.prefix_caching
    kv = sum(engine.runner.kv_cache.block_bytes) * engine.scheduler.block_manager.num_blocks
    assert kv <= (free - 25 * model.state_bytes) // 4
    with pytest.raises(StartupError, match="--max-num-seqs 201: the states of as many sequences take"):
        build(max_num_seqs=201)
    states = "beside the weights, .*iB for the states of --max-num-seqs sequences and .*iB to work in"
    with pytest.raises(StartupError, match=f"only .*B are free {states}"):
        build(max_num_seqs=100, kv_cache_memory=free)
    with pytest.raises(StartupError, match=f"would have 0 bytes {states}; .* or lower --max-num-seqs"):
        build(max_num_seqs=200)


def test_a_model_without_keys_and_values_has_memory_for_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("mamba2", tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    files = open_model(str(tmp_path), weights=True)
    state_bytes = run_on_library(tmp_path).runner.model.state_bytes
    monkeypatch.setattr("services.compute.loop.engine.free_memory", lambda _: state_bytes * 200)

    def sizes(**options: Any) -> tuple[int, int, int]:
        """Places, the longest sequence, and blocks."""
        engine = build_engine(ComputeSettings(dtype="float32", num_threads=1, **options), files)
        return engine.scheduler.max_num_seqs, engine.max_model_len, engine.scheduler.block_manager.num_blocks

    assert sizes() == (50, 1 << 15, 50 * (1 << 11))  # a quarter of 200
    assert sizes(max_model_len=60) == (50, 60, 50 * 4)
    assert sizes(max_model_len=60, kv_cache_memory=state_bytes * 7) == (7, 60, 7 * 4)
    assert sizes(max_model_len=60, max_num_seqs=200) == (200, 60, 200 * 4)
    assert sizes(max_model_len=1 << 20) == (50, 1 << 20, 50 * (1 << 16))
    with pytest.raises(StartupError, match="^--kv-cache-memory .*: only .* are free beside the weights$"):
        sizes(kv_cache_memory=state_bytes * 201)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*sorted(CONFIGS.keys() - {"phi3-longrope"}), "demo"])
def test_native_models_run_on_the_library_too(name: str, tmp_path: Path) -> None:
    reference_model(name, tmp_path)
    folder = DEMO_MODEL if name == "demo" else tmp_path
    some = prompts(6, SIZES["vocab_size"])
    assert run_on_library(folder).generate(some, NUM_TOKENS) == Engine(folder).generate(some, NUM_TOKENS)


GEMMA4_TEXT: dict[str, Any] = {
    **SIZES,
    "model_type": "gemma4_unified_text",
    "head_dim": 16,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def test_the_text_of_a_model_that_sees_runs_by_the_class_of_the_text(tmp_path: Path) -> None:
    """Gemma 4 12B as published, whose own class makes masks of a step's tokens."""
    config = transformers.Gemma4UnifiedConfig(text_config=GEMMA4_TEXT, audio_config=None)
    whole = transformers.Gemma4UnifiedForConditionalGeneration(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    whole.save_pretrained(tmp_path)
    engine = run_on_library(tmp_path)
    assert engine.runner.model.implementation == "transformers (ragged)"
    assert_greedy(engine, whole.float().eval(), prompts(3, SIZES["vocab_size"]), NUM_TOKENS)
    register()
    whole.set_attn_implementation(ATTENTION)
    with pytest.raises(Unsupported, match="its mask is not a rule of positions: index"):
        TransformersModel(whole, FLOAT32, is_ragged=True)


def test_a_model_that_sees_whose_text_has_no_class_reads_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Glm4vConfig(
        text_config={**SIZES, "model_type": "glm4v_text", "rope_parameters": rope}, vision_config=vision
    )
    whole = transformers.Glm4vForConditionalGeneration(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    whole.save_pretrained(tmp_path)
    assert_greedy(run_on_library(tmp_path), whole.float().eval(), prompts(3, SIZES["vocab_size"]), NUM_TOKENS)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 64, "kv_cache_memory": "8MiB"}
    with caplog.at_level(logging.WARNING):
        engine = build_engine(ComputeSettings(**options), open_model(str(tmp_path), weights=True))
    assert engine.images is None and "the model reads text only: how it sees is not known here" in caplog.text


def test_what_a_row_of_several_sequences_would_make_wrong_is_found(tmp_path: Path) -> None:
    """Each found by what a layer computes, not by its class."""
    register()
    asks = transformers.AutoModelForCausalLM.from_config(ALL["llama4-chunks"])
    mixes, counts = (transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen3"]) for _ in range(2))
    mixes.model.layers[1].mlp.register_forward_hook(lambda _, inputs, output: output + inputs[0].roll(1, 1))
    counts.model.layers[2].input_layernorm.register_forward_hook(
        lambda _, __, output: output * (1 + 0.1 * torch.arange(output.shape[1], device=output.device)[:, None])
    )
    for model, reason in (
        (asks, "the length of its cache"),
        (mixes, "its place in the row"),
        (counts, "its place in the row"),
    ):
        model.eval().set_attn_implementation(ATTENTION)
        with pytest.raises(Unsupported, match=reason):
            TransformersModel(model, FLOAT32, is_ragged=True)


@pytest.mark.parametrize(("num_tokens", "continues_chunks"), [(1, None), (4, False), (5, True)])
def test_a_layer_that_forgets_its_state_is_found(
    num_tokens: int, continues_chunks: bool | None, tmp_path: Path
) -> None:
    """Where so many tokens or more follow it, though another layer of the kind reads its own. Tokens of a probe that
    follow at once are one more than the convolution's three."""
    model = make("lfm2", tmp_path)

    def forget(_: object, __: object, terms: dict[str, Any]) -> None:
        cache = next(each for each in terms.values() if isinstance(each, PassingCache))
        if terms["hidden_states"].shape[1] >= num_tokens:
            assert cache.states is not None
            cache.states.layers.pop((2, 0), None)

    model.model.layers[2].conv.register_forward_pre_hook(forget, with_kwargs=True)
    if continues_chunks is None:
        with pytest.raises(Unsupported, match="it forgets a sequence from one token to the next"):
            TransformersModel(model, FLOAT32, is_ragged=False)
    else:
        assert TransformersModel(model, FLOAT32, is_ragged=False).continues_chunks == continues_chunks


def test_layers_that_hand_over_another_dtype_have_no_kernel(tmp_path: Path) -> None:
    """Which reads the backend's bytes."""
    config = transformers.Starcoder2Config(**SIZES | {"hidden_size": 128})
    reference_model("starcoder2", tmp_path, config=config)
    backend = choose_backend(torch.bfloat16, torch.device("cpu"))
    model = load_library_modules(tmp_path, backend, Packed("none", 32), config)
    wider = torch.nn.Identity()
    wider.register_forward_hook(lambda _, __, output: output.float())
    attention = model.model.layers[1].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj, wider)
    register()
    model.set_attn_implementation(ATTENTION)
    executor = TransformersModel(model, backend, is_ragged=True)
    assert executor.kernels.keys() == executor.shapes.keys() - {1}


def test_every_question_that_the_library_can_ask_of_a_cache_is_answered_or_refused() -> None:
    cache = PassingCache()
    for name in [
        *(each for each in dir(transformers.Cache) if not each.startswith("_")),
        "layers",
        "seen_tokens",
        "max_length",
    ]:
        if name in ANSWERS:
            getattr(cache, name)
        else:
            with pytest.raises(Unsupported):
                getattr(cache, name)
    with pytest.raises(Unsupported):
        len(cache)
    assert {name for name in ANSWERS if not name.startswith("__")} == {
        "update",
        "note",
        "get_seq_length",
        "get_query_offset",
        "get_mask_sizes",
        "get_conv_state",
        "update_conv_state",
        "get_recurrent_state",
        "update_recurrent_state",
        "is_recording_past",
        "state",
        "is_sliding",
        "is_linear",
        "is_dummy",
        "is_compileable",
    }


def test_bfloat16_and_a_cache_of_int8() -> None:
    some = prompts(4, SIZES["vocab_size"])
    exact = run_on_library(DEMO_MODEL).generate(some, 1)
    logits = [run_on_library(DEMO_MODEL, dtype=torch.bfloat16), run_on_library(DEMO_MODEL, kv_group=8)]
    engine = run_on_library(DEMO_MODEL)
    assert engine.generate(some, 1) == exact
    for other in logits:
        other.generate(some, 1)
        for number in range(len(some)):
            expected, found = engine.logits[number][0], other.logits[number][0]
            assert found.dtype == torch.float32
            assert float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("cap", [None, 3.0])
def test_attention_with_sinks_and_caps_against_float64(cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, dim, generator=generator)
        for heads, length, dim in ((4, 3, 24), (2, 7, 24), (2, 7, 16))
    )
    sinks = torch.randn(4, generator=generator)
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
    found = masked_attention(q, k, v, mask, scale=0.3, softcap=cap, sinks=sinks)
    for sequence, head, query in [(0, 0, 0), (0, 3, 2), (1, 1, 1), (1, 2, 0)]:
        scores = k[sequence, head // 2].double() @ q[sequence, head, query].double() * 0.3
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        weights = scores[mask[sequence, 0, query]].exp()
        expected = (
            weights
            @ v[sequence, head // 2][mask[sequence, 0, query]].double()
            / (weights.sum() + sinks[head].double().exp())
        )
        torch.testing.assert_close(found[sequence, head, query].double(), expected, atol=1e-6, rtol=1e-5)


def load(folder: Path, max_model_len: int = 512) -> None:
    load_modules = partial(load_library_modules, folder, FLOAT32, Packed("none", 32))
    load_transformers_model(folder, FLOAT32, max_model_len, load_modules)


REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "recurrent-gemma": (
        transformers.RecurrentGemmaConfig(**SIZES, head_dim=16, lru_width=64, attention_window_size=24),
        "keeps other state than keys and values",
    ),  # in its modules, where no cache sees it
    "openai-gpt": (transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2), "no KV cache"),
    "bert": (transformers.BertConfig(**HEADS), "not causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_a_paged_cache_cannot_serve_are_refused(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(
        tmp_path
    )  # the usual small weights: what tokens do to each other is little
    with pytest.raises(StartupError, match=reason) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_what_comes_with_code_or_with_an_encoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(transformers.T5Config().to_json_string())
    with pytest.raises(StartupError, match="t5 is an encoder-decoder"):
        load(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it was run')\n")
    file.write_text(
        json.dumps(
            {
                "model_type": "own",
                "auto_map": {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"},
            }
        )
    )
    with pytest.raises(StartupError, match="code that comes with it"):
        load(tmp_path)
    file.write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(StartupError, match="can't read config.json"):
        load(tmp_path)
    file.write_text(transformers.CLIPConfig().to_json_string())
    with pytest.raises(StartupError, match="clip is not a language model"):
        load(tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
    }
    file.write_text(
        transformers.Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=128).to_json_string()
    )
    with pytest.raises(StartupError, match="--max-model-len 128"):
        load(tmp_path)


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    make("phi", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"no tensor model\.layers\.1\.self_attn\.q_proj\.weight"):
        load(tmp_path)
    save_file(
        tensors | {"model.layers.1.self_attn.q_proj.weight": lost[:3].clone()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(StartupError, match=r"q_proj\.weight has the shape \(3, 64\), .* says \(64, 64\)"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"holds no \*\.safetensors"):
        load(tmp_path)


def test_the_engine_chooses_by_architecture_and_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("gpt2", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    files = open_model(str(tmp_path))
    assert files.max_model_len == 512
    small: dict[str, Any] = {"kv_cache_memory": "1MiB", "dtype": "float32"}
    with caplog.at_level(logging.INFO):
        engine = build_engine(ComputeSettings(**small), files)
    assert engine.runner.model.implementation == "transformers (ragged)"
    assert engine.max_model_len == 512 and engine.runner.vocab_size == 512
    demo = open_model("demo")
    assert build_engine(ComputeSettings(**small), demo).runner.model.implementation == "native"
    assert (
        build_engine(ComputeSettings(**small, model_impl="transformers"), demo).runner.model.implementation
        == "transformers (ragged)"
    )
    make("bloom-alibi", tmp_path / "bloom")
    (tmp_path / "bloom" / "tokenizer.json").write_text("{}")
    bloom = open_model(str(tmp_path / "bloom"))
    assert bloom.max_model_len is None
    unbounded = build_engine(ComputeSettings(**small), bloom)
    assert unbounded.max_model_len == unbounded.runner.kv_cache.num_blocks * 16
    assert build_engine(ComputeSettings(**small, max_model_len=100), bloom).max_model_len == 100
    with pytest.raises(StartupError, match="GPT2LMHeadModel is not supported"):
        build_engine(ComputeSettings(**small, model_impl="native"), files)
    with pytest.raises(StartupError, match="--quantization w8a8 runs on a CPU in bfloat16 only"):
        build_engine(ComputeSettings(**small, quantization="w8a8"), files)
    build_engine(ComputeSettings(kv_cache_memory="1MiB", dtype="bfloat16", quantization="w8a8"), files)


def test_an_error_of_the_library_is_a_refusal_that_names_it(tmp_path: Path) -> None:
    config = transformers.BertConfig(**HEADS)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # which only the library reads
    with pytest.raises(
        StartupError, match=f"^{tmp_path.name} can't run on the transformers library: [A-Z][A-Za-z]+: .+"
    ) as raised:
        build_engine(ComputeSettings(kv_cache_memory="1MiB", dtype="float32"), open_model(str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_a_refusal_at_the_command_line_is_one_line(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(REFUSED["recurrent-gemma"][0]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    said = refused("services.compute", tmp_path, model=str(tmp_path))
    assert said.splitlines()[-1].startswith("penstock: RecurrentGemmaForCausalLM can't run over a paged KV cache: ")
    assert "Traceback" not in said
