// Short words at the edge of the page, which a screen reader says.

import {h} from "./dom.js";

const SHOWN_MS = 4000, MOST = 4;

export function notify(text, {isError = false} = {}) {
  const box = document.getElementById("notices");
  const notice = h("p", {class: isError ? "notice is-error" : "notice"}, text);
  box.append(notice);
  while (box.children.length > MOST) box.firstElementChild.remove();
  setTimeout(() => notice.remove(), isError ? 2 * SHOWN_MS : SHOWN_MS);
}
