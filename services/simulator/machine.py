"""Machine: what a replica runs on, from a card's data sheet or from steps that were measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.compute.scheduling.step_cost import StepCost
from services.simulator.hardware import HARDWARE, Precision
from services.simulator.models import DecoderShape
from services.simulator.reading import reason
from services.simulator.roofline import CardGroup, Roofline, Work, kv_tokens
from shared.process.errors import StartupError


class Cost(Protocol):
    """Seconds of a step."""

    def seconds(self, work: Work) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """The cost that a scheduler learned from a server's steps."""

    step_cost: StepCost

    def seconds(self, work: Work) -> float:
        return self.step_cost.seconds(int(work.num_tokens), int(work.num_context_tokens))


@dataclass(frozen=True, slots=True)
class Machine:
    cost: Cost
    kv_tokens: int  # for which the KV cache has room
    price: float  # $ an hour


def find_machine(
    name: str, model: DecoderShape, precision: Precision, group: CardGroup, price: float | None
) -> Machine:
    """A group of known cards, or a .json with the cost of measured steps. price: $ of a card for an
    hour; None: the one that is assumed. Raises StartupError."""
    if name in HARDWARE:
        hardware = HARDWARE[name]
        room = kv_tokens(model, hardware, precision, group)
        whole_price = (hardware.price if price is None else price) * group.num_cards
        return Machine(Roofline(model, hardware, precision, group), room, whole_price)
    try:
        fields = json.loads(Path(name).read_text())
        fixed_s, *others = costs = [float(fields[key]) for key in ("fixed_s", "per_token_s", "per_context_token_s")]
        if fixed_s <= 0 or min(others) < 0:
            raise ValueError("its costs must be at least 0, and fixed_s above 0")
        machine = Machine(MeasuredCost(StepCost(*costs)), int(fields["kv_tokens"]), 1.0 if price is None else price)
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = (
            f"--hardware {name}: not one of {', '.join(HARDWARE)}, nor a file with fixed_s, per_token_s, "
            "per_context_token_s and kv_tokens"
        )
        raise StartupError(f"{text} ({reason(error)})") from None
    if group.num_cards > 1:
        raise StartupError(
            f"--hardware {name}: its steps were measured as they are, so it can't be divided over {group.num_cards} "
            "cards"
        )
    return machine
