"""Readers: which gateways are gone, so that their requests have no reader any more."""

from dataclasses import dataclass, field

from shared.wire.registry import Registry


@dataclass(slots=True)
class Readers:
    """A gateway is gone when it has been absent for grace_s. Only the time in which this replica could read
    the registry counts: after a gap, every gateway has its whole grace again."""

    grace_s: float
    # by gateway, on the registry's clock
    _absent_since: dict[str, float] = field(default_factory=dict)

    def gone(self, gateway_ids: set[str], registry: Registry) -> set[str]:
        """The gateways that have been absent for longer than the grace, when the registry was read last."""
        now, absent = registry.looked_at, gateway_ids - registry.ids("gateway")
        self._absent_since = {name: max(self._absent_since.get(name, now), registry.seen_since) for name in absent}
        return {name for name, since in self._absent_since.items() if now - since > self.grace_s}
