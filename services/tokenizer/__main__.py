"""`python -m services.tokenizer`: settings, objects, run."""

import os
import sys
from typing import Any

from services.tokenizer.encoder import Encoder
from services.tokenizer.service import TokenizerService
from shared.model.files import ModelFiles, open_model
from shared.process.errors import StartupError
from shared.process.settings import TokenizerSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging


def load_tokenizer(files: ModelFiles) -> Any:
    """The model's fast tokenizer, without torch: where torch is installed transformers would import
    it (2 s, 200 MiB) for nothing."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    from transformers import AutoTokenizer

    try:
        # False: never ask on stdin whether to run a checkpoint's code
        return AutoTokenizer.from_pretrained(files.folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for files it can't use
        if "trust_remote_code" in str(error):
            raise StartupError(
                f"{files.file('tokenizer_config.json')}: auto_map names code in the checkpoint, and that is never run"
            ) from None
        problem = " ".join(str(error).replace(str(files.folder), str(files.weights)).split()) or type(error).__name__
        raise StartupError(f"{files.weights}: the tokenizer can't be loaded: {problem}") from None


def main() -> None:
    settings = load_settings(TokenizerSettings)
    start_logging(settings)
    files = open_model(settings.model, settings.served_model_name)
    encoder = Encoder(
        load_tokenizer(files),
        files,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    encoder.chat_template.start()
    stage = Stage("tokenizer", settings, model=files.name, aliases=files.aliases)
    stage.parsers = encoder.parsers
    stage.sampling = files.sampling
    TokenizerService(stage, settings, encoder, files.max_model_len).run()


if __name__ == "__main__":
    run_stage(main)
