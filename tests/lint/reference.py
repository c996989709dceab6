"""The pages of docs/reference/ are what the code gives."""

from docs.reference.pages import FOLDER, pages
from tests.lint.contents import with_contents
from tests.lint.problem import Problem


def wanted() -> dict[str, str]:
    return {name: with_contents(text) for name, text in pages().items()}


def write() -> None:
    for name, text in wanted().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def problems() -> list[Problem]:
    wrong = [
        FOLDER / name
        for name, text in wanted().items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    return [Problem(path, 0, "the code says otherwise; make docs writes it") for path in wrong]
