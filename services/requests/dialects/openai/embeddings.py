"""The body of a request for embeddings, of OpenAI's API and of those that are made into one."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema

from services.requests.bodies.body import ANYTHING
from services.requests.bodies.content import Content
from services.requests.bodies.fields import (
    MAX_INPUTS,
    PROMPT_SCHEMA,
    Prompt,
    at,
    at_most,
    join_parts,
    read_prompt,
    read_token_ids,
    whole_items,
)
from services.requests.bodies.ignored import tell_others
from services.requests.dialects.openai.messages import Message
from services.requests.dialects.openai.schemas import (
    MAX_MESSAGES,
    MAX_TEMPLATE,
    ChatCompletionBody,
    QueuedBody,
    checked_truncation,
)
from shared.model.sampling_params import MAX_TOKENS
from shared.process.errors import Invalid
from shared.wire.messages import EmbeddingParams, EncodingParams


def read_input(value: Any) -> list[Prompt]:
    """Texts and token ids, as prompts are read; in a list, both, and llama.cpp's objects with a
    `prompt_string` or with the parts of a message's `content`."""
    items = [value] if isinstance(value, dict) else whole_items(value)
    kinds = {type(each) for each in items} if isinstance(items, list) else set()
    if len(kinds) < 2 and dict not in kinds:
        return read_prompt(items, MAX_INPUTS)
    return [
        read_one(each, f"[{index}]" if items is value else "") for index, each in enumerate(at_most(MAX_INPUTS)(items))
    ]


def read_one(value: Any, path: str) -> Prompt:
    """A text, token ids, or an object with a text."""
    if isinstance(value, dict):
        text = join_parts(value["content"]) if isinstance(value.get("content"), list) else value.get("prompt_string")
        if not isinstance(text, str):
            raise at(path, "expected an object with a prompt_string, or with the parts of a content")
        tell_others(value, {"content", "prompt_string"}, f"input{path}")
        return text
    return value if isinstance(value, str) else read_token_ids(value, path)


class EncodedBody(QueuedBody):
    """The fields of every request for what a model makes of texts."""

    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="keep an input's first so many tokens; -1: as many as fit"
    )


class EmbeddingBody(EncodedBody):
    """Texts, or one conversation, which the model's chat template makes a text."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "service_tier": ("auto", "default"),
        "metadata": ANYTHING,
        "safety_identifier": ANYTHING,
    }

    input: Annotated[list[Prompt] | None, PlainValidator(read_input), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        None, description="a text, token ids, or a list of these: a vector is made of each"
    )
    messages: Annotated[
        list[Message] | None,
        FailFast(),
        Field(
            min_length=1, max_length=MAX_MESSAGES, description="instead of input: one vector of a conversation's text"
        ),
    ] = None
    add_generation_prompt: bool = Field(False, description="of messages: end the text as if an answer followed")
    continue_final_message: bool = Field(False, description="of messages: the last one is not over")
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE, description="instead of the model's own, where the operator allows it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="of messages: variables of the template")
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: little-endian float32")
    dimensions: int | None = Field(
        None, ge=1, description="keep only the first so many numbers, of models that are made for it"
    )
    pooling: Literal["mean", "last", "cls"] | None = Field(
        None, description="of all tokens, the last, or the first; by default what the model was made for"
    )
    normalize: bool = Field(True, description="scale each vector to length 1")

    @property
    def embedding(self) -> EmbeddingParams:
        return EmbeddingParams(self.pooling or "", self.dimensions, self.normalize)

    def encoding(self) -> EncodingParams:
        """How an input is to be encoded."""
        return EncodingParams(
            truncate_prompt_tokens=checked_truncation(self.truncate_prompt_tokens), keeps_beginning=True
        )

    def prompts(self, *, may_bring_template: bool) -> list[dict[str, Any]]:
        """The fields of GenerateRequest that hold the input, for each vector. Raises Invalid."""
        if (self.input is None) == (self.messages is None):
            raise Invalid("give input or messages, one of them", param="input")
        if self.input is not None:
            return [{"prompt": each} if isinstance(each, str) else {"prompt_token_ids": each} for each in self.input]
        assert self.messages is not None
        if any(isinstance(message.content, Content) for message in self.messages):
            raise Invalid("embeddings are made of texts: images can't be understood", param="messages")
        chat = ChatCompletionBody.model_construct(
            model=self.model,
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        options = chat.chat_options(chat.calling(), may_bring_template=may_bring_template)
        return [{"messages": tuple(message.to_wire() for message in self.messages), "chat": options}]
