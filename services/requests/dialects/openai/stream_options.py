"""`stream_options`: the field in which a client asks for more in its stream."""

from pydantic import Field

from services.requests.bodies.body import Body

MAX_RESUME_S = 60.0


class StreamOptions(Body):
    include_usage: bool = Field(False, description="a last chunk with usage; the others say null")
    continuous_usage_stats: bool = Field(False, description="usage so far, in each chunk")
    include_position: bool = Field(False, description="an `id:` line with each event, the position to resume after")
    include_obfuscation: bool = Field(True, description="taken, and nothing is added either way")
    resume_within_s: float = Field(
        0.0, ge=0, le=MAX_RESUME_S, description="seconds that the response goes on after its client disconnects; then, unless resumed, it is cancelled"
    )
