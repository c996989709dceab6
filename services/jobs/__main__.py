"""`python -m services.jobs`: settings, objects, run."""

from services.jobs.runtime import JobsRuntime
from services.jobs.worker import work
from services.requests.store.client import connect
from shared.process.settings import JobsSettings, load_settings
from shared.wire.stage import Stage, run_stage, start_logging


def main() -> None:
    settings = load_settings(JobsSettings)
    start_logging(settings)
    stage = Stage("jobs", settings)
    stage.transport.wait_until_up(settings.redis_timeout_s)
    runtime = JobsRuntime(settings, stage, connect(settings))
    runtime.start()
    try:
        work(runtime)
    finally:
        stage.leave()
        runtime.close()


if __name__ == "__main__":
    run_stage(main)
