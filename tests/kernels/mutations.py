"""Documents with one value changed."""

from typing import Any

from hypothesis import strategies as st


def change_one(document: dict[str, Any], data: st.DataObject, values: st.SearchStrategy[Any]) -> None:
    """Give some key of it, or of what it holds, another value."""
    while nested := [key for key, value in document.items() if isinstance(value, dict) and value]:
        if data.draw(st.booleans()):
            break
        document = document[data.draw(st.sampled_from(nested))]
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(values)
