"""The generated pages by their names: `make docs` writes them, `make check` compares them with the
code (tests/lint/reference.py).

The program stands beside its pages, so that who finds a wrong line finds what wrote it. It is in no
wheel: it is for who changes the code.
"""

from pathlib import Path

from docs.reference import api, messages, metrics, models, settings

FOLDER = Path(__file__).parent


def pages() -> dict[str, str]:
    """Each page's text by its file's name. Pure: the same code gives the same bytes."""
    return {
        "api.md": api.page(),
        "messages.md": messages.page(),
        "metrics.md": metrics.page(),
        "models.md": models.page(),
        "../../services/operator/supported_models.txt": models.listing(),
        "settings.md": settings.page(),
    }
