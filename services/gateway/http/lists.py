"""Lists of the API: a page of what there is, after a certain object."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shared.process.errors import Invalid

T = TypeVar("T")


def page_of(
    found: Sequence[T],
    after: str | None,
    limit: int,
    id_of: Callable[[T], str],
    describe: Callable[[T], dict[str, Any]],
) -> dict[str, Any]:
    """Make a page: at most `limit` of the objects, after the one with the id `after`. Raises
    Invalid if that is not among them."""
    if after is not None:
        places = [number for number, each in enumerate(found) if id_of(each) == after]
        if not places:
            raise Invalid(
                f"no object {after!r} in this list: give the id of one that it has, or leave after out", param="after"
            )
        found = found[places[0] + 1 :]
    page = [describe(each) for each in found[:limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
