"""Anthropic's lists of models. All of them are one page, so `limit`, `after_id` and `before_id` have nothing to choose."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from shared.wire.messages import Replica


def list_of(served: Mapping[str, Replica]) -> dict[str, Any]:
    """The models by their names."""
    cards = [card(name, replica) for name, replica in sorted(served.items())]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"] if cards else None, "last_id": cards[-1]["id"] if cards else None}


def card(name: str, replica: Replica) -> dict[str, Any]:
    """One of them. A sequence's length bounds prompt and answer together; it is null while no compute of the model is alive."""
    return {
        "type": "model", "id": name, "display_name": name, "created_at": datetime.fromtimestamp(int(replica.started_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active", "max_input_tokens": replica.max_model_len, "max_tokens": replica.max_model_len,
    }  # fmt: skip
