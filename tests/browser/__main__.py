"""`make verify SUITE=browser`: the playground in a headless Chromium, against `penstock up --chaos-demo`.

The model is the demo. It prints a line a check; the exit code is 1 if one fails.

python -m tests.browser [name …] [--screenshots FOLDER]
python -m tests.browser --picture docs/images/kill.gif      the README's picture, recorded again with the default model
"""

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from services.modeltools.make_vision_model import make_vision_model
from tests.browser import checks, looks
from tests.browser.page import Page, open_browser
from tests.browser.picture import record
from tests.pipeline.up import Up


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="checks to run; all by default")
    parser.add_argument("--screenshots", type=Path, help="a folder for what the page looks like after each check")
    parser.add_argument("--picture", type=Path, help="where the moving picture of a kill goes; instead of the checks")
    arguments = parser.parse_args()
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        print(
            "make verify SUITE=browser needs Chromium and its driver: apt install chromium chromium-driver",
            file=sys.stderr,
        )
        return 1
    if arguments.picture is not None:
        with tempfile.TemporaryDirectory() as folder:
            record(arguments.picture, Path(folder))
        return 0
    found: dict[str, Callable[[Page], None]] = {
        name: value for name, value in (vars(checks) | vars(looks)).items() if getattr(value, "is_check", False)
    }
    if unknown := sorted(set(arguments.names) - set(found)):
        print(f"no check {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 1
    num_failed = 0
    chosen = {name: check for name, check in found.items() if not arguments.names or name in arguments.names}
    for sees in (False, True):
        checks_of_model = {name: check for name, check in chosen.items() if getattr(check, "is_seeing", False) == sees}
        if checks_of_model:
            with tempfile.TemporaryDirectory() as folder:
                num_failed += run(checks_of_model, Path(folder), arguments.screenshots, sees=sees)
    return 1 if num_failed else 0


def run(chosen: dict[str, Callable[[Page], None]], folder: Path, screenshots: Path | None, *, sees: bool) -> int:
    """Check the demo, or a tiny model that sees. Returns how many failed."""
    model = "demo"
    if sees:
        model = str(folder / "tiny-eye")
        make_vision_model(Path(model), shape="tiny-smolvlm", text="demo", dtype="bfloat16", seed=0)
    up = Up(folder, "--samplers", "2", "--chaos-demo", model=model, timeout_s=180)
    try:
        return sum(
            not passes(name, check, up.url, screenshots, "tiny-eye" if sees else "penstock-demo")
            for name, check in chosen.items()
        )
    finally:
        up.end()


def passes(name: str, check: Callable[[Page], None], url: str, screenshots: Path | None, model: str) -> bool:
    """Whether it holds, in a browser of its own that has seen nothing yet, and the browser had
    nothing to complain of.
    """
    driver = open_browser()
    started_at = time.monotonic()
    try:
        page = Page(driver, url, model)
        check(page)
        assert (said := page.complaints()) == [], said
        print(f"{name}: passed in {time.monotonic() - started_at:.1f} s", flush=True)
        return True
    except Exception:
        traceback.print_exc()
        print(f"{name}: FAILED", flush=True)
        return False
    finally:
        if screenshots is not None:
            screenshots.mkdir(parents=True, exist_ok=True)
            driver.save_screenshot(str(screenshots / f"{name}.png"))
        driver.quit()


if __name__ == "__main__":
    sys.exit(main())
