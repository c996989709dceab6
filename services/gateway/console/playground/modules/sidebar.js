// The list of chats.

import {h, icon, iconButton, replace} from "./dom.js";

export class Sidebar {
  // actions: {start(), open(chat), rename(chat, title), remove(chat), close(), theme(), help()}.
  constructor(element, actions) {
    this.element = element;
    this.actions = actions;
    this.list = h("ul", {class: "chats"});
    replace(element,
      h("div", {class: "brand"}, mark(), h("strong", {}, "Penstock"), iconButton("close", "Close the list of chats", actions.close, {class: "icon-button only-narrow"})),
      h("button", {type: "button", class: "new-chat", onclick: actions.start}, icon("plus"), "New chat"),
      this.list,
      h("footer", {class: "sidebar-foot"},
        h("a", {href: "/docs", target: "_blank"}, "API"), h("a", {href: "/health", target: "_blank"}, "Health"),
        h("button", {type: "button", class: "plain", onclick: actions.help}, "Shortcuts"),
        iconButton("theme", "Dark or light", actions.theme)));
  }

  show(chats, current) {
    replace(this.list, chats.map(chat => this.#item(chat, chat.id === current?.id)));
  }

  #item(chat, isCurrent) {
    const open = h("button", {type: "button", class: "chat-link", "aria-current": isCurrent ? "page" : null, onclick: () => this.actions.open(chat)}, chat.title);
    const item = h("li", {class: isCurrent ? "is-current" : ""}, open,
      iconButton("edit", `Rename ${chat.title}`, () => this.#rename(chat, item)),
      iconButton("trash", `Delete ${chat.title}`, () => this.actions.remove(chat)));
    return item;
  }

  #rename(chat, item) {
    const input = h("input", {type: "text", class: "rename", value: chat.title, maxlength: 80, "aria-label": "Title of the chat"});
    const done = isKept => this.actions.rename(chat, isKept ? input.value.trim() || chat.title : chat.title);
    input.addEventListener("keydown", event => {
      event.stopPropagation();
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") done(false);
    });
    input.addEventListener("blur", () => input.isConnected && done(true));
    replace(item, input);
    input.select();
  }
}

function mark() {
  return h("img", {src: "/playground/icon.svg", alt: "", width: 24, height: 24});
}
