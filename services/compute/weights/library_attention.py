"""Attention of the library's modules with a backend's kernels: queries, keys and values by one product, and where a
module attends as Llama's or Qwen 3's does, norms and rotation in the kernel's call."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from services.compute.backends.backend import Backend, Linear
from services.compute.models.probe import Probe
from services.compute.models.transformers_attention import RaggedStep, current_step


class KernelNorm(nn.Module):
    """An RMSNorm."""

    def __init__(self, weight: Tensor, eps: float, backend: Backend) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps
        self.row_math = backend.row_math

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns the same shape."""
        rows = as_rows(x, self.weight.dtype)
        return self.row_math.norm(rows, weight=self.weight, eps=self.variance_epsilon).view(x.shape).to(x.dtype)

    __call__ = forward


class JointLinear:
    """The product of layers that have the same input: the first that is called computes it for all of them."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        self.linear = linear
        self.dtype = dtype
        self.x: Tensor | None = None
        self.product: Tensor | None = None

    def columns(self, x: Tensor, part: slice, *, is_last: bool) -> Tensor:
        """x: [..., k]. Returns a part of the product, [T, n]. is_last: after this one the product is not kept."""
        if self.product is None or self.x is not x:
            self.x, self.product = x, self.linear(as_rows(x, self.dtype))
        found = self.product[:, part].contiguous()
        if is_last:
            self.x = self.product = None
        return found


class LayerOfJoint(nn.Module):
    """A layer of a JointLinear."""

    def __init__(self, joint: JointLinear, part: slice, *, is_last: bool) -> None:
        super().__init__()
        self.joint = joint
        self.part = part
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., k]. Returns [..., n]."""
        return self.joint.columns(x, self.part, is_last=self.is_last).view(*x.shape[:-1], -1).to(x.dtype)

    __call__ = forward


class SelfAttention:
    """Llama's attention, perhaps with norms of queries and keys, in the place of its module's own forward: where a
    kernel attends, one call of it normalizes and turns, too."""

    def __init__(self, module: Any, norms: list[KernelNorm]) -> None:
        """norms: of queries and of keys, or none."""
        self.library = module.forward
        self.module = module
        self.joint: JointLinear = module.q_proj.joint
        self.norms = (norms[0].weight, norms[1].weight) if norms else (None, None)
        self.eps = norms[0].variance_epsilon if norms else 0.0
        self.has_equal_halves = False  # of cosines and sines, as the kernel takes them: a probe shows it

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, T, hidden]. Returns the same shape."""
        step, number = current_step.get(None), self.module.layer_idx
        if (
            isinstance(step, RaggedStep)
            and step.kernels is not None
            and number in step.kernels.layers
            and self.has_equal_halves
        ):
            qkv, kv = self.joint.linear(as_rows(hidden_states, self.joint.dtype)), step.layers[number].kv
            out = step.kernels.turn_and_attend(number, qkv, kv, position_embeddings, self.norms, self.eps)
            return self.module.o_proj(out[None]).to(hidden_states.dtype), None
        if isinstance(step, Probe):
            self.has_equal_halves = all(torch.equal(*each.chunk(2, -1)) for each in position_embeddings)
        found: tuple[Tensor, None] = self.library(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
            **others,
        )
        return found


def exchange_attention(model: Any) -> None:
    """Let kernels do all of it, in the modules of a model whose layers are a backend's."""
    for module in model.modules():
        if attends_as_llama(module):
            norms = [each for name in ("q_norm", "k_norm") if (each := getattr(module, name, None)) is not None]
            if all(type(each) is KernelNorm for each in norms) and len({each.variance_epsilon for each in norms}) < 2:
                module.forward = SelfAttention(module, norms)


def attends_as_llama(module: Any) -> bool:
    """Whether a module attends as Llama does or Qwen 3, has a joint product, and rotates halves."""
    if type(getattr(module, "q_proj", None)) is not LayerOfJoint:
        return False
    forwards = (LlamaAttention.forward, Qwen3Attention.forward)
    if body_of(type(module).forward) not in map(body_of, forwards):
        return False
    functions = vars(sys.modules[type(module).__module__])
    return all(body_of(functions[each.__name__]) == body_of(each) for each in (apply_rotary_pos_emb, rotate_half))


def as_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., k] as [T, k], row behind row, as kernels read it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.dtype == dtype and rows.is_contiguous() else rows.to(dtype).contiguous()


@cache
def body_of(forward: Callable[..., Any]) -> str:
    """The code of a module's forward, whatever its input is called."""
    function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    assert isinstance(function, ast.FunctionDef)
    inputs = [each.arg for each in function.args.args[1:2]]
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in inputs:
            node.id = "x"
    return "\n".join(ast.unparse(each) for each in function.body)
