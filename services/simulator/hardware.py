"""Cards and links by their data sheets, and how numbers are kept on them."""

from dataclasses import dataclass

# shares of the data sheets' figures that good kernels reach
BANDWIDTH_SHARE, FLOPS_SHARE, LINK_SHARE = 0.8, 0.6, 0.8
HOST_S = 1.5e-3  # of a step, in addition to its bytes and operations
# A step that is not recorded is launched kernel by kernel, while the card computes what was launched.
LAUNCH_S = 10e-6  # of the host, in Python
# of a layer, and of each gather: padding, the collective, putting parts side by side
LAYER_LAUNCHES, GATHER_LAUNCHES = 9, 7


@dataclass(frozen=True, slots=True)
class Link:
    """A way between cards. Each card receives `bandwidth` bytes/s while it sends as many. A gather of N
    ranks takes base_s + (N - 1) hop_s in addition to its bytes, as in a ring."""

    bandwidth: float
    base_s: float
    hop_s: float

    @property
    def byte_s(self) -> float:
        return 1 / (LINK_SHARE * self.bandwidth)

    def latency_s(self, num_ranks: int) -> float:
        return self.base_s + (num_ranks - 1) * self.hop_s


@dataclass(frozen=True, slots=True)
class Hardware:
    """A card."""

    memory: float  # bytes
    bandwidth: float  # bytes/s
    flops: float  # dense 16-bit operations/s
    int8_ops: float  # dense int8 operations/s
    link: str = "shared-memory"  # to other cards in the host
    price: float = 0.0  # $ an hour
    host_s: float = HOST_S
    launch_s: float = LAUNCH_S
    bandwidth_share: float = BANDWIDTH_SHARE
    flops_share: float = FLOPS_SHARE


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a number, by where it is kept. Embeddings, and what ranks exchange, have 16 bits."""

    weight_bytes: float = 2.0  # in the layers
    head_bytes: float = 2.0  # in the LM head
    kv_bytes: float = 2.0
    has_int8_products: bool = False


# Latencies: NCCL's own model of a ring with its LL128 protocol (src/graph/tuning.cc). Over TCP a hop is
# assumed to take 30 us, and a barrier in shared memory 2 us for each rank; so are 10 GB/s there.
LINKS = {
    "nvlink3": Link(300e9, 14e-6, 1.9e-6),
    "nvlink4": Link(450e9, 14e-6, 1.9e-6),
    "pcie4": Link(31.5e9, 14e-6, 2.5e-6),
    "pcie5": Link(63e9, 14e-6, 2.5e-6),
    "ethernet-10g": Link(1.25e9, 14e-6, 30e-6),
    "ethernet-25g": Link(3.125e9, 14e-6, 30e-6),
    "ethernet-100g": Link(12.5e9, 14e-6, 30e-6),
    "shared-memory": Link(10e9, 0.0, 2e-6),
}
# NVIDIA's data sheets, without sparsity; a 4090 with sums in float32. The prices are round, and assumed.
HARDWARE = {
    "a100-40g": Hardware(40e9, 1.555e12, 312e12, 624e12, "nvlink3", 1.3),
    "a100-80g": Hardware(80e9, 2.04e12, 312e12, 624e12, "nvlink3", 1.8),
    "h100-80g": Hardware(80e9, 3.35e12, 989e12, 1979e12, "nvlink4", 3.0),
    "h200-141g": Hardware(141e9, 4.8e12, 989e12, 1979e12, "nvlink4", 3.8),
    "l40s-48g": Hardware(48e9, 0.864e12, 362e12, 733e12, "pcie4", 1.0),
    "l4-24g": Hardware(24e9, 0.30e12, 121e12, 242e12, "pcie4", 0.6),
    "rtx4090-24g": Hardware(24e9, 1.01e12, 165e12, 660e12, "pcie4", 0.4),
}
PRECISIONS = {  # by --quantization
    "none": Precision(),
    "w8a8": Precision(1.0, 1.0, has_int8_products=True),
    "w4": Precision(4.75 / 8, 1.0),  # groups of 32 on a GPU; multiplied in 16 bits
}
KV_BYTES = {"auto": 2.0, "int8": 1 + 2 / 64}  # by --kv-cache-dtype; a float16 scale for 64 numbers
