"""The things in a fault's hands: the processes, Redis, the clients, and the history."""

from dataclasses import dataclass

from tests.chaos.cluster import Cluster
from tests.chaos.history import History
from tests.chaos.load import Load
from tests.chaos.store import Store


@dataclass(frozen=True, slots=True)
class Arena:
    cluster: Cluster
    store: Store
    load: Load
    history: History
