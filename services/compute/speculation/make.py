"""The proposers that settings ask for."""

from collections.abc import Sequence

from services.compute.candidates.constraints import Constraints
from services.compute.speculation.grammar import GrammarProposer
from services.compute.speculation.lookup import Lookup
from services.compute.speculation.prediction import PredictionProposer
from services.compute.speculation.proposer import Proposer

AUTO = ("grammar", "prediction", "lookup")


def make_proposers(names: tuple[str, ...], constraints: Constraints, loaded: Sequence[Proposer] = ()) -> list[Proposer]:
    """Makes one proposer of each name, those that run no model first. auto: all that need no weights of their own;
    loaded: those that have them."""
    wanted = {each for name in names for each in (AUTO if name == "auto" else (name,))}
    made: dict[str, Proposer] = {"grammar": GrammarProposer(constraints), "prediction": PredictionProposer(), "lookup": Lookup()}
    return [*(proposer for name, proposer in made.items() if name in wanted), *loaded]
