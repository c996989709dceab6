"""Readers: which gateways are gone, so that nobody reads their requests any more."""

from dataclasses import dataclass, field

from shared.wire.registry import Registry


@dataclass(slots=True)
class Readers:
    """Absence counts from look to look, and only over time in which this replica could see: after a
    blind gap every gateway has its whole grace again."""

    grace_s: float
    # by gateway, on the registry's clock
    _absent_since: dict[str, float] = field(default_factory=dict)

    def gone(self, gateway_ids: set[str], registry: Registry) -> set[str]:
        """The gateways that have been absent for longer than the grace, as of the registry's
        look."""
        now, absent = registry.looked_at, gateway_ids - registry.ids("gateway")
        self._absent_since = {each: max(self._absent_since.get(each, now), registry.seen_since) for each in absent}
        return {each for each, since in self._absent_since.items() if now - since > self.grace_s}
