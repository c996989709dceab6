"""The library of native kernels, by ctypes: plain pointers and no build against Python or torch, so
one library serves every version of both.

A call costs a few microseconds, and a layer makes few. `PENSTOCK_KERNELS` names what to use: auto
(default), one of build.py's instruction sets, or torch.
"""

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch

from services.compute.backends.cpu.build import INSTRUCTION_SETS, LIBRARY, source_id
from shared.process.errors import StartupError
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

VARIABLE = "PENSTOCK_KERNELS"
CHOICES = ("auto", *INSTRUCTION_SETS, "torch")

Pointer, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Weight(ctypes.Structure):
    """kernels.h's Weight."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("type", "n", "k", "padded_n", "padded_k", "is_gated")),
        *((name, Pointer) for name in ("data", "scales", "sums", "bias")),
        ("group", ctypes.c_int64),
        *((name, Pointer) for name in ("table", "group_scales", "zeros", "minima")),
        ("activation", ctypes.c_int64),
        ("next", Pointer),
        *((name, ctypes.c_int64) for name in ("is_gate", "bits", "offset", "lowest", "highest")),
        *((name, Pointer) for name in ("steps", "minimum_steps")),
        ("is_widened", ctypes.c_int64),
    ]


class CacheRows(ctypes.Structure):
    """kernels.h's CacheRows."""

    _fields_ = [
        ("keys", Pointer),
        ("values", Pointer),
        *((name, ctypes.c_int64) for name in ("block_size", "num_kv_heads", "row_bytes", "group")),
    ]


class AttentionArguments(ctypes.Structure):
    """kernels.h's Attention."""

    _fields_ = [
        ("queries", Pointer),
        *((name, ctypes.c_int64) for name in ("query_stride", "gate_column")),
        ("cache", CacheRows),
        *((name, Pointer) for name in ("query_starts", "context_lens", "block_tables", "block_lens", "last_seen")),
        *(
            (name, ctypes.c_int64)
            for name in ("num_sequences", "table_width", "num_heads", "head_dim", "sharing", "num_before", "window")
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        *((name, Pointer) for name in ("sinks", "out")),
        ("out_stride", ctypes.c_int64),
        ("workspace", Pointer),
    ]


class Rotation(ctypes.Structure):
    """kernels.h's Rotation."""

    _fields_ = [
        ("qkv", Pointer),
        ("stride", ctypes.c_int64),
        *((name, Pointer) for name in ("cosines", "sines", "q_norm", "k_norm")),
        ("eps", ctypes.c_float),
        ("slots", Pointer),
        ("cache", CacheRows),
        *((name, ctypes.c_int64) for name in ("tokens", "num_heads", "head_dim", "rotary_dim", "is_norm_joint")),
        *((name, ctypes.c_int64) for name in ("norms_after_rotation", "kv_projections", "has_value_norm")),
    ]


class RecurrentPointers(ctypes.Structure):
    """kernels.h's RecurrentLayer."""

    _fields_ = [
        *((name, Pointer) for name in ("states", "inputs")),
        ("ring", ctypes.c_int64),
        *((name, Pointer) for name in ("convolution", "convolution_bias", "decay", "step_bias", "skip", "norm")),
    ]


class RecurrenceArguments(ctypes.Structure):
    """kernels.h's Recurrence."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("kind", "num_heads", "num_key_heads", "is_tiled", "key_dim", "value_dim", "kernel")
        ),
        *((name, ctypes.c_int64) for name in ("norm_group", "norm_width", "is_gated_first", "has_sigmoid_gate")),
        *((name, ctypes.c_float) for name in ("least_step", "most_step", "eps")),
        *((name, Pointer) for name in ("query_starts", "starts", "slots", "num_folded", "fold_to")),
        ("num_sequences", ctypes.c_int64),
        *((name, Pointer) for name in ("projected", "out")),
        ("out_stride", ctypes.c_int64),
        ("layer", RecurrentPointers),
        ("workspace", Pointer),
    ]


class Addition(ctypes.Structure):
    """kernels.h's Addition."""

    _fields_ = [
        *((name, Pointer) for name in ("x", "h", "norm_weight")),
        *((name, ctypes.c_float) for name in ("eps", "multiplier", "scale")),
        *((name, ctypes.c_int64) for name in ("rows", "k")),
        ("out", Pointer),
    ]


class NormPointers(ctypes.Structure):
    """kernels.h's Norms."""

    _fields_ = [
        *((name, Pointer) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "q", "k")),
        ("is_qk_joint", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    """kernels.h's Layer."""

    _fields_ = [
        *((name, ctypes.POINTER(Weight)) for name in ("qkv", "output", "gate_up", "down")),
        ("norms", NormPointers),
        ("cache", CacheRows),
        ("window", ctypes.c_int64),
        ("rope", ctypes.c_int64),
        ("sinks", Pointer),
        ("recurrent", RecurrentPointers),
        *((name, ctypes.c_int64) for name in ("head_dim", "sharing", "gate_column", "rotary_dim", "kv_projections")),
        ("scalar", ctypes.c_float),
    ]


# returns when all ranks' columns of a result are there
Meet = ctypes.CFUNCTYPE(None, Pointer, Int)


class RankGroup(ctypes.Structure):
    """kernels.h's Group."""

    _fields_ = [
        ("meet", Meet),
        ("meet_with", Pointer),
        *((name, ctypes.c_int64) for name in ("first_output", "first_intermediate")),
        *((name, Pointer) for name in ("attended", "intermediate")),
        ("padded_intermediate", ctypes.c_int64),
    ]


class Layers(ctypes.Structure):
    """kernels.h's Layers."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size")),
        ("x", Pointer),
        ("h", Pointer),
        ("eps", ctypes.c_float),
        ("multiplier", ctypes.c_float),
        ("cosines", ctypes.POINTER(Pointer)),
        ("sines", ctypes.POINTER(Pointer)),
        ("rotation", Rotation),
        ("attention", AttentionArguments),
        ("recurrence", RecurrenceArguments),
        ("group", ctypes.POINTER(RankGroup)),
    ]


class Largest(ctypes.Structure):
    """kernels.h's Largest."""

    _fields_ = [
        ("logits", Pointer),
        *((name, ctypes.c_int64) for name in ("rows", "vocab", "k")),
        *((name, Pointer) for name in ("values", "ids", "maxima")),
    ]


class Masses(ctypes.Structure):
    """kernels.h's Masses."""

    _fields_ = [
        ("logits", Pointer),
        *((name, ctypes.c_int64) for name in ("vocab", "count")),
        *((name, Pointer) for name in ("rows", "largest", "temperatures", "out", "partial")),
    ]


class DrawArguments(ctypes.Structure):
    """kernels.h's Draws."""

    _fields_ = [
        *((name, Pointer) for name in ("logits", "token_ids")),
        *((name, ctypes.c_int64) for name in ("rows", "k")),
        *((name, Pointer) for name in ("num_kept", "tail_mass", "temperatures", "seeds", "positions", "columns")),
    ]


# by their names in kernels.h
STRUCTURES = {
    "Weight": Weight,
    "CacheRows": CacheRows,
    "Attention": AttentionArguments,
    "Rotation": Rotation,
    "RecurrentLayer": RecurrentPointers,
    "Recurrence": RecurrenceArguments,
    "Addition": Addition,
    "Norms": NormPointers,
    "Layer": Layer,
    "Group": RankGroup,
    "Layers": Layers,
    "Largest": Largest,
    "Masses": Masses,
    "Draws": DrawArguments,
}


class NativeContext:
    """An instruction set of the library, and workspaces that grow to the largest call. One thread
    at a time may use it; another opens its own."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        """handle: of penstock_open. It is closed with this object: callers of its functions keep
        a reference."""
        # the end of the process gives back more
        weakref.finalize(self, library.penstock_close, handle).atexit = False

        def function(name: str, *arguments: object, result: object = None) -> Callable[..., int]:
            found = getattr(library, f"penstock_{name}")
            found.argtypes, found.restype = [Pointer, *arguments], result
            return partial(found, handle)

        self.instruction_set: str = library.penstock_instruction_set(handle).decode()
        weight = ctypes.POINTER(Weight)
        self.workspace_bytes = function("workspace_bytes", result=Int)
        self.reserve = function("reserve", weight, Int)
        self.reserve_attention = function("reserve_attention", ctypes.POINTER(AttentionArguments))
        self.reserve_recurrence = function("reserve_recurrence", ctypes.POINTER(RecurrenceArguments))
        self.reserve_search = function("reserve_search", Int, Int)
        self.pack = function("pack", weight, *[Pointer] * 2)
        self.pack_columns = function("pack_columns", weight, *[Pointer] * 3)
        self.pack_int4 = function("pack_int4", weight, *[Pointer] * 4)
        self.pack_groups = function("pack_groups", weight, *[Pointer] * 7)
        self.linear = function("linear", weight, *[Pointer] * 2, Float, Int, *[Pointer] * 3, Int)
        self.mlp = function("mlp", weight, weight, *[Pointer] * 2, Float, Int, *[Pointer] * 2)
        self.add_rows = function("add_rows", ctypes.POINTER(Addition))
        self.finish_logits = function("finish_logits", Pointer, Int, Float, Float)
        self.attention = function("attention", ctypes.POINTER(AttentionArguments))
        self.recurrence = function("recurrence", ctypes.POINTER(RecurrenceArguments))
        self.rotate_and_write = function("rotate_and_write", ctypes.POINTER(Rotation))
        self.run_layers = function("run_layers", ctypes.POINTER(Layers))
        self.find_largest = function("find_largest", ctypes.POINTER(Largest))
        self.sum_masses = function("sum_masses", ctypes.POINTER(Masses))
        self.decide = function("decide", ctypes.POINTER(DrawArguments))
        # a RankGroup's, of ranks that share memory
        self.meet = ctypes.cast(library.penstock_meet, Meet)


def open_context() -> NativeContext | None:
    """A context of the instruction set that PENSTOCK_KERNELS names; None: run on torch. Says which,
    or why not. Raises StartupError for a wrong choice."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise StartupError(f"{VARIABLE}={wanted}: expected one of {', '.join(CHOICES)}")
    if wanted == "torch":
        return None
    if not LIBRARY.exists():
        log.warning(
            "the native kernels are not built, torch computes instead",
            fix="install g++ and run: penstock build-kernels",
        )
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))  # after torch: its libgomp is then the one that both use
    except OSError as error:
        log.warning(
            "the native kernels can't be loaded, torch computes instead",
            error=str(error),
            fix="run: penstock build-kernels",
        )
        return None
    if not is_of_these_sources(library):
        log.warning(
            "the native kernels were built from other sources, torch computes instead",
            fix="run: penstock build-kernels",
        )
        return None
    library.penstock_open.restype, library.penstock_close.argtypes, library.penstock_close.restype = (
        Pointer,
        [Pointer],
        None,
    )
    library.penstock_instruction_set.argtypes, library.penstock_instruction_set.restype = [Pointer], ctypes.c_char_p
    handle = library.penstock_open(wanted.encode())
    if handle is None and wanted != "auto":
        raise StartupError(f"{VARIABLE}={wanted}: this machine does not have it")
    if handle is None:
        log.warning(
            "this processor has no instruction set that the native kernels are for, torch computes instead",
            needed=" or ".join(INSTRUCTION_SETS),
        )
        return None
    context = NativeContext(library, handle)
    log.info("native kernels", instruction_set=context.instruction_set)
    return context


def is_of_these_sources(library: ctypes.CDLL) -> bool:
    """Whether it was built from the C++ beside this file, and its structures are those above."""
    if not hasattr(library, "penstock_source_id") or not hasattr(library, "penstock_size_of"):
        return False
    library.penstock_source_id.restype, library.penstock_size_of.restype = ctypes.c_char_p, Int
    if library.penstock_source_id().decode() != source_id():
        return False
    return all(
        library.penstock_size_of(name.encode()) == ctypes.sizeof(structure) for name, structure in STRUCTURES.items()
    )


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
