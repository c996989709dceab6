"""The proposers that settings ask for."""

from services.compute.candidates.constraints import Constraints
from services.compute.speculation.grammar import GrammarProposer
from services.compute.speculation.lookup import Lookup
from services.compute.speculation.proposer import Proposer

AUTO = ("grammar", "lookup")


def make_proposers(names: tuple[str, ...], constraints: Constraints, loaded: tuple[Proposer, ...] = ()) -> list[Proposer]:
    """One of each name, those that run no model first. auto: all that need no weights of their own;
    loaded: those that have them."""
    wanted = {each for name in names for each in (AUTO if name == "auto" else (name,))}
    made: dict[str, Proposer] = {"grammar": GrammarProposer(constraints), "lookup": Lookup()}
    return [*(proposer for name, proposer in made.items() if name in wanted), *loaded]
