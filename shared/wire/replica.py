"""Replica: the message by which a live process announces itself."""

from __future__ import annotations

from typing import Any

from msgspec import field
from msgspec.structs import force_setattr

from shared.model.wire_struct import WireStruct
from shared.wire.load import Load


class Replica(WireStruct, frozen=True, forbid_unknown_fields=False):
    """A live process, as it announces itself in the registry. A reader passes over further fields, which
    a newer version may write: stages of two versions meet during an upgrade."""

    stage: str
    replica_id: str
    host: str
    pid: int
    started_at: float
    model: str | None = None
    max_model_len: int | None = None
    idle_s: float = 0.0  # since its loop last came round: large means stuck
    # a Load; msgspec, which takes it for Any, leaves the map on the wire to it
    load: Load | Any = field(default_factory=Load)
    aliases: tuple[str, ...] = ()  # further names of the model
    problem: str = ""  # the error that keeps it from Redis at the moment
    # a tokenizer's: how the model writes "tool_calls" and "reasoning"; missing: it does not
    parsers: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""  # compute's: changes with everything that may change its tokens
    is_encoder: bool = False  # compute's: the model makes embeddings, and no text
    # a tokenizer's: the makers' defaults of sampling parameters
    sampling: dict[str, int | float] = field(default_factory=dict)
    # compute's: the labels of a classification head; empty: there is none
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False  # several labels may be true of one text
    sizes: dict[str, int] = field(default_factory=dict)  # compute's: of the model, by llama.cpp's names
    # compute's: of all that decides the bytes of keys and values; empty: it has no prefix cache
    kv_fingerprint: str = ""
    block_size: int = 0  # the same: tokens of a block of it
    takes_images: bool = False  # compute's: the model sees
    ranks: tuple[str, ...] = ()  # compute's: the other processes of its group, by host and pid
    # compute's: family, format and quantization of the weights, by Ollama's names
    weights: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.load, Load):
            force_setattr(self, "load", Load.unpacked(self.load))
