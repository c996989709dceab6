"""Finding and reading a model's files: config.json, generation_config.json, the tokenizer. No
torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from socket import gaierror
from typing import Any, Literal

from shared.model.gguf.checkpoint import unpack_metadata, unpack_vision
from shared.model.gguf.parts import model_name, part_names
from shared.model.gguf.vision import MMPROJ, find_mmproj
from shared.model.sampling_params import MAX_TOKENS, SamplingParams
from shared.model.vision.families import read_family
from shared.model.vision.shape import VisionFamily
from shared.process.errors import Invalid, StartupError, words_of
from shared.process.telemetry import get_logger

log = get_logger("penstock.stage")

DEMO_MODEL = Path(__file__).parents[2] / "services" / "demo" / "model"
PULLED_MODELS = Path.home() / ".penstock" / "models"  # what `penstock pull` brings, by name
TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["*.safetensors"]
# in a hub's repository, of the same model, with names of their makers' own; not the numbered folders in which
# sentence-transformers keeps what follows the model
OTHER_FORMS = ["[!0-9]*/*", "consolidated*.safetensors"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# how the architecture of a model with a classification head ends
CLASSIFIER = "ForSequenceClassification"
DTYPES = frozenset(
    (
        "auto",
        "float64",
        "double",
        "float32",
        "float",
        "float16",
        "half",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
    )
)
# whatever else a config.json has
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# as config.json may call it
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "dim")


# A config.json leaves out of its text_config what has the default of the model's class.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
# of generation_config.json
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

MAX_ADDED_TOKENS = 1 << 17  # models that speak add some 65,000


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint and what its JSON files say."""

    folder: Path  # the JSON files, the tokenizer's among them
    weights: Path  # the same folder, or a GGUF file, of several parts the first
    name: str  # as clients call it
    config: dict[str, Any]
    generation_config: dict[str, Any]
    aliases: tuple[str, ...] = ()  # further names
    vision: VisionFamily | None = None  # how it sees images; None: it does not
    vision_folder: Path | None = None  # the configuration of that
    mmproj: Path | None = None  # its weights, if they have a GGUF file of their own

    def file(self, name: str) -> Path:
        """The file by the name that the user knows, for messages: of a GGUF file's metadata, that
        file."""
        return self.weights if self.weights.is_file() else self.folder / name

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence the model was made for; None: config.json does not say, as where
        positions are not learned (ALiBi)."""
        name = next((name for name in LENGTHS if self.config.get(name) is not None), None)
        if name is None:
            return None
        length = self.config[name]
        if not isinstance(length, int) or length < 1:
            raise StartupError(f"{self.file('config.json')}: {name} is not a positive number")
        return length

    @property
    def vocab_size(self) -> int:
        """Raises StartupError."""
        size = self.config.get("vocab_size")
        if not isinstance(size, int) or size < 1:
            raise StartupError(f"{self.folder / 'config.json'}: vocab_size is not a positive number")
        return size

    @property
    def hidden_size(self) -> int | None:
        """The dimensions of a token's hidden state; None: config.json does not say."""
        sizes = (self.config.get(name) for name in HIDDEN_SIZES)
        return next((size for size in sizes if isinstance(size, int)), None)

    @property
    def pooling(self) -> Literal["", "mean", "last", "cls"]:
        """How the model makes one vector of a text, as sentence-transformers wrote it down; empty:
        there is none."""
        described = _read_json(self.folder / "1_Pooling" / "config.json") or {}
        names: dict[str, Literal["mean", "last", "cls"]] = {
            "pooling_mode_mean_tokens": "mean",
            "pooling_mode_lasttoken": "last",
            "pooling_mode_cls_token": "cls",
        }
        return next((pooling for name, pooling in names.items() if described.get(name) is True), "")

    @property
    def has_images(self) -> bool:
        """Whether the model was made to see, in a way that is known here or not."""
        return "vision_config" in (_read_json(self.folder / "config.json") or {})

    @property
    def labels(self) -> tuple[str, ...]:
        """The names that a classification head tells texts apart by, in the order of its outputs;
        empty: the model has no such head."""
        if not any(str(name).endswith(CLASSIFIER) for name in self.config.get("architectures") or []):
            return ()
        names = self.config.get("id2label")
        if not isinstance(names, dict) or not names:
            count = self.config.get("num_labels", 2)
            return tuple(f"LABEL_{number}" for number in range(count if isinstance(count, int) else 2))
        return tuple(str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names)))

    @property
    def is_multi_label(self) -> bool:
        """Whether several labels may be true of one text."""
        return self.config.get("problem_type") == "multi_label_classification"

    def can_shorten(self, dimensions: int) -> bool:
        """Whether the first so many dimensions of an embedding are one, too: of models that were
        trained for it (Kusupati et al. 2022), and say so."""
        sizes = self.config.get("matryoshka_dimensions")
        if isinstance(sizes, list):
            return dimensions in sizes
        return bool(self.config.get("is_matryoshka")) and dimensions <= (self.hidden_size or 0)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer's files bring a template, in one of the places that transformers
        looks at."""
        is_own_file = any((self.folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
        return is_own_file or bool((_read_json(self.folder / "tokenizer_config.json") or {}).get("chat_template"))

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

    @property
    def sampling(self) -> dict[str, int | float]:
        """The makers' values for requests that do not say them, by the names of SamplingParams.
        Raises StartupError."""
        given = {
            name: self.generation_config[name] for name in SAMPLING if self.generation_config.get(name) is not None
        }
        if strange := next(
            (name for name, value in given.items() if isinstance(value, bool) or not isinstance(value, int | float)),
            None,
        ):
            raise StartupError(
                f"{self.file('generation_config.json')}: {strange} is {repr(given[strange])[:80]}, not a number"
            )
        if given.get("top_k", 0) < 0:
            given["top_k"] = 0  # -1 is some makers' way to say "off"
        longest = self.generation_config.get("max_new_tokens")
        if isinstance(longest, int) and longest > 0:
            given["max_tokens"] = min(longest, MAX_TOKENS)
        try:
            SamplingParams(**given)
        except Invalid as error:
            raise StartupError(f"{self.file('generation_config.json')}: {error}") from None
        return given


def open_model(model: str, served_name: str = "", *, weights: bool = False) -> ModelFiles:
    """The model's files: `demo`, a folder, a GGUF file or a folder with one, a model that was
    pulled, or a hub id, which is downloaded (the weights only if asked). Raises StartupError.

    served_name: the names that clients use, joined by commas; the first stands in streams, metrics
    and lists.
    """
    folder, name = _find(model, weights)
    file = folder if folder.is_file() else _only_gguf(folder)
    folder, location = (unpack_metadata(file), file) if file is not None else (folder, folder)
    config = _read_json(folder / "config.json")
    if config is None:
        raise StartupError(f"{folder} holds no config.json: is it a Hugging Face checkpoint folder?")
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"{folder} holds no tokenizer.json, the fast tokenizer's file")
    _check_added_tokens(folder)
    if weights and file is None:
        _check_weights(folder)
    names = [each.strip() for each in served_name.split(",") if each.strip()] or [name]
    generation = _read_json(folder / "generation_config.json") or {}
    if file is not None:  # its metadata seldom says how to sample; a file next to it does
        generation |= _read_json(file.parent / "generation_config.json") or {}
    mmproj, vision_folder = _mmproj(file, config["hidden_size"]) if file is not None else (None, None)
    vision_folder = vision_folder or folder
    vision = read_vision(vision_folder)
    files = ModelFiles(
        folder, location, names[0], text_config(config), generation, tuple(names[1:]), vision, vision_folder, mmproj
    )
    _check_config(files)
    return files


def _check_added_tokens(folder: Path) -> None:
    """Check that they are not more than a tokenizer's library can hold in a sensible memory, some 3
    KB for each. Counted without reading the JSON: each has a field `content`. Raises
    StartupError."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            count = (folder / name).read_bytes().count(b'"content"')
        except OSError:
            continue  # its reader raises the error
        if count > MAX_ADDED_TOKENS:
            raise StartupError(
                f"{folder / name} adds {count} tokens to the vocabulary; at most {MAX_ADDED_TOKENS} are taken"
            )


def _check_weights(folder: Path) -> None:
    """Check that there are weights; compute reads them. Raises StartupError."""
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        return
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    why = (
        f"; {pickles[0]} is a pickle, which may run code when it is read: convert it to safetensors"
        if pickles
        else "; other formats are not read"
    )
    raise StartupError(f"{folder} holds no *.safetensors{why}")


def _check_config(files: ModelFiles) -> None:
    """Check what every stage's library would fail at in words of its own. Raises StartupError."""
    for name in COUNTS:
        value = files.config.get(name, 1)
        is_left_out = value is None and name != "vocab_size"
        if not is_left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise StartupError(f"{files.file('config.json')}: {name} is {repr(value)[:80]}, not a positive number")
    if not isinstance(files.config.get("quantization_config"), dict | None):
        raise StartupError(f"{files.file('config.json')}: quantization_config is not an object")
    for name in ("dtype", "torch_dtype"):
        if (dtype := files.config.get(name)) is not None and (
            not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES
        ):
            raise StartupError(
                f"{files.file('config.json')}: {name} is {repr(dtype)[:80]}, which is no dtype that is known"
            )
    for file, source in (("generation_config.json", files.generation_config), ("config.json", files.config)):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int)
                or not 0 <= token_id < files.config.get("vocab_size", 1 << 31)
            ):
                raise StartupError(
                    f"{files.file(file)}: eos_token_id is {repr(value)[:80]}, which names no token of the vocabulary"
                )


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model's text part, if it takes images too: what it has to say beside
    what is said of the whole, all on one level."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {
        name: value for name, value in config.items() if name not in ("text_config", "vision_config", "model_type")
    }
    return TEXT_DEFAULTS.get(str(text.get("model_type")), {}) | text | whole


def read_processor(folder: Path) -> dict[str, Any]:
    """Read what preprocessor_config.json says of images, or, of newer checkpoints, processor_config.json."""
    nested = (_read_json(folder / "processor_config.json") or {}).get("image_processor")
    return nested if isinstance(nested, dict) else _read_json(folder / "preprocessor_config.json") or {}


def _mmproj(file: Path, hidden_size: int) -> tuple[Path | None, Path | None]:
    """The mmproj file beside a GGUF model, and the folder of its configuration. With one that can't be
    used, the model reads text only."""
    try:
        mmproj = find_mmproj(file)
        return mmproj, unpack_vision(mmproj, hidden_size) if mmproj is not None else None
    except StartupError as error:
        log.warning("the model reads text only", file=file, reason=error)
        return None, None


def read_vision(folder: Path) -> VisionFamily | None:
    """How the model of a folder sees images; None: it does not, or says too little. Raises StartupError."""
    processor = read_processor(folder)
    return read_family(_read_json(folder / "config.json") or {}, processor) if processor else None


def _find(model: str, weights: bool) -> tuple[Path, str]:
    """The model's place, a folder or a file, and its name."""
    path = Path(model).expanduser()
    if model == "demo":
        return DEMO_MODEL, "penstock-demo"
    if path.is_dir():
        return path.resolve(), path.resolve().name
    if path.is_file():
        # a link keeps its name: of parts, the names tell which they are
        return path.parent.resolve() / path.name, model_name(path)
    if model and not model.startswith((".", "/", "~")) and (PULLED_MODELS / model).is_dir():
        return PULLED_MODELS / model, model
    return _download(model, weights), model


def _only_gguf(folder: Path) -> Path | None:
    """The folder's GGUF file, or its first part, if it is that which the folder is about. Raises
    StartupError for several models."""
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(
        {file.with_name(part_names(file.name)[0]) for file in folder.glob("*.gguf") if MMPROJ not in file.name}
    )
    if len(files) > 1:
        raise StartupError(f"{folder} holds {len(files)} GGUF models: name one of them, as {files[0]}")
    return files[0] if files else None


def _download(model: str, weights: bool) -> Path:
    if model.endswith(".gguf"):
        raise StartupError(f"no file {model!r}")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise StartupError(
            f"no folder {model!r} and no file, penstock pull has brought no such model, and it is not a hub id "
            "(owner/name) either"
        )
    from huggingface_hub import snapshot_download  # 0.4 s that a local model need not pay

    try:
        return Path(
            snapshot_download(
                model, allow_patterns=TOKENIZER_FILES + (WEIGHT_FILES if weights else []), ignore_patterns=OTHER_FORMS
            )
        )
    except Exception as error:  # the hub's client raises its own, httpx's and OSError's kinds
        raise StartupError(
            f"no folder {model!r}, and the hub has no such model or can't be reached: {download_error(error)}"
        ) from None


def download_error(error: Exception) -> str:
    """The hub's error, in one line. Its client wraps what the network says."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionError | TimeoutError | gaierror):
        cause = cause.__cause__ or cause.__context__
    return (
        words_of(error) if cause is None else f"{words_of(error)} (is there a network? HF_ENDPOINT names another hub)"
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path}: {words_of(error)}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path}: expected an object")
    return value
