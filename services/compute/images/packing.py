"""Embeddings of an image in Redis, or why there are none."""

import msgpack
import torch
from torch import Tensor

from shared.process.errors import Invalid

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def pack(found: Tensor | Invalid) -> bytes:
    """found: [tokens, hidden]."""
    if isinstance(found, Invalid):
        packed: bytes = msgpack.packb([str(found), found.status, found.param, found.code])
        return packed
    raw = found.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    packed = msgpack.packb([str(found.dtype).removeprefix("torch."), list(found.shape), raw])
    return packed


def unpack(packed: bytes) -> Tensor | Invalid:
    """The embeddings, or why there are none; Invalid for bytes that are neither."""
    try:
        first, *rest = msgpack.unpackb(packed)
        if first in DTYPES:
            shape, raw = rest
            return torch.frombuffer(bytearray(raw), dtype=DTYPES[first]).view(shape)
        status, param, code = rest
        return Invalid(str(first), status=int(status), param=param, code=code)
    except (ValueError, TypeError, RuntimeError, msgpack.UnpackException) as error:
        return Invalid(f"the image's embeddings in Redis can't be read: {error}", status=500)
