"""`python -m services.sampler`: settings, objects, run."""

from services.sampler.detokenizer import load_tokenizer
from services.sampler.service import SamplerService
from shared.model.files import open_model
from shared.process.settings import SamplerSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging


def main() -> None:
    settings = load_settings(SamplerSettings)
    start_logging(settings)
    files = open_model(settings.model, settings.served_model_name)
    tokenizer = load_tokenizer(files.folder, files.file("tokenizer.json"))
    SamplerService(Stage("sampler", settings, model=files.name, aliases=files.aliases), settings, tokenizer).run()


if __name__ == "__main__":
    run_stage(main)
