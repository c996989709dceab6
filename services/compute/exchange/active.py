"""ActiveRequest: all that compute knows of a request that it answers for, from its claim to its
end."""

import time
from dataclasses import dataclass, field

from services.compute.sequence import Sequence
from shared.wire.messages import TokenizedRequest


@dataclass(slots=True)
class ActiveRequest:
    """Kept by its sequence's handle, in one place: ComputeService.active."""

    sequence: Sequence
    message: TokenizedRequest  # what was asked, as it came
    entry_id: bytes  # of the group entry that stays pending until the request has ended
    gateway_id: str | None  # who reads it
    sampler_id: str | None = None  # to whom the sequence was introduced last; None: to nobody
    was_claimed: bool = False  # from a replica that died or left
    num_logged_tokens: int = 0  # that it came with
    taken_at: float = field(default_factory=time.time)  # wall clock, s
    scheduled_at: float = 0.0  # the same: its first step began; 0: not yet
