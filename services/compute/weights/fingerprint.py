"""The fingerprint of a replica: equal where the same request gives the same bytes.

The contents of the model's files are hashed, so two fine-tunes of one base differ. That reads the
whole checkpoint, so the hashes are kept in the user's cache and used again while the file system says
that a file is the same.
"""

import fcntl
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from services.compute.backends.backend import Backend
from shared.model.decision import DRAW
from shared.model.files import TOKENIZER_FILES, WEIGHT_FILES, ModelFiles, open_model
from shared.model.gguf.checkpoint import cache_folder
from shared.model.gguf.parts import parts_of
from shared.process.settings import ComputeSettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.compute")

BATCH_VARIANT = "_batch_variant"  # end of a fingerprint that promises no equal bits
HASHES = ".penstock-hashes"  # in the model's folder: a JSON object of file name: [stamp, SHA-256]
LOCK_S = 600.0  # to wait for another process that hashes
SETTINGS = (
    "dtype",
    "model_impl",
    "quantization",
    "quantization_group",
    "quantize_attention_output",
    "activations",
    "kv_cache_dtype",
    "kv_cache_group",
)
HEAD_SETTINGS = ("quantize_lm_head",)
VISION_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """name: changes with whatever may change a token: Penstock's version, the contents of the
    model's files, how they are computed, and the rule of the draw. It ends in BATCH_VARIANT where
    the same request may get other bits in another batch. kv: changes with whatever may change a
    key or a value: neither the tokenizer nor the head nor the draw does."""

    name: str
    kv: str


def fingerprint(settings: ComputeSettings, files: ModelFiles, backend: Backend) -> Fingerprint:
    """The fingerprint of a replica."""
    hashes = content_hashes(files)
    facts: dict[str, Any] = {
        "version": version("penstock"),
        "config": files.config,
        "weights": {name: each for name, each in hashes.items() if is_weights(name)},
        "settings": {name: getattr(settings, name) for name in SETTINGS},
        "arithmetic": backend.arithmetic,
    }
    if "longrope" in json.dumps(files.config, default=str):  # the longest sequence chooses its factors
        facts["max_model_len"] = min(
            (each for each in (settings.max_model_len, files.max_model_len) if each is not None), default=None
        )
    if files.vision is not None:  # an image's digest names its tokens, and these decide what they are
        facts["vision"] = vision_fingerprint(files, str(backend.dtype), backend.device.type)
    kv = digest_of(facts)
    head = {name: getattr(settings, name) for name in HEAD_SETTINGS}
    name = digest_of({"kv": kv, "head": head, "files": hashes, "draw": DRAW})[:12]
    return Fingerprint(f"fp_{name}{BATCH_VARIANT if settings.allow_batch_variance else ''}", kv)


def with_drafts(name: str, settings: ComputeSettings, speculators: Sequence[str]) -> str:
    """The fingerprint `name`, and the contents of the models that draft: no token depends on them,
    but ranks that divide them must have the same. Raises StartupError."""
    paths = {"self": settings.self_draft, "draft": settings.draft_model}
    drafts = {each: content_hashes(open_model(path, weights=True)) for each in speculators if (path := paths.get(each))}
    return f"{name} with drafts {digest_of(drafts)[:12]}" if drafts else name


def vision_fingerprint(files: ModelFiles, dtype: str, device: str) -> str:
    """Equal where an image becomes the same embeddings: of the weights, of how pixels are made, and of
    the libraries and the processor that compute."""
    hashes = content_hashes(files)
    facts = {
        "version": version("penstock"),
        "files": {name: each for name, each in hashes.items() if is_weights(name) or name in VISION_FILES},
        "dtype": dtype,
        "device": device,
        "libraries": {name: version(name) for name in ("torch", "transformers", "pillow")},
        "processor": processor_facts() if device == "cpu" else torch.cuda.get_device_name(),
    }
    return f"vp_{digest_of(facts)[:12]}"


def processor_facts() -> list[str]:
    """A CPU's model and its instructions: by these oneDNN chooses how products are summed."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    found = {line for line in lines if line.partition(":")[0].strip() in wanted}
    return [
        *sorted(found),
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        platform.processor(),
    ]


def digest_of(facts: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def is_weights(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in (*WEIGHT_FILES, "*.gguf"))


def content_hashes(files: ModelFiles) -> dict[str, str]:
    """SHA-256 by name of the weights and the tokenizer's files; of a GGUF model, which holds both,
    of its file, or of each part."""
    if files.weights.is_file():
        paths = [*parts_of(files.weights), *([files.mmproj] if files.mmproj is not None else [])]
    else:
        paths = sorted(
            {
                file
                for pattern in (*WEIGHT_FILES, *TOKENIZER_FILES)
                for file in files.folder.glob(pattern)
                if file.is_file()
            }
        )
    with _alone(paths[0].parent):
        stamps = {path.name: _stamp(path) for path in paths}
        known = _read(paths[0].parent, stamps)
        missing = [path for path in paths if path.name not in known]
        if missing:
            started_at = time.monotonic()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                hashes = dict(zip((path.name for path in missing), pool.map(_hash, missing), strict=True))
            log.info("model files hashed", files=len(missing), seconds=round(time.monotonic() - started_at, 2))
            known |= {name: [stamps[name], digest] for name, digest in hashes.items()}
            _write(paths[0].parent, known)
    return {path.name: known[path.name][1] for path in paths}


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While one process of the host hashes, its user's others wait, and then find the hashes. The lock is
    on a file of ours: a lock on the weights may keep others from reading them (flock(2), SMB). Where none
    can be had, each hashes."""
    with ExitStack() as stack, suppress(OSError, RuntimeError):
        store = _cached(folder)
        store.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(store.with_suffix(".lock").open("w"))
        started_at = time.monotonic()
        is_said = False
        while not _lock(file) and time.monotonic() - started_at < LOCK_S:
            if not is_said:
                log.info("waiting for another process that hashes the model's files", folder=folder)
            is_said = True
            time.sleep(0.05)
        stack = stack.pop_all()
    with stack:
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stamp(path: Path) -> list[int]:
    """Changes whenever the file is written, replaced, or copied elsewhere."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cached(folder: Path) -> Path:
    """Raises RuntimeError if the user has no home folder."""
    return cache_folder("hashes") / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]


def _stores(folder: Path) -> Iterator[Path]:
    """Where the hashes of a folder's files are kept: in it, or where it is read-only, in the cache."""
    yield folder / HASHES
    with suppress(RuntimeError):
        yield _cached(folder)


def _read(folder: Path, stamps: Mapping[str, list[int]]) -> dict[str, list[Any]]:
    """Whatever is kept that is a hash, and of these files, what has their stamps; a broken file holds
    none."""
    known: dict[str, list[Any]] = {}
    for store in _stores(folder):
        with suppress(OSError, ValueError):
            found = json.loads(store.read_text(encoding="utf-8"))
            for name, entry in found.items() if isinstance(found, dict) else ():
                if (
                    isinstance(entry, list)
                    and len(entry) == 2
                    and isinstance(entry[1], str)
                    and entry[0] == stamps.get(name, entry[0])
                ):
                    known[name] = entry
    return known


def _write(folder: Path, hashes: dict[str, list[Any]]) -> None:
    """Replaces the file in one go. Where nothing can be written, the files are hashed again at the next
    start."""
    for store in _stores(folder):
        with suppress(OSError):
            store.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=store.parent, prefix=HASHES, delete=False) as file:
                json.dump(hashes, file)
                file.flush()
                Path(file.name).replace(store)
            return
