"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema

from services.gateway.openai.fields import TokenIds, read_token_ids
from services.gateway.openai.schemas import MAX_MESSAGES, MAX_NAME, Body, Message
from shared.errors import Invalid
from shared.messages import EncodingParams
from shared.sampling_params import MAX_TOKENS


def read_tokens(value: Any) -> TokenIds | list[int]:
    """Token ids, or none."""
    return value if value == [] else read_token_ids(value, "")


class TokenizeBody(Body):
    """A text, or a conversation."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"add_generation_prompt": (True,), "continue_final_message": (False,), "tools": ([],)}

    model: str | None = Field(None, max_length=MAX_NAME, description="by default the one that is served")
    prompt: str | None = None
    messages: Annotated[list[Message] | None, FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)] = None
    add_special_tokens: bool | None = Field(None, description="by default of prompts, not of conversations")
    parse_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    return_token_strs: bool = False

    def check(self) -> None:
        """Raises Invalid unless there is one thing to encode."""
        if (self.prompt is None) == (self.messages is None):
            raise Invalid("give prompt or messages, one of them", param="prompt")

    def encoding(self) -> EncodingParams:
        return EncodingParams(self.add_special_tokens, self.parse_special_tokens, self.truncate_prompt_tokens, self.return_token_strs)


class DetokenizeBody(Body):
    model: str | None = Field(None, max_length=MAX_NAME)
    tokens: Annotated[Any, PlainValidator(read_tokens), WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
