// Where a message is written. Enter sends, Shift+Enter is a new line.

import {h, icon} from "./dom.js";
import {ImageTray} from "./images.js";

export class Composer {
  // onsend(text, images) returns whether it was taken; onstop() ends the running answer; ondrop() drops its connection.
  constructor({onsend, onstop, ondrop}) {
    this.tray = new ImageTray();
    this.area = h("textarea", {id: "composer-text", rows: 1, placeholder: "Message", "aria-label": "Message", enterkeyhint: "send"});
    this.send = h("button", {class: "send", "aria-label": "Send", title: "Send (Enter)"}, icon("send"));
    this.stop = h("button", {type: "button", class: "send is-stop", "aria-label": "Stop", title: "Stop (Escape)", onclick: onstop}, icon("stop"));
    this.drop = h("button", {type: "button", class: "secondary drop", title: "Cut the connection to the server, and resume at the same token", onclick: ondrop},
      icon("drop"), "Drop the connection");
    this.element = h("form", {class: "composer", onsubmit: event => { event.preventDefault(); this.#submit(onsend); }},
      h("div", {class: "composer-side"}, this.drop), this.tray.element,
      h("div", {class: "composer-box"}, this.tray.button, this.tray.input, this.area, this.send, this.stop));
    this.area.addEventListener("input", () => this.#fit());
    this.area.addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit(onsend);
    });
    this.setRunning(false);
  }

  setRunning(isRunning) {
    this.isRunning = isRunning;
    this.send.hidden = isRunning;
    this.stop.hidden = this.drop.hidden = !isRunning;
  }

  focus() {
    this.area.focus();
  }

  #submit(onsend) {
    const text = this.area.value.trim();
    if ((!text && !this.tray.urls.length) || this.isRunning || !onsend(text, this.tray.urls)) return;
    this.tray.take();
    this.area.value = "";
    this.#fit();
  }

  #fit() {
    this.area.style.setProperty("height", "auto");
    this.area.style.setProperty("height", `${Math.min(this.area.scrollHeight, 240)}px`);
  }
}
