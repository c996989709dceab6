"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import Body
from services.requests.bodies.fields import TokenIds, at_most, read_token_ids
from services.requests.neutral.messages import MAX_NAME, Message
from services.requests.neutral.schemas import MAX_DOCUMENTS, MAX_MESSAGES, MAX_TEMPLATE, ChatCompletionBody
from services.requests.neutral.tools import Tools, check_depth
from shared.model.sampling_params import MAX_TOKENS
from shared.process.errors import Invalid
from shared.wire.messages import EncodingParams

OF_TEMPLATES = ("tools", "chat_template_kwargs", "chat_template", "documents", "add_generation_prompt", "continue_final_message")


def read_tokens(value: Any) -> TokenIds | list[int]:
    """Token ids, or none."""
    return value if value == [] else read_token_ids(value, "")


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str = Field("", max_length=MAX_NAME, description="by default the one that is served")
    prompt: str | None = None
    messages: Annotated[list[Message] | None, FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)] = None
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(check_depth)] = None
    chat_template: str | None = Field(None, max_length=MAX_TEMPLATE, description="instead of the model's own, where the operator allows it")
    documents: Annotated[list[dict[str, Any]] | None, BeforeValidator(at_most(MAX_DOCUMENTS)), BeforeValidator(check_depth)] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = Field(None, description="by default of prompts, not of conversations")
    parse_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    return_token_strs: bool = False

    def check(self) -> None:
        """Raises Invalid unless there is one thing to encode."""
        if (self.prompt is None) == (self.messages is None):
            raise Invalid("give prompt or messages, one of them", param="prompt")
        for name in OF_TEMPLATES if self.messages is None else ():
            if getattr(self, name) not in (None, [], {}, type(self).model_fields[name].default):
                raise Invalid(f"{name} is for messages, which a template renders", param=name)

    def as_chat(self) -> ChatCompletionBody:
        """A chat of the same messages, whose template is given the same."""
        given = {name: getattr(self, name) for name in ("messages", *OF_TEMPLATES) if name in self.model_fields_set}
        return ChatCompletionBody.model_construct(**given)

    def encoding(self) -> EncodingParams:
        return EncodingParams(self.add_special_tokens, self.parse_special_tokens, self.truncate_prompt_tokens, self.return_token_strs)


class DetokenizeBody(Body):
    model: str = Field("", max_length=MAX_NAME)
    tokens: Annotated[Any, PlainValidator(read_tokens), WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]
