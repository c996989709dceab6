"""Replicas with other settings beside each other: every gateway asks the same one, and /health warns of them."""

import asyncio
import shutil
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from services.gateway import app
from services.operator.status import Status, render
from services.requests.prepare import embedder, fingerprint_of, makers_sampling, parsers_of
from services.requests.store.admission.admission import Admission
from services.requests.store.files.storage import Storage
from services.requests.store.tenants.tenant import EVERYBODY
from shared.process.errors import Invalid
from shared.wire.registry import Registry, UnlikeReplicas, unlike_replicas
from shared.wire.replica import Replica

OLD = Replica(
    "tokenizer",
    "t-1",
    "host",
    1,
    started_at=10.0,
    model="m",
    parsers={"tool_calls": "hermes"},
    sampling={"temperature": 0.6},
)
NEW = Replica(
    "tokenizer",
    "t-2",
    "host",
    2,
    started_at=20.0,
    model="m",
    parsers={"tool_calls": "mistral"},
    sampling={"temperature": 0.15},
)
OLD_COMPUTE = Replica("compute", "c-1", "host", 3, started_at=10.0, model="m", fingerprint="fp_old")
NEW_COMPUTE = Replica("compute", "c-2", "host", 4, started_at=20.0, model="m", fingerprint="fp_new")


def test_the_newest_replica_speaks_for_its_stage_in_whatever_order_they_are_listed() -> None:
    for replicas in permutations([OLD, NEW, OLD_COMPUTE, NEW_COMPUTE]):
        context = SimpleNamespace(registry=Registry(replicas))
        assert parsers_of(context, "m") == ("mistral", "")  # type: ignore[arg-type]
        assert makers_sampling(context, "m") == {"temperature": 0.15}  # type: ignore[arg-type]
        assert fingerprint_of(context, "m") == "fp_new"  # type: ignore[arg-type]


def encoder(name: str, **more: Any) -> list[Replica]:
    others = [
        Replica(stage, f"{name}-{stage}", "host", 1, started_at=1.0, model=name) for stage in ("tokenizer", "sampler")
    ]
    return [
        *others,
        Replica("compute", f"{name}-compute", "host", 1, started_at=1.0, model=name, is_encoder=True, **more),
    ]


@pytest.mark.parametrize(
    ("replicas", "is_strict", "found"),
    [
        (encoder("bge"), False, ("bge", "bge")),
        ([*encoder("bge"), *encoder("reranker", labels=("0",))], False, ("bge", "bge")),
        (encoder("bge", aliases=("GPT-4",)), False, ("bge", "GPT-4")),
        ([*encoder("bge"), *encoder("GPT-4")], False, ("GPT-4", "GPT-4")),
        ([*encoder("bge"), *encoder("e5")], False, None),
        (encoder("reranker", labels=("0",)), False, None),
        (encoder("bge"), True, None),
    ],
)
def test_the_one_encoder_answers_to_a_name_that_no_model_has(
    replicas: list[Replica], is_strict: bool, found: tuple[str, str] | None
) -> None:
    registry, settings = Registry(tuple(replicas)), SimpleNamespace(strict_fields=is_strict)
    admission = Admission(SimpleNamespace(registry=registry), None, settings)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(
        registry=registry, settings=settings, tenant=EVERYBODY, resolve=lambda name: admission.resolve(name, EVERYBODY)
    )
    if found is not None:
        assert embedder(context, "GPT-4") == found
        return
    with pytest.raises(Invalid) as refused:
        embedder(context, "GPT-4")
    assert refused.value.code == "model_not_found"


def test_health_warns_of_replicas_that_would_answer_differently() -> None:
    alike = Replica("compute", "c-3", "host", 5, started_at=30.0, model="m", fingerprint="fp_new")
    alone = Replica("compute", "c-4", "host", 6, started_at=30.0, model="other", fingerprint="fp_other")
    assert unlike_replicas([NEW_COMPUTE, alike, alone]) == []
    [warning] = unlike_replicas([NEW_COMPUTE, alike, alone, OLD_COMPUTE])
    assert warning.startswith("compute replicas of m have different fingerprints") and warning.endswith(
        "fp_new (c-2, c-3), fp_old (c-1)"
    )


def test_the_log_warns_of_them_once_for_each_change_and_status_every_time(caplog: pytest.LogCaptureFixture) -> None:
    told = UnlikeReplicas()
    alike, unlike = Registry((NEW_COMPUTE,)), Registry((NEW_COMPUTE, OLD_COMPUTE))
    for registry in (alike, unlike, unlike, alike, alike, unlike):
        told.tell(registry)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("compute replicas of m have different fingerprints") for line in lines] == [
        True,
        False,
        True,
    ], lines
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(Status([], [], {}, 0, unlike_replicas(unlike.replicas)), 200))
    assert "fp_new (c-2), fp_old (c-1)" in shown.get()


def test_health_warns_of_a_files_folder_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's own figure, against a bound above and below it; the folder is made with the first file."""
    files = SimpleNamespace(storage=Storage(str(tmp_path / "not" / "yet")))
    context = SimpleNamespace(stage=SimpleNamespace(registry=Registry(())), files=files)
    free = shutil.disk_usage(tmp_path).free
    for least, is_told in ((free // 2, False), (free * 2, True)):
        monkeypatch.setattr(app, "LEAST_FREE_BYTES", least)
        told = asyncio.run(app.warnings(context, 0))  # type: ignore[arg-type]
        assert [line.startswith("the files folder is full: ") and line.endswith(" MiB are free") for line in told] == [
            True
        ] * is_told
