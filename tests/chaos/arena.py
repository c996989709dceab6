"""What a fault has in its hands: the processes, Redis, and the clients."""

from dataclasses import dataclass

from tests.chaos.cluster import Cluster
from tests.chaos.load import Load
from tests.chaos.store import Store
from tests.chaos.tally import Tally


@dataclass(frozen=True, slots=True)
class Arena:
    cluster: Cluster
    store: Store
    load: Load
    tally: Tally
