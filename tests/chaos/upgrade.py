"""An upgrade under load: processes of an older commit are replaced by this tree's, one after another,
gateways and workers first and the other stages in an order that the seed draws, as
docs/operate/upgrade.md says, while clients ask and batches are answered.

The answers are those that the older version gave in quiet. Each state between the two versions lasts
for some seconds, and so does the last one.
"""

import asyncio
import random
import shutil
import subprocess
import sys
from pathlib import Path

from services.compute.backends.cpu.build import LIBRARY
from tests.chaos import batches
from tests.chaos.arena import Arena
from tests.chaos.cluster import ROOT
from tests.chaos.faults import Fault

FIRST, THEN = ("gateway", "jobs"), ("tokenizer", "compute", "sampler")
STAYS_S = 3.0  # as it is, after each replacement
NUM_LINES = 100  # of a batch
SOURCES = [f"{LIBRARY.parent.relative_to(ROOT)}/*.{suffix}" for suffix in ("cpp", "h", "inc")]
BUILD = "from services.compute.backends.cpu.build import build; print(build() or 'kernels of the older version built')"


def check_out(commit: str, folder: Path) -> Path:
    """A folder in `folder` with the commit's stages and their kernels, which call themselves version 0,
    as an older release is another. Exits with a message if there is no such commit.
    """
    tree, packed = folder / "older", folder / "older.tar"
    archive = ["git", "archive", "--output", str(packed), commit, "services", "shared"]
    made = subprocess.run(archive, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"python -m tests.chaos --from {commit}: {made.stderr.strip()}; it needs a clone with that commit")
    shutil.unpack_archive(packed, tree, filter="data")
    (tree / "penstock-0.dist-info").mkdir()
    (tree / "penstock-0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0\n")
    if LIBRARY.exists():
        if subprocess.run(["git", "diff", "--quiet", commit, "--", *SOURCES], cwd=ROOT).returncode == 0:
            shutil.copy(LIBRARY, tree / LIBRARY.relative_to(ROOT))
        else:
            subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True)
    return tree


async def replace_all(arena: Arena, rng: random.Random) -> None:
    """The whole upgrade."""
    run = batches.Run(arena.cluster, rng)
    try:
        await batches.learn(run)
        replacing = asyncio.create_task(replace_each(arena, [*FIRST, *rng.sample(THEN, len(THEN))]))
        while not replacing.done():
            await batches.answer(run, NUM_LINES)
        await replacing
    finally:
        left = [slot.name for slot in arena.cluster.slots if slot.tree != ROOT]
        for finding in [*run.wrong, *([f"not replaced: {', '.join(left)}"] if left else [])]:
            arena.history.find(finding)


async def replace_each(arena: Arena, stages: list[str]) -> None:
    tally = arena.history.judge.tally
    for slot in [slot for stage in stages for slot in arena.cluster.of(stage)]:
        num_answered, num_lives, slot.tree = tally.total("answered"), slot.num_lives, ROOT
        arena.cluster.leave(slot)
        while slot.num_lives == num_lives:
            await asyncio.sleep(0.1)
        await arena.cluster.wait_ready()
        await asyncio.sleep(STAYS_S)
        print(f"{slot.name} is replaced; {tally.total('answered') - num_answered} answers meanwhile", flush=True)


UPGRADE = Fault("upgrade", 1, replace_all, "each process is replaced by one of this version")
