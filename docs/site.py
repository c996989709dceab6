"""Changes to pages for the site; GitHub shows them as they are."""

import re
from typing import Any

from mkdocs.structure.pages import Page

CONTENTS = re.compile(r"<!-- contents -->\n.*?<!-- end of contents -->\n", re.DOTALL)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page without its list of sections, which the site has beside it. The front page has the whole width."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    return CONTENTS.sub("", markdown)
