"""Checks of how the playground looks: what is seen, read and hit, on a laptop and on a phone."""

from tests.browser.checks import QUESTION, check, enter
from tests.browser.page import Page


@check
def it_opens_on_the_conversation_and_its_settings_are_words(page: Page) -> None:
    assert page.one("#composer-text").is_displayed() and not page.one("#settings").is_displayed()
    page.one(".settings-button").click()
    assert page.one("#settings").is_displayed()
    labels = page.run(
        """return [...document.querySelectorAll("#settings label:has(.name)")].map(each => {
          const words = (each.querySelector("span") ?? each).firstChild.textContent, name = each.querySelector(".name").textContent;
          return [words, name, each.title];
        })"""  # noqa: E501
    )
    assert len(labels) > 40 and ["Temperature", "temperature", "temperature in the API"] in labels
    assert [words for words, _, _ in labels if "_" in words or not words[:1].isupper()] == []
    page.run("document.querySelectorAll('#settings details').forEach(each => { each.open = true; })")
    assert page.run(CUT_OFF) == [], "placeholders that are longer than their fields"


CUT_OFF = """
const context = document.createElement("canvas").getContext("2d");
return [...document.querySelectorAll("#settings :is(input, textarea)[placeholder]")].filter(each => {
  const style = getComputedStyle(each);
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  return context.measureText(each.placeholder).width > each.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
}).map(each => `${each.id}: ${each.placeholder}`);
"""  # noqa: E501


@check
def every_text_has_contrast(page: Page) -> None:
    """WCAG's 4.5 : 1 of what can be seen, in both themes and both views; of composed colours as the
    browser computes them.
    """
    enter(page, temperature=0)
    page.say(QUESTION)
    page.answer()
    for theme in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        for view in ("Chat", "Pipeline"):
            page.run(
                "[...document.querySelectorAll('.tabs button')].find(each => each.textContent === "
                "arguments[0]).click()",
                view,
            )
            page.wait("it is drawn", lambda view=view: view == "Chat" or page.all(".replica"))
            assert (weak := page.run(CONTRAST)) == [], (theme, view, weak)


CONTRAST = """
const rgb = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
const part = value => { const share = value / 255; return share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4; };
const light = ({r, g, b}) => .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
const ground = element => {
  for (let each = element; each; each = each.parentElement) { const colour = rgb(getComputedStyle(each).backgroundColor); if (colour.a === 1) return colour; }
  return {r: 255, g: 255, b: 255};
};
return [...document.querySelectorAll("body *")].filter(each => {
  const words = [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const isSeen = each.checkVisibility({visibilityProperty: true, opacityProperty: true});
  if (!words || !isSeen || each.closest(":disabled, [aria-hidden=true], .visually-hidden, .skip")) return false;
  const a = light(rgb(getComputedStyle(each).color)), b = light(ground(each));
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5;
}).map(each => `${each.className}: ${each.textContent.slice(0, 40)}`);
"""  # noqa: E501


@check
def every_stage_is_seen_at_once(page: Page) -> None:
    """On a laptop; a stage's cards share the whole width of their row."""
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    page.run("document.querySelectorAll('.tabs button')[1].click()")
    page.wait("the pipeline is drawn", lambda: len(page.all(".replica[class='replica']")) >= 5)
    assert page.run("return document.querySelector('.way-back').getBoundingClientRect().bottom") < 800
    free = page.run(
        """return [...document.querySelectorAll(".replicas")].map(each =>
          each.getBoundingClientRect().right - each.lastElementChild.getBoundingClientRect().right)"""
    )
    assert max(free) <= 1


FINGER_PX = 44
SMALL = """
return [...document.querySelectorAll("a, button, summary, select, textarea, input")].filter(each => {
  const target = each.type === "checkbox" ? each.labels[0] : each;
  const {width, height} = target.getBoundingClientRect();
  return each.checkVisibility({visibilityProperty: true}) && !each.closest(".visually-hidden, .skip") && Math.min(width, height) < arguments[0] - .5;
}).map(each => `${each.outerHTML.slice(0, 90)} ${each.getBoundingClientRect().width} x ${each.getBoundingClientRect().height}`);
"""  # noqa: E501


@check
def a_finger_hits_everything_on_a_phone(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    page.open()
    enter(page, temperature=0)
    page.say(QUESTION)
    page.answer()
    assert (small := page.run(SMALL, FINGER_PX)) == [], small
    name = """const select = document.querySelector(".model"), context = document.createElement("canvas").getContext("2d"), style = getComputedStyle(select);
      context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      return select.clientWidth - context.measureText(arguments[0]).width"""  # noqa: E501
    assert page.run(name, "Qwen2.5-0.5B-Instruct") > 20, "a name as long as many are is read whole"
    page.run(
        "document.querySelector('.settings-button').click(); document.querySelectorAll('#settings "
        "details').forEach(each => { each.open = true; })"
    )
    assert (small := page.run(SMALL, FINGER_PX)) == [], small
    page.run("document.querySelector('.settings-button').click(); document.querySelector('.menu').click()")
    page.wait("the list of chats", lambda: page.one(".chat-link").is_displayed())
    assert (small := page.run(SMALL, FINGER_PX)) == [], small
    page.run("document.querySelectorAll('.tabs button')[1].click()")
    page.wait("the pipeline is drawn", lambda: page.all(".kill"))
    assert (small := page.run(SMALL, FINGER_PX)) == [], small


@check
def a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
    )
    page.open()
    enter(page, temperature=0)
    page.say(QUESTION)
    page.answer()
    assert page.run("return document.documentElement.scrollWidth") <= 360
    page.run("document.querySelectorAll('.tabs button')[1].click()")
    page.wait("the pipeline is drawn", lambda: page.all(".replica"))
    assert page.run("const pane = document.querySelector('.pipeline'); return pane.scrollWidth - pane.clientWidth") <= 0
    assert not page.one("#chat").is_displayed()
