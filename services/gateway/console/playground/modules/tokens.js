// An answer as its tokens, each tinted by how likely it was; pointing at one, or moving there by arrow keys, shows the alternatives.

import {h, replace} from "./dom.js";

const MOST_SHOWN = 4000;

export function tokensView(tokens) {
  const card = h("div", {class: "alternatives", role: "status", "aria-live": "polite", hidden: true});
  const list = h("div", {class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", tabindex: "0"});
  const view = h("div", {class: "tokens-view"}, legend(), list, card);
  let shown = 0, current = -1;

  function update() {
    for (; shown < Math.min(tokens.length, MOST_SHOWN); shown += 1) list.append(tokenElement(tokens[shown], shown));
  }

  function select(index) {
    if (index < 0 || index >= shown) return;
    list.children[current]?.setAttribute("aria-selected", "false");
    current = index;
    const element = list.children[index];
    element.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", element.id || (element.id = `token-${Math.random().toString(36).slice(2)}`));
    replace(card, alternatives(tokens[index]));
    card.hidden = false;
    const box = element.getBoundingClientRect(), own = view.getBoundingClientRect();
    card.style.setProperty("left", `${Math.max(0, Math.min(box.left - own.left, own.width - card.offsetWidth))}px`);
    card.style.setProperty("top", `${box.bottom - own.top + 6}px`);
  }

  function hide() {
    card.hidden = true;
    list.children[current]?.setAttribute("aria-selected", "false");
    current = -1;
  }

  list.addEventListener("pointerover", event => {
    const element = event.target.closest(".token");
    if (element) select(Number(element.dataset.index));
  });
  list.addEventListener("pointerleave", hide);
  list.addEventListener("blur", hide);
  list.addEventListener("keydown", event => {
    const move = {ArrowRight: 1, ArrowLeft: -1, Home: -current, End: shown - 1 - current}[event.key];
    if (event.key === "Escape" && !card.hidden) {
      hide();
      event.stopPropagation();
    }
    if (move === undefined) return;
    select(Math.max(0, Math.min(shown - 1, current + move)));
    event.preventDefault();
  });
  update();
  return {element: view, update};
}

function tokenElement({token, logprob}, index) {
  const share = Math.exp(logprob);
  const level = share > 0.9 ? 0 : share > 0.6 ? 1 : share > 0.3 ? 2 : share > 0.1 ? 3 : 4;
  return h("span", {class: `token level-${level}`, role: "option", "aria-selected": "false", "aria-label": `${token}, ${percent(logprob)}`, data: {index}}, visible(token));
}

function alternatives({token, logprob, top}) {
  const listed = top.some(each => each.token === token) ? top : [{token, logprob}, ...top];
  return [
    h("p", {class: "chosen"}, h("code", {}, spelled(token)), ` ${percent(logprob)}`),
    top.length > 0 && h("ol", {}, listed.map(each => h("li", {class: each.token === token ? "is-chosen" : ""},
      h("code", {}, spelled(each.token)),
      h("span", {class: "bar-track"}, h("span", {class: "bar-fill", style: {width: `${Math.max(1, 100 * Math.exp(each.logprob))}%`}})),
      h("span", {class: "share"}, percent(each.logprob))))),
  ];
}

function legend() {
  const steps = ["over 90 %", "60", "30", "10", "less"];
  return h("p", {class: "legend", "aria-hidden": "true"}, "Likelihood", steps.map((text, level) => h("span", {class: `token level-${level}`}, text)));
}

const percent = logprob => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};
const visible = token => token.replaceAll("\n", "↵\n");
const spelled = token => JSON.stringify(token).slice(1, -1).replaceAll('\\"', '"') || "(empty)";
