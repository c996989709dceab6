"""The bodies of /tokenize, as vLLM and as llama.cpp have it, and of /detokenize."""

from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import Body
from services.requests.bodies.fields import MAX_NAME, TokenIds, at_most, read_token_ids
from services.requests.dialects.openai.messages import Message
from services.requests.dialects.openai.schemas import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_TEMPLATE,
    ChatCompletionBody,
    description_of,
)
from services.requests.dialects.openai.tools import Tools
from shared.model.sampling_params import MAX_TOKENS
from shared.process.errors import Invalid
from shared.wire.messages import EncodingParams

OF_TEMPLATES = (
    "tools",
    "chat_template_kwargs",
    "chat_template",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
)


def read_tokens(value: Any) -> TokenIds | list[int]:
    """Token ids, or none."""
    return value if value == [] else read_token_ids(value, "")


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    prompt: str | None = Field(None, description="a text; give it or messages")
    messages: Annotated[list[Message] | None, FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        None, description="a conversation, which the model's template renders"
    )
    tools: Tools | None = Field(None, description="of messages: told to the template")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="of messages: variables of the template")
    chat_template: str | None = Field(
        None,
        max_length=MAX_TEMPLATE,
        description="of messages: instead of the model's own, where the operator allows it",
    )
    documents: Annotated[list[dict[str, Any]] | None, BeforeValidator(at_most(MAX_DOCUMENTS))] = Field(
        None, description="of messages: told to the template"
    )
    add_generation_prompt: bool = Field(True, description="of messages: end the text as if an answer followed")
    continue_final_message: bool = Field(False, description="of messages: the last one is not over")
    add_special_tokens: bool | None = Field(None, description=description_of("add_special_tokens"))
    parse_special_tokens: bool | None = Field(None, description=description_of("parse_special_tokens"))
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="keep the last so many tokens")
    return_token_strs: bool = Field(False, description="the tokens' texts, too, as token_strs")

    def check(self) -> None:
        """Raises Invalid unless there is one thing to encode."""
        if (self.prompt is None) == (self.messages is None):
            raise Invalid("give either prompt or messages", param="prompt")
        for name in OF_TEMPLATES if self.messages is None else ():
            if getattr(self, name) not in (None, [], {}, type(self).model_fields[name].default):
                raise Invalid(f"{name} is for messages, which a template renders", param=name)

    def as_chat(self) -> ChatCompletionBody:
        """A chat of the same messages, whose template is given the same."""
        given = {name: getattr(self, name) for name in ("messages", *OF_TEMPLATES) if name in self.model_fields_set}
        return ChatCompletionBody.model_construct(**given)

    def encoding(self) -> EncodingParams:
        return EncodingParams(
            self.add_special_tokens, self.parse_special_tokens, self.truncate_prompt_tokens, self.return_token_strs
        )


class ContentBody(Body):
    """A text, as llama.cpp's server takes it."""

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    content: str = Field(description="the text")
    add_special: bool = Field(False, description="add a BOS and the like")
    parse_special: bool = Field(True, description="read special tokens that are spelt in the text as tokens")
    with_pieces: bool = Field(
        False, description="of each token its id and its piece: its text, or the bytes of a part of a character"
    )

    def encoding(self) -> EncodingParams:
        return EncodingParams(self.add_special, self.parse_special, return_token_strs=self.with_pieces)


class DetokenizeBody(Body):
    """Token ids, to be spelt as a text."""

    model: str = Field("", max_length=MAX_NAME, description="a served name; may be left out if only one is served")
    tokens: Annotated[
        Any, PlainValidator(read_tokens), WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
    ] = Field(description="token ids")
