"""transformers' modules with a backend's kernels: of a GGUF file, or of a safetensors folder in any
format, quantized as they are read if that is asked for.

Modules that are products are exchanged, whatever module of the library they sit in: linear layers, gated
MLPs as a whole, mixtures or their experts, the head; and embeddings, where the file's own rows can be read.
So are RMSNorms, and attention (library_attention.py). Nothing else of the library is replaced: other
parameters are filled. A module is made, filled and packed before the next one is read: the peak is the model
in its final form plus one module.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter
from transformers.pytorch_utils import Conv1D

from services.compute.backends.backend import Backend, Linear, Mlp, RouterConfig
from services.compute.backends.choose import has_same_columns
from services.compute.backends.host_memory import give_back_free_memory
from services.compute.backends.matrix import Dense, Matrix, concatenate
from services.compute.models.config import Packed
from services.compute.models.decoder import EmbeddingRows
from services.compute.models.library_errors import first_line
from services.compute.models.llama import ACTIVATIONS
from services.compute.models.moe import Expert, MoeMlp, Router, run_experts
from services.compute.models.transformers_attention import Unsupported
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.library_attention import (
    JointLinear,
    KernelNorm,
    LayerOfJoint,
    as_rows,
    body_of,
    exchange_attention,
)
from services.compute.weights.library_source import ConvertedSource
from services.compute.weights.loader import check_quantizable, warn_of_widened
from shared.process.errors import StartupError

# layers that say which experts a token gets, or how much of one: they stay in float
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.[a-z_]+)?$")
ATTENTION_OUTPUT = re.compile(r"attn\w*\.(o_proj|out_proj|c_proj|dense)$|attention\w*\.(o_proj|out_proj|dense|wo)$")
# the library's activations, by their classes
ACTIVATION_OF = {type(ACT2FN[name]): activation for name, activation in ACTIVATIONS.items()}
Source = GgufSource | ConvertedSource


class KernelLinear(nn.Module):
    """A backend's linear layer in the place of torch's. rows, columns: where its matrix has each row
    and each column of that layer's; None: in their order."""

    def __init__(
        self,
        linear: Callable[[Tensor], Tensor],
        backend: Backend,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.dtype = backend.dtype
        self.rows = rows
        self.inputs = None if columns is None else columns.argsort()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns [..., n]."""
        x = x if self.inputs is None else x[..., self.inputs]
        product = self.linear(as_rows(x, self.dtype))
        product = product if self.rows is None else product[:, self.rows]
        return product.view(*x.shape[:-1], product.shape[-1]).to(x.dtype)

    __call__ = forward  # torch's own, which looks for hooks, takes as long as a small product


class KernelHead(nn.Module):
    """The last layer, whose results are float32."""

    def __init__(self, linear: Linear, backend: Backend) -> None:
        super().__init__()
        self.linear = linear
        self.dtype = backend.dtype
        # some models ask for its dtype
        self.register_buffer("weight", torch.empty(0, dtype=backend.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns [..., n] float32."""
        logits = self.linear.logits(as_rows(x, self.dtype)).clone()  # the next call writes them again
        return logits.view(*x.shape[:-1], logits.shape[-1])


class KernelMlp(KernelLinear):
    """A gated MLP, whose layers are a backend's."""

    def __init__(self, mlp: Mlp, backend: Backend) -> None:
        super().__init__(lambda rows: mlp(rows, norm=None, eps=0.0, has_residual=False), backend)


@dataclass(frozen=True, slots=True)
class ActivatedLinear:
    """A layer, and what a module of the library does with its results."""

    linear: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x)).contiguous()


class KernelExperts(nn.Module):
    """A mixture's experts, each a backend's layers."""

    def __init__(self, experts: list[Expert], backend: Backend) -> None:
        super().__init__()
        self.experts = experts
        self.row_math = backend.row_math
        self.dtype = backend.dtype
        is_plain = not any(isinstance(each.gate_up, ActivatedLinear) for each in experts)
        pairs = [(each.gate_up, each.down) for each in experts]
        self.grouped = backend.group_experts(pairs, len(experts)) if is_plain else None

    def routed(self, router: Router) -> MoeMlp:
        """The mixture as one."""
        return MoeMlp(self.row_math, router, tuple(self.experts), None, self.grouped)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [T, hidden]; chosen, weights: [T, num_active]. Returns [T, hidden]."""
        rows = as_rows(x, self.dtype)
        results = run_experts(self.experts, rows, chosen) if self.grouped is None else self.grouped.run(rows, chosen)
        total = self.row_math.add_experts(rows, results, weights.float(), shared=None, has_residual=False)
        return total.view(x.shape).to(x.dtype)

    __call__ = forward


class FileEmbedding(nn.Module):
    """Rows of the file, times a scale where the model has one."""

    def __init__(self, rows: EmbeddingRows, scale: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        found = self.rows[ids.flatten()].view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale.to(found.dtype)


def load_library_modules(
    location: Path,
    backend: Backend,
    packing: Packed,
    config: Any,
    key_mapping: dict[str, str] | None = None,
    auto_class: Any = AutoModelForCausalLM,
) -> Any:
    """location: a GGUF file, or a folder; packing: how layers are quantized that the file has in float;
    config: transformers' own, of the model; key_mapping: patterns of tensors' names, by which the folder's
    differ from the model's. Returns an auto_class's model. Raises StartupError, naming a tensor that is
    missing or wrong."""
    with torch.device("meta"):
        outline = make_modules(location, config, backend.dtype, auto_class)
    source: Source = (
        GgufSource(location, backend.dtype, backend.device, is_native=False)
        if location.is_file()
        else ConvertedSource(location, backend.dtype, backend.device, outline, key_mapping)
    )
    try:
        check_quantizable(location, source.quantized_as, packing.option)
        source.check_modules(outline)
        with parameters_without_memory():
            model = make_modules(location, config, backend.dtype, auto_class)
        exchange = ModuleExchange(source, backend, packing, model)
        exchange.run()
        source.report()
        warn_of_widened(exchange.widened, backend.dtype)
    finally:
        source.close()
        give_back_free_memory()
    return model.eval().to(backend.device)


def make_modules(path: Path, config: Any, dtype: torch.dtype, auto_class: Any = AutoModelForCausalLM) -> Any:
    """The model, whatever its parameters hold. Raises StartupError."""
    # no file has the layer behind a bare encoder, and no vector here is made by it
    bare = {"add_pooling_layer": False} if auto_class is AutoModel else {}
    try:
        return auto_class.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False, **bare)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        ArithmeticError,
        IndexError,
        KeyError,
    ) as error:  # whatever numbers of a file lead to in the library's code
        raise StartupError(
            f"{path}: transformers can't make the model that it describes: {first_line(error)}"
        ) from None


@dataclass(frozen=True, slots=True)
class ModuleExchange:
    """Puts a backend's modules in the place of a model's, and fills the rest."""

    source: Source
    backend: Backend
    packing: Packed
    model: Any  # whose parameters have no memory
    widened: Counter[str] = field(default_factory=Counter)  # layers, by the form that no kernel reads

    def run(self) -> None:
        head, done = self.model.get_output_embeddings(), "-"
        in_float32 = set(self.model._keep_in_fp32_modules_strict or ())
        if self.backend.dtype == torch.float16:
            in_float32 |= set(self.model._keep_in_fp32_modules or ())
        head_name = ""
        for name, module in list(self.model.named_modules()):
            if module is head:
                head_name = name
            elif (
                not name.startswith(done)
                and not any(part in name for part in in_float32)
                and self.model.get_submodule(name) is module
            ):
                self.join_projections(name, module)
                made = self.exchanged(name, module)
                if made is not None:
                    self.put(name, made)
                    done = name + "."
                    give_back_free_memory()
        fill(self.model, self.source, in_float32, head_name + ".")
        if head is not None:  # last, for it may be the embedding, which is there now
            self.put(head_name, KernelHead(self.head(head_name, head), self.backend))
        for name, module in list(self.model.named_modules()):
            weight = module._parameters.get("weight") if has_same_columns(self.backend) else None
            if weight is not None and weight.dim() == 2 and weight.dtype == self.backend.dtype and ROUTER.search(name):
                del module.weight
                module.weight = KernelWeight.of(weight, self.backend)
        exchange_attention(self.model)

    def put(self, name: str, module: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(parent), last, module)

    def exchanged(self, name: str, module: nn.Module) -> nn.Module | None:
        """The module that takes the place of this one; None: it stays."""
        if (mlp := self.mlp(name, module)) is not None:
            return KernelMlp(mlp, self.backend)
        if body_of(type(module).forward) == body_of(LlamaRMSNorm.forward):
            weight = self.source.dense(f"{name}.weight", tuple(module.get_parameter("weight").shape))
            return KernelNorm(weight, module.variance_epsilon, self.backend)  # type: ignore[arg-type]
        if type(module).forward in (nn.Linear.forward, Conv1D.forward) and self.source.has(f"{name}.weight"):
            if self.is_read_elsewhere(name):
                return None
            packing = self.packing
            quantization = packing.of_output if ATTENTION_OUTPUT.search(name) else packing.quantization
            linear = self.linear([name], [module], "none" if ROUTER.search(name) else quantization)
            return KernelLinear(linear, self.backend, *self.source.orders(f"{name}.weight"))
        if isinstance(module, nn.Embedding):
            rows = self.source.kept_embedding((module.num_embeddings, module.embedding_dim), f"{name}.weight")
            return None if rows is None else FileEmbedding(rows, getattr(module, "embed_scale", None))
        if self.has_experts(module):
            return KernelExperts(self.experts(name, module), self.backend)
        return None

    def join_projections(self, name: str, module: nn.Module) -> None:
        """Make queries, keys and values by one product, where a module has three layers for them."""
        names = [f"{name}.{which}_proj" for which in "qkv"]
        layers: list[Any] = [module._modules.get(f"{which}_proj") for which in "qkv"]
        if any(type(layer) is not nn.Linear for layer in layers):
            return
        kinds = {(layer.in_features, layer.bias is None) for layer in layers}
        if len(kinds) > 1 or any(
            not self.source.has(f"{each}.weight") or self.is_read_elsewhere(each) for each in names
        ):
            return
        if any(self.source.orders(f"{each}.weight") != (None, None) for each in names):
            return
        matrices = self.matrices(names, layers)
        if not self.backend.is_kept(concatenate(matrices, self.backend.dtype)) and all(
            self.backend.is_kept(each) for each in matrices
        ):
            return
        joint = JointLinear(self.made(matrices, names, layers, self.packing.quantization, None), self.backend.dtype)
        ends = list(accumulate((layer.out_features for layer in layers), initial=0))
        for each, part in zip(names, pairwise(ends), strict=True):
            self.put(each, LayerOfJoint(joint, slice(*part), is_last=each == names[-1]))

    def is_read_elsewhere(self, name: str) -> bool:
        """Whether a module that this layer is a part of reads its weight itself."""
        *parts, last = name.split(".")
        kinds: list[Any] = [type(self.model.get_submodule(".".join(parts[:end]))) for end in range(len(parts) + 1)]
        return any(f".{last}.weight" in source_of(kind) for kind in kinds)

    def linear(self, names: list[str], modules: list[Any], quantization: str, activation: str | None = None) -> Linear:
        """A layer of linear modules with the same inputs; activation: of a gated one."""
        return self.made(self.matrices(names, modules), names, modules, quantization, activation)

    def matrices(self, names: list[str], modules: list[Any]) -> list[Matrix]:
        """The matrices of linear modules."""
        matrices: list[Matrix] = []
        for name, module in zip(names, modules, strict=True):
            if isinstance(module, Conv1D):
                shape = tuple(module.get_parameter("weight").shape)
                matrices.append(Dense(self.source.dense(f"{name}.weight", shape).T.contiguous()))
            else:
                matrices.append(self.source.matrix(f"{name}.", (module.out_features, module.in_features)))
        return matrices

    def made(
        self, matrices: list[Matrix], names: list[str], modules: list[Any], quantization: str, activation: str | None
    ) -> Linear:
        """The layer of these modules' matrices; activation: of a gated one."""
        biases = [
            self.source.dense(f"{name}.bias", tuple(module.bias.shape))
            for name, module in zip(names, modules, strict=True)
            if module.bias is not None
        ]
        return self.backend.make_linear(
            self.joined(matrices),
            torch.cat(biases) if biases else None,
            quantization=quantization,
            group=self.packing.group,
            is_gated=activation is not None,
            activation=activation or "silu",
        )

    def joined(self, matrices: list[Matrix]) -> Matrix:
        """Matrices of a layer as one."""
        joined = concatenate(matrices, self.backend.dtype)
        if not self.backend.is_kept(joined):
            self.widened.update({str(each) for each in matrices if not isinstance(each, Dense)})
        return joined

    def mlp(self, name: str, module: nn.Module) -> Mlp | None:
        """A gated MLP or a mixture of a form that backends know; None: it is none."""
        if body_of(type(module).forward) == body_of(Qwen3MoeSparseMoeBlock.forward):
            return self.mixture(name, module)
        if body_of(type(module).forward) in (body_of(LlamaMLP.forward), body_of(Qwen2MLP.forward)):
            parts, function = ["gate_proj", "up_proj"], module.act_fn
        elif body_of(type(module).forward) == body_of(Phi3MLP.forward):
            parts, function = ["gate_up_proj"], module.activation_fn
        else:
            return None
        activation = ACTIVATION_OF.get(type(function))
        if activation is None or any(
            type(module.get_submodule(each)) is not nn.Linear for each in (*parts, "down_proj")
        ):
            return None
        layers = [module.get_submodule(each) for each in parts]
        quantization = self.packing.quantization
        gate_up = self.linear([f"{name}.{each}" for each in parts], layers, quantization, activation)
        return self.backend.make_mlp(gate_up, self.linear([f"{name}.down_proj"], [module.down_proj], quantization))

    def mixture(self, name: str, module: Any) -> Mlp | None:
        """A mixture whose router is Qwen 3's; None: it is another."""
        gate, experts = module.gate, module.experts
        if body_of(type(gate).forward) != body_of(Qwen3MoeTopKRouter.forward) or not self.has_experts(experts):
            return None
        weight = self.source.dense(f"{name}.gate.weight", tuple(gate.weight.shape))
        router = Router(
            self.backend.make_linear(Dense(weight)),
            RouterConfig(gate.top_k, has_normalized_weights=gate.norm_topk_prob),
        )
        return KernelExperts(self.experts(f"{name}.experts", experts), self.backend).routed(router)

    def has_experts(self, module: nn.Module) -> bool:
        """Whether a module has the library's common interface of experts, which says what it has."""
        is_common = hasattr(module, "_apply_gate") and "down_proj" in module._parameters
        return is_common and not getattr(module, "has_post_expert_norm", True)

    def experts(self, name: str, module: Any) -> list[Expert]:
        """A mixture's experts, whose module has the parameters of all of them in a tensor each."""
        up = "gate_up_proj" if module.has_gate else "up_proj"
        function = module._apply_gate if module.has_gate else module.act_fn
        is_plain = type(module)._apply_gate is _default_apply_gate and module.has_gate
        activation = ACTIVATION_OF.get(type(module.act_fn)) if is_plain else None
        biases = [
            self.source.dense(f"{name}.{each}_bias", tuple(module.get_parameter(f"{each}_bias").shape))
            if module.has_bias
            else None
            for each in (up, "down_proj")
        ]
        experts = []
        for number in range(len(module.down_proj)):
            up_layer, down = (
                self.backend.make_linear(
                    self.joined([self.expert(f"{name}.{each}", number, module)]),
                    None if bias is None else bias[number].contiguous(),
                    quantization=self.packing.quantization,
                    group=self.packing.group,
                    is_gated=each == up and activation is not None,
                    activation=activation or "silu",
                )
                for each, bias in zip((up, "down_proj"), biases, strict=True)
            )
            # the types of other functions follow from the library's modules
            gate_up: Any = up_layer if activation is not None else ActivatedLinear(up_layer, function)
            experts.append(Expert(gate_up, down))
        return experts

    def expert(self, name: str, number: int, module: Any) -> Matrix:
        """An expert's matrix [n, k]. name: of the parameter."""
        shape = tuple(getattr(module, name.rpartition(".")[2]).shape[1:])
        turned = shape[::-1] if module.is_transposed else shape
        return self.source.expert(name, number, turned, is_transposed=module.is_transposed)

    def head(self, name: str, module: Any) -> Linear:
        """The last layer."""
        quantization, embedding = self.packing.of_head, self.model.get_input_embeddings()
        embedding_name = next(each for each, module in self.model.named_modules() if module is embedding)
        if not self.source.is_tied(f"{name}.weight", f"{embedding_name}.weight"):
            return self.linear([name], [module], quantization)
        matrix = self.source.tied_head(getattr(embedding, "weight", None), (module.out_features, module.in_features))
        bias = None if module.bias is None else self.source.dense(f"{name}.bias", tuple(module.bias.shape))
        return self.backend.make_linear(matrix, bias, quantization=quantization, group=self.packing.group)


class KernelWeight(Tensor):
    """A matrix [n, k] that a module of the library multiplies by itself, which turns it to float32 before or not:
    the product is the backend's, in float32, as it is of bfloat16's numbers. Whatever else a module does with it
    is refused: torch's products of it would have other bits in other company."""

    linear: Linear

    @classmethod
    def of(cls, weight: Tensor, backend: Backend) -> "KernelWeight":
        made = weight.data.as_subclass(cls)
        made.linear = backend.make_linear(Dense(weight.data))
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        terms = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        weight = terms.get("weight")
        if function is nn.functional.linear and isinstance(weight, cls) and not isinstance(terms["input"], cls):
            x, bias = terms["input"], terms.get("bias")
            logits = weight.linear.logits(as_rows(x, weight.dtype)).clone()
            product = logits.view(*x.shape[:-1], logits.shape[-1]).to(x.dtype)
            return product if bias is None else product + bias
        if function in (Tensor.float, Tensor.type, Tensor.to) and isinstance(args[0], cls):
            return args[0]
        if function in OF_A_WEIGHT:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise Unsupported(f"it reads a router's weight by {torch.overrides.resolve_name(function) or function}")


# of a KernelWeight: what does not read its numbers
OF_A_WEIGHT = (Tensor.dtype.__get__, Tensor.device.__get__, Tensor.shape.__get__, Tensor.size, Tensor.dim)  # type: ignore[attr-defined]


@cache
def source_of(kind: Any) -> str:
    """The code of a class."""
    return inspect.getsource(kind)


def fill(model: Any, source: Source, in_float32: set[str], without: str) -> None:
    """Give the parameters that are left their values, and the buffers that are part of a checkpoint.
    without: the start of names that are not."""
    stored = model.state_dict().keys()
    for name, tensor in [
        *model.named_parameters(),
        *((name, buffer) for name, buffer in model.named_buffers() if name in stored),
    ]:
        if name.startswith(without) or (isinstance(tensor, nn.Parameter) and not tensor.is_meta):
            continue
        dtype = torch.float32 if any(part in name for part in in_float32) else None
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        if isinstance(tensor, nn.Parameter) or source.has(name):
            values = source.dense(name, tuple(tensor.shape), dtype=dtype)
        else:
            values = torch.zeros(tensor.shape, dtype=dtype)
        setattr(module, last, nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Parameters that are made meanwhile are on the device `meta`; buffers, which no file has, are
    computed as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
