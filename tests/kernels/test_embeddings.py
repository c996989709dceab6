"""Embeddings: transformers' hidden states, pooled; and the same bits alone, in chunks, in a batch,
after a preemption, and beside a prefix cache.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from services.compute.execution.model_runner import ModelRunner
from services.compute.execution.pooling import NOT_FINITE, pool, read_dense_layers
from services.compute.loop.engine import build_engine
from services.compute.scheduling.policy import StepPolicy
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Request, Sequence, Tokens
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.files import DEMO_MODEL, open_model
from shared.model.sampling_params import SamplingParams
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from shared.wire.messages import EmbeddingParams
from tests.kernels.families import SIZES, Engine, reference_model
from tests.kernels.test_prompt_logprobs import random_prompts
from tests.kernels.test_transformers_models import ONE_BY_ONE, RAGGED

WAYS = ("mean", "last", "cls")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ENCODERS: dict[str, PretrainedConfig] = {
    "bert": transformers.BertConfig(**SMALL, max_position_embeddings=48),
    "roberta": transformers.RobertaConfig(
        **SMALL, max_position_embeddings=50, pad_token_id=1
    ),  # whose positions begin at 2
    "distilbert": transformers.DistilBertConfig(
        vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=48
    ),
    "mpnet": transformers.MPNetConfig(**SMALL, max_position_embeddings=50),
    "modernbert": transformers.ModernBertConfig(
        **SMALL,
        max_position_embeddings=48,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "gemma3-bidirectional": transformers.Gemma3TextConfig(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=48,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    ),  # EmbeddingGemma
}


def embed(scheduler: Scheduler, runner: ModelRunner, prompts: list[list[int]], asked: EmbeddingParams) -> list[Any]:
    """compute's loop without Redis: the vectors, in the order of the prompts."""
    sequences = [
        Sequence(Request(number, str(number), SamplingParams(max_tokens=0), embedding=asked), Tokens(list(prompt)))
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    found: dict[int, Any] = {}
    while scheduler.num_unfinished:
        batch = scheduler.schedule(StepPolicy(splits_prompts=runner.model.splits_prompts))
        assert batch is not None and batch.sampled == []
        vectors, failures = pool(runner.pooled_states(batch, runner.run(batch)).numpy(), batch, scheduler.get)
        assert failures == {}
        for handle, vector in vectors.items():
            found[handle] = vector
            scheduler.finish(scheduler.get(handle))
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
    return [found[number] for number in range(len(prompts))]


def pooled(states: torch.Tensor, pooling: str) -> Any:
    """states: [tokens, hidden]. As sentence-transformers does, of length 1."""
    vector = {"mean": states.double().mean(0), "last": states[-1].double(), "cls": states[0].double()}[pooling]
    return (vector / vector.norm()).numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "impl"),
    [
        *((name, impl) for name in ("llama3", "gemma2", "demo") for impl in ("native", "transformers")),
        *((name, "transformers") for name in ("gpt2", "bloom-alibi")),
    ],
)
def test_they_are_transformers_hidden_states_pooled(name: str, impl: str, tmp_path: Path) -> None:
    reference, folder = (
        reference_model(name, tmp_path, config=(RAGGED | ONE_BY_ONE).get(name)),
        DEMO_MODEL if name == "demo" else tmp_path,
    )
    prompts = random_prompts()
    engine = Engine(folder, max_batched_tokens=70, model_impl=impl)
    for pooling in WAYS:
        vectors = embed(engine.scheduler, engine.runner, prompts, EmbeddingParams(pooling))
        for prompt, vector in zip(prompts, vectors, strict=True):
            with torch.inference_mode():
                states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
            np.testing.assert_allclose(vector, pooled(states, pooling), atol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_bits_are_the_same_in_any_company(quantization: str, pooling: Any, tmp_path: Path) -> None:
    """On the native kernels: alone; in a batch, in chunks of another size; with so few blocks that
    sequences are preempted; and, of the last token, on a prefix that was computed before."""
    reference_model("qwen3", tmp_path)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": quantization}
    prompts, asked = random_prompts(), EmbeddingParams(pooling)
    lone = Engine(tmp_path, **kind, max_batched_tokens=512)
    alone = [embed(lone.scheduler, lone.runner, [prompt], asked)[0].tobytes() for prompt in prompts]
    for more in (
        {"max_batched_tokens": 70},
        {"max_batched_tokens": 70, "num_blocks": 9, "strategy": "paged"},
        {"max_batched_tokens": 64, "max_num_seqs": 3},
    ):
        crowd = Engine(tmp_path, **kind, **more)
        for _ in range(2):
            assert [vector.tobytes() for vector in embed(crowd.scheduler, crowd.runner, prompts, asked)] == alone, more
        assert (crowd.scheduler.prefixes.num_hits > 0) == (pooling == "last")


@pytest.fixture(params=sorted(ENCODERS))
def encoder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny encoder with random weights, saved with a tokenizer."""
    torch.manual_seed(3)
    config = ENCODERS[request.param]
    masked = transformers.AutoModelForMaskedLM
    kind = masked if type(config) in masked._model_mapping else transformers.AutoModel
    model = kind.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    save_word_tokenizer(tmp_path)
    return tmp_path


def save_word_tokenizer(folder: Path) -> None:
    """One that knows a few dozen words. [CLS] stands before a text, [SEP] after it and between two texts."""
    vocab = {
        word: number
        for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(60))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)


def test_an_encoder_whose_weights_are_no_numbers_is_refused(encoder: Path) -> None:
    tensors = load_file(encoder / "model.safetensors")
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor[0, 0] = float("nan")
    save_file(tensors, encoder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match="its results are NaN or infinite"):
        build_engine(
            ComputeSettings(model=str(encoder), dtype="float32", num_threads=1, max_num_seqs=4),
            open_model(str(encoder), weights=True),
        )


def test_encoders_read_in_both_directions_and_alike_in_any_company(encoder: Path) -> None:
    engine = build_engine(
        ComputeSettings(model=str(encoder), dtype="float32", num_threads=1, max_num_seqs=4),
        open_model(str(encoder), weights=True),
    )
    assert engine.is_encoder and engine.pooling == "mean" and engine.max_model_len == 48
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(4, 64, (length,), generator=generator).tolist() for length in (1, 2, 17, 48, 30, 48, 3, 48)
    ]
    reference = transformers.AutoModel.from_pretrained(encoder, dtype=torch.float32)
    for pooling in WAYS:
        vectors = embed(engine.scheduler, engine.runner, prompts, EmbeddingParams(pooling))
        for prompt, vector in zip(prompts, vectors, strict=True):
            with torch.inference_mode():
                states = reference(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            np.testing.assert_allclose(vector, pooled(states, pooling), atol=1e-5)
            assert (
                embed(engine.scheduler, engine.runner, [prompt], EmbeddingParams(pooling))[0].tobytes()
                == vector.tobytes()
            )


BARE: dict[str, PretrainedConfig] = {
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
}


@pytest.mark.parametrize("name", BARE)
def test_a_decoder_without_a_head_makes_embeddings_and_no_text(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    reference = transformers.AutoModel.from_config(BARE[name], dtype=torch.float32).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.12)
    reference.save_pretrained(tmp_path)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    engine = build_engine(
        ComputeSettings(dtype="float32", num_threads=1, max_model_len=256, kv_cache_memory="8MiB"),
        open_model(str(tmp_path), weights=True),
    )
    assert engine.runner.model.implementation == "native" and engine.is_encoder and engine.pooling == "last"
    prompts = random_prompts()
    vectors = embed(engine.scheduler, engine.runner, prompts, EmbeddingParams("last"))
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, pooled(states, "last"), atol=1e-4)


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    """As sentence-transformers writes them: the vector is normalized and shortened behind them."""
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    layers = [torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 6)]
    for number, (layer, name) in enumerate(zip(layers, ("linear.Identity", "activation.Tanh"), strict=True), 2):
        folder = tmp_path / f"{number}_Dense"
        folder.mkdir()
        modules.append({"path": folder.name, "type": "sentence_transformers.models.Dense"})
        (folder / "config.json").write_text(json.dumps({"activation_function": f"torch.nn.modules.{name}"}))
        save_file(
            {f"linear.{each}": tensor for each, tensor in layer.state_dict().items()}, folder / "model.safetensors"
        )
    assert read_dense_layers(tmp_path, 4) == ()
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    dense = read_dense_layers(tmp_path, 4)
    assert len(read_dense_layers(tmp_path, None)) == 2
    states = torch.randn(3, 4)
    asked = EmbeddingParams("mean", 5)
    sequence = Sequence(Request(1, "1", SamplingParams(max_tokens=0), embedding=asked), Tokens([7] * 3, 3))
    batch = ScheduledBatch((BatchRow(1, (7,) * 3, 0, (), pooled=range(3)),), 0)
    found, failures = pool(states.numpy(), batch, {1: sequence}.__getitem__, dense)
    with torch.inference_mode():
        expected = torch.tanh(layers[1](layers[0](states.mean(0))))[:5]
    assert failures == {}
    np.testing.assert_allclose(found[1], expected / expected.norm(), atol=1e-6)
    (tmp_path / "3_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.ReLU"}))
    with pytest.raises(StartupError, match="activation_function 'torch.nn.ReLU' is not supported"):
        read_dense_layers(tmp_path, 4)
    (tmp_path / "3_Dense" / "config.json").unlink()
    with pytest.raises(StartupError, match="its Dense layers can't be read"):
        read_dense_layers(tmp_path, 4)


@pytest.mark.parametrize(
    ("num_inputs", "tensors", "message"),
    [
        (5, {}, r"_Dense: linear.weight has the shape \(8, 4\), linear.bias \(8,\); a layer behind 5 dimensions has"),
        (4, {"linear.bias": torch.zeros(1)}, r"linear.bias \(1,\)"),
        (4, {"linear.weight": torch.zeros(4)}, r"linear.weight has the shape \(4,\)"),
        (None, {"linear.weight": torch.zeros(8)}, "a layer behind any dimensions"),
    ],
)
def test_a_dense_layer_of_another_shape_is_refused_at_start(
    num_inputs: int | None, tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    modules = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text("{}")
    save_file(
        {"linear.weight": torch.zeros(8, 4), "linear.bias": torch.zeros(8)} | tensors,
        tmp_path / "2_Dense" / "model.safetensors",
    )
    with pytest.raises(StartupError, match=message):
        read_dense_layers(tmp_path, num_inputs)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from(WAYS),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4) | st.none(),
    st.booleans(),
)
def test_any_chunks_make_the_same_vector(
    chunks: list[int], pooling: Any, seed: int, dimensions: int | None, is_normalized: bool
) -> None:
    asked = EmbeddingParams(pooling, dimensions, is_normalized)
    states = np.random.default_rng(seed).standard_normal((sum(chunks), 4), np.float32) * 1000

    def run(lengths: list[int]) -> bytes:
        sequence = Sequence(
            Request(1, "1", SamplingParams(max_tokens=0), embedding=asked), Tokens([7] * sum(chunks), sum(chunks))
        )
        first = 0
        found: dict[int, Any] = {}
        for length in lengths:
            part = sequence.pooled_tokens(first, first + length)
            row = BatchRow(
                1, (7,) * length, first, (), pooled=range(part.start - first, part.stop - first) if part else part
            )
            assert not found
            found, failures = pool(
                states[part.start : part.stop] if part else states[:0],
                ScheduledBatch((row,), 0),
                {1: sequence}.__getitem__,
            )
            assert failures == {}
            first += length
        return bytes(found[1].tobytes())

    whole = run([sum(chunks)])
    assert run(chunks) == whole
    vector = np.frombuffer(whole, np.float32)
    plain = {"mean": states.astype(np.float64).mean(0), "last": states[-1], "cls": states[0]}[pooling][
        :dimensions
    ].astype(np.float64)
    np.testing.assert_allclose(
        vector,
        plain / np.linalg.norm(plain) if is_normalized else plain,
        rtol=1e-5,
        atol=1e-5 * float(np.abs(plain).max()),
    )


def test_numbers_that_are_none_fail_their_own_request() -> None:
    sequences = {
        number: Sequence(
            Request(
                number,
                str(number),
                SamplingParams(max_tokens=0),
                embedding=EmbeddingParams("mean", is_normalized=False),
            ),
            Tokens([7], 1),
        )
        for number in (1, 2)
    }
    rows = tuple(BatchRow(number, (7,), 0, (), pooled=range(1)) for number in sequences)
    found, failures = pool(np.array([[np.nan], [2.0]], np.float32), ScheduledBatch(rows, 0), sequences.__getitem__)
    assert failures == {1: NOT_FINITE} and found[2].tolist() == [2.0]
