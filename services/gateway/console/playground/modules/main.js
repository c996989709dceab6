// The page: what it holds, and who tells whom. Each part draws itself; here is what happens.

import {ApiError, listModels} from "./api.js";
import {Bar} from "./bar.js";
import {ChatPane} from "./chat-pane.js";
import {copyText} from "./clipboard.js";
import {addMessage, leaveOut, newChat, path, show, toMessages} from "./conversation.js";
import {generate} from "./generate.js";
import {notify} from "./notices.js";
import {FieldError, bodyOf} from "./parameters.js";
import {PipelinePane} from "./pipeline-pane.js";
import {SettingsPanel} from "./settings.js";
import {ask, listen, showHelp} from "./shortcuts.js";
import {Sidebar} from "./sidebar.js";
import {ChatStore} from "./store.js";
import {applyTheme, toggleTheme} from "./theme.js";

const SAVE_EVERY_MS = 500;
const MODELS_EVERY_MS = 15_000;
const element = id => document.getElementById(id);

applyTheme();
const store = await ChatStore.open();
const chats = await store.all();
const running = new Map(); // AnswerStream by chat id
const unsaved = new Set();
let current = chats[0] ?? null;
let models = [];
const usual = {}; // by model, what a request gets that says nothing
const seeing = new Set(); // models that take images
let view = "chat";
const screens = {narrow: matchMedia("(max-width: 959px)"), wide: matchMedia("(min-width: 1240px)"), large: matchMedia("(min-width: 1600px)")};
let hasSettings = false;

const pane = new ChatPane(element("chat"), {send, stop, drop, edit, again, answer, shorten, takeBack, copy: (message, button) => copyText(message.content, button), choose: message => {
  if (running.has(current.id)) return;
  show(current, message);
  changed(current);
  pane.show(current);
}});
const sidebar = new Sidebar(element("sidebar"), {start, open, remove, rename, theme: toggleTheme, help: showHelp, close: () => setMenu(false)});
const bar = new Bar(element("bar"), {menu: () => setMenu(!element("app").classList.contains("has-menu")), model: chooseModel, view: setView, settings: toggleSettings});
const settings = new SettingsPanel(element("settings"), {onclose: toggleSettings, onkey: connect, onchange: () => changed(current)});
const pipeline = new PipelinePane(element("pipeline"), () => modelOf(current));

for (const message of chats.flatMap(chat => Object.values(chat.messages))) {
  if (message.isRunning) Object.assign(message, {isRunning: false, finishReason: "stopped"}); // the page was left in the middle of it
}
if (current === null) {
  current = newChat();
  chats.unshift(current);
}
open(current);
setView(location.hash === "#pipeline" ? "pipeline" : "chat");
listen({
  start, compose: () => pane.composer.focus(), help: showHelp, settings: toggleSettings, drop, escape, again: () => {
    const last = path(current).at(-1);
    if (last?.role === "assistant") again(last);
  },
  pipeline: () => setView(view === "pipeline" ? "chat" : "pipeline"), previous: () => step(-1), next: () => step(1),
});
if (!store.isLasting) notify("This browser keeps no data here: chats are gone when the page is closed");
await connect();
setInterval(connect, MODELS_EVERY_MS);
setInterval(save, SAVE_EVERY_MS);
addEventListener("pagehide", save);
for (const screen of Object.values(screens)) screen.addEventListener("change", layOut);

// Chats ------------------------------------------------------------------------------------------------------------------------------------------------

function start() {
  const empty = chats.find(chat => chat.leaf === null);
  if (empty) chats.splice(chats.indexOf(empty), 1);
  const chat = empty ?? newChat(current?.settings);
  chats.unshift(chat);
  open(chat);
  pane.composer.focus();
}

function open(chat) {
  current = chat;
  pane.show(chat);
  pane.composer.setRunning(running.has(chat.id));
  sidebar.show(chats, chat);
  settings.show(chat.settings, usual[modelOf(chat)]);
  pane.composer.tray.setAccepts(seeing.has(modelOf(chat)));
  if (models.length) bar.showModels(models, modelOf(chat));
  setMenu(false);
}

async function remove(chat) {
  if (!(await ask(`Delete “${chat.title}”? It can't be brought back.`, "Delete"))) return;
  running.get(chat.id)?.stop();
  unsaved.delete(chat);
  chats.splice(chats.indexOf(chat), 1);
  await store.remove(chat.id);
  if (!chats.length) chats.push(newChat());
  open(chat === current ? chats[0] : current);
}

function rename(chat, title) {
  chat.title = title;
  changed(chat);
  sidebar.show(chats, current);
}

function step(by) {
  const next = chats[chats.indexOf(current) + by];
  if (next) open(next);
}

// Messages ---------------------------------------------------------------------------------------------------------------------------------------------

function send(text, images = []) {
  const leaf = current.leaf;
  const message = {role: "user", content: text, ...(images.length ? {images: [...images]} : {})};
  return ready() && reply(addMessage(current, leaf, message));
}

// Another version of a message: of a user's, with a new answer.
function edit(message, text) {
  if (message.role === "assistant") {
    addMessage(current, message.parent, {role: "assistant", content: text, model: message.model, finishReason: "stop"});
    changed(current);
    pane.show(current);
  } else if (ready()) reply(addMessage(current, message.parent, {role: message.role, content: text, toolCallId: message.toolCallId, images: message.images}));
}

function again(message) {
  if (ready()) reply(current.messages[message.parent]);
}

// The oldest turns are left out of what the model reads, and it is asked again in the place of the answer that failed for their length.
function shorten(message) {
  if (!ready()) return;
  leaveOut(path(current, message.parent), message.error);
  delete current.messages[message.id];
  reply(current.messages[message.parent]);
}

// Have the model read all of the chat again.
function takeBack() {
  for (const each of path(current)) delete each.isLeftOut;
  changed(current);
  pane.show(current);
}

// A function's result; once all of an answer's calls have theirs, the model goes on.
function answer(message, call, text) {
  if (!ready()) return;
  const told = addMessage(current, current.leaf, {role: "tool", content: text, toolCallId: call.id});
  const given = new Set(path(current).filter(each => each.role === "tool").map(each => each.toolCallId));
  if (message.toolCalls.every(each => given.has(each.id))) reply(told);
  else {
    changed(current);
    pane.show(current);
  }
}

function ready() {
  if (running.has(current.id)) return false;
  try {
    bodyOf(current.settings);
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    notify(error.message, {isError: true});
    if (!hasSettings) toggleSettings();
    return false;
  }
  if (!models.length) notify("No model is there yet", {isError: true});
  return models.length > 0;
}

// Have the model answer what ends with this message.
function reply(parent) {
  const chat = current;
  const body = {model: modelOf(chat), messages: toMessages(chat, parent.id), ...bodyOf(chat.settings)};
  const message = addMessage(chat, parent.id, {role: "assistant", content: "", isRunning: true, showsTokens: Boolean(body.logprobs)});
  const stream = generate(body, message, () => {
    changed(chat);
    if (chat === current) pane.update(message);
    pipeline.follow(message);
  });
  running.set(chat.id, stream);
  pane.composer.setRunning(true);
  pane.show(chat);
  chats.splice(chats.indexOf(chat), 1);
  chats.unshift(chat);
  sidebar.show(chats, current);
  stream.done.then(() => {
    running.delete(chat.id);
    changed(chat);
    if (chat !== current) return;
    pane.composer.setRunning(false);
    pane.show(chat);
    pane.say(message.error ? `The answer failed: ${message.error.message}` : "The answer is complete");
  });
  return true;
}

function stop() {
  running.get(current.id)?.stop();
}

function drop() {
  running.get(current.id)?.drop();
}

function escape() {
  if (element("app").classList.contains("has-menu")) setMenu(false);
  else if (running.has(current.id)) stop();
  else if (hasSettings && !screens.wide.matches) toggleSettings();
}

// Models and keeping -----------------------------------------------------------------------------------------------------------------------------------

async function connect() {
  try {
    const cards = await listModels(), found = cards.map(each => each.id);
    if (found.length) models = found; // a model whose last replica was just killed will be back: until then the server says what is missing
    for (const each of cards) {
      usual[each.id] = each.sampling;
      if (each.input_modalities?.includes("image")) seeing.add(each.id);
    }
    pane.composer.tray.setAccepts(seeing.has(modelOf(current)));
    bar.showModels(models, modelOf(current));
    settings.setUsual(usual[modelOf(current)]);
  } catch (error) {
    if (!models.length) bar.showModels([], null);
    if (error instanceof ApiError && error.status === 401) notify("This server wants an API key: it goes into Settings, Access", {isError: true});
  }
}

function modelOf(chat) {
  return models.includes(chat.model) ? chat.model : models[0];
}

function chooseModel(name) {
  current.model = name;
  pane.composer.tray.setAccepts(seeing.has(name));
  settings.setUsual(usual[name]);
  changed(current);
}

function changed(chat) {
  if (chat.leaf !== null) unsaved.add(chat);
}

function save() {
  for (const chat of unsaved) store.put(chat).catch(error => notify(`The chat could not be kept: ${error.message}`, {isError: true}));
  unsaved.clear();
}

// What is shown ----------------------------------------------------------------------------------------------------------------------------------------

function setView(name) {
  view = name;
  history.replaceState(null, "", name === "pipeline" ? "#pipeline" : location.pathname);
  layOut();
  pipeline.setShown(view === "pipeline");
}

function toggleSettings() {
  hasSettings = element("settings").hidden;
  if (hasSettings && view === "pipeline") setView("chat");
  else layOut();
  if (hasSettings) element("settings").querySelector("button")?.focus({preventScroll: true});
}

function layOut() {
  element("pipeline").hidden = view !== "pipeline";
  element("settings").hidden = !hasSettings || view === "pipeline";
  element("app").dataset.view = view;
  element("app").classList.toggle("has-drawer", screens.narrow.matches || (view === "pipeline" && !screens.large.matches));
  bar.showView(view, !element("settings").hidden);
}

function setMenu(isOpen) {
  element("app").classList.toggle("has-menu", isOpen);
}
