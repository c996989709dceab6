"""Where an answer breaks what of its schemas could not be enforced."""

from typing import Any

from services.requests.answers.choice import Choice, content_and_calls
from services.requests.grammars.answers import AnswerChecker
from services.requests.record import ResponseRecord


async def schema_errors(answers: AnswerChecker, record: ResponseRecord, text: str) -> list[dict[str, Any]]:
    """The errors of a whole answer's text, for its record's schemas."""
    content, calls = content_and_calls(Choice(0, text=[text]), record)
    return await answers.check(record.checks, content, calls)
