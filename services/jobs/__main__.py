"""`python -m services.jobs`: settings, objects, run."""

from services.jobs.office import Office
from services.jobs.worker import work
from shared.process.settings import JobsSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging


def main() -> None:
    settings = load_settings(JobsSettings)
    start_logging(settings)
    stage = Stage("jobs", settings)
    stage.transport.wait_until_up(settings.redis_timeout_s)
    office = Office(settings, stage)
    office.start()
    try:
        work(office)
    finally:
        stage.leave()
        office.close()


if __name__ == "__main__":
    run_stage(main)
