"""A checkpoint to ModelWeights, or to a rank's ModelParts, with a progress bar.

Q, K and V are joined into one matrix, and gate and up, while they are read: one GEMM each. A tensor
is cast, packed and quantized as it is read, so the peak is the model in its final form plus the
tensors of one layer. A rank's part of a layer is a layer of some of its outputs, and is made as
the whole is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from services.compute.backends.backend import Backend, LayerWeights, Linear, Norms, PerLayerProducts
from services.compute.backends.host_memory import give_back_free_memory
from services.compute.backends.matrix import Dense, Joined, Matrix, concatenate, reordered
from services.compute.models.config import IN_EIGHT_BITS, ModelConfig, Packed
from services.compute.models.decoder import EmbeddingRows, ModelWeights, PerLayerWeights
from services.compute.models.moe import Expert, MoeConfig, Router
from services.compute.models.parts import LayerParts, MixtureParts, MlpParts, ModelParts, whole_layer
from services.compute.ranks.parallel.heads import heads_of
from services.compute.ranks.parallel.share import EVERYTHING, Portion, Share
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.hybrid_layers import MatrixRows, has_matrix, projections, read_recurrent, with_gate
from services.compute.weights.mxfp4 import read_expert
from services.compute.weights.safetensors_source import SafetensorsSource
from services.compute.weights.source import in_halves
from services.compute.weights.stacked_experts import is_stacked, read_stacked
from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

# of a router, by its name in a mixture: most families', MiniMax M2's, and ERNIE's
CORRECTIONS = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
)

FACTORS = "router.per_expert_scale"  # Gemma 4's, in a layer
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"


def open_source(location: Path, config: ModelConfig, backend: Backend) -> SafetensorsSource | GgufSource:
    """The tensors of a folder, or of a GGUF file. Raises StartupError."""
    dtype, device = backend.dtype, backend.device
    return (
        GgufSource(location, dtype, device)
        if location.is_file()
        else SafetensorsSource(location, dtype, device, config.quantization_config)
    )


def check_quantizable(location: Path, quantized_as: str, option: str) -> None:
    """Raises StartupError, which names the option that asks for it, where layers keep the form that
    they have in the file. quantized_as: a source's."""
    if option and quantized_as:
        again = "; penstock quantize --calibrate dequantizes it first" if location.is_file() else ""
        raise StartupError(
            f"{option}: {location} is quantized already ({quantized_as}) and keeps its form; only dense checkpoints "
            f"are quantized{again}"
        )


def warn_of_widened(widened: Counter[str], dtype: torch.dtype) -> None:
    """Say in the log what the file holds in fewer bits than the memory. widened: layers, by their form."""
    if widened:
        layers = "; ".join(f"{count} of {form}" for form, count in widened.items())
        log.warning(
            f"layers are widened to {str(dtype).removeprefix('torch.')}: nothing here reads them as the file has them",
            layers=layers,
        )


def load_weights(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    *,
    quantization: str = "none",
    group: int = 32,
    attention_output: bool = False,
    lm_head: bool = False,
) -> ModelWeights:
    """Load all of the model's weights, of a folder or a GGUF file: quantized layer by layer as they
    are read, or packed as `penstock quantize` left them.

    Raises StartupError, naming the tensor that is missing or wrong.
    """
    parts = load_parts(
        folder,
        config,
        backend,
        EVERYTHING,
        quantization=quantization,
        group=group,
        attention_output=attention_output,
        lm_head=lm_head,
    )
    assert parts.embedding is not None and parts.lm_head is not None
    layers = [whole_layer(each, config, backend) for each in parts.layers]
    return ModelWeights(parts.embedding, layers, parts.norm, parts.lm_head, parts.per_layer)


def load_parts(
    folder: Path,
    config: ModelConfig,
    backend: Backend,
    portion: Portion,
    *,
    quantization: str = "none",
    group: int = 32,
    attention_output: bool = False,
    lm_head: bool = False,
) -> ModelParts:
    """Load as much of the weights as a rank has, as load_weights does."""
    if config.packed is not None:
        if quantization not in ("none", config.packed.quantization):
            raise StartupError(
                f"--quantization {quantization}: {folder} is quantized already, as {config.packed.quantization}"
            )
        has_four_bits = config.packed.quantization in IN_EIGHT_BITS
        if has_four_bits and attention_output and not config.packed.attention_output:
            raise StartupError(f"--quantize-attention-output: {folder} is quantized already, without it")
        if has_four_bits and lm_head and not config.packed.lm_head:
            raise StartupError(f"--quantize-lm-head: {folder} is quantized already, without it")
    source = open_source(folder, config, backend)
    packing = Packed(quantization, group, attention_output, lm_head)
    loader = Loader(source, config, backend, config.packed or packing, portion)
    try:
        check_quantizable(folder, source.quantized_as, packing.option)
        embedding = source.embedding((config.vocab_size, config.hidden_size)) if portion.has_embedding else None
        parts = []
        for number in range(config.num_layers) if portion.layers is None else portion.layers:
            parts.append(loader.parts(number))
            give_back_free_memory()
        norm = loader.norm("model.norm.weight", config.hidden_size)
        of_head = replace(loader, portion=EVERYTHING) if portion.is_sharded else loader
        found = ModelParts(
            embedding=embedding,
            layers=parts,
            norm=norm,
            lm_head=of_head.head_part(embedding) if portion.has_head else None,
            per_layer=loader.per_layer_weights() if config.per_layer_size else None,
        )
        # the first rank has a part of everything
        source.report(portion.layers if portion.share.rank == 0 else range(0))
        warn_of_widened(loader.widened, backend.dtype)
        return found
    finally:
        source.close()
        give_back_free_memory()


def norm_names(config: ModelConfig, number: int) -> dict[str, str]:
    """The norms of a layer: the tensor's name in it, by the field of Norms."""
    names = {}
    if config.has_pre_norms:
        names["before_attention"] = "input_layernorm.weight"
        names["before_mlp"] = (
            "pre_feedforward_layernorm.weight" if config.has_post_norms else "post_attention_layernorm.weight"
        )
    if config.has_post_norms:
        names |= {
            "after_attention": "post_attention_layernorm.weight",
            "after_mlp": "post_feedforward_layernorm.weight",
        }
    if config.moe is not None and config.moe.is_beside_mlp:
        names |= {
            "after_dense": "post_feedforward_layernorm_1.weight",
            "before_experts": "pre_feedforward_layernorm_2.weight",
            "after_experts": "post_feedforward_layernorm_2.weight",
            "router": "router.scale",
        }
    if config.per_layer_size:
        names["after_per_layer"] = "post_per_layer_input_norm.weight"
    if config.has_qk_norm and number not in config.recurrent_layers:
        of_heads = ("query_layernorm", "key_layernorm") if config.norms_after_rotation else ("q_norm", "k_norm")
        projected = "qk" if config.shape_of(number).kv_projections else "q"
        names |= {field: f"self_attn.{name}.weight" for field, name in zip(projected, of_heads, strict=False)}
    return names


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes a model's layers from a checkpoint's tensors, or restores them from packed ones: whole, or
    a rank's part of each."""

    source: SafetensorsSource | GgufSource
    config: ModelConfig
    backend: Backend
    packing: Packed
    portion: Portion = EVERYTHING
    # layers, by the form that the file has and no kernel reads
    widened: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> Share:
        return self.portion.share

    def layer(self, number: int) -> LayerWeights:
        """A layer of the whole model."""
        return whole_layer(self.parts(number), self.config, self.backend)

    def parts(self, number: int) -> LayerParts:
        config, prefix, shape = self.config, f"model.layers.{number}.", self.config.shape_of(number)
        hidden, head_dim = config.hidden_size, shape.head_dim
        q_size, kv_size = config.num_heads * head_dim, shape.num_kv_heads * head_dim
        projected = "qkv"[: 1 + shape.kv_projections]
        attention = prefix + "self_attn."
        sizes = {"q": q_size, "k": kv_size} if config.is_qk_norm_joint else {"q": head_dim, "k": head_dim}
        norms = {
            field: self.norm(prefix + name, sizes.get(field, hidden))
            for field, name in norm_names(config, number).items()
        }
        if number in config.recurrent_layers:
            return self.recurrent_parts(number, Norms(**norms))
        own = heads_of(config, self.share.size, may_repeat=not self.portion.is_sharded)[self.share.rank]
        heads = [scaled(each, head_dim) for each in (own.queries, own.kv, own.kv)][: len(projected)]
        return LayerParts(
            norms=Norms(**norms),
            qkv=self.joined(prefix + "qkv.", with_gate(config, attention), has_bias=config.has_qkv_bias)
            if config.has_attention_gate
            else self.linear(
                prefix + "qkv.",
                [attention + "qkv_proj."]
                if config.has_fused_projections
                else [attention + f"{name}_proj." for name in projected],
                [(size, hidden) for size in (q_size, kv_size, kv_size)[: len(projected)]],
                config.has_qkv_bias,
                parts=heads,
                num_rotated=2 if config.rotates_neighbours else 0,
            ),
            output=self.columns(
                prefix + "output.",
                attention + "o_proj.",
                (hidden, q_size),
                config.has_output_bias,
                self.packing.of_output,
            ),
            mlp=self.mlp(number, norms.get("router")),
            sinks=self.source.dense(attention + "sinks", (config.num_heads,), [own.queries]).float()
            if config.has_sinks and own.queries
            else None,
            scalar=float(self.source.dense(prefix + "layer_scalar", (1,))) if config.has_layer_scalar else 1.0,
            per_layer=self.per_layer_products(prefix) if config.per_layer_size else None,
        )

    def recurrent_parts(self, number: int, norms: Norms) -> LayerParts:
        config, prefix, sizes = self.config, f"model.layers.{number}.", self.config.recurrence
        assert sizes is not None
        is_packed, (pieces, output) = config.packed is not None, projections(sizes, self.source, prefix)
        return LayerParts(
            norms=norms,
            qkv=self.joined(prefix + "qkv.", pieces, has_bias=False),
            output=self.columns(
                prefix + "output.",
                output,
                (config.hidden_size, sizes.inner),
                has_bias=False,
                quantization=self.packing.of_output,
            ),
            mlp=self.mlp(number, None),
            sinks=None,
            recurrent=read_recurrent(sizes, self.source, prefix, is_packed=is_packed),
        )

    def mlp(self, number: int, router_norm: Tensor | None) -> MlpParts | MixtureParts:
        prefix, moe = f"model.layers.{number}.", self.config.moe
        if moe is not None and number in moe.sparse_layers:
            return self.mixture(prefix, moe, router_norm)
        return self.plain_mlp(prefix, self.config.intermediate_size_of(number))

    def per_layer_products(self, prefix: str) -> PerLayerProducts:
        hidden, size = self.config.hidden_size, self.config.per_layer_size
        gate, projection = prefix + "per_layer_input_gate.", prefix + "per_layer_projection."
        return PerLayerProducts(
            self.whole(gate, gate, (size, hidden), has_bias=False, quantization=None),
            self.whole(projection, projection, (hidden, size), has_bias=False, quantization=None),
        )

    def per_layer_weights(self) -> PerLayerWeights:
        """The table is read by rows, from the file where the device is a CPU: it is half of a small model."""
        config, name = self.config, "model.per_layer_model_projection."
        width = config.num_layers * config.per_layer_size
        return PerLayerWeights(
            self.source.embedding((config.per_layer_vocab_size, width), PER_LAYER_EMBEDDING),
            self.whole(name, name, (width, config.hidden_size), has_bias=False, quantization=None),
            self.norm("model.per_layer_projection_norm.weight", config.per_layer_size),
        )

    def plain_mlp(self, prefix: str, intermediate_size: int) -> MlpParts:
        names = (
            ["gate_up_proj", "down_proj"]
            if self.config.has_fused_projections
            else ["gate_proj", "up_proj", "down_proj"]
        )
        return self.gated(
            prefix, [f"{prefix}mlp.{name}." for name in names], intermediate_size, self.config.has_mlp_bias
        )

    def gated(self, name: str, sources: list[str], inter: int, has_bias: bool) -> MlpParts:
        """name: when it is packed; sources: of gate, up and down, or of gate and up in one, and down."""
        hidden, part = self.config.hidden_size, self.share.part(inter)
        fused = sources[0].replace(".gate_proj.", ".gate_up_proj.")
        if len(sources) == 3 and isinstance(self.source, SafetensorsSource) and has_matrix(self.source, fused):
            sources = [fused, sources[-1]]
        gate_up = self.linear(
            name + "gate_up.", sources[:-1], [(inter, hidden)] * 2, has_bias, is_gated=True, parts=[part, part]
        )
        return MlpParts(gate_up, self.columns(name + "down.", sources[-1], (hidden, inter), has_bias, None))

    def mixture(self, prefix: str, moe: MoeConfig, router_norm: Tensor | None) -> MixtureParts:
        """Load experts by Mixtral's names, by Qwen's, by gpt-oss' or by Gemma's; their experts each a tensor
        of its own, or all in one, as transformers 5 has them in memory."""
        hidden = self.config.hidden_size
        mixtral = prefix + "block_sparse_moe."
        # a GGUF file has its router under all families' names
        is_mixtral = self.source.has(mixtral + "gate.weight") and not self.source.has(prefix + "mlp.gate.weight")
        block = prefix if moe.is_beside_mlp else mixtral if is_mixtral else prefix + "mlp."
        router = self.router(prefix, block, moe, router_norm)
        shared = shared_gate = None
        if moe.shared_intermediate_size:
            names = [f"{block}{moe.shared_name}.{which}_proj." for which in ("gate", "up", "down")]
            shared = self.gated(prefix + "shared.", names, moe.shared_intermediate_size, has_bias=False)
        if moe.has_shared_gate:
            shared_gate = self.whole(
                prefix + "shared.gate.", block + "shared_expert_gate.", (1, hidden), has_bias=False
            )
        numbers = self.share.part(moe.num_experts, unit=1)
        if moe.has_bias and isinstance(self.source, SafetensorsSource) and self.config.packed is None:
            experts = [self.gpt_oss_expert(block + "experts.", number, moe) for number in numbers]
        elif isinstance(self.source, SafetensorsSource) and self.source.has(block + "experts.gate_up_proj"):
            experts = self.fused_experts(block, moe, numbers)
        else:
            experts = [self.one_expert(prefix, block, number, moe) for number in numbers]
        dense = self.plain_mlp(prefix, self.config.intermediate_size) if moe.is_beside_mlp else None
        return MixtureParts(router, numbers, tuple(experts), shared, shared_gate, dense)

    def router(self, prefix: str, block: str, moe: MoeConfig, norm: Tensor | None) -> Router:
        """A mixture's, with its weights as the file has them: what is float32 there becomes a sum of three
        matrices in the backend's dtype."""
        n, hidden, source = moe.num_experts, self.config.hidden_size, f"{block}{moe.router_name}."
        correction, rest = self.correction(block, moe) if moe.router.has_correction else None, None
        factors = None
        if moe.is_beside_mlp:
            factors = self.source.dense(prefix + FACTORS, (n,), dtype=torch.float32)
        if self.config.packed is not None:
            # other tensors of a layer with an MLP beside the mixture begin with "router."
            name = prefix + ("router.proj." if moe.is_beside_mlp else "router.")
            linear = self.restored(name, [(n, hidden)], moe.has_bias)
            if self.source.has(prefix + "router_rest.data"):
                rest = self.restored(prefix + "router_rest.", [(2 * n, hidden)], has_bias=False)
            return Router(linear, moe.router, correction, rest, norm, factors)
        matrix = self.source.matrix(source, (n, hidden), dtype=torch.float32)
        bias = self.source.dense(source + "bias", (n,)) if moe.has_bias else None
        if isinstance(matrix, Dense):
            parts, left = [], matrix.weight.float()
            for _ in range(3):
                parts.append(left.to(self.backend.dtype))
                left = left - parts[-1].float()
            if any(bool(each.any()) for each in parts[1:]):
                rest = self.backend.make_linear(Dense(torch.cat(parts[1:])))
        return Router(self.backend.make_linear(matrix, bias), moe.router, correction, rest, norm, factors)

    def correction(self, block: str, moe: MoeConfig) -> Tensor:
        """A router's, [experts] float32."""
        name = next((name for name in CORRECTIONS if self.source.has(block + name)), CORRECTIONS[0])
        shape = (1, moe.num_experts) if name == CORRECTIONS[2] else (moe.num_experts,)
        return self.source.dense(block + name, shape, dtype=torch.float32).flatten()

    def one_expert(self, prefix: str, block: str, number: int, moe: MoeConfig) -> Expert:
        which = ("w1", "w3", "w2") if block.endswith("block_sparse_moe.") else ("gate_proj", "up_proj", "down_proj")
        name, names = f"{prefix}experts.{number}.", [f"{block}experts.{number}.{each}." for each in which]
        hidden, inter = self.config.hidden_size, moe.intermediate_size
        gate_up = self.linear(name + "gate_up.", names[:2], [(inter, hidden)] * 2, moe.has_bias, is_gated=True)
        return Expert(_there(gate_up), self.whole(name + "down.", names[2], (hidden, inter), moe.has_bias, None))

    def fused_experts(self, block: str, moe: MoeConfig, numbers: range) -> list[Expert]:
        """Load some experts from [experts, 2 * intermediate, hidden], gates first, and [experts, hidden,
        intermediate], or, in Qwen 3 VL's published files, with the last two turned round."""
        assert isinstance(self.source, SafetensorsSource)
        source, hidden, inter = self.source, self.config.hidden_size, moe.intermediate_size
        is_turned = source.stored_shape(block + "experts.down_proj")[1:] == (inter, hidden) != (hidden, inter)

        def matrices(which: str, shape: tuple[int, int]) -> list[Matrix]:
            name = f"{block}experts.{which}_proj"
            if is_stacked(source, name):
                return [read_stacked(source, name, number, shape, is_turned=is_turned) for number in numbers]
            whole = source.dense(name, (moe.num_experts, *(shape[::-1] if is_turned else shape)), [numbers])
            return [Dense(each.T.contiguous() if is_turned else each) for each in whole]

        pairs = zip(matrices("gate_up", (2 * inter, hidden)), matrices("down", (hidden, inter)), strict=True)
        return [self.expert(gate_up, down, []) for gate_up, down in pairs]

    def gpt_oss_expert(self, block: str, number: int, moe: MoeConfig) -> Expert:
        """Load one of experts in which gates and ups take turns."""
        assert isinstance(self.source, SafetensorsSource)
        hidden, inter = self.config.hidden_size, moe.intermediate_size
        order = torch.arange(2 * inter).view(-1, 2).T.flatten()
        gate_up, gate_up_bias = read_expert(self.source, block + "gate_up_proj", number, (2 * inter, hidden), order)
        down, down_bias = read_expert(self.source, block + "down_proj", number, (hidden, inter), torch.arange(hidden))
        return self.expert(gate_up, down, [gate_up_bias, down_bias])

    def expert(self, gate_up: Matrix, down: Matrix, biases: list[Tensor]) -> Expert:
        """biases: of both, or none."""
        layers = [
            self.made([matrix], biases[at : at + 1], None, is_gated=at == 0, whole_n=matrix.shape[0])
            for at, matrix in enumerate((gate_up, down))
        ]
        return Expert(*layers)

    def norm(self, name: str, size: int) -> Tensor:
        """The weight of a norm. A packed checkpoint has it with the offset."""
        weight = self.source.dense(name, (size,))
        return weight if self.config.packed is not None else (weight.float() + self.config.norm_offset).to(weight.dtype)

    def head(self, embedding: EmbeddingRows) -> Linear:
        """The last layer of the whole model."""
        return _there(self.head_part(embedding))

    def head_part(self, embedding: EmbeddingRows | None) -> Linear | None:
        """The rank's logits. Where the embedding is tied, the last layer is the embedding's own values,
        packed once more."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        if not self.config.is_tied or self.config.packed is not None:
            return self.columns("lm_head.", "lm_head.", shape, has_bias=False, quantization=self.packing.of_head)
        part = self.share.part(shape[0])
        if not part:
            return None
        head = self.source.tied_head(embedding, shape, None if self.share.size == 1 else [part])
        return self.backend.make_linear(
            head, quantization=self.packing.of_head, group=self.packing.group, whole_n=shape[0]
        )

    def whole(
        self, name: str, source: str, shape: tuple[int, int], has_bias: bool, quantization: str | None = "none"
    ) -> Linear:
        """A layer that every rank has whole."""
        return _there(self.linear(name, [source], [shape], has_bias, quantization=quantization))

    def columns(
        self, name: str, source: str, shape: tuple[int, int], has_bias: bool, quantization: str | None
    ) -> Linear | None:
        """The rank's outputs of a layer."""
        return self.linear(
            name, [source], [shape], has_bias, quantization=quantization, parts=[self.share.part(shape[0])]
        )

    def linear(
        self,
        name: str,
        sources: list[str],
        shapes: list[tuple[int, int]],
        has_bias: bool,
        *,
        is_gated: bool = False,
        quantization: str | None = None,
        parts: Sequence[range] | None = None,
        num_rotated: int = 0,
    ) -> Linear | None:
        """A layer of several matrices with the same inputs, each a source's or all one source's: of
        these parts of their outputs, or of all. It is quantized like most layers unless it says how.
        num_rotated: how many, from the first on, are of heads whose neighbouring dimensions rotate
        together. None: the parts are empty."""
        if parts is not None and not any(parts):
            return None
        rows = None if parts is None or self.share.size == 1 else parts
        if self.config.packed is not None:
            return self.restored(name, shapes, has_bias, is_gated=is_gated, rows=rows)
        of_sources: list[Sequence[range] | None] = [None] * len(sources) if rows is None else [[each] for each in rows]
        if len(sources) < len(shapes):
            of_sources = [None if rows is None else side_by_side(shapes, rows)]
            shapes = [(sum(shape[0] for shape in shapes), shapes[0][1])]
        read = list(zip(sources, shapes, of_sources, strict=True))
        matrices = [self.source.matrix(source, shape, some) for source, shape, some in read]
        biases = (
            [self.source.dense(source + "bias", shape[:1], some) for source, shape, some in read] if has_bias else []
        )
        for number in range(num_rotated):
            matrix = matrices[number]
            assert not isinstance(matrix, Joined)
            order = in_halves(matrix.shape[0], self.config.head_dim)
            matrices[number] = reordered(matrix, order)
            if biases:
                biases[number] = biases[number][order]
        return self.made(matrices, biases, quantization, is_gated=is_gated, whole_n=sum(shape[0] for shape in shapes))

    def joined(self, name: str, pieces: list[MatrixRows], *, has_bias: bool) -> Linear:
        """A layer of rows of matrices whose inputs are the hidden states."""
        shapes = [(piece.height, self.config.hidden_size) for piece in pieces]
        if self.config.packed is not None:
            counts = [(piece.count, k) for piece, (_, k) in zip(pieces, shapes, strict=True)]
            return self.restored(name, counts, has_bias, is_gated=False, rows=None)
        read = [(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
        matrices = [self.source.matrix(piece.source, shape, piece.rows) for piece, shape in read]
        biases = (
            [self.source.dense(piece.source + "bias", shape[:1], piece.rows) for piece, shape in read]
            if has_bias
            else []
        )
        return self.made(matrices, biases, None, is_gated=False, whole_n=sum(piece.count for piece in pieces))

    def made(
        self, matrices: list[Matrix], biases: list[Tensor], quantization: str | None, *, is_gated: bool, whole_n: int
    ) -> Linear:
        """The layer of these matrices, one after the other along the outputs."""
        joined = concatenate(matrices, self.backend.dtype)
        # where a backend has no layers of several forms, all of them are widened
        widened = [each for each in matrices if not isinstance(each, Dense)] if not self.backend.is_kept(joined) else []
        self.widened.update({str(each) for each in widened})
        return self.backend.make_linear(
            joined,
            torch.cat(biases) if biases else None,
            quantization=quantization or self.packing.quantization,
            group=self.packing.group,
            is_gated=is_gated,
            activation=self.config.activation,
            whole_n=whole_n,
        )

    def restored(
        self,
        name: str,
        shapes: list[tuple[int, int]],
        has_bias: bool,
        *,
        is_gated: bool = False,
        rows: Sequence[range] | None = None,
    ) -> Linear:
        """A layer that is packed. rows: as linear's parts."""
        assert isinstance(self.source, SafetensorsSource)
        n, k = sum(shape[0] for shape in shapes), shapes[0][1]
        parts, activation = self.source.parts(name), self.config.activation
        # a gated layer has one output for each of two rows
        outputs = None if rows is None else rows[:1] if is_gated else side_by_side(shapes, rows)
        try:
            return self.backend.restore_linear(
                parts, n, k, is_gated=is_gated, has_bias=has_bias, activation=activation, outputs=outputs
            )
        except ValueError as error:
            raise StartupError(f"{self.source.folder}: {name.rstrip('.')}: {error}") from None


def scaled(part: range, factor: int) -> range:
    """The places of a part of units that have so many each."""
    return range(part.start * factor, part.stop * factor)


def side_by_side(shapes: Sequence[tuple[int, int]], parts: Sequence[range]) -> list[range]:
    """The places of parts of matrices that stand one after the other."""
    starts = accumulate((shape[0] for shape in shapes), initial=0)
    return [range(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=False)]


def _there(linear: Linear | None) -> Linear:
    assert linear is not None
    return linear
