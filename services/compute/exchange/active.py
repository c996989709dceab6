"""ActiveRequest: all that compute knows of a request that it answers for, from its claim to its end."""

from dataclasses import dataclass

from services.compute.sequence import Sequence
from shared.messages import TokenizedRequest


@dataclass(slots=True)
class ActiveRequest:
    """Kept by its sequence's handle, in one place: ComputeService.active."""

    sequence: Sequence
    request: TokenizedRequest
    entry_id: bytes  # of the group entry that stays pending until the request has ended
    gateway_id: str | None  # who reads it
    sampler_id: str | None = None  # to whom the sequence was introduced last; None: to nobody
