"""Where an answer breaks what of its schemas could not be enforced."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice, content_and_calls
from services.requests.workers.grammars.answers import AnswerChecker


async def schema_errors(answers: AnswerChecker, record: ResponseRecord, text: str) -> list[dict[str, Any]]:
    """The errors of a whole answer's text, for its record's schemas."""
    content, calls = content_and_calls(Choice(0, text=[text]), record)
    return await answers.check(record.tenant_id, record.checks, content, calls)


async def while_checked(checking: Coroutine[Any, Any, None], every_s: float) -> AsyncIterator[None]:
    """Yields again and again until the answer is checked, so that a stream can send its pings."""
    task = asyncio.create_task(checking)
    try:
        while not (await asyncio.wait({task}, timeout=every_s))[0]:
            yield
        task.result()
    finally:
        task.cancel()
