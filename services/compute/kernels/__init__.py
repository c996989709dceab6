"""The one dispatch: the operations a model is made of. Today all of them are the torch reference, on the CPU and on CUDA alike."""

from services.compute.kernels.reference import decode_attention, linear, prefill_attention, rms_norm, rotary, silu_mul, write_kv

__all__ = ["decode_attention", "linear", "prefill_attention", "rms_norm", "rotary", "silu_mul", "write_kv"]
