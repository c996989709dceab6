"""`python -m tests.clients.programs.guidance URL MODEL`: answers that grammars hold, streamed as
guidance does it: a choice, and a regex.
"""

import sys

from guidance import assistant, gen, select, user

from tests.clients.documented import names_of

if __name__ == "__main__":
    model = names_of("guidance", sys.argv[1], sys.argv[2])["model"]
    with user():
        asked = model + "Where does it rain?"
    with assistant():
        assert (asked + select(["Paris", "Rome"], name="place"))["place"] in ("Paris", "Rome")
        assert (asked + gen("days", regex="[1-9] days"))["days"].endswith(" days")
