"""`penstock chat`: a conversation in the terminal, streamed from the gateway."""

import json
import sys
from collections.abc import Iterator

import httpx

from shared.errors import StartupError


def chat(url: str, model: str | None, system: str | None, temperature: float, api_key: str) -> None:
    """Until Ctrl-D. Ctrl-C stops an answer. Raises StartupError if the gateway can't be reached."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None), trust_env=False) as client:
        model = model or first_model(client)
        print(f"{model} at {url} — Ctrl-C stops an answer, Ctrl-D ends the chat")
        messages = [{"role": "system", "content": system}] if system else []
        while (question := ask()) is not None:
            if not question.strip():
                continue
            messages.append({"role": "user", "content": question})
            answer = say(client, {"model": model, "messages": messages, "temperature": temperature, "stream": True})
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def first_model(client: httpx.Client) -> str:
    try:
        reply = client.get("/v1/models")
        if reply.status_code == 401:
            raise StartupError(f"{reply.json()['error']['message']} Give penstock chat one with --api-key, or PENSTOCK_API_KEY")
        models = reply.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise StartupError(f"no gateway at {client.base_url}: is Penstock up? ({error})") from None
    if not models:
        raise StartupError("the gateway serves no model at the moment: see penstock status")
    return str(models[0]["id"])


def ask() -> str | None:
    """A line from the user; None at the end."""
    try:
        return input("\n> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def say(client: httpx.Client, body: dict[str, object]) -> str | None:
    """Print the answer as it comes. Returns it, or None if there was an error."""
    answer = []
    try:
        for text in deltas(client, body):
            answer.append(text)
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    print()
    return "".join(answer)


def deltas(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """The text of each event of the stream. Raises RuntimeError with the gateway's message."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(json.loads(response.read())["error"]["message"])
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
