"""`python -m tests.clients.scripted.compute`: a compute replica whose model says what the file SCRIPT says."""

import os
from pathlib import Path

from tokenizers import Tokenizer

from services.compute import __main__ as compute
from services.compute.backends.backend import Backend
from services.compute.loop import engine
from services.compute.ranks.place import Placement
from shared.model.files import ModelFiles
from shared.process.settings import ComputeSettings
from shared.wire.stage import run_stage
from tests.clients.scripted.model import ScriptedModel, follow
from tests.clients.scripted.script import Script


def load_scripted(
    settings: ComputeSettings, files: ModelFiles, backend: Backend, max_model_len: int | None, place: Placement
) -> ScriptedModel:
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    return ScriptedModel(files.vocab_size, follow(Script.read(Path(os.environ["SCRIPT"])), tokenizer))


if __name__ == "__main__":
    # a function of a module, in the types' eyes not to be set
    setattr(engine, "load_model", load_scripted)  # noqa: B010
    run_stage(compute.main)
