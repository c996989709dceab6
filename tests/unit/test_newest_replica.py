"""While replicas with other settings take over, every gateway asks the same one."""

from itertools import permutations
from types import SimpleNamespace

from services.gateway.openai.routes import fingerprint_of, parsers_of
from shared.messages import Replica
from shared.registry import Registry

OLD = Replica("tokenizer", "t-1", "host", 1, started_at=10.0, model="m", parsers={"tool_calls": "hermes"})
NEW = Replica("tokenizer", "t-2", "host", 2, started_at=20.0, model="m", parsers={"tool_calls": "mistral"})
OLD_COMPUTE = Replica("compute", "c-1", "host", 3, started_at=10.0, model="m", fingerprint="fp_old")
NEW_COMPUTE = Replica("compute", "c-2", "host", 4, started_at=20.0, model="m", fingerprint="fp_new")


def test_the_newest_replica_speaks_for_its_stage_in_whatever_order_they_are_listed() -> None:
    for replicas in permutations([OLD, NEW, OLD_COMPUTE, NEW_COMPUTE]):
        context = SimpleNamespace(stage=SimpleNamespace(registry=Registry(replicas)))
        assert parsers_of(context, "m") == ("mistral", "")  # type: ignore[arg-type]
        assert fingerprint_of(context, "m") == "fp_new"  # type: ignore[arg-type]
