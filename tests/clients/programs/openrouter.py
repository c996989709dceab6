"""OpenRouter's own package, told another server's address: the models with all that it asks of them, and a chat."""

import sys
from typing import Any

from openrouter import OpenRouter


def main(url: str, model: str) -> None:
    with OpenRouter(api_key="none", server_url=f"{url}/v1") as client:
        [card] = [each for each in client.models.list().result.data if each.id == model]
        assert card.context_length and "text" in card.architecture.output_modalities, card
        assert "temperature" in card.supported_parameters and (card.pricing.prompt, card.pricing.completion) == (
            "0",
            "0",
        ), card
        messages = [{"role": "user", "content": "What is Penstock?"}]
        asked: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "top_p": 0, "max_tokens": 40}
        answer = client.chat.send(**asked, stream=False).choices[0].message.content
        stream = client.chat.send(**asked, stream=True)
        assert (
            answer and "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == answer
        ), answer


if __name__ == "__main__":
    main(*sys.argv[1:])
