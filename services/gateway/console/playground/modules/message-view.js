// One message: its text, thoughts, calls, tokens, and what can be done with it.

import {h, iconButton, replace, throttled} from "./dom.js";
import {speedOf} from "./generate.js";
import {picture} from "./images.js";
import {showMarkdown} from "./markdown.js";
import {tokensView} from "./tokens.js";

const REASONS = {length: "reached the longest answer", stopped: "stopped", tool_calls: "calls tools", cancelled: "cancelled"};

export class MessageView {
  // actions: {edit(message, text), again(message), choose(message), copy(message, button), answer(message, call, text), shorten(message) or null};
  // versions: all in its place.
  constructor(message, versions, actions) {
    this.message = message;
    this.versions = versions;
    this.actions = actions;
    this.body = h("div", {class: "message-body"});
    this.foot = h("footer", {class: "message-foot"});
    const names = {user: "You", assistant: message.model ?? "Model", tool: "Tool result"};
    this.head = h("h3", {class: "message-role"}, names[message.role]);
    this.element = h("li", {class: `message is-${message.role}${message.isLeftOut ? " is-left-out" : ""}`, data: {id: message.id}}, h("article", {}, this.head, this.body, this.foot));
    this.isTokens = Boolean(message.showsTokens);
    this.update = throttled(() => this.#draw());
    this.#draw();
  }

  get isEditing() {
    return this.body.querySelector(".edit-form") !== null;
  }

  #draw() {
    const {message} = this;
    this.element.classList.toggle("is-running", Boolean(message.isRunning));
    if (this.isEditing) return;
    if (message.role === "assistant") {
      if (message.model) this.head.textContent = message.model;
      this.#drawAnswer();
    } else {
      const seen = message.images?.length ? h("div", {class: "pictures"}, message.images.map(picture)) : null;
      replace(this.body, seen, message.content ? h("div", {class: "plain-text"}, message.content) : null);
    }
    this.#drawFoot();
  }

  #drawAnswer() {
    const {message} = this;
    this.parts ??= {thoughts: null, text: h("div", {class: "markdown"}), tokens: null, calls: h("div", {class: "calls"}), notes: h("div", {class: "notes"})};
    const {parts} = this;
    if (message.reasoning && !parts.thoughts) {
      parts.thoughtsText = h("div", {class: "plain-text"});
      parts.thoughts = h("details", {class: "thoughts", open: true}, h("summary", {}, "Reasoning"), parts.thoughtsText);
    }
    if (parts.thoughts) parts.thoughtsText.textContent = message.reasoning;
    const showsTokens = this.isTokens && message.tokens?.length;
    if (showsTokens) {
      parts.tokens ??= tokensView(message.tokens);
      parts.tokens.update();
    } else showMarkdown(parts.text, message.content);
    this.#drawCalls();
    this.#drawNotes();
    const children = [parts.thoughts, showsTokens ? parts.tokens.element : parts.text, parts.calls, parts.notes].filter(Boolean);
    if (children.length !== this.body.children.length || children.some((each, index) => each !== this.body.children[index])) replace(this.body, children);
    const isWaiting = message.isRunning && !message.content && !message.reasoning && !message.toolCalls?.length;
    this.body.classList.toggle("is-waiting", Boolean(isWaiting));
  }

  #drawCalls() {
    const {message, parts} = this;
    const calls = (message.toolCalls ?? []).filter(Boolean);
    const drawn = JSON.stringify(calls) + message.isRunning;
    if (parts.callsDrawn === drawn) return;
    parts.callsDrawn = drawn;
    replace(parts.calls, calls.map(call => this.#call(call)));
  }

  #call(call) {
    const text = h("code", {}, pretty(call.function.arguments));
    const title = h("p", {class: "call-name"}, "Calls ", h("code", {}, call.function.name));
    if (this.message.isRunning) return h("div", {class: "call"}, title, h("pre", {}, text));
    const area = h("textarea", {rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: "What the function returned"});
    const form = h("form", {class: "call-answer", onsubmit: event => {
      event.preventDefault();
      this.actions.answer(this.message, call, area.value);
    }}, area, h("button", {class: "primary"}, "Send result"));
    return h("div", {class: "call"}, title, h("pre", {tabindex: "0"}, text), form);
  }

  #drawNotes() {
    const {message, parts} = this;
    const notes = (message.breaks ?? []).map(({position, resumedAfterMs}) => h("p", {class: "note"}, resumedAfterMs === null
      ? `Connection gone after token ${position ?? 0}; resuming …`
      : `Connection gone after token ${position ?? 0}, resumed at token ${(Number(position) || 0) + 1} after ${(resumedAfterMs / 1000).toFixed(1)} s.`));
    const canShorten = message.error?.code === "context_length_exceeded" && this.actions.shorten;
    if (message.error) notes.push(h("div", {class: "note is-error", role: "alert"}, h("p", {}, message.error.message),
      canShorten && h("button", {type: "button", class: "secondary", onclick: () => this.actions.shorten(message)}, "Leave out the oldest messages and ask again")));
    replace(parts.notes, notes);
  }

  #drawFoot() {
    const {message} = this;
    const index = this.versions.findIndex(each => each.id === message.id);
    const many = this.versions.length > 1;
    replace(this.foot,
      many && h("span", {class: "versions"},
        iconButton("previous", "Previous version", () => this.actions.choose(this.versions[index - 1]), {disabled: index === 0}),
        h("span", {}, `${index + 1} / ${this.versions.length}`),
        iconButton("next", "Next version", () => this.actions.choose(this.versions[index + 1]), {disabled: index === this.versions.length - 1})),
      !message.isRunning && h("span", {class: "actions"},
        iconButton("copy", "Copy", event => this.actions.copy(message, event.currentTarget)),
        iconButton("edit", "Edit", () => this.#edit()),
        message.role === "assistant" && iconButton("again", "Regenerate", () => this.actions.again(message)),
        message.tokens?.length > 0 && h("button", {type: "button", class: "plain", "aria-pressed": String(this.isTokens), onclick: () => this.#toggleTokens()}, "Tokens")),
      message.role === "assistant" && h("span", {class: "figures"}, figures(message)));
  }

  #toggleTokens() {
    this.isTokens = this.message.showsTokens = !this.isTokens;
    this.#draw();
    this.foot.querySelector("[aria-pressed]")?.focus();
  }

  #edit() {
    const area = h("textarea", {class: "edit-text", value: this.message.content, rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "Edit the message"});
    const close = () => {
      this.body.replaceChildren();
      this.#draw();
      this.foot.querySelector('[aria-label="Edit"]')?.focus();
    };
    const save = () => this.actions.edit(this.message, area.value);
    area.addEventListener("keydown", event => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      event.stopPropagation();
    });
    replace(this.body, h("form", {class: "edit-form", onsubmit: event => { event.preventDefault(); save(); }}, area,
      h("div", {class: "edit-actions"}, h("button", {type: "button", class: "secondary", onclick: close}, "Cancel"),
        h("button", {class: "primary"}, this.message.role === "assistant" ? "Save as a version" : "Send again"))));
    area.focus();
  }
}

function figures(message) {
  const {timing} = message;
  if (!timing || timing.firstMs === null) return message.isRunning ? "waiting" : null;
  const speed = speedOf(timing);
  const texts = [`${(timing.firstMs / 1000).toFixed(2)} s to first token`];
  if (!message.isRunning && timing.numOutput) texts.push(`${timing.numOutput} tokens`);
  if (!message.isRunning && speed) texts.push(`${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`);
  if (timing.numCached) texts.push(`${timing.numCached} of ${timing.numPrompt} prompt tokens cached`);
  if (REASONS[message.finishReason]) texts.push(REASONS[message.finishReason]);
  return texts.join(" · ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
