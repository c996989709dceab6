"""The wiring: every stream and key this system uses, who writes it, who reads it, what it carries.

Nothing else in the repository builds a Redis key. How messages are moved is entries.py; what they say
is messages.py.
"""

from dataclasses import dataclass

from shared.wire.messages import (
    Control,
    GenerateRequest,
    Offer,
    StepCandidates,
    StepDecisions,
    StepEvents,
    TokenizedRequest,
)

LOG_TTL_S = 3600  # of a finished request's token log: how long a client may still read it
# of a running request's: a backstop, far beyond any generation, and any jump of Redis' clock
RUNNING_LOG_TTL_S = 7 * 24 * 3600
REPLICA_STREAM_TTL_S = 600  # of a one-reader stream whose reader no longer renews it
MAX_DEAD_LETTERS = 10_000
FILE_TTL_S = 30 * 24 * 3600  # of files and batches, at most
LONGEST_WINDOW_S = 24 * 3600  # in which a batch is to be answered
SERVED_TTL_S = 30 * 24 * 3600  # of what is known of a model without replicas

# The one field of a stream entry; group entries also carry the request's id and gateway in the
# clear, so that a message that does not decode can still fail its request.
MESSAGE, REQUEST_ID, GATEWAY_ID = b"m", b"r", b"g"
# Further fields in a gateway's stream of events, for the end of a request: an encoded TokenEvent, and its
# position, which only the script that writes the end knows.
END_EVENT, END_POSITION = b"e", b"p"


@dataclass(frozen=True, slots=True)
class GroupStream:
    """Shared by the replicas of one stage: each entry goes to one of them and stays pending until
    its work is done."""

    key: str
    message_type: type
    group: str


@dataclass(frozen=True, slots=True)
class DirectStream:
    """Read by one replica, which trims it behind itself."""

    key: str
    message_type: type


CONTROL = DirectStream("control", Control)  # gateway, a replica that leaves → every replica; trimmed by age
DEAD_LETTER = "dead-letter"  # stream of messages that no process could handle, kept to 10,000: any stage → an operator
REPLICAS = "replicas"  # set of "<stage>:<replica id>", live or recently so; permanent
BATCHES_RUNNING = "batches-running"  # set of the batches that have not ended; 30 days past the last one
# hash of the counts of all batches, and of what waits; 30 days past the last change. Gateway, jobs
# → gateways
BATCH_FIGURES = "batch-figures"
CELERY_PREFIX = "celery:"  # prefix of the keys that Celery makes for its queue
JOB_QUEUE = f"{CELERY_PREFIX}jobs"  # list: the tasks that no worker has taken yet
# set of "<stage>:<model>", of the keys served:…; 30 days past the last replica. Gateways, jobs that
# wait for replicas → the same
SERVED = "served"
WATCHED = "watched"  # there while the live view is open, renewed for 3 s at a time: gateway → every replica


def requests(model: str) -> GroupStream:
    """gateway → any tokenizer of that model"""
    return GroupStream(f"requests:{model}", GenerateRequest, group="tokenizer")


def prompts(model: str) -> GroupStream:
    """tokenizer → any compute of that model"""
    return GroupStream(f"prompts:{model}", TokenizedRequest, group="compute")


def offers_key(model: str) -> str:
    """The entries of prompts:<model> that were delivered to a compute by choice, and that it has not
    taken up: a sorted set of "<entry>/<compute id>" by the time from which any compute may take
    them (ms, Redis' clock). Tokenizer, compute → compute. Lives an hour past the last offer."""
    return f"offers:{model}"


def offered(compute_id: str) -> DirectStream:
    """tokenizer → that compute: which of its entries in prompts:<model> it has not read itself"""
    return DirectStream(f"offered:{compute_id}", Offer)


def prefixes_key(compute_id: str) -> str:
    """The set of the blocks in a compute's prefix cache: the first 8 bytes of their hashes; compute →
    tokenizer. Written only while there are other replicas. Lives 10 s past the last write; while
    the loop turns, there is one each second."""
    return f"prefixes:{compute_id}"


def candidates(sampler_id: str) -> DirectStream:
    """compute → that sampler"""
    return DirectStream(f"candidates:{sampler_id}", StepCandidates)


def decisions(compute_id: str) -> DirectStream:
    """sampler → that compute"""
    return DirectStream(f"decisions:{compute_id}", StepDecisions)


def events(gateway_id: str) -> DirectStream:
    """sampler, or the stage that fails a request → that gateway"""
    return DirectStream(f"events:{gateway_id}", StepEvents)


def log_key(request_id: str) -> str:
    """The token log: sampler, or the stage that fails the request → every stage. Entry IDs are
    `<position>-0`; see token_log.py. Lives 7 days at most while the request runs, and an hour past
    its end."""
    return f"log:{request_id}"


def response_key(response_id: str) -> str:
    """The record by which a gateway streams a response again: gateway → any gateway. Lives 7 days at
    most, and an hour past the end of its last sequence."""
    return f"response:{response_id}"


def stored_key(response_id: str) -> str:
    """The request of a stored response, with its conversation: gateway → any gateway. Lives as long as
    the response's record. If a client's error ended the response, it is kept only in the background, up to 1 MiB."""
    return f"stored:{response_id}"


def open_key(response_id: str) -> str:
    """The accounting of a running response, a hash: `left`, its sequences that have not ended;
    `account` and `size`, who is charged for its data in Redis, and for how many bytes; `keeps`, the
    longest stored data that stays if the response is refused. Gateway → the stage that ends a
    request. Lives until the response ends, 7 days at most."""
    return f"open:{response_id}"


def held_key(tenant_id: str) -> str:
    """The bytes of a tenant's requests and stored responses: a sorted set of "<bytes>/<response>" by
    the time when they are forgotten (s, Redis' clock). Written by gateways, and by the stage that
    ends a request. Lives 7 days past the last submission."""
    return f"held:{tenant_id}"


def held_bytes_key(account: str) -> str:
    """The sum over the sorted set of that key. Lives as long."""
    return f"{account}:bytes"


def tombstone_key(request_id: str) -> str:
    """Set when a request is cancelled: gateway, compute → any stage that is about to work on it. Lives an hour."""
    return f"cancelled:{request_id}"


def reader_key(response_id: str) -> str:
    """The reader of a resumed response: a hash of its `generation` and its `gateway`; gateway → the
    stages that send it events. Without it, the gateway that submitted the response. Lives as long
    as the response's record."""
    return f"reader:{response_id}"


def response_of(request_id: str) -> str:
    """The response that a request is a sequence of: ids are `<response>.<index>`."""
    return request_id.rpartition(".")[0] or request_id


def inflight_key(model: str) -> str:
    """Admitted requests that have not ended: a hash of tokens by request id, and their sum under "".
    Gateways add a request, the stage that ends it removes it. Deleted when empty; else it lives 7
    days past the last submission."""
    return f"inflight:{model}"


def shares_key(model: str) -> str:
    """How much of `inflight:<model>` each tenant has: a hash of requests and of tokens by the tenant's
    account (held). Written with it, and deleted with it. It says whose turn it is when the pipeline
    is full."""
    return f"shares:{model}"


def quota_key(tenant_id: str) -> str:
    """The rest of a tenant's limits in this minute: a hash of `requests` and `tokens`, and `at`, the
    time of these numbers. Written by gateways, for tenants with limits only. Lives 2 minutes past
    the last submission: it is full by then."""
    return f"quota:{tenant_id}"


def running_key(tenant_id: str) -> str:
    """A tenant's admitted requests: a hash of their inflight keys by request id (in the home cell, for
    another cell: "@<mark> <time> <model>"); requests that are no longer in flight do not count.
    Written by gateways, for tenants with limited concurrency only. Lives 7 days past the last
    submission."""
    return f"running:{tenant_id}"


def attempts_key(request_id: str) -> str:
    """Whether a request has been in a step, in how many trials a replica died, and the length of its
    log then: compute → the compute that claims it. Lives an hour; deleted with the request's end."""
    return f"attempts:{request_id}"


def replica_key(stage: str, replica_id: str) -> str:
    """A live replica's announcement. Lives 4 s, renewed every second."""
    return f"replica:{stage}:{replica_id}"


def served_key(stage: str, model: str) -> str:
    """The last replica of that stage of the model, as it announced itself: gateways and jobs that wait
    for replicas → the same, tokenizers. Lives 30 days past that replica."""
    return f"served:{stage}:{model}"


def file_key(file_id: str) -> str:
    """A file's name and owner: gateway, jobs → any gateway. Lives until the file expires, 30 days at most."""
    return f"file:{file_id}"


def files_key(owner: str) -> str:
    """An owner's files by their age: a sorted set. A process that finds a name without a file removes
    it. Lives 30 days past the last file."""
    return f"files:{owner}"


def uploads_key(owner: str) -> str:
    """An owner's files that are being stored: a sorted set of "<file id>/<bytes>" by the time when
    their room is given up. Written by gateways. Lives 11 minutes past the last upload."""
    return f"uploads:{owner}"


def module_set_key(owner: str, set_id: str) -> str:
    """A set of prompt modules, a hash: what it is, and each module's tokens. Gateway → gateway,
    jobs. Lives 30 days past its last use.
    """
    return f"module-set:{owner}/{set_id}"


def module_sets_key(owner: str) -> str:
    """An owner's sets of prompt modules: a sorted set of "<bytes>/<set>" by the time of their last
    use; gateway, jobs. Lives 30 days past the last use.
    """
    return f"module-sets:{owner}"


def images_key(response_id: str) -> str:
    """The files of the images in a response's requests: a hash by their digests. Gateway, jobs →
    compute. Deleted when the response ends; lives 7 days at most, and 10 minutes until it is
    submitted."""
    return f"images:{response_id}"


def wanted_images_key(fingerprint: str) -> str:
    """The images that compute replicas wait for, a list of EncodeImage messages: compute → any encoder
    with that fingerprint. Lives 10 minutes past the last one."""
    return f"images-wanted:{fingerprint}"


def embeddings_key(fingerprint: str, image_key: str, response_id: str = "") -> str:
    """Embeddings of an image; with the response that asked, why it gets none: encoder → compute. Lives
    a minute past its encoding, and seconds past its reading."""
    return f"embeddings:{fingerprint}/{image_key}" + (f"/{response_id}" if response_id else "")


def batch_key(batch_id: str) -> str:
    """A batch, a hash: what was asked, its status and counts. Gateway, jobs → both. Lives 31 days."""
    return f"batch:{batch_id}"


def batches_key(owner: str) -> str:
    """An owner's batches by their age: a sorted set. Lives 31 days past the last batch."""
    return f"batches:{owner}"


def batch_lease_key(batch_id: str) -> str:
    """The worker that runs the batch at the moment, as long as it renews this. Lives 15 s, renewed every second."""
    return f"batch-lease:{batch_id}"


def batch_queued_key(batch_id: str) -> str:
    """Set while a task for the batch is in Celery's queue: then no process sends one more. Lives 60 s."""
    return f"batch-queued:{batch_id}"


def upkeep_key(name: str) -> str:
    """Set by the worker that has done this part of the upkeep. Lives until the part is due
    again."""
    return f"upkeep:{name}"


def view_key(replica_id: str) -> str:
    """The state that a replica shows while it is watched: compute → gateways. Lives 4 s, renewed twice a second."""
    return f"view:{replica_id}"
