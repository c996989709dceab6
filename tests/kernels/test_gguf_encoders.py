"""GGUF files of encoders: the vectors that transformers makes with the weights that the blocks mean, and the
same bits in any company."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import PoolingType
from tokenizers import Tokenizer
from transformers import BertTokenizer, PretrainedConfig

from services.compute.loop.engine import Engine, build_engine
from services.compute.weights.library_attention import LayerOfJoint
from services.compute.weights.library_modules import FileEmbedding, KernelLinear, KernelMlp
from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.settings import ComputeSettings
from shared.wire.messages import EmbeddingParams
from tests.kernels.gguf_files import ARCHITECTURES, Kind, Writer
from tests.kernels.test_embeddings import WAYS, embed, pooled
from tests.kernels.test_gguf import cache  # noqa: F401
from tests.unit.test_gguf_tokenizer import SCRIPTS, wordpiece

ARCHITECTURES |= {"bert": "bert", "nomic_bert": "nomic-bert"}
VOCABULARY, METADATA = wordpiece(is_cased=False)
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY) + 1,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # of which the writer asks
    "intermediate_size": 96,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "bert": transformers.BertConfig(**SIZES, max_position_embeddings=300),
    "nomic-bert": transformers.NomicBertConfig(**SIZES, max_position_embeddings=300),
}
# Nomic's published names, by the library's
PUBLISHED = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


class EncoderWriter(Writer):
    """With WordPiece; of Nomic's models, the three parts of attention are one tensor."""

    pooling = PoolingType.CLS

    def metadata(self) -> None:
        self.sizes(self.config.num_key_value_heads)
        self.writer.add_layer_norm_eps(self.config.layer_norm_eps)
        self.writer.add_causal_attention(False)
        self.writer.add_pooling_type(self.pooling)
        if self.architecture == "nomic-bert":
            self.writer.add_rope_freq_base(self.config.rope_parameters["rope_theta"])

    def rope_factors(self) -> None:
        """No architecture here has any."""

    def tokenizer(self) -> None:
        writer = self.writer
        writer.add_token_type_count(self.config.type_vocab_size)
        writer.add_tokenizer_model(METADATA["tokenizer.ggml.model"])
        writer.add_token_list(METADATA["tokenizer.ggml.tokens"])
        writer.add_token_types(METADATA["tokenizer.ggml.token_type"])
        for name, number in METADATA.items():
            if name.endswith("_token_id"):
                writer.add_uint32(name, number)

    def tensor(self, name: str, parameter: torch.Tensor, kind: Kind, *, seed: int) -> None:
        if self.architecture == "bert":
            is_small = "position_embeddings" in name or "token_type" in name
            super().tensor(name, parameter, Kind.F32 if is_small else kind, seed=seed)
        elif "q_proj" in name:
            attention = self.model.get_submodule(name.removesuffix(".q_proj.weight"))
            parts = [getattr(attention, f"{each}_proj").weight.data for each in "qkv"]
            whole = torch.cat(parts)
            self.matrix(f"encoder.layers.{name.split('.')[1]}.attn.Wqkv.weight", whole, kind, seed=seed)
            for part, meant in zip(parts, whole.chunk(3), strict=True):
                part.copy_(meant)
        elif "k_proj" not in name and "v_proj" not in name:
            for mine, published in PUBLISHED.items():
                name = name.replace(mine, published)
            name = name.replace("layers.", "encoder.layers.") if name.startswith("layers.") else name
            super().tensor(name, parameter, Kind.F32 if "token_type" in name else kind, seed=seed)


def make(name: str, path: Path, kind: Kind = Kind.F32, left_out: frozenset[str] = frozenset()) -> Any:
    """The model of the file that it writes."""
    torch.manual_seed(7)
    bare: dict[str, Any] = {"add_pooling_layer": False}
    model = transformers.AutoModel.from_config(CONFIGS[name], dtype=torch.float32, **bare).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2).requires_grad_(False)
    EncoderWriter(model, path, left_out).write(kind)
    return model


def run(path: Path, dtype: str = "float32", **options: Any) -> Engine:
    settings = ComputeSettings(model=str(path), dtype=dtype, num_threads=1, max_num_seqs=4, **options)
    return build_engine(settings, open_model(str(path), weights=True))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_vectors_are_transformers_and_alike_in_any_company(name: str, kind: Kind, tmp_path: Path) -> None:
    model, path = make(name, tmp_path / "model.gguf", kind), tmp_path / "model.gguf"
    tokenizer = Tokenizer.from_file(str(open_model(str(path)).folder / "tokenizer.json"))
    original = BertTokenizer(VOCABULARY, do_lower_case=True)
    prompts = [tokenizer.encode(text).ids[:300] for text in SCRIPTS]
    assert prompts == [original.encode(text)[:300] for text in SCRIPTS]
    exact, quantized = run(path), run(path, "bfloat16")
    assert exact.is_encoder and exact.pooling == "cls" and exact.max_model_len == 300
    for pooling in WAYS:
        asked = EmbeddingParams(pooling)
        vectors, near = (embed(each.scheduler, each.runner, prompts, asked) for each in (exact, quantized))
        for prompt, vector, other in zip(prompts, vectors, near, strict=True):
            with torch.inference_mode():
                expected = pooled(model(input_ids=torch.tensor([prompt])).last_hidden_state[0], pooling)
            np.testing.assert_allclose(vector, expected, atol=1e-5)
            assert other @ expected > 0.999
        for engine, found in ((exact, vectors), (quantized, near)):
            alone = [embed(engine.scheduler, engine.runner, [prompt], asked)[0] for prompt in prompts]
            assert [each.tobytes() for each in alone] == [each.tobytes() for each in found]


def test_layers_and_the_embedding_stay_in_the_files_blocks(tmp_path: Path) -> None:
    make("nomic-bert", tmp_path / "model.gguf", Kind.Q8_0)
    executor: Any = run(tmp_path / "model.gguf", "bfloat16").runner.model
    layer = executor.model.layers[1]
    assert isinstance(executor.model.embeddings.word_embeddings, FileEmbedding) and isinstance(layer.mlp, KernelMlp)
    assert all(isinstance(getattr(layer.self_attn, f"{each}_proj"), LayerOfJoint) for each in "qkv")
    assert isinstance(layer.self_attn.o_proj, KernelLinear)
    assert layer.self_attn.k_proj(torch.zeros(1, 64)).shape == (1, 64)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--quantization w8a8", "w8a8"), ("--quantize-attention-output", True), ("--quantize-lm-head", True)],
)
def test_an_encoder_is_not_quantized(option: str, value: object, tmp_path: Path) -> None:
    make("bert", tmp_path / "model.gguf")
    name = option.split()[0].removeprefix("--").replace("-", "_")
    with pytest.raises(StartupError, match=f"^{option}: .* is an encoder; these are not quantized$"):
        run(tmp_path / "model.gguf", "bfloat16", **{name: value})


@pytest.mark.parametrize(
    ("name", "left_out", "change", "message"),
    [
        ("bert", "encoder.layer.1.output.dense.bias", None, "the file has no tensor blk.1.ffn_down.bias"),
        ("bert", "embeddings.token_type_embeddings.weight", None, "the file has no tensor token_types.weight"),
        ("nomic-bert", "layers.2.self_attn.q_proj.weight", None, "the file has no tensor blk.2.attn_qkv.weight"),
        ("bert", "", lambda writer: writer.add_pooling_type(PoolingType.RANK), "bert.pooling_type is 4; of encoders"),
        ("bert", "", lambda writer: writer.add_causal_attention(True), "bert.attention.causal is true"),
    ],
)
def test_what_is_not_read_is_said_by_name(
    name: str,
    left_out: str,
    change: Callable[[Any], None] | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change is not None:
        metadata = EncoderWriter.metadata

        def changed(writer: EncoderWriter) -> None:
            metadata(writer)
            for key in ("bert.pooling_type", "bert.attention.causal"):
                writer.writer.kv_data[0].pop(key)
            change(writer.writer)

        monkeypatch.setattr(EncoderWriter, "metadata", changed)
    make(name, tmp_path / "model.gguf", left_out=frozenset({left_out}))
    with pytest.raises(StartupError, match=message):
        run(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [(PoolingType.NONE, "mean"), (PoolingType.MEAN, "mean"), (PoolingType.CLS, "cls"), (PoolingType.LAST, "last")],
)
def test_a_file_says_how_a_text_becomes_one_vector(
    pooling: PoolingType, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncoderWriter, "pooling", pooling)
    make("bert", tmp_path / "model.gguf")
    assert run(tmp_path / "model.gguf").pooling == expected
