// The bar at the top: which model, and what is shown.

import {h, icon, iconButton, replace} from "./dom.js";

export class Bar {
  // actions: {menu(), model(name), view(name), settings()}.
  constructor(element, actions) {
    this.model = h("select", {"aria-label": "Model", class: "model", onchange: event => actions.model(event.target.value)});
    this.tabs = Object.fromEntries([["chat", "Chat"], ["pipeline", "Pipeline"]].map(([name, label]) =>
      [name, h("button", {type: "button", "aria-pressed": "false", onclick: () => actions.view(name)}, label)]));
    this.settings = h("button", {type: "button", class: "secondary settings-button", "aria-pressed": "false", "aria-label": "Settings", title: "Settings (Alt+S)", onclick: actions.settings},
      icon("sliders"), h("span", {class: "label"}, "Settings"));
    replace(element, iconButton("menu", "Chats", actions.menu, {class: "icon-button menu"}), this.model,
      h("div", {class: "tabs", role: "group", "aria-label": "View"}, Object.values(this.tabs)), this.settings);
  }

  showModels(names, current) {
    replace(this.model, names.length ? names.map(name => h("option", {value: name, selected: name === current}, name)) : h("option", {}, "no model yet"));
  }

  showView(view, hasSettings) {
    for (const [name, tab] of Object.entries(this.tabs)) tab.setAttribute("aria-pressed", String(name === view));
    this.settings.setAttribute("aria-pressed", String(hasSettings));
  }
}
