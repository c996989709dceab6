"""`python -m services.encoder`: settings, objects, run."""

from shared.model.files import open_model
from shared.process.errors import StartupError
from shared.process.host_memory import enough_memory
from shared.process.settings import EncoderSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging

CALL_TIMEOUT_S = 600.0  # one call of the encoder that takes longer has hung


def main() -> None:
    settings = load_settings(EncoderSettings)
    start_logging(settings)
    files = open_model(settings.model, settings.served_model_name, weights=True)
    if files.vision is None or files.vision_folder is None:
        raise StartupError(f"{files.name} takes no images: it needs no encoder stage")

    # torch takes seconds to import: only now, so that a bad setting is told at once
    with enough_memory(
        files.name, "An encoder holds the part of a model that sees: give it more memory, or take a smaller model"
    ):
        from services.compute.images.reader import PixelProcess
        from services.compute.loop.engine import open_tower
        from services.encoder.service import EncoderService

        tower = open_tower(settings, files)
    stage = Stage("encoder", settings, model=files.name, aliases=files.aliases, step_timeout_s=CALL_TIMEOUT_S)
    stage.fingerprint = tower.fingerprint
    EncoderService(stage, tower, PixelProcess(stage.transport, files.vision_folder, files.vision)).run()


if __name__ == "__main__":
    run_stage(main)
