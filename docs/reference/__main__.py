"""`python -m docs.reference`: write the pages of this folder from the code that they describe.

The program stands beside its pages, so that who finds a wrong line finds what wrote it. It is in no wheel: it is for who changes the code. `make check`
compares the pages on disk with what the code gives (tests/lint/reference.py).
"""

import sys

from docs.reference.pages import FOLDER, pages


def main() -> int:
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(FOLDER.parent.parent)} is new\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
