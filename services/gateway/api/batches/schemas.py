"""The body of POST /v1/batches."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from services.requests.bodies.body import Body
from services.requests.bodies.fields import at_most
from shared.process.errors import Invalid
from shared.wire.streams import FILE_TTL_S, LONGEST_WINDOW_S

SECONDS = {"s": 1, "m": 60, "h": 3600}
WINDOW = re.compile(r"([1-9]\d{0,5})([smh])")


class ExpiresAfter(Body):
    anchor: Literal["created_at"] = Field(description="from when the seconds count: the file's creation")
    seconds: int = Field(ge=3600, le=FILE_TTL_S, description="how long the file is kept")


class BatchBody(Body):
    input_file_id: str = Field(max_length=64, description="an uploaded file of purpose batch")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        description="the endpoint of every line"
    )
    completion_window: str = Field(
        max_length=16, description="how long the batch may take: 24h, or a whole number with s, m or h"
    )
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None,
        BeforeValidator(at_most(16)),
    ] = Field(None, description="up to 16 pairs of texts, repeated in the batch")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="how long the files that the batch writes are kept; by default 30 days"
    )

    @property
    def window_s(self) -> int:
        """Raises Invalid."""
        match = WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * SECONDS[match[2]] if match is not None else 0
        if not 0 < seconds <= LONGEST_WINDOW_S:
            raise Invalid(
                f"completion_window must be 24h, or a shorter one such as 90m, got {self.completion_window!r}",
                param="completion_window",
            )
        return seconds
