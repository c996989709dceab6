"""Cases that between them have every pair of values: most mistakes are of one value, or of two together."""

from collections.abc import Collection, Sequence
from itertools import combinations

Case = Sequence[str | int]  # a value for each factor
Values = frozenset[tuple[int, str | int]]  # one or two: the number of the factor, and its value


def values_of(case: Case, once: Collection[int] = ()) -> set[Values]:
    """Each pair of the case's values, but of the factors `once` each value alone."""
    places = [each for each in enumerate(case) if each[0] not in once]
    return {frozenset(pair) for pair in combinations(places, 2)} | {frozenset([each]) for each in enumerate(case)}


def covering(cases: Sequence[Case], once: Collection[int] = ()) -> list[int]:
    """The numbers of cases, in ascending order, that have all that `values_of` finds in any of `cases`.

    Greedy, as in D. Cohen et al., "The AETG System" (1997): the next is the first case of those
    that add the most. So the choice depends on the cases and their order alone.
    """
    missing = [values_of(case, once) for case in cases]
    chosen = []
    while any(missing):
        number = max(range(len(cases)), key=lambda each: len(missing[each]))  # of several, max takes the first
        chosen.append(number)
        added = missing[number]
        missing = [each - added for each in missing]
    return sorted(chosen)
