"""How a tiny model of an architecture is made: a config of transformers, with layers enough that
each kind of layer is there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MANY = 24  # layers, among which is every kind
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "no_rope_layers", "activation_sparsity_pattern")  # one by one
# of what a layer holds: which one it is, and of how many
PLACES = ("idx", "index", "layer_id", "num_hidden_layers", "store_full_length_kv")


@dataclass(frozen=True)
class Blueprint:
    """A model_type of transformers, and the fields of its config."""

    model_type: str
    fields: dict[str, Any]
    length_name: str = "num_hidden_layers"  # empty: the fields say all of the layers
    text: "Blueprint | None" = None  # of a model that sees

    def config(self, num_layers: int | None = None) -> PretrainedConfig:
        """With so many layers, of the kinds that the class chooses; None: those that the blueprint
        says, or as few as have each kind."""
        if self.text is not None:
            text = self.text.config(num_layers).to_dict() | {"model_type": self.text.model_type}
            return CONFIG_MAPPING[self.model_type](**self.fields, text_config=text)
        if not self.length_name:
            return CONFIG_MAPPING[self.model_type](**self.fields)
        if num_layers is None:
            num_layers = self.fields.get(self.length_name) or self.fewest_layers()
            return CONFIG_MAPPING[self.model_type](**self.fields | {self.length_name: num_layers})
        plain = {name: value for name, value in self.fields.items() if name not in KINDS_OF_LAYERS}
        return CONFIG_MAPPING[self.model_type](**plain | {self.length_name: num_layers})

    def fewest_layers(self) -> int:
        if given := next((self.fields[name] for name in KINDS_OF_LAYERS if name in self.fields), None):
            return len(given)
        kinds = kinds_of_layers(self.config(MANY))
        return next(count for count in range(2, MANY + 1) if set(kinds[:count]) == set(kinds))

    def missing_kinds(self, config: PretrainedConfig) -> list[str]:
        """The kinds of layers that a larger model of the class has, and this config's has not."""
        if self.text is not None:
            return self.text.missing_kinds(self.text.config())
        if not self.length_name or type(config) not in AutoModel._model_mapping:
            return []
        there = {str(kind) for kind in kinds_of_layers(config)}
        return sorted({str(kind) for kind in kinds_of_layers(self.config(MANY))} - there)

    def model_class(self, config: PretrainedConfig) -> Any:
        mapping = (AutoModelForCausalLM if self.text is None else AutoModelForImageTextToText)._model_mapping
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found


def text(
    model_type: str, without: tuple[str, ...] = (), length_name: str = "num_hidden_layers", **fields: Any
) -> Blueprint:
    """A model of text, with the sizes of all but those that its class does not know."""
    return Blueprint(
        model_type, {name: value for name, value in SIZES.items() if name not in without} | fields, length_name
    )


def seeing(model_type: str, of_text: Blueprint, vision: dict[str, Any] | None, **fields: Any) -> Blueprint:
    """A model that sees, around a model of text."""
    return Blueprint(model_type, fields | ({} if vision is None else {"vision_config": vision}), text=of_text)


def kinds_of_layers(config: PretrainedConfig) -> list[tuple[object, ...]]:
    """Tell each layer's kind: its modules, and all that these hold beside their weights and their number."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 0]
    layers = max(stacks, key=len) if stacks else nn.ModuleList()
    length = getattr(config, "num_hidden_layers", None)
    layers = next((each for each in stacks if len(each) == length), layers)
    return [tuple(sign for name, module in layer.named_modules() for sign in signs(name, module)) for layer in layers]


def signs(name: str, module: nn.Module) -> list[tuple[str, object]]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, bool | int | str | None)
        and not key.startswith("_")
        and not any(part in key for part in PLACES)
    }
    return [(name, type(module).__name__), *((f"{name}.{key}", value) for key, value in sorted(plain.items()))]
