// Colours for code: Prism's tokens (vendor/) as spans. A language's grammar is fetched when code of it is first seen.

import {h} from "./dom.js";

const {Prism} = globalThis;
const NEEDS = {
  bash: [], c: ["clike"], clike: [], cpp: ["clike", "c"], css: [], diff: [], go: ["clike"], java: ["clike"], javascript: ["clike"], json: [],
  markup: [], python: [], rust: [], sql: [], typescript: ["clike", "javascript"], yaml: [],
};
const ALIASES = {
  sh: "bash", shell: "bash", zsh: "bash", "c++": "cpp", golang: "go", js: "javascript", jsx: "javascript", mjs: "javascript", html: "markup", xml: "markup",
  svg: "markup", py: "python", python3: "python", rs: "rust", ts: "typescript", tsx: "typescript", yml: "yaml",
};
const LONGEST = 8_000; // characters: beyond, colours would cost more than they help. 40,000 held the page up for seconds
const loading = new Map();

// Colour an element's text, now or once the grammar is there.
export async function highlight(element, language) {
  const name = ALIASES[language.toLowerCase()] ?? language.toLowerCase();
  if (!Object.hasOwn(NEEDS, name) || element.textContent.length > LONGEST) return;
  if (!Prism.languages[name] || loading.has(name)) await load(name);
  const text = element.textContent;
  element.replaceChildren(...Prism.tokenize(text, Prism.languages[name]).map(toNode));
}

function load(name) {
  if (!loading.has(name)) {
    loading.set(name, (async () => {
      for (const each of [...NEEDS[name], name]) if (!Prism.languages[each]) await import(`../vendor/prism/prism-${each}.min.js`);
      loading.delete(name);
    })());
  }
  return loading.get(name);
}

function toNode(token) {
  if (typeof token === "string") return document.createTextNode(token);
  const content = Array.isArray(token.content) ? token.content : [token.content];
  return h("span", {class: `syntax-${token.type}`}, content.map(toNode));
}
