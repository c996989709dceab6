"""StateCache: the tensors of recurrent layers' states and logs. Who has which slot is state_slots.py's."""

from collections.abc import Sequence

from torch import Tensor

from services.compute.backends.backend import Backend, LayerCache
from services.compute.backends.torch.recurrent import StateLayer, make_state_layer
from services.compute.models.config import ModelConfig


class StateCache:
    """A model's, of so many sequences."""

    def __init__(self, config: ModelConfig, backend: Backend, num_slots: int) -> None:
        self.num_own = config.num_own
        self.layers: dict[int, StateLayer] = {}  # by number
        if config.recurrence is not None:
            self.layers = {
                number: make_state_layer(config.recurrence, num_slots, backend.dtype, backend.device)
                for number in config.recurrent_layers
            }

    def among(self, kv_layers: Sequence[Tensor]) -> list[LayerCache]:
        """A cache for each layer of the model that has its own. kv_layers: KVCache's, of the other layers."""
        others = iter(kv_layers)
        return [self.layers[number] if number in self.layers else next(others) for number in range(self.num_own)]
