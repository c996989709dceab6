"""The queue of jobs: Celery, on the same Redis as everything else. The gateway sends, the workers
of services/jobs take.

A task says only which batch to look at. What is to be done, and how far it is, is in Redis and in
the files: a task that comes twice, late or never costs time, and nothing else. So tasks have no
results, and their messages are acknowledged when they are done.
"""

from typing import TYPE_CHECKING, Any

from shared.wire.redis_urls import parse_named
from shared.wire.streams import CELERY_PREFIX, JOB_QUEUE, batch_queued_key

if TYPE_CHECKING:
    from celery import Celery

    from shared.wire.job_transport import JobTransport

RUN_BATCH = "penstock.run_batch"
# after which a task that a dead worker had is another's: beyond the longest, which ends itself
# after a minute
TASK_VISIBILITY_S = 300
# after which a task may be sent once more, should the first one be lost; the sweep says when it is
# not
QUEUED_S = 60


def make_queue(redis_url: str, transport: "type[JobTransport] | None" = None) -> "Celery":
    """Celery's app. transport: in the place of JobTransport. Takes 0.2 s the first time, for its
    modules."""
    from celery import Celery

    from shared.wire.job_transport import URL, JobTransport

    named = parse_named(redis_url)
    app = Celery(
        "penstock", broker="redis://of-the-transport", set_as_current=False
    )  # kombu warns of a URL without a host
    app.conf.update(
        task_default_queue=JOB_QUEUE.removeprefix(CELERY_PREFIX),
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport=transport or JobTransport,
        broker_transport_options={
            URL: redis_url,
            "visibility_timeout": TASK_VISIBILITY_S,
            "global_keyprefix": (named.prefix if named is not None else "") + CELERY_PREFIX,
        },
    )
    return app


def send_batch(app: "Celery", client: Any, batch_id: str) -> bool:
    """Have some worker look at the batch, unless a task is on its way. Returns whether one was
    sent. Raises kombu's OperationalError, RedisError, OSError."""
    if not client.set(batch_queued_key(batch_id), "1", nx=True, ex=QUEUED_S):
        return False
    app.send_task(RUN_BATCH, args=[batch_id], retry=False)
    return True
