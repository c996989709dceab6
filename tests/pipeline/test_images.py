"""Images through a whole pipeline: every API, hostile files, and no byte of an answer depends on
company, cache or deaths.
"""

import base64
import http.client
import io
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import pytest

from services.modeltools.make_vision_model import make_vision_model
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.kernels.vision_models import picture
from tests.pipeline.up import run_forked
from tests.waiting import wait_until

NAME = "eye"


def file_of(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture(width, height, seed).save(file, kind)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(data)}", **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(*parts: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": list(parts)}],
        "max_tokens": 12,
        "temperature": 0,
        **others,
    }


def answer_of(deployment: Deployment, given: dict[str, Any]) -> str:
    reply = deployment.post("/v1/chat/completions", given)
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["choices"][0]["message"]["content"]
    return found


def bytes_of(deployment: Deployment, given: dict[str, Any]) -> str:
    """The answer with its logprobs."""
    reply = deployment.post("/v1/chat/completions", given | {"logprobs": True, "top_logprobs": 2})
    assert reply.status_code == 200, reply.text
    return json.dumps(reply.json()["choices"])


def figure(deployment: Deployment, name: str) -> float:
    metrics = httpx.get(f"{deployment.url()}/metrics", trust_env=False).text
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolVLM's form around the demo's own text part."""
    folder = tmp_path_factory.mktemp("models") / NAME
    make_vision_model(folder, shape="tiny-smolvlm", text="demo", dtype="bfloat16", seed=0)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path, tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    place = tmp_path_factory.mktemp("seeing")
    with running_redis(place / "redis", redis_binary) as url:
        deployment = Deployment(url, place, environment={"PENSTOCK_MODEL": str(folder)})
        try:
            yield deployment.start_all()
        finally:
            deployment.stop()


def test_every_api_sees_the_same(seeing: Deployment) -> None:
    data = file_of(200, 140)
    given = body(text("What is this? "), image(data))
    chat = seeing.post("/v1/chat/completions", given).json()
    num_tokens, said = chat["usage"]["prompt_tokens"], chat["choices"][0]["message"]["content"]
    assert num_tokens > 13 * 4
    uploaded = httpx.post(
        f"{seeing.url()}/v1/files", files={"file": ("a.png", data)}, data={"purpose": "vision"}, trust_env=False
    ).json()
    by_file = body(text("What is this? "), {"type": "image_url", "image_url": {"file_id": uploaded["id"]}})
    assert answer_of(seeing, by_file) == said
    client = seeing.client()
    items: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this? "},
                {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(data)}"},
            ],
        }
    ]
    response = client.responses.create(model=NAME, input=items, max_output_tokens=12, temperature=0)
    assert response.output_text == said and response.usage is not None and response.usage.input_tokens == num_tokens
    again = client.responses.create(
        model=NAME, input="And this?", previous_response_id=response.id, max_output_tokens=12, temperature=0
    )
    assert again.usage is not None and again.usage.input_tokens > num_tokens
    blocks: Any = [
        text("What is this? "),
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}},
    ]
    with anthropic.Anthropic(base_url=seeing.url(), api_key="none") as claude:
        message = claude.messages.create(
            model=NAME, max_tokens=12, extra_body={"temperature": 0}, messages=[{"role": "user", "content": blocks}]
        )
        assert message.content[0].type == "text" and message.content[0].text == said
        assert (
            claude.messages.count_tokens(model=NAME, messages=[{"role": "user", "content": blocks}]).input_tokens
            == num_tokens
        )
    with ollama.Client(seeing.url()) as client_of_ollama:
        asked: Any = [{"role": "user", "content": "What is this? ", "images": [data]}]
        told = client_of_ollama.chat(NAME, asked, options={"temperature": 0, "num_predict": 12})
    assert told.prompt_eval_count == num_tokens  # the image stands before the text
    tokens = seeing.post("/tokenize", {"model": NAME, "messages": given["messages"]}).json()
    assert tokens["count"] == num_tokens
    assert seeing.get("/props").json()["modalities"] == {"vision": True, "audio": False}


def test_the_terminal_sends_images_too(seeing: Deployment, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of(200, 140))
    (tmp_path / "a.txt").write_text("no image")
    asked = ["chat", "--url", seeing.url(), "--temperature", "0", "--max-tokens", "12"]
    code, said = run_forked(tmp_path / "log", *asked, "--image", str(tmp_path / "a.png"), "What is this? ")
    given = body(image(file_of(200, 140)), text("What is this?"))
    assert code == 0 and answer_of(seeing, given).split()[0] in said
    for path, words in (("a.txt", "no PNG, JPEG, WebP or GIF"), ("b.png", "No such file")):
        code, said = run_forked(tmp_path / "log2", *asked, "--image", str(tmp_path / path), "What?")
        assert code == 2 and words in said and "Traceback" not in said


@pytest.mark.more
def test_answers_depend_on_the_image_and_on_nothing_else(seeing: Deployment, folder: Path, tmp_path: Path) -> None:
    """Alone, in a crowd, in chunks, without a cache, by another replica, and while replicas are killed."""
    sizes = [(200, 140), (64, 64), (90, 300), (300, 300)]
    files = [file_of(*sizes[number % 4], number) for number in range(6)]
    questions = [
        body(
            text("See: "),
            image(file),
            *([image(files[number - 1]), text(" And?")] if number % 2 else []),
            temperature=1.5,
            seed=3,
            ignore_eos=True,
        )
        for number, file in enumerate(files)
    ]
    expected = [bytes_of(seeing, question) for question in questions]
    assert len(set(expected)) == len(expected)
    low = bytes_of(seeing, body(text("See: "), image(files[0], detail="low"), temperature=1.5, seed=3, ignore_eos=True))
    assert low != expected[0]

    def ask_all(deployment: Deployment) -> list[str]:
        found = [""] * len(questions)

        def ask(number: int) -> None:
            found[number] = bytes_of(deployment, questions[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert ask_all(seeing) == expected
    rng = random.Random(2)
    computes = [name for name in seeing.processes if name.startswith("compute")]
    for turn in range(3):
        settings = [
            {"max_batched_tokens": 64, "prefix_caching": False},
            {"num_threads": 2, "image_cache": 4096},
            {"kv_disk": f"{tmp_path / 'kv'},64MiB"},
        ][turn]
        found: list[list[str]] = []
        asking = threading.Thread(target=lambda found=found: found.append(ask_all(seeing)))
        asking.start()
        threading.Event().wait(rng.uniform(0.0, 0.4))
        for name in computes:
            seeing.kill(name)
        computes = [seeing.start("compute", f"compute-{turn}", **settings)]
        asking.join()
        assert found == [expected]
        wait_until(lambda: seeing.get("/ready").status_code == 200, description="the gateway knows of it")


def test_hostile_images_are_one_error_each(seeing: Deployment) -> None:
    plain = file_of(64, 64)
    black = io.BytesIO()
    picture(8, 8).resize((1, 1)).resize((9000, 9000)).save(black, "PNG")
    vector = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="http://127.0.0.1/"/></svg>'
    for data, words in [
        (black.getvalue(), "megapixels"),
        (plain[:-200], "can't be read"),
        (plain[:40], "can be read"),
        (b"hello", "no image"),
        (vector, "no image"),
        (b"%PDF-1.4" + plain, "no image"),
        (b"x" * (21 << 20), "at most 20 MiB"),
    ]:
        reply = seeing.post("/v1/chat/completions", body(text("x"), image(data)))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (
            400,
            "invalid_image",
            "messages[0].content[1].image_url",
        ), reply.text
        assert words in error["message"], error
    empty = httpx.post(
        f"{seeing.url()}/v1/files", files={"file": ("a.png", b"")}, data={"purpose": "vision"}, trust_env=False
    ).json()
    reply = seeing.post("/v1/chat/completions", body({"type": "image_url", "image_url": {"file_id": empty["id"]}}))
    assert reply.status_code == 400 and "empty" in reply.json()["error"]["message"]
    broken = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.encodebytes(plain).decode().replace("+", "%2B")},
    }
    assert answer_of(seeing, body(text("x"), broken)) == answer_of(seeing, body(text("x"), image(plain))), (
        "lines, and what URLs escape"
    )
    polyglot = plain + b"PK\x03\x04 and a zip behind it"
    assert answer_of(seeing, body(text("x"), image(polyglot)))
    for parts, words in [
        ([image(plain)] * 65, "at most 64 images"),
        ([image(b"x")] * 5000, "parts"),
        ([image(b"")], "empty"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,§"}}], "base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,abc"}}], "data URL"),
        ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}], "not fetched from this host"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "data URL"),
        ([{"type": "image_url", "image_url": {"file_id": "file-" + 24 * "0"}}], "No such File"),
        ([{"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}], "detail"),
        ([{"type": "image_url"}], "url"),
    ]:
        reply = seeing.post("/v1/chat/completions", body(*parts))
        assert reply.status_code in (400, 404) and words in reply.json()["error"]["message"], reply.text
    token = body(text("<image> is a word"), image(plain))
    assert answer_of(seeing, token), "a spelled token is text"
    forced = seeing.post("/v1/chat/completions", token | {"parse_special_tokens": True})
    assert forced.status_code == 400


@pytest.mark.more
def test_encoder_stages_make_the_same_embeddings_and_may_die(seeing: Deployment) -> None:
    def encoded_by(stage: str) -> float:
        return sum(replica.load.images_encoded or 0 for replica in seeing.registry().of(stage))

    def restart_compute(name: str) -> None:
        for each in [each for each in seeing.processes if each.startswith("compute")]:
            seeing.kill(each)
        seeing.wait_live(seeing.start("compute", name))
        wait_until(lambda: seeing.get("/ready").status_code == 200, description="the gateway knows of it")

    questions = [
        body(text("See: "), image(file_of(300, 200 + number, 50 + number)), text("?"), ignore_eos=True)
        for number in range(4)
    ]
    expected = [bytes_of(seeing, question) for question in questions]
    encoders = [seeing.start("encoder", f"encoder-{number}") for number in range(2)]
    seeing.wait_live(*encoders)
    restart_compute("compute-with-encoders")
    assert [bytes_of(seeing, question) for question in questions] == expected
    wait_until(lambda: encoded_by("encoder") == 4, description="the encoders tell of it")
    assert encoded_by("compute") == 0
    wait_until(lambda: figure(seeing, "penstock_images_encoded_total") == 4, description="the gateway tells of it")
    check_that_who_leaves_takes_no_image_along(seeing, encoders)
    restart_compute("compute-without")
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(bytes_of(seeing, question) for question in questions))
    asking.start()
    threading.Event().wait(0.15)
    for name in encoders:
        seeing.kill(name)
    asking.join()
    assert found == expected


def check_that_who_leaves_takes_no_image_along(seeing: Deployment, encoders: list[str]) -> None:
    """Two ask about one image, of which each has a file; who asked first leaves before the encoders come to it."""
    question = body(text("See: "), image(file_of(140, 140, 90)), ignore_eos=True)
    for name in encoders:
        os.kill(seeing.processes[name].pid, signal.SIGSTOP)
    found: list[str] = []
    leaver = http.client.HTTPConnection(seeing.url().removeprefix("http://"))
    leaver.request(
        "POST", "/v1/chat/completions", json.dumps(question | {"stream": True}), {"Content-Type": "application/json"}
    )
    with seeing.redis() as client:
        wait_until(lambda: bool(client.keys("images-wanted:*")), description="the image is asked for")
        asking = threading.Thread(target=lambda: found.append(bytes_of(seeing, question)))
        asking.start()
        wait_until(lambda: len(client.keys("images:*")) == 2, description="another asks for it")
        leaver.close()
        wait_until(lambda: len(client.keys("images:*")) == 1, description="the first has left")
    for name in encoders:
        os.kill(seeing.processes[name].pid, signal.SIGCONT)
    asking.join()
    assert found == [bytes_of(seeing, question)]


def test_a_request_whose_image_is_gone_says_so(seeing: Deployment) -> None:
    [compute] = [name for name in seeing.processes if name.startswith("compute")][-1:]
    seeing.kill(compute)
    replies: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: replies.append(seeing.post("/v1/chat/completions", body(text("x"), image(file_of(80, 80, 77)))))
    )
    asking.start()
    with seeing.redis() as client:
        wait_until(lambda: bool(client.keys("images:*")), description="the image is there")
        client.delete(*client.keys("images:*"))
    seeing.start("compute", "compute-late")
    asking.join()
    assert replies[0].status_code == 410 and replies[0].json()["error"]["code"] == "image_gone"
    assert answer_of(seeing, body(text("x"), image(file_of(80, 80, 77))))
    with seeing.redis() as client:
        wait_until(lambda: not client.keys("images:*"), description="nothing is left of the images")


def test_a_model_that_reads_text_only_refuses(demo: Deployment) -> None:
    reply = demo.post("/v1/chat/completions", body(text("x"), image(file_of(9, 9))) | {"model": "penstock-demo"})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "model_not_supported"
