"""StepPolicy: the bounds of one step that do not follow from its sequences."""

from dataclasses import dataclass

from services.compute.scheduling.drafts import Drafting


@dataclass(frozen=True, slots=True)
class StepPolicy:
    apart: frozenset[int] = frozenset()  # handles that run in steps of their own, by turns with all others
    held: frozenset[int] = frozenset()  # handles whose grammars' masks are not filled yet: they do not run
    in_stages: frozenset[int] = frozenset()  # handles whose next tokens a step in the model's stages decides
    num_stages: int = 1  # of the model, which computes as many steps at once
    drafting: Drafting | None = None
    splits_prompts: bool = True  # False: each token sees all others, so a prompt must be computed in one step
    awaits_restoring: bool = False  # a sequence begins after the second tier was asked for its blocks


PLAIN = StepPolicy()
