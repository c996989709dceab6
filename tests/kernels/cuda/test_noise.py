"""The noise by Triton, in the interpreter: bit for bit numpy's."""

import numpy as np
import torch
import triton
import triton.language as tl

from services.compute.backends.cuda.kernels.search import gumbel_noise, logarithm
from shared.model import noise


def test_the_noise_has_the_bits_of_numpys() -> None:
    """Uniform numbers at their borders, numbers of all binades, what is not normal, and tokens of several rows."""
    rng = np.random.default_rng(3)
    edges = [
        2.0**-53,
        1 - 2.0**-53,
        0.5,
        np.sqrt(0.5),
        np.nextafter(np.sqrt(0.5), 0),
        1.0,
        2.0**-1022,
        2.0**-1074,
        2.0**-1060,
        np.finfo(np.float64).max,
    ]
    x = np.concatenate([rng.random(1000), np.exp(rng.uniform(-708, 709, 1000)), 1 - 2.0 ** -np.arange(1.0, 54), edges])
    x = np.resize(x, 4096)
    found = torch.empty(len(x), dtype=torch.float64)
    logarithms[(1,)](torch.from_numpy(x), found, SIZE=len(x), enable_fp_fusion=False)
    assert found.numpy().tobytes() == noise.log(x).tobytes()
    states, token_ids = rng.integers(0, 1 << 64, 4, dtype=np.uint64), rng.integers(-1, 1 << 31, (4, 256))
    token_ids[:, :2] = noise.TAIL_ID, 0
    found = torch.empty((4, 256), dtype=torch.float64)
    noises[(4,)](
        torch.from_numpy(states.view(np.int64)), torch.from_numpy(token_ids), found, SIZE=256, enable_fp_fusion=False
    )
    assert found.numpy().tobytes() == noise.gumbel(noise.unit(noise.token_bits(states, token_ids))).tobytes()


@triton.jit  # type: ignore[untyped-decorator]
def logarithms(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, logarithm(tl.load(x_ptr + at)))


@triton.jit  # type: ignore[untyped-decorator]
def noises(states_ptr, token_ids_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    state = tl.load(states_ptr + row).to(tl.uint64, bitcast=True)
    tl.store(out_ptr + row * SIZE + at, gumbel_noise(state, tl.load(token_ids_ptr + row * SIZE + at)))
