"""`penstock make-model` for models that see: SmolVLM's form, an eye of random weights before the text
part of another model, or of a random one.

What such a model says of an image means nothing, but each of its parts costs what a trained one's
costs.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.torch.backend import TorchBackend
from services.compute.models.architectures import read_config
from services.compute.models.config import ModelConfig
from services.compute.weights.loader import open_source
from services.modeltools.make_model import tensor_sizes
from services.modeltools.out_folder import open_out_folder, write_model
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError

MAX_TILES = 8  # in a row or in a column, that the tokenizer has names for
TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>")
# before the text's own template, which knows contents that are texts: an image becomes the token
PRELUDE = """\
{%- set seen = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- set content = namespace(text=message['content'] if message['content'] is string else '') -%}
{%- for part in (message['content'] if message['content'] is not string else []) -%}
{%- set content.text = content.text + ('<image>' if part['type'] == 'image' else part['text']) -%}
{%- endfor -%}
{%- set seen.messages = seen.messages + [dict(message, content=content.text)] -%}
{%- endfor -%}
{%- set messages = seen.messages -%}
"""


@dataclass(frozen=True, slots=True)
class Eye:
    """The sizes of SmolVLM's part that sees."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    tile: int  # pixels of a side
    patch: int
    scale: int  # patches of a token's side
    longest_edge: int  # pixels that images are resized to


EYES = {"smolvlm-256m": Eye(768, 3072, 12, 12, 512, 16, 4, 2048), "tiny-smolvlm": Eye(32, 48, 2, 2, 64, 8, 4, 256)}
TEXTS = {"smolvlm-256m": "smollm2-135m", "tiny-smolvlm": "demo"}  # that belong to them


def make_vision_model(out: Path, *, shape: str, text: str, dtype: str, seed: int, force: bool = False) -> None:
    """Write a checkpoint. shape: of EYES; text: a model, as --model takes it, of a family with Llama's
    tensors. Raises StartupError."""
    eye, files = EYES[shape], open_model(text or TEXTS[shape], weights=True)
    open_out_folder(out, force=force)
    if files.config.get("architectures", [None])[0] != "LlamaForCausalLM":
        raise StartupError(
            f"--text {text}: the text part is of Llama's family, and this model is {files.config.get('architectures')}"
        )
    sys.stderr.write(f"making a model of shape {shape} around {files.name}\n")
    tokenizer, ids = with_image_tokens(files)
    config = read_config(files.config)
    vocab_size = max(config.vocab_size, -(-(max(ids.values()) + 1) // 64) * 64)
    generator = torch.Generator().manual_seed(seed)
    tensors = text_tensors(files, config, vocab_size, generator) | eye_tensors(eye, config.hidden_size, generator)

    def write_config() -> None:
        text_config = {
            name: value for name, value in files.config.items() if name not in ("architectures", "quantization_config")
        }
        text_config |= {"model_type": "llama", "vocab_size": vocab_size, "tie_word_embeddings": config.is_tied}
        write(out / "config.json", config_json(eye, text_config, ids["<image>"], dtype))
        write(out / "preprocessor_config.json", processor_json(eye))
        write(out / "generation_config.json", files.generation_config | {"eos_token_id": list(files.eos_token_ids)})
        write(out / "tokenizer.json", tokenizer)
        own = json.loads((files.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = own.pop("chat_template", None)
        if (files.folder / "chat_template.jinja").is_file():
            template = (files.folder / "chat_template.jinja").read_text(encoding="utf-8")
        write(out / "tokenizer_config.json", own)
        if isinstance(template, str):
            (out / "chat_template.jinja").write_text(PRELUDE + template, encoding="utf-8")

    write_model(out, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}, write_config)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_image_tokens(files: ModelFiles) -> tuple[dict[str, Any], dict[str, int]]:
    """The text's tokenizer with the tokens of images, and their ids."""
    tokenizer = json.loads((files.folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = tokenizer["added_tokens"]
    first = max([*tokenizer["model"]["vocab"].values(), *(each["id"] for each in added), files.vocab_size - 1]) + 1
    names = [*TOKENS, *(f"<row_{row + 1}_col_{column + 1}>" for row in range(MAX_TILES) for column in range(MAX_TILES))]
    ids = {name: first + number for number, name in enumerate(names)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added += [{"id": number, "content": name, **plain} for name, number in ids.items()]
    return tokenizer, ids


def text_tensors(
    files: ModelFiles, config: ModelConfig, vocab_size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The text's weights, dequantized, by SmolVLM's names; new rows of the embedding are random."""
    backend = TorchBackend(torch.float32, torch.device("cpu"))
    source = open_source(files.weights, config, backend)
    tensors = {
        name.replace("model.", "model.text_model.", 1): source.dense(name, size) for name, size in tensor_sizes(config)
    }
    more = (vocab_size - config.vocab_size, config.hidden_size)
    embedding = tensors["model.text_model.embed_tokens.weight"]
    tensors["model.text_model.embed_tokens.weight"] = torch.cat(
        [embedding, torch.randn(more, generator=generator) * embedding.std()]
    )
    if not config.is_tied:
        head = source.dense("lm_head.weight", (config.vocab_size, config.hidden_size))
        tensors["lm_head.weight"] = torch.cat([head, torch.zeros(more)])
    source.close()
    return tensors


def eye_tensors(eye: Eye, text_hidden_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights, such that what comes out is as large as a text's embeddings are."""
    hidden, inter, num_patches = eye.hidden_size, eye.intermediate_size, (eye.tile // eye.patch) ** 2

    def matrix(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * float(size[-1] ** -0.5)

    found = {
        "embeddings.patch_embedding.weight": matrix(hidden, 3 * eye.patch**2).reshape(hidden, 3, eye.patch, eye.patch),
        "embeddings.patch_embedding.bias": torch.zeros(hidden),
        "embeddings.position_embedding.weight": 0.1 * torch.randn((num_patches, hidden), generator=generator),
        "post_layernorm.weight": torch.ones(hidden),
        "post_layernorm.bias": torch.zeros(hidden),
    }
    for number in range(eye.num_layers):
        linears = {f"self_attn.{name}_proj": (hidden, hidden) for name in ("q", "k", "v", "out")} | {
            "mlp.fc1": (inter, hidden),
            "mlp.fc2": (hidden, inter),
        }
        for name, size in linears.items():
            found |= {
                f"encoder.layers.{number}.{name}.weight": matrix(*size),
                f"encoder.layers.{number}.{name}.bias": torch.zeros(size[0]),
            }
        for name in ("layer_norm1", "layer_norm2"):
            found |= {
                f"encoder.layers.{number}.{name}.weight": torch.ones(hidden),
                f"encoder.layers.{number}.{name}.bias": torch.zeros(hidden),
            }
    connector = 0.1 * matrix(text_hidden_size, hidden * eye.scale**2)
    return {f"model.vision_model.{name}": tensor for name, tensor in found.items()} | {
        "model.connector.modality_projection.proj.weight": connector
    }


def config_json(eye: Eye, text: dict[str, Any], image_token_id: int, dtype: str) -> dict[str, Any]:
    vision = {
        "model_type": "smolvlm_vision",
        "hidden_size": eye.hidden_size,
        "intermediate_size": eye.intermediate_size,
        "num_hidden_layers": eye.num_layers,
        "num_attention_heads": eye.num_heads,
        "image_size": eye.tile,
        "patch_size": eye.patch,
    }
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "dtype": dtype,
        "image_token_id": image_token_id,
        "scale_factor": eye.scale,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def processor_json(eye: Eye) -> dict[str, Any]:
    """The file that transformers' image processor reads. resample 1: Lanczos."""
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_image_size": {"longest_edge": eye.tile},
        "rescale_factor": 1 / 255,
        "resample": 1,
        "size": {"longest_edge": eye.longest_edge},
    }
