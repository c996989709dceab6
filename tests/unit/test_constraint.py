"""Constraints: their texts are bounded, and the error names who asked."""

import pytest

from shared.model.constraint import MAX_TEXT, Constraint
from shared.process.errors import Invalid


@pytest.mark.parametrize(("param", "named"), [("guided_regex", "guided_regex"), ("", "regex")])
def test_a_text_that_is_too_long_is_refused_by_the_field_that_asked_or_else_by_its_kind(param: str, named: str) -> None:
    assert Constraint("regex", "a" * MAX_TEXT, param).text
    with pytest.raises(Invalid, match=f"^{named} takes at most {MAX_TEXT} characters, got {MAX_TEXT + 1}$") as refused:
        Constraint("regex", "a" * (MAX_TEXT + 1), param)
    assert refused.value.param == named
