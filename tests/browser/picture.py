"""The moving picture on the README: a stream of the default model in the playground, compute killed
under it, and the text that comes out all the same.

The text is compared with that of an undisturbed run, by the API; only then is the picture written.
Its time runs faster where the machine was slow: the last frame says how many times.
"""

import hashlib
import io
import re
import time
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from tests.browser.checks import enter, reference, same_text
from tests.browser.page import Page, open_browser
from tests.pipeline.up import Up

MODEL = "smollm2-135m"
QUESTION = "What is a hydroelectric power plant?"
PARAMETERS: dict[str, Any] = {"max_tokens": 110, "seed": 7, "temperature": 0.5}
WINDOW = (1180, 700)  # of the browser
WIDTH = 900  # px of the picture
HEIGHT = 430
STRIP = 34  # px below the page: what is happening, in words
SECONDS = 8.0  # the picture runs so long, and rests at its end
REST_S = 3.0
COLOURS = 48
MOST_FRAMES = 60
MOST_BYTES = 600_000
PAUSE_S = 0.2  # between two shots: the model needs the processor, too
KILL_AFTER = 0.35  # of the text
NUMBERS = re.compile(r"^\s*\d+\.\s", re.MULTILINE)  # of lists: the page makes lists of them
STAGE = '.stage[data-stage="compute"]'
BUTTON = f"{STAGE} .replica:not(.is-killed) .kill:not([hidden])"


def record(path: Path, folder: Path) -> None:
    """Write the picture. folder: for the pipeline's data. Raises AssertionError if the texts differ
    or the picture is too large.
    """
    up = Up(folder, "--chaos-demo", "--jobs", "0", model=MODEL, num_threads=0, timeout_s=600)
    driver = open_browser(*WINDOW)
    try:
        page = Page(driver, up.url, model=MODEL)
        wanted = reference(page, MODEL, QUESTION, **PARAMETERS)
        frames, took_s = play(page, wanted)
        shown = page.answer()
        same_text(shown, NUMBERS.sub("", wanted))
    finally:
        driver.quit()
        up.end()
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:12]
    faster = f", shown {took_s / SECONDS:.0f} times as fast" if took_s > 1.5 * SECONDS else ""
    end = f"Text equal to an undisturbed run's: {len(wanted)} characters, sha256 {digest}{faster}."
    write(path, [*frames, (frames[-1][0], end)])
    print(f"{path}: {len(frames)} frames, {path.stat().st_size} bytes; {end}")


def play(page: Page, wanted: str) -> tuple[list[tuple[Image.Image, str]], float]:
    """The pictures of one answer during which compute is killed, each with what is happening, and
    how many seconds it took.
    """
    enter(page, **PARAMETERS)
    page.run("document.querySelectorAll('.tabs button')[1].click()")
    page.wait("compute may be killed", lambda: page.all(BUTTON))
    page.say(QUESTION)
    page.wait("the answer begins", lambda: page.text(".message:last-child .markdown").strip())
    found, said, is_killed, began_at = (
        [],
        "The answer streams. Its tokens are in a log in Redis.",
        False,
        time.monotonic(),
    )
    while page.all(".message.is-running"):
        page.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", STAGE)
        length = len(page.text(".message:last-child .markdown"))
        if not is_killed and length > KILL_AFTER * len(wanted):
            page.run("document.querySelector(arguments[0]).click()", BUTTON)
            is_killed, said, at_kill = True, "kill -9 compute. Another process reads the log and takes over.", length
        elif is_killed and length > at_kill + 20:
            said = "The stream goes on at the next token."
        found.append((picture(page), said))
        time.sleep(PAUSE_S)
    found.append((picture(page), said))
    assert is_killed, "the answer was over before compute was killed"
    step = max(1, len(found) // MOST_FRAMES + 1)
    return [*found[:-1:step], found[-1]], time.monotonic() - began_at


def picture(page: Page) -> Image.Image:
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    small = shot.resize((WIDTH, round(shot.height * WIDTH / shot.width)), Image.Resampling.LANCZOS)
    return small.crop((0, 0, WIDTH, min(HEIGHT, small.height)))


def write(path: Path, frames: list[tuple[Image.Image, str]]) -> None:
    """The frames as one GIF with one palette, the last of them for longer."""
    drawn = [with_strip(image, said) for image, said in frames]
    palette = drawn[len(drawn) // 2].quantize(COLOURS, dither=Image.Dither.NONE)
    flat = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in drawn]
    durations = [round(SECONDS * 1000 / (len(flat) - 1))] * (len(flat) - 1) + [round(REST_S * 1000)]
    path.parent.mkdir(parents=True, exist_ok=True)
    flat[0].save(path, save_all=True, append_images=flat[1:], duration=durations, loop=0, optimize=True, disposal=1)
    assert path.stat().st_size < MOST_BYTES, f"{path.stat().st_size} bytes"


def with_strip(image: Image.Image, said: str) -> Image.Image:
    whole = Image.new("RGB", (image.width, image.height + STRIP), "#1d2127")
    whole.paste(image)
    font = ImageFont.load_default(size=17)
    ImageDraw.Draw(whole).text((16, image.height + 7), said, fill="#ffffff", font=font)
    return whole
