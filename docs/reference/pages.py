"""The generated pages by their names."""

from pathlib import Path

from docs.reference import api, messages, metrics, settings

FOLDER = Path(__file__).parent


def pages() -> dict[str, str]:
    """Each page's text by its file's name. Pure: the same code gives the same bytes."""
    return {"api.md": api.page(), "messages.md": messages.page(), "metrics.md": metrics.page(), "settings.md": settings.page()}
