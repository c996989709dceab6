"""Finding and reading a model's files: config.json, generation_config.json, the tokenizer. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import StartupError

DEMO_MODEL = Path(__file__).parent.parent / "services" / "demo" / "model"
TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["*.safetensors"]
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")  # as config.json may call it


# A config.json leaves out of its text_config what has the default of the model's class.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072}
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint folder and what its JSON files say."""

    folder: Path
    name: str  # as clients call it
    config: dict[str, Any]
    generation_config: dict[str, Any]
    aliases: tuple[str, ...] = ()  # further names

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence the model was made for; None: config.json does not say, as where positions are not learned (ALiBi)."""
        name = next((name for name in LENGTHS if self.config.get(name) is not None), None)
        if name is None:
            return None
        length = self.config[name]
        if not isinstance(length, int) or length < 1:
            raise StartupError(f"{self.folder / 'config.json'}: {name} is not a positive number")
        return length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer: generation_config.json's word before config.json's."""
        for source in (self.generation_config, self.config):
            value = source.get("eos_token_id")
            if isinstance(value, int):
                return (value,)
            if isinstance(value, list) and value:
                return tuple(value)
        return ()


def open_model(model: str, served_name: str = "", *, weights: bool = False) -> ModelFiles:
    """The model's files: `demo`, a folder, or a hub id, which is downloaded (the weights only if asked). Raises StartupError.

    served_name: the names that clients use, joined by commas; the first stands in streams, metrics and lists.
    """
    if model == "demo":
        folder, name = DEMO_MODEL, "penstock-demo"
    elif Path(model).is_dir():
        folder, name = Path(model).resolve(), Path(model).resolve().name
    else:
        folder, name = _download(model, weights), model
    config = _read_json(folder / "config.json")
    if config is None:
        raise StartupError(f"{folder} holds no config.json: is it a Hugging Face checkpoint folder?")
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"{folder} holds no tokenizer.json, the fast tokenizer's file")
    names = [each.strip() for each in served_name.split(",") if each.strip()] or [name]
    return ModelFiles(folder, names[0], text_config(config), _read_json(folder / "generation_config.json") or {}, tuple(names[1:]))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model that takes images too, what its text part has to say beside what is said of the whole, all on one level."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {name: value for name, value in config.items() if name not in ("text_config", "vision_config", "model_type")}
    return TEXT_DEFAULTS.get(text.get("model_type", ""), {}) | text | whole


def _download(model: str, weights: bool) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise StartupError(f"no folder {model!r}, and it is not a hub id (owner/name) either")
    from huggingface_hub import snapshot_download  # 0.4 s that a local model need not pay

    try:
        return Path(snapshot_download(model, allow_patterns=TOKENIZER_FILES + (WEIGHT_FILES if weights else [])))
    except Exception as error:  # the hub's client raises its own, httpx's and OSError's kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(f"no folder {model!r}, and the hub has no such model or can't be reached: {reason}") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path}: expected an object")
    return value
