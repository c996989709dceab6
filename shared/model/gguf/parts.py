"""A GGUF model in several files, as llama.cpp's gguf-split cuts it: name-00001-of-00003.gguf and so
on. The first holds the metadata, each holds some of the tensors."""

import re
from dataclasses import replace
from pathlib import Path

from shared.model.gguf.reader import GgufHead, read_head
from shared.process.errors import StartupError

PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> tuple[str, ...]:
    """The names of all parts of the model of which a file of this name is one; the name alone, if
    it says nothing of parts."""
    match = PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return (name,)
    return tuple(
        f"{match['model']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)
    )


def model_name(path: Path) -> str:
    """The file's name without what is said of parts."""
    match = PART.fullmatch(path.name)
    return path.stem if match is None else match["model"]


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model whose first part, or only file, this is. Raises StartupError for
    another part, and where one is missing."""
    names = part_names(path.name)
    if len(names) == 1:
        return (path,)
    paths = tuple(path.with_name(name) for name in names)
    if path != paths[0]:
        raise StartupError(f"{path} is not the first part of its model: name {paths[0].name}")
    missing = [number for number, each in enumerate(paths) if not each.is_file()]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"{path}: part {missing[0] + 1} of {len(paths)} is missing: {paths[missing[0]]}{more}")
    return paths


def read_model(path: Path) -> GgufHead:
    """The metadata of the first part, or of the only file, and the tensors of all. Raises
    StartupError for parts that do not belong together, too."""
    paths = parts_of(path)
    heads = [read_head(each) for each in paths]
    for number, head in enumerate(heads):
        count, place = head.metadata.get("split.count") or 1, head.metadata.get("split.no") or 0
        if (count, place) != (len(heads), number):
            said = f"{place + 1} of {count}" if isinstance(place, int) else f"{place!r} of {count!r}"
            raise StartupError(
                f"{head.path}: its metadata says that it is part {said}, its name says {number + 1} of {len(heads)}"
            )
    tensors = {name: info for head in heads for name, info in head.tensors.items()}
    found = sum(len(head.tensors) for head in heads)
    if len(tensors) < found:
        raise StartupError(f"{path}: a tensor is in two of its {len(heads)} parts")
    expected = heads[0].metadata.get("split.tensors.count", found)
    if expected != found:
        raise StartupError(f"{path}: its {len(heads)} parts hold {found} tensors, and should hold {expected}")
    return replace(heads[0], tensors=tensors)
