"""A decoder's layers in native code, as one call: one parallel region a step, in which threads wait
for each other only. With taps the call ends where a copy is taken, and another goes on."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.compute.backends.backend import LayerCache, LayerWeights, Wiring
from services.compute.backends.buffers import Buffers, Taps
from services.compute.backends.cpu.attention import NativePlan, cache_rows, is_joint
from services.compute.backends.cpu.library import (
    AttentionArguments,
    Layer,
    Layers,
    Meet,
    NativeContext,
    NormPointers,
    Pointer,
    RankGroup,
    RecurrenceArguments,
    pointer,
)
from services.compute.backends.cpu.linear import NativeLinear, NativeMlp
from services.compute.backends.cpu.recurrent import NativeStatePlan, layer_pointers
from services.compute.backends.gathered import GatheredLinear, GatheredMlp, own_of
from services.compute.backends.torch.attention import Heads
from services.compute.backends.torch.recurrent import StateLayer
from services.compute.ranks.parallel.ranks import Cut
from services.compute.ranks.parallel.share import UNIT

TILE_ROWS = 16  # of activations


class NativeStack:
    """See backend.py's Stack."""

    def __init__(
        self,
        context: NativeContext,
        buffers: Buffers,
        layers: Sequence[LayerWeights],
        heads: Sequence[Heads],
        wiring: Wiring,
        cut: Cut | None = None,
    ) -> None:
        """layers: of one context, with its MLPs; heads: of the layers of each rope."""
        self.context = context
        self.buffers = buffers
        self.wiring = wiring
        self.weights = layers  # what the structures point to
        self.team = None if cut is None else Team(context, cut)
        self.layers = (Layer * len(layers))()
        self.caches: Sequence[LayerCache] = ()
        self.hidden_size: int = wiring.hidden_size
        self.heads = [heads[rope] for rope in wiring.ropes]
        self.qkv_width = 0  # of the layer with the most
        for each, layer, window, rope in zip(self.layers, layers, wiring.windows, wiring.ropes, strict=True):
            linears = linears_of(layer)
            for name, linear in linears.items():
                if linear is not None:
                    setattr(each, name, ctypes.pointer(linear.struct))
            if (qkv := linears["qkv"]) is not None:
                self.qkv_width = max(self.qkv_width, qkv.num_outputs)
            norms = layer.norms
            each.norms = NormPointers(
                *map(
                    pointer,
                    (
                        norms.before_attention,
                        norms.after_attention,
                        norms.before_mlp,
                        norms.after_mlp,
                        norms.q,
                        norms.k,
                    ),
                )
            )
            each.window, each.rope, each.sinks = window or 0, rope, pointer(layer.sinks)
            own = heads[rope]
            each.head_dim, each.sharing, each.rotary_dim = own.head_dim, own.sharing, own.rotary_dim or own.head_dim
            each.gate_column, each.kv_projections, each.scalar = own.gate_column, own.kv_projections, layer.scalar

    def __call__(self, x: Tensor, caches: Sequence[LayerCache], plan: NativePlan, taps: Taps | None = None) -> Tensor:
        rotation, attention = plan.rotation, plan.attention
        if caches is not self.caches:
            self._point_to(caches)
        qkv, h = self._take(len(x))
        group = None
        if self.team is not None:
            x = x if h is None else x.clone()  # each rank adds what was gathered to its own
            group = ctypes.pointer(self.team.begin(x if h is None else h, attention))
        rotation.qkv = attention.queries = qkv.data_ptr()
        rotation.eps = self.wiring.eps
        tables = [
            (Pointer * len(plan.ropes))(*(table.data_ptr() for table in each)) for each in zip(*plan.ropes, strict=True)
        ]
        called = Layers(
            self.layers,
            len(self.layers),
            self.hidden_size,
            x.data_ptr(),
            pointer(h),
            self.wiring.eps,
            self.wiring.residual_multiplier,
            *tables,
            rotation,
            attention,
            self._recurrence(plan.states, qkv),
            group,
        )
        if taps is None:
            self.context.run_layers(called)
        else:
            for first, last in taps.pieces(len(self.layers)):
                taps.keep(first, x)
                called.layers, called.num_layers = ctypes.pointer(self.layers[first]), last - first
                self.context.run_layers(called)
            taps.keep(len(self.layers), x)
        if self.team is None:
            return x
        self.team.check()
        return x if self.team.cut.rank else x.clone()  # rank 0 reads it while others begin to write the next one

    def reserve(self, num_tokens: int) -> None:
        self._take(num_tokens)

    def _recurrence(self, states: NativeStatePlan | None, projected: Tensor) -> RecurrenceArguments:
        if states is None:
            return RecurrenceArguments()
        states.arguments.projected, states.arguments.eps = projected.data_ptr(), self.wiring.eps
        return states.arguments

    def _take(self, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        h, shape = None, (num_tokens, self.hidden_size)
        if not self.wiring.adds_in_layers:
            h = (
                self.buffers.take("h", shape, torch.bfloat16)
                if self.team is None
                else self.team.ranks.region("h", shape, torch.bfloat16)
            )
        return self.buffers.take("qkv", (num_tokens, self.qkv_width), torch.bfloat16), h

    def _point_to(self, caches: Sequence[LayerCache]) -> None:
        for each, layer, heads, cache in zip(self.layers, self.weights, self.heads, caches, strict=True):
            if isinstance(cache, StateLayer):
                assert layer.recurrent is not None
                each.recurrent = layer_pointers(layer.recurrent, cache)
                continue
            each.cache = cache_rows(cache, heads.head_dim)
            each.norms.is_qk_joint = is_joint(layer.norms.q, heads.head_dim)
        self.caches = caches


def linears_of(layer: LayerWeights) -> dict[str, NativeLinear | None]:
    """The layer's matrices, by their names in kernels.h; None: this rank has no columns of one."""
    mlp, output = layer.mlp, layer.output
    if isinstance(mlp, GatheredMlp):
        assert isinstance(output, GatheredLinear)
        found = {
            "qkv": own_of(layer.qkv),
            "output": output.linear,
            "gate_up": mlp.gate_up.linear,
            "down": mlp.down.linear,
        }
    else:
        assert isinstance(mlp, NativeMlp)
        found = {"qkv": own_of(layer.qkv), "output": own_of(output), "gate_up": mlp.gate_up, "down": mlp.down}
    checked: dict[str, NativeLinear | None] = {}
    for name, linear in found.items():
        assert linear is None or isinstance(linear, NativeLinear)
        checked[name] = linear
    return checked


class Team:
    """The ranks that run the layers together, as native code sees them."""

    def __init__(self, context: NativeContext, cut: Cut) -> None:
        self.cut = cut
        self.ranks = cut.ranks
        self.group = RankGroup(
            meet_with=cut.ranks.meeting,
            first_output=cut.hidden[cut.rank].start,
            first_intermediate=cut.intermediate[cut.rank].start,
        )
        self.group.padded_intermediate = -(-cut.intermediate[-1].stop // UNIT) * UNIT
        # of the step: what is gathered, of whose dimension the ranks have which parts
        self.results: list[tuple[Tensor, Sequence[range], int]] = []
        self.error: BaseException | None = None  # of a gather, which native code can't raise
        self.group.meet = context.meet if cut.ranks.meeting is not None else Meet(self._complete)

    def begin(self, added: Tensor, attention: AttentionArguments) -> RankGroup:
        """Prepare a step. added: [T, hidden], what the layers add to, or write what is added to it; attention: of
        the step, whose result becomes a part of the ranks'."""
        cut, num_tokens = self.cut, len(added)
        attended = self.ranks.region("attended", (num_tokens, cut.attended[-1].stop), torch.bfloat16)
        num_tiles = -(-num_tokens // (2 * TILE_ROWS)) * 2
        intermediate = self.ranks.region(
            "intermediate", (num_tiles, self.group.padded_intermediate // UNIT, TILE_ROWS, UNIT), torch.bfloat16
        )
        # of tiles those that have tokens, and of a single one its tokens
        tokens = intermediate[: -(-num_tokens // TILE_ROWS), :, : min(num_tokens, TILE_ROWS)]
        own = cut.attended[cut.rank]
        attention.out, attention.out_stride = (
            attended.data_ptr() + own.start * attended.element_size(),
            attended.shape[1],
        )
        self.group.attended, self.group.intermediate = attended.data_ptr(), intermediate.data_ptr()
        units = [range(each.start // UNIT, -(-each.stop // UNIT)) for each in cut.intermediate]
        self.results = [(attended, cut.attended, 1), (added, cut.hidden, 1), (tokens, units, 1), (added, cut.hidden, 1)]
        return self.group

    def _complete(self, _: int | None, gathered: int) -> None:
        """A RankGroup's meet. After an error the ranks are out of step: nothing is gathered any more."""
        if self.error is None:
            try:
                self.ranks.all_gather_in_place(*self.results[gathered])
            except BaseException as error:
                self.error = error

    def check(self) -> None:
        """Raises the error of the step's gathers, if there was one."""
        if self.error is not None:
            raise self.error
