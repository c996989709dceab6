// The chat as it is shown: its messages, and below them the composer.

import {Composer} from "./composer.js";
import {canLeaveOut, path, versions} from "./conversation.js";
import {h, iconButton, replace} from "./dom.js";
import {takeImages} from "./images.js";
import {MessageView} from "./message-view.js";

const NEAR_PX = 80; // from the end: then the view follows what comes

export class ChatPane {
  constructor(element, actions) {
    this.actions = actions;
    this.list = h("ol", {class: "messages"});
    this.scroller = h("div", {class: "scroller", tabindex: "-1"}, this.list);
    this.composer = new Composer({onsend: actions.send, onstop: actions.stop, ondrop: actions.drop});
    this.toEnd = iconButton("down", "To the end", () => this.#scrollToEnd(), {class: "icon-button to-end", hidden: true});
    this.status = h("p", {class: "visually-hidden", role: "status"});
    replace(element, this.scroller, h("div", {class: "chat-foot"}, this.toEnd, this.composer.element), this.status);
    takeImages(element, this.composer.tray);
    this.views = new Map();
    this.scroller.addEventListener("scroll", () => {
      this.isFollowing = this.#distance() < NEAR_PX;
      this.toEnd.hidden = this.isFollowing;
    }, {passive: true});
    new ResizeObserver(() => this.isFollowing && this.#scrollToEnd()).observe(this.list);
    new ResizeObserver(() => this.isFollowing && this.#scrollToEnd()).observe(this.scroller);
    this.isFollowing = true;
  }

  show(chat) {
    const shown = path(chat);
    const actions = {...this.actions, shorten: canLeaveOut(shown) ? this.actions.shorten : null};
    this.views = new Map(shown.map(message => [message.id, new MessageView(message, versions(chat, message), actions)]));
    const firstRead = shown.find(each => !each.isLeftOut);
    replace(this.list, shown.length ? [...this.views].map(([id, view]) => [
      id === firstRead?.id && firstRead !== shown[0] && this.#leftOut(),
      view.element,
    ]) : this.#welcome());
    this.isFollowing = true;
    this.#scrollToEnd();
  }

  // A message of the shown chat has changed.
  update(message) {
    this.views.get(message.id)?.update();
  }

  say(text) {
    this.status.textContent = text;
  }

  #leftOut() {
    return h("li", {class: "left-out"}, h("span", {}, "The model no longer reads what is above."),
      h("button", {type: "button", class: "plain", onclick: this.actions.takeBack}, "Let it read all again"));
  }

  #welcome() {
    const examples = ["What is Penstock?", "Write a Python function that merges two sorted lists.", "Explain how a hydroelectric power plant works, as a list."];
    return h("li", {class: "welcome"}, h("h2", {}, "Ask the model something"),
      h("p", {}, "Chats stay in this browser. Settings has every sampling parameter, JSON schemas and tools; Pipeline shows what the server does while it answers."),
      h("ul", {class: "examples"}, examples.map(text => h("li", {}, h("button", {type: "button", class: "example", onclick: () => this.actions.send(text)}, text)))));
  }

  #distance() {
    return this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
  }

  #scrollToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
