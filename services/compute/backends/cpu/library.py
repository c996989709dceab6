"""The library of native kernels, by ctypes: plain pointers and no build against Python or torch, so one library serves every version of both.

A call costs a few microseconds, and a layer makes few. `PENSTOCK_KERNELS` names what to use: auto (default), amx, avx512, avx2, or torch.
"""

import ctypes
import os
from functools import cache

import torch

from services.compute.backends.cpu.build import LIBRARY, source_id
from shared.errors import StartupError
from shared.telemetry import get_logger

log = get_logger("penstock.compute")

VARIABLE = "PENSTOCK_KERNELS"
CHOICES = ("auto", "amx", "avx512", "avx2", "torch")

Pointer = ctypes.c_void_p


class Weight(ctypes.Structure):
    """kernels.h's Weight."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("type", "n", "k", "padded_n", "padded_k", "is_gated")),
        *((name, Pointer) for name in ("data", "scales", "sums", "bias")),
        ("group", ctypes.c_int64),
        *((name, Pointer) for name in ("table", "group_scales", "zeros", "minima")),
        ("activation", ctypes.c_int64),
    ]


class CacheRows(ctypes.Structure):
    """kernels.h's CacheRows."""

    _fields_ = [("keys", Pointer), ("values", Pointer), *((name, ctypes.c_int64) for name in ("block_size", "num_kv_heads", "row_bytes", "group"))]


class Attention(ctypes.Structure):
    """kernels.h's Attention."""

    _fields_ = [
        ("queries", Pointer),
        ("query_stride", ctypes.c_int64),
        ("cache", CacheRows),
        *((name, Pointer) for name in ("query_starts", "context_lens", "block_tables")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "table_width", "num_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("out", Pointer),
        ("workspace", Pointer),
    ]


class Rotation(ctypes.Structure):
    """kernels.h's Rotation."""

    _fields_ = [
        *((name, Pointer) for name in ("qkv", "cosines", "sines", "q_norm", "k_norm")),
        ("eps", ctypes.c_float),
        ("slots", Pointer),
        ("cache", CacheRows),
        *((name, ctypes.c_int64) for name in ("tokens", "num_heads", "head_dim", "rotary_dim", "is_norm_joint")),
    ]


class Addition(ctypes.Structure):
    """kernels.h's Addition."""

    _fields_ = [
        *((name, Pointer) for name in ("x", "h", "norm_weight")),
        ("eps", ctypes.c_float),
        ("multiplier", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("rows", "k")),
        ("out", Pointer),
    ]


class Largest(ctypes.Structure):
    """kernels.h's Largest."""

    _fields_ = [("logits", Pointer), *((name, ctypes.c_int64) for name in ("rows", "vocab", "k")), *((name, Pointer) for name in ("values", "ids", "maxima"))]


class Masses(ctypes.Structure):
    """kernels.h's Masses."""

    _fields_ = [
        ("logits", Pointer),
        *((name, ctypes.c_int64) for name in ("vocab", "count")),
        *((name, Pointer) for name in ("rows", "largest", "temperatures", "out", "partial")),
    ]


@cache
def load_library() -> ctypes.CDLL | None:
    """The library with an instruction set chosen; None: run on torch. Says once which, and why. Raises StartupError for a wrong choice."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in CHOICES:
        raise StartupError(f"{VARIABLE}={wanted}: expected one of {', '.join(CHOICES)}")
    if wanted == "torch":
        return None
    if not LIBRARY.exists():
        log.warning("the native kernels are not built, torch computes instead", fix="install g++ and run: penstock build-kernels")
        return None
    library = ctypes.CDLL(str(LIBRARY))  # after torch: its libgomp is then the one that both use
    if not hasattr(library, "penstock_source_id") or not _is_built_from(library, source_id()):
        log.warning("the native kernels were built from other sources, torch computes instead", fix="run: penstock build-kernels")
        return None
    library.penstock_choose.restype = ctypes.c_char_p
    library.penstock_pack.argtypes = [ctypes.POINTER(Weight), Pointer, Pointer]
    library.penstock_pack_columns.argtypes = [ctypes.POINTER(Weight), *[Pointer] * 3]
    library.penstock_pack_groups.argtypes = [ctypes.POINTER(Weight), *[Pointer] * 5]
    library.penstock_linear.argtypes = [ctypes.POINTER(Weight), Pointer, Pointer, ctypes.c_float, ctypes.c_int64, Pointer, Pointer, Pointer]
    library.penstock_mlp.argtypes = [ctypes.POINTER(Weight), ctypes.POINTER(Weight), Pointer, Pointer, ctypes.c_float, ctypes.c_int64, Pointer, Pointer]
    library.penstock_add_rows.argtypes = [ctypes.POINTER(Addition)]
    library.penstock_finish_logits.argtypes = [Pointer, ctypes.c_int64, ctypes.c_float, ctypes.c_float]
    library.penstock_attention.argtypes = [ctypes.POINTER(Attention)]
    library.penstock_rotate_and_write.argtypes = [ctypes.POINTER(Rotation)]
    library.penstock_find_largest.argtypes = [ctypes.POINTER(Largest)]
    library.penstock_sum_masses.argtypes = [ctypes.POINTER(Masses)]
    names = ("pack", "pack_columns", "pack_groups", "linear", "mlp", "add_rows", "finish_logits", "attention", "rotate_and_write", "find_largest", "sum_masses")
    for name in names:
        getattr(library, f"penstock_{name}").restype = None
    chosen = library.penstock_choose(wanted.encode())
    if chosen is None and wanted != "auto":
        raise StartupError(f"{VARIABLE}={wanted}: this machine does not have it")
    if chosen is None:
        log.warning("this processor has none of AVX2, AVX-512 and AMX, torch computes instead")
        return None
    log.info("native kernels", instruction_set=chosen.decode())
    return library


def _is_built_from(library: ctypes.CDLL, sources: str) -> bool:
    library.penstock_source_id.restype = ctypes.c_char_p
    return bool(library.penstock_source_id().decode() == sources)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
