"""`python -m tests.clients.programs.guidance URL`: text that grammars hold, streamed as guidance does it: a choice, a regex and JSON by a schema."""

import json
import sys
from typing import Literal

import guidance
from guidance import assistant, gen, select, user
from pydantic import BaseModel

from tests.clients.documented import names_of


class Forecast(BaseModel):
    place: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]  # guidance reads the answer by a call a byte, and Python bounds those: no long numbers


if __name__ == "__main__":
    model = names_of("guidance", sys.argv[1], sys.argv[2])["model"]
    with user():
        asked = model + "Where does it rain?"
    with assistant():
        assert (asked + select(["Paris", "Rome"], name="place"))["place"] in ("Paris", "Rome")
        assert (asked + gen("days", regex="[1-9] days"))["days"].endswith(" days")
        found = (asked + guidance.json("forecast", schema=Forecast))["forecast"]
    assert Forecast.model_validate(json.loads(found)), found
