"""Page: the playground in a browser, as a user has it: what can be seen, typed and pressed."""

import shutil
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.waiting import wait_until

TIMEOUT_S = 120.0
EXPECTED = (
    "Failed to load resource",
    "net::ERR_",
)  # what the browser says of connections that a check cuts, and of processes that it kills


def open_browser(width: int = 1440, height: int = 900) -> Any:
    options = webdriver.ChromeOptions()
    arguments = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        f"--window-size={width},{height}",
    )
    for argument in arguments:
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(TIMEOUT_S)
    return driver


class Page:
    """Opened, and ready for a message."""

    def __init__(self, driver: Any, url: str, model: str = "penstock-demo") -> None:
        self.driver = driver
        self.url = url
        self.model = model
        self.open()

    def open(self) -> None:
        self.driver.get(self.url)
        self.wait(f"{self.model} is there to be asked", lambda: self.model in self.text(".model"))

    def wait(self, description: str, condition: Any) -> None:
        wait_until(condition, description=description, timeout_s=TIMEOUT_S)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """All that the elements say, seen or not."""
        said: str = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent).join('\\n')", selector
        )
        return said

    def press(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def say(self, text: str) -> None:
        area = self.one("#composer-text")
        self.run("arguments[0].value = arguments[1]", area, text[:-1])  # a browser takes long to be typed into
        area.send_keys(text[-1])
        area.send_keys(Keys.ENTER)

    def set(self, field: str, value: str | bool) -> None:
        """A parameter, as if it had been entered."""
        self.run(
            """const input = document.getElementById(arguments[0]);
            if (input.type === "checkbox") { input.checked = arguments[1]; input.dispatchEvent(new Event("change")); }
            else { input.value = arguments[1]; input.dispatchEvent(new Event(input.tagName === "SELECT" ? "change" : "input")); }""",  # noqa: E501
            field,
            value,
        )

    def answer(self) -> str:
        """The last answer's text, as it is stored, complete."""
        self.wait("the answer is complete", lambda: self.all(".message") and not self.all(".message.is-running"))
        return self.text(".message:last-child .markdown").strip()

    def complaints(self) -> list[str]:
        """Errors in the browser's console, violations of the policy among them."""
        return [
            each["message"]
            for each in self.driver.get_log("browser")
            if each["level"] == "SEVERE" and not any(said in each["message"] for said in EXPECTED)
        ]
