"""gpt-oss' checkpoints: their experts are in MXFP4 (weights/mxfp4.py), which the loader reads by
itself; all linear layers are plain."""

from dataclasses import dataclass

from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import StoredLayer, StoredWeight, WeightFormat

DESCRIPTION = "experts in MXFP4"


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    description: str = DESCRIPTION

    def holds(self, layer: StoredLayer) -> bool:  # noqa: ARG002
        return False

    def matrix(self, layer: StoredLayer) -> StoredWeight:
        raise AssertionError(f"{layer.name} is not in MXFP4")


def read_mxfp4(options: Options) -> WeightFormat:  # noqa: ARG001
    return Mxfp4Experts()
