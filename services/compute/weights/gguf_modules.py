"""transformers' modules with the weights of a GGUF file: layers stay in the file's blocks, and a
backend's kernels compute them.

Three kinds of modules are exchanged: linear layers and mixtures' experts whose matrices are kept,
and embeddings. All other parameters are filled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.compute.backends.backend import Backend, Linear
from services.compute.backends.matrix import concatenate
from services.compute.models.architectures import ACTIVATIONS
from services.compute.models.decoder import EmbeddingRows
from services.compute.models.library_errors import first_line
from services.compute.models.moe import Expert, run_experts
from services.compute.weights.gguf_layouts import find_layout
from services.compute.weights.gguf_source import GgufSource
from services.compute.weights.source import EMBEDDING
from shared.process.errors import StartupError

EXPANSION = ".kv_b_proj"  # the layer that makes keys and values of compressed ones, which files have in two tensors


class KernelLinear(nn.Module):
    """A backend's linear layer in the place of torch's. rows, columns: where its matrix has each row
    and each column of that layer's; None: in their order."""

    def __init__(self, linear: Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.rows = rows
        self.inputs = None if columns is None else columns.argsort()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns [..., n]."""
        x = x if self.inputs is None else x[..., self.inputs]
        result = self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return result if self.rows is None else result[..., self.rows]


class KernelHead(KernelLinear):
    """The last layer, whose results are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.logits(x.reshape(-1, x.shape[-1])).clone().view(*x.shape[:-1], -1)


class KernelExperts(nn.Module):
    """A mixture's experts, each a backend's layers."""

    def __init__(self, experts: list[Expert], backend: Backend) -> None:
        super().__init__()
        self.experts = experts
        self.row_math = backend.row_math
        self.grouped = backend.group_experts([(each.gate_up, each.down) for each in experts], len(experts))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x: [T, hidden]; chosen, weights: [T, num_active]. Returns [T, hidden]."""
        results = run_experts(self.experts, x, chosen) if self.grouped is None else self.grouped.run(x, chosen)
        return self.row_math.add_experts(x, results, weights.float(), shared=None, has_residual=False)


class FileEmbedding(nn.Module):
    """Rows of the file, times a scale where the model has one."""

    def __init__(self, rows: EmbeddingRows, scale: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        found = self.rows[ids.flatten()].view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale.to(found.dtype)


def load_gguf_modules(path: Path, backend: Backend, config: Any) -> Any:
    """config: transformers' own, of the file. Returns an AutoModelForCausalLM. Raises StartupError,
    naming a tensor that is missing or wrong."""
    source = GgufSource(path, backend.dtype, backend.device)
    try:
        with torch.device("meta"):
            check_shapes(make_modules(path, config, backend.dtype), source)
        with parameters_without_memory():
            model = make_modules(path, config, backend.dtype)
        head = model.get_output_embeddings()
        for name, module in list(model.named_modules()):
            if (found := exchange(name, module, source, backend, config, is_head=module is head)) is not None:
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, found)
        fill(model, source)
        source.report()
    finally:
        source.close()
    return model.eval().to(backend.device)


def make_modules(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model, whatever its parameters hold. Raises StartupError."""
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    except (
        RuntimeError,
        ValueError,
        TypeError,
        ArithmeticError,
        IndexError,
        KeyError,
    ) as error:  # whatever numbers of a file lead to in the library's code
        raise StartupError(
            f"{path}: transformers can't make the model that the metadata describe: {first_line(error)}"
        ) from None


def check_shapes(model: Any, source: GgufSource) -> None:
    """Raises StartupError for a parameter that the file has not, or in another shape: before any
    takes memory."""
    for name, parameter in model.named_parameters():
        shape, part = tuple(parameter.shape), name.rpartition(".")[2]
        if part in ("gate_up_proj", "down_proj") and not source.has(name):
            which = "gate" if part == "gate_up_proj" else "down"
            source.check(
                f"{name.rpartition('.')[0]}.0.{which}_proj.weight",
                (shape[1] // 2 if which == "gate" else shape[1], shape[2]),
            )
        elif EXPANSION not in name and (name != "lm_head.weight" or source.has(name)):
            source.check(name, shape)


def exchange(
    name: str, module: nn.Module, source: GgufSource, backend: Backend, config: Any, *, is_head: bool
) -> nn.Module | None:
    """The module that takes the place of this one; None: it stays."""
    if isinstance(module, nn.Linear) and not name.endswith(EXPANSION):
        shape, of_file = (module.out_features, module.in_features), f"{name}."
        if is_head and not source.has(of_file + "weight"):
            of_file = EMBEDDING.removesuffix("weight")  # it is tied
        elif not source.keeps(of_file + "weight"):
            return None
        bias = source.dense(of_file + "bias", shape[:1]) if module.bias is not None else None
        linear = backend.make_linear(source.matrix(of_file, shape), bias)
        return KernelHead(linear) if is_head else KernelLinear(linear, *source.orders(of_file + "weight"))
    if isinstance(module, nn.Embedding) and source.keeps(f"{name}.weight"):
        rows = source.embedding((module.num_embeddings, module.embedding_dim), f"{name}.weight")
        return FileEmbedding(rows, getattr(module, "embed_scale", None))
    is_mixture = {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys()
    if is_mixture and find_layout(source.layouts, f"{name}.down_proj") is None:
        activation = ACTIVATIONS[str(getattr(config, "hidden_activation", getattr(config, "hidden_act", "silu")))]
        return KernelExperts(read_experts(name, module, source, backend, activation), backend)
    return None


def read_experts(name: str, module: nn.Module, source: GgufSource, backend: Backend, activation: str) -> list[Expert]:
    """A mixture's experts, whose module has the parameters of all of them in two tensors: gates and
    ups [experts, 2 * intermediate, hidden], and downs [experts, hidden, intermediate]."""
    num_experts, hidden, inter = module.get_parameter("down_proj").shape
    experts = []
    for number in range(num_experts):
        gate, up = (source.matrix(f"{name}.{number}.{which}_proj.", (inter, hidden)) for which in ("gate", "up"))
        gate_up = backend.make_linear(concatenate([gate, up], backend.dtype), is_gated=True, activation=activation)
        experts.append(
            Expert(gate_up, backend.make_linear(source.matrix(f"{name}.{number}.down_proj.", (hidden, inter))))
        )
    return experts


def fill(model: Any, source: GgufSource) -> None:
    """Give the parameters that are left their values, and the buffers that are part of a
    checkpoint."""
    in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    stored = model.state_dict().keys()
    for name, tensor in [
        *model.named_parameters(),
        *((name, buffer) for name, buffer in model.named_buffers() if name in stored),
    ]:
        dtype = torch.float32 if any(part in name for part in in_float32) else None
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        if parent.endswith(EXPANSION):
            of_attention = parent.removesuffix(EXPANSION)
            attention = model.get_submodule(of_attention)
            sizes = (attention.num_heads, attention.qk_nope_head_dim, attention.v_head_dim, attention.kv_lora_rank)
            values = source.key_value_expansion(f"{of_attention}.", *sizes)
        elif isinstance(tensor, nn.Parameter) or source.has(name):
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
