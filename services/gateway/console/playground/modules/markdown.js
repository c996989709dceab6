// Markdown to elements. markdown-it parses (vendor/), and its tokens become a few known elements here: no HTML of the text's ever does.

import {copyText} from "./clipboard.js";
import {h} from "./dom.js";
import {highlight} from "./highlight.js";

const parser = globalThis.markdownit({html: false, linkify: false, typographer: false});

const BLOCKS = {
  paragraph_open: "p", blockquote_open: "blockquote", bullet_list_open: "ul", ordered_list_open: "ol", list_item_open: "li",
  table_open: "table", thead_open: "thead", tbody_open: "tbody", tr_open: "tr", th_open: "th", td_open: "td",
};
const INLINES = {strong_open: "strong", em_open: "em", s_open: "s"};

// Show a text in `container`. Blocks that have not changed keep their elements, so an answer that grows redraws its last block only.
export function showMarkdown(container, text) {
  const lines = text.split("\n");
  const environment = {};
  const groups = topLevel(parser.parse(text, environment));
  const links = Object.keys(environment.references ?? {}).length; // a definition may change links in any block
  const before = container.markdownBlocks ?? [];
  const blocks = groups.map(({tokens, from, to}, index) => {
    const source = `${links} ${lines.slice(from, to).join("\n")}`;
    const old = before[index];
    return old?.source === source ? old : {source, element: build(tokens)};
  });
  for (const [index, {element}] of blocks.entries()) {
    const present = container.children[index];
    if (present === element) continue;
    if (present) present.replaceWith(element);
    else container.append(element);
  }
  while (container.children.length > blocks.length) container.lastElementChild.remove();
  container.markdownBlocks = blocks;
}

// Tokens by block of the document, with the lines each stands on.
function topLevel(tokens) {
  const groups = [];
  let depth = 0, group = null;
  for (const token of tokens) {
    if (depth === 0) groups.push((group = {tokens: [], from: token.map?.[0] ?? 0, to: token.map?.[1] ?? 0}));
    group.tokens.push(token);
    depth += token.nesting;
  }
  return groups;
}

function build(tokens) {
  const root = fragmentOf(tokens);
  return root.children.length === 1 ? root.firstElementChild : h("div", {}, root);
}

function fragmentOf(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.nesting === -1) open.pop();
    else if (token.nesting === 1) {
      const element = opened(token);
      if (!token.hidden) parent.append(element);
      open.push(token.hidden ? parent : element);
    } else parent.append(closed(token));
  }
  return root;
}

function opened(token) {
  if (token.type === "heading_open") return h(`h${Math.min(6, Number(token.tag[1]) + 2)}`);
  if (token.type === "link_open") return link(token.attrGet("href"));
  const element = h(BLOCKS[token.type] ?? INLINES[token.type] ?? "span");
  const start = token.attrGet("start");
  if (start !== null && element.tagName === "OL") element.start = Number(start);
  if (token.tag === "table") element.tabIndex = 0;
  return element;
}

function closed(token) {
  switch (token.type) {
    case "inline": return fragmentOf(token.children);
    case "fence": case "code_block": return codeBlock(token.content, token.info.trim().split(/\s+/)[0]);
    case "code_inline": return h("code", {}, token.content);
    case "hr": return h("hr");
    case "softbreak": return "\n";
    case "hardbreak": return h("br");
    case "image": return link(token.attrGet("src"), token.content || "image"); // a link: showing it would tell a stranger that it was seen
    default: return token.content;
  }
}

// A link that says where it leads, and takes nothing along.
function link(address, text) {
  let url = null;
  try {
    url = new URL(address, "relative:");
  } catch {
    url = null;
  }
  if (url === null || !["http:", "https:", "mailto:"].includes(url.protocol)) return h("span", {}, text ?? null);
  return h("a", {href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href}, text ?? null);
}

function codeBlock(text, language) {
  const code = h("code", {tabindex: "0"}, text.replace(/\n$/, ""));
  highlight(code, language);
  const copy = h("button", {type: "button", class: "plain", onclick: () => copyText(code.textContent, copy)}, "Copy");
  return h("figure", {class: "code"}, h("figcaption", {}, h("span", {}, language || "text"), copy), h("pre", {}, code));
}
