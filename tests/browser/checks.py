"""Checks of the playground. Each has a browser of its own."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
from selenium.webdriver.common.keys import Keys

from tests.browser.page import Page

QUESTION, ANSWER = "What is Penstock?", "Penstock is a server for large language models."
LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "seed": 7, "temperature": 0.8}
LONGEST = LONG | {"max_tokens": 900}

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\"> <script>document.title='hacked'</script> "
    "[a](javascript:document.title='hacked') "
    "[b](data:text/html,x) ![c](http://evil.example/c.png) <iframe "
    "src=//evil.example></iframe>\n\n```html\n<script>document.title='hacked'</script>\n```\n"
)

# Without double quotes, which JSON writes in another way
PAYLOADS = [
    "<img src=x onerror=document.title='hacked'>",
    "</pre></code><script>document.title='hacked'</script>",
    "<svg/onload=document.title='hacked'><math><mi xlink:href=javascript:hacked=1>x</mi></math>",
    "[a](javascript:document.title='hacked') [b](JaVaScRiPt:hacked=1) [c](data:text/html,<script>hacked=1</script>) "
    "<javascript:hacked=1>",
    "![x](x onerror=hacked=1) ![y](https://evil.example/y.png) [z](https://evil.example/' onmouseover='hacked=1)",
    "<iframe srcdoc=<script>parent.document.title='hacked'</script>></iframe><object "
    "data=data:text/html,x></object><base href=//evil.example>",
    "`</code><img src=x onerror=hacked=1>` **<b onclick=hacked=1>x</b>** &lt;img src=x onerror=hacked=1&gt; "
    "&#60;script&#62;hacked=1&#60;/script&#62;",
    "<a href=&#106;avascript:hacked=1>x</a><form action=javascript:hacked=1><button>x</button></form><meta "
    "http-equiv=refresh content=0;url=//evil.example>",
]

# Elements that the page itself never makes there; forms and drawings it makes, but not in what was written
MADE = (
    ".message :is(img, script, iframe, object, embed, base, meta, style, math, video), :is(.markdown, .call pre) "
    ":is(form, svg)"
)


def check(function: Callable[[Page], None]) -> Callable[[Page], None]:
    function.is_check = True  # type: ignore[attr-defined]
    return function


def seeing(function: Callable[[Page], None]) -> Callable[[Page], None]:
    """A check against a model that sees."""
    function.is_seeing = True  # type: ignore[attr-defined]
    return check(function)


def enter(page: Page, **parameters: Any) -> None:
    for name, value in parameters.items():
        page.set(f"parameter-{name}", value if isinstance(value, bool) else str(value))


def reference(page: Page, model: str = "penstock-demo", question: str = QUESTION, **parameters: Any) -> str:
    """The answer to a question without a page between."""
    body = {"model": model, "messages": [{"role": "user", "content": question}]} | parameters
    reply = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def plain(text: str) -> str:
    """Without the spaces and marks that markdown takes."""
    return "".join(character for character in text if character.isalnum())


def same_text(shown: str, wanted: str) -> None:
    """Up to what markdown takes. Says where they part."""
    one, other = plain(shown), plain(wanted)
    at = next(
        (number for number, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its),
        min(len(one), len(other)),
    )
    assert one == other, (
        f"after {at} of {len(one)} and {len(other)} letters: {one[max(0, at - 40) : at + 40]!r}, "
        f"{other[max(0, at - 40) : at + 40]!r}"
    )


@check
def chats_stream_and_are_kept(page: Page) -> None:
    enter(page, temperature=0)
    page.say(QUESTION)
    assert page.answer().startswith(ANSWER)
    page.wait("it is stored", lambda: page.run("return document.querySelector('.chat-link').textContent") == QUESTION)
    page.driver.execute_async_script("setTimeout(arguments[0], 1200)")
    page.open()
    page.wait("it is there after a reload", lambda: page.answer().startswith(ANSWER))
    page.one(".new-chat").click()
    assert not page.all(".message") and len(page.all(".chat-link")) == 2


@check
def messages_are_edited_and_regenerated_without_loss(page: Page) -> None:
    enter(page, temperature=0)
    page.say(QUESTION)
    page.answer()
    page.one('.is-assistant [aria-label="Regenerate"]').click()
    page.wait("a second version", lambda: "2 / 2" in page.text(".is-assistant .versions"))
    page.answer()
    page.one('.is-assistant [aria-label="Previous version"]').click()
    assert "1 / 2" in page.text(".is-assistant .versions")
    page.one('.is-user [aria-label="Edit"]').click()
    page.one(".edit-text").clear()
    page.one(".edit-text").send_keys("How does a turbine work?", Keys.CONTROL, Keys.ENTER)
    page.wait(
        "the edited question has its answer", lambda: "2 / 2" in page.text(".is-user .versions") and page.answer()
    )
    assert not page.answer().startswith(ANSWER)
    page.one('.is-user [aria-label="Previous version"]').click()
    assert page.answer().startswith(ANSWER)


@check
def tokens_show_their_alternatives_to_mouse_and_keyboard(page: Page) -> None:
    enter(page, temperature=0, logprobs=True, top_logprobs=3)
    page.say(QUESTION)
    page.wait("tokens", lambda: page.answer() is not None and page.all(".token[data-index]"))
    assert "".join(
        page.run("return [...document.querySelectorAll('.token[data-index]')].map(each => each.textContent)")
    ).startswith(ANSWER)
    page.run("document.querySelector('.tokens').focus()")
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT)
    assert len(page.all(".alternatives li")) == 3 and "%" in page.text(".alternatives")
    page.press(Keys.ESCAPE)
    assert not page.one(".alternatives").is_displayed()


@check
def schemas_and_tools_reach_the_model(page: Page) -> None:
    enter(page, max_tokens=300)  # a schema allows 64 spaces between two parts of the text, and the demo likes them
    page.set("setting-format", "json_schema")
    page.set(
        "setting-schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        ),
    )
    page.say(QUESTION)
    assert isinstance(json.loads(page.answer())["ok"], bool)
    page.set("setting-format", "text")
    parameters = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    page.set(
        "setting-tools", json.dumps([{"type": "function", "function": {"name": "roll", "parameters": parameters}}])
    )
    page.set("setting-toolChoice", "roll")
    page.say("Roll a die")
    page.wait("a call", lambda: page.all(".call-answer textarea"))
    assert "roll" in page.text(".call-name") and json.loads(page.text(".call pre"))["n"] in (1, 2)
    page.set("setting-toolChoice", "none")
    page.one(".call-answer textarea").send_keys("It shows 2")
    page.one(".call-answer .primary").click()
    page.wait("the model goes on", lambda: page.all(".message.is-tool") and page.answer())


@check
def what_is_entered_wrongly_is_said_at_its_field(page: Page) -> None:
    place = "return document.querySelector('#parameter-temperature + input').value"
    enter(page, temperature="0.3")
    for wrong, problem, slider in (
        ("warm", "warm is no number", "0.3"),
        ("0.3.", "0.3. is no number", "0.3"),
        ("5000", "from 0 to 100", "2"),
    ):
        enter(page, temperature=wrong)
        assert (page.text("#parameter-temperature-problem"), page.run(place)) == (f"Temperature: {problem}", slider)
    enter(page, temperature="warm")
    page.say(QUESTION)
    assert not page.all(".message") and "warm is no number" in page.text(".notice")
    assert page.one("#settings").is_displayed(), "the field can be mended"
    notice, rest = page.one(".notice").rect, page.one("#panes").rect
    assert notice["y"] + notice["height"] <= rest["y"], "a notice covers nothing"
    enter(page, temperature="", logit_bias="{")
    assert "not valid JSON" in page.one("#parameter-logit_bias").find_element(
        "xpath", "../p[contains(@class, 'problem')]"
    ).get_attribute("textContent")


@check
def old_messages_are_left_out_after_an_overflow(page: Page) -> None:
    """The demo's window has 1,024 tokens. What is left out stays on the page, is told, and can be taken back."""
    enter(page, temperature=0, max_tokens=20)
    words = "water turbine " * 90
    for _ in range(9):
        page.say(words)
        page.answer()
        if page.all(".note.is-error"):
            break
    num_shown = len(page.all(".message"))
    assert "maximum context length" in page.text(".note.is-error")
    page.one(".note.is-error button").click()
    page.wait("the answer", lambda: not page.all(".note.is-error") and page.answer())
    assert len(page.all(".message")) == num_shown and len(page.all(".message.is-left-out")) in range(2, num_shown - 1)
    page.one(".left-out button").click()
    assert not page.all(".message.is-left-out")
    page.one('.is-assistant:last-child [aria-label="Regenerate"]').click()
    page.wait("all of it is too much", lambda: page.all(".note.is-error"))
    page.one(".new-chat").click()
    page.say(words * 6)
    page.wait("one message is too much", lambda: page.all(".note.is-error"))
    assert not page.all(".note.is-error button"), "nothing older can be left out"


@check
def a_dropped_connection_goes_on_at_the_same_token(page: Page) -> None:
    enter(page, **LONG)
    page.say(QUESTION)
    page.wait("some text", lambda: len(page.text(".message:last-child .markdown")) > 100)
    page.one(".drop").click()
    page.wait("it resumes", lambda: "resumed at token" in page.text(".note"))
    same_text(page.answer(), reference(page, **LONG))


@check
def hostile_text_stays_text(page: Page) -> None:
    page.driver.execute_async_script(
        """const [text, done] = arguments;
        import("/playground/modules/markdown.js").then(({showMarkdown}) => {
          const box = document.createElement("div");
          document.body.append(box);
          box.className = "hostile";
          showMarkdown(box, text);
          setTimeout(done, 500);
        });""",
        HOSTILE,
    )
    assert page.driver.title == "Penstock"
    assert page.run("return document.querySelectorAll('.hostile :is(img, script, iframe)').length") == 0
    assert page.run("return [...document.querySelectorAll('.hostile a')].map(each => each.protocol)") == ["http:"]
    refused = page.run(
        "try { document.body.innerHTML = '<b>x</b>'; return false; } catch (error) { return error instanceof "
        "TypeError; }"
    )
    assert refused, "the policy lets innerHTML through"
    page.driver.get_log("browser")  # that refusal is in it


@check
def what_the_model_writes_stays_text(page: Page) -> None:
    """The model itself writes each payload, since a schema leaves it nothing else: streamed in
    pieces, as an answer, as a call and its name, and read again.
    """
    enter(page, max_tokens=400, temperature=0)
    for payload in PAYLOADS:
        page.set("setting-format", "json_schema")
        page.set("setting-schema", json.dumps(only({"text": {"const": payload}})))
        page.say("Write it")
        assert plain(page.answer()).startswith("text"), payload  # as markdown shows it
        check_harmless(page, payload)
        page.one(".new-chat").click()  # the demo's window is short
    page.set("setting-format", "text")
    page.set(
        "setting-tools",
        json.dumps(
            [{"type": "function", "function": {"name": "show", "parameters": only({"html": {"enum": PAYLOADS[:2]}})}}]
        ),
    )
    page.set("setting-toolChoice", "show")
    page.say("Show it")
    page.wait("a call", lambda: page.all(".call-answer textarea"))
    assert json.loads(page.text(".call pre"))["html"] in PAYLOADS[:2]
    check_harmless(page, "a call")
    page.driver.execute_async_script("setTimeout(arguments[0], 1200)")  # it is stored
    page.open()
    page.wait("the chat is there again", lambda: page.all(".call pre"))
    check_harmless(page, "what was stored")


def only(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def check_harmless(page: Page, what: str) -> None:
    """Nothing of it is an element, a link that runs, or was run."""
    assert page.driver.title != "hacked" and page.run("return window.hacked") is None, what
    made = page.run("return [...document.querySelectorAll(arguments[0])].map(each => each.outerHTML)", MADE)
    assert made == [], (what, made)
    links = page.run("return [...document.querySelectorAll('.message a')].map(each => each.protocol)")
    assert set(links) <= {"http:", "https:"}, (what, links)
    handlers = page.run(
        "return [...document.querySelectorAll('.message *')].flatMap(each => each.getAttributeNames()).filter(each => "
        "each.startsWith('on'))"
    )
    assert handlers == [], (what, handlers)


@check
def the_keyboard_suffices(page: Page) -> None:
    enter(page, temperature=0)
    page.run("document.activeElement.blur()")
    page.press("/")
    page.press(QUESTION, Keys.ENTER)
    page.answer()
    page.press(Keys.ALT, "n")
    assert not page.all(".message")
    page.press(Keys.ALT, Keys.ARROW_DOWN)
    assert len(page.all(".message")) == 2
    page.press(Keys.ALT, "p")
    assert page.one("#pipeline").is_displayed()
    unnamed = page.run(
        """return [...document.querySelectorAll("button, input, select, textarea")]
        .filter(each => !(each.ariaLabel || each.textContent.trim() || each.labels?.length)).map(each => each.outerHTML)"""  # noqa: E501
    )
    assert unnamed == [], unnamed


@check
def the_text_goes_on_when_replicas_are_killed(page: Page) -> None:
    """Compute, then a sampler, then the gateway itself, under one answer; which is the one without
    kills. Each is mended before the next: a gateway that comes later has not seen what was before."""
    wanted = reference(page, **LONGEST)
    enter(page, **LONGEST)
    page.say(QUESTION)
    page.run("document.querySelectorAll('.tabs button')[1].click()")
    for stage in ("compute", "sampler", "gateway"):
        page.wait("the answer grows", grows(page))
        assert page.all(".message.is-running"), "the answer is over before all were killed"
        button = f'.stage[data-stage="{stage}"] .replica:not(.is-killed) .kill:not([hidden])'
        page.wait(f"{stage} may be killed", lambda button=button: page.all(button))
        page.run("document.querySelector(arguments[0]).click()", button)
        page.wait(f"{stage} was killed", lambda stage=stage: re.search(rf"{stage} \w+ was killed", page.text(".news")))
        if stage == "compute":
            page.wait(
                "the timeline tells of it",
                lambda: page.all(".recent-request .of-lost") and "goes on at compute" in page.text(".news"),
            )
    same_text(page.answer(), wanted)
    assert "resumed at token" in page.text(".note")


def grows(page: Page) -> Callable[[], bool]:
    """Whether the last answer has become longer than it is now, or is complete."""
    length = len(page.text(".message:last-child .markdown"))
    return lambda: len(page.text(".message:last-child .markdown")) > length or not page.all(".message.is-running")


DROP = """
const [width, height, how, done] = arguments;
const canvas = document.createElement("canvas");
Object.assign(canvas, {width, height});
const context = canvas.getContext("2d");
const paint = context.createLinearGradient(0, 0, width, height);
paint.addColorStop(0, "#0b7285"); paint.addColorStop(1, "#ffe066");
context.fillStyle = paint; context.fillRect(0, 0, width, height);
context.fillStyle = "#c92a2a"; context.beginPath(); context.arc(width / 3, height / 2, height / 5, 0, 7); context.fill();
canvas.toBlob(blob => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([blob], "drawing.png", {type: "image/png"}));
  const target = document.getElementById("composer-text");
  const isDrop = how === "drop", told = isDrop ? {dataTransfer: transfer} : {clipboardData: transfer};
  const event = new (isDrop ? DragEvent : ClipboardEvent)(how, {...told, bubbles: true});
  target.dispatchEvent(event);
  setTimeout(done, 200);
}, "image/png");
"""  # noqa: E501


@seeing
def images_are_dropped_and_pasted_shown_and_kept(page: Page) -> None:
    enter(page, temperature=0)
    page.driver.execute_async_script(DROP, 320, 200, "drop")
    page.driver.execute_async_script(DROP, 90, 160, "paste")
    assert len(page.all(".tray img")) == 2
    page.all(".tray .icon-button")[1].click()
    assert len(page.all(".tray img")) == 1
    page.say("What do you see?")
    assert page.answer()
    assert len(page.all(".message.is-user .picture")) == 1 and not page.all(".tray img")
    assert "prompt tokens" not in page.text(".note.is-error")
    page.driver.execute_async_script("setTimeout(arguments[0], 1200)")
    page.open()
    page.wait("the image is there after a reload", lambda: len(page.all(".message.is-user .picture")) == 1)
    size = page.run(
        "const image = document.querySelector('.message .picture'); return [image.naturalWidth, image.naturalHeight]"
    )
    assert size == [320, 200]
    page.one(".message.is-user [aria-label='Edit']").click()
    page.one(".edit-text").send_keys(" Say it in one word.")
    page.one(".edit-form .primary").click()
    assert page.answer() and len(page.all(".message.is-user .picture")) == 1


@check
def a_model_that_reads_text_only_takes_no_image(page: Page) -> None:
    page.driver.execute_async_script(DROP, 90, 60, "drop")
    assert not page.all(".tray img") and "reads text only" in page.text("#notices")
    assert not page.one(".composer [aria-label='Add images']").is_displayed()
