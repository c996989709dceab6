"""Messages to text, by the model's own chat template."""

from typing import Any

from shared.errors import Invalid
from shared.messages import ChatMessage


def render(tokenizer: Any, messages: tuple[ChatMessage, ...]) -> str:
    """The conversation as the model was trained to read it, up to where the assistant speaks. Raises Invalid with the template's word.

    `tokenizer` is a transformers tokenizer. A template is a program that came with the model and runs sandboxed; whatever it raises
    is about this conversation (or a broken template), and fails this request alone.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise Invalid("this model has no chat template: use /v1/completions", param="messages", code="no_chat_template")
    conversation = []
    for message in messages:
        entry = {"role": message.role, "content": message.content}
        if message.name is not None:
            entry["name"] = message.name
        conversation.append(entry)
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise Invalid(f"the model's chat template refuses these messages: {error}", param="messages", code="chat_template_error") from error
    return str(text)
