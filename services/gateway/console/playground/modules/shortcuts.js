// Keys, and the list of them.

import {h} from "./dom.js";

const KEYS = [
  ["Enter", "send"], ["Shift + Enter", "new line"], ["Escape", "stop the answer, close what is open"], ["/", "write a message"],
  ["Alt + N", "new chat"], ["Alt + ↑ / ↓", "previous, next chat"], ["Alt + P", "pipeline or chat"], ["Alt + S", "settings"],
  ["Alt + R", "regenerate the last answer"], ["Alt + D", "drop the connection"], ["?", "this list"],
];

const BY_CODE = {KeyN: "start", KeyP: "pipeline", KeyS: "settings", KeyR: "again", KeyD: "drop", ArrowUp: "previous", ArrowDown: "next"};

// actions: by the names above, and `escape`, `compose`, `help`.
export function listen(actions) {
  addEventListener("keydown", event => {
    const isWriting = event.target.closest?.("input, textarea, select");
    let name = null;
    if (event.altKey && !event.ctrlKey && !event.metaKey) name = BY_CODE[event.code] ?? null;
    else if (event.key === "Escape") name = "escape";
    else if (!isWriting && !event.ctrlKey && !event.metaKey) name = {"/": "compose", "?": "help"}[event.key] ?? null;
    if (name === null || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    actions[name]();
  });
}

export function showHelp() {
  const dialog = h("dialog", {class: "help", "aria-labelledby": "help-title", onclose: () => dialog.remove()},
    h("h2", {id: "help-title"}, "Shortcuts"),
    h("dl", {}, KEYS.map(([keys, text]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, text)))),
    h("form", {method: "dialog"}, h("button", {class: "primary"}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

// Resolves to whether the user agrees.
export function ask(question, action) {
  return new Promise(resolve => {
    const dialog = h("dialog", {class: "ask", "aria-label": question, onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); }},
      h("p", {}, question),
      h("form", {method: "dialog", class: "edit-actions"}, h("button", {class: "secondary", value: "no"}, "Cancel"), h("button", {class: "primary is-danger", value: "yes"}, action)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
