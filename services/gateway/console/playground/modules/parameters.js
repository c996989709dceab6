// Every parameter that the page can send: the API's name, and words. An empty field is not sent: the default counts.
// The server declares its sampling parameters (sampling.js); those whose form is a chat's own are here.

import {SAMPLING} from "./sampling.js";

const number = (name, label, options = {}) => ({name, label, kind: "number", ...options});
const integer = (name, label, options = {}) => ({name, label, kind: "integer", step: 1, ...options});
const json = (name, label, hint) => ({name, label, kind: "json", hint});
const flag = (name, label, hint, fallback = false) => ({name, label, kind: "flag", hint, fallback});
const choice = (name, label, values, hint) => ({name, label, kind: "choice", values, hint});

const declared = section => SAMPLING.filter(field => field.section === section);

export const GROUPS = [
  {title: "Sampling", isOpen: true, fields: [
    ...declared("Sampling"),
    integer("max_tokens", "Longest answer", {least: 1, placeholder: "no limit", hint: "In tokens, of some four letters each"}),
    integer("seed", "Seed", {placeholder: "random", hint: "The same seed gives the same answer"}),
  ]},
  {title: "Tokens and likelihoods", fields: [
    flag("logprobs", "Show each token", "And how likely it was"),
    integer("top_logprobs", "Alternatives", {min: 0, max: 20, fallback: 5, hint: "So many other tokens are shown at each place"}),
    ...declared("Tokens and likelihoods"),
    flag("parse_special_tokens", "Read special tokens", "Those that you spell in a message are special"),
    flag("add_special_tokens", "Mark the beginning", "Add a token for the beginning of the text"),
    integer("truncate_prompt_tokens", "Cut the prompt", {least: -1, placeholder: "no", hint: "Keep so many of its last tokens"}),
  ]},
  ...["Penalties and bias", "llama.cpp's samplers", "Repeated phrases (DRY)", "Where it ends"].map(title => ({title, fields: declared(title)})),
  {title: "Reasoning and template", fields: [
    choice("reasoning_effort", "Reasoning effort", ["none", "minimal", "low", "medium", "high"], "For models whose template knows it"),
    flag("include_reasoning", "Show the reasoning", "What the model thinks before it answers", true),
    json("chat_template_kwargs", "Template variables", '{"enable_thinking": false}'),
    json("documents", "Documents", '[{"title": …, "text": …}]'),
  ]},
  {title: "Order and cache", fields: [
    integer("priority", "Priority", {least: -100, most: 100, placeholder: "0", hint: "Smaller is sooner"}),
    number("deadline_s", "Begin within", {least: 0, placeholder: "any time", hint: "Seconds; else it is refused"}),
    {name: "cache_salt", label: "Cache group", kind: "text", hint: "Only chats of the same group share what the server keeps of prompts"},
  ]},
];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {answer: {type: "string", maxLength: 200}, confidence: {type: "number", minimum: 0, maximum: 1}},
  required: ["answer", "confidence"],
  additionalProperties: false,
};

export const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city",
    parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]},
  },
}];

export class FieldError extends Error {
  constructor(label, message) {
    super(`${label}: ${message}`);
  }
}

// What the API takes of a chat's settings, without messages. Throws FieldError.
export function bodyOf(settings) {
  const body = {};
  const entered = settings.parameters ?? {};
  for (const field of GROUPS.flatMap(group => group.fields)) {
    const value = read(field, entered[field.name]);
    if (value !== undefined) body[field.name] = value;
  }
  if (!body.logprobs) delete body.top_logprobs;
  else body.top_logprobs ??= 5;
  return {...body, ...formatOf(settings), ...toolsOf(settings)};
}

// One field's value; undefined if it is not to be sent.
export function read(field, text) {
  if (text === undefined || text === "" || text === null) return undefined;
  switch (field.kind) {
    case "flag": return text === field.fallback ? undefined : text;
    case "lines": return text.split("\n").filter(line => line !== "");
    case "json": return parse(field.label, text);
    case "number": case "integer": return readNumber(field, text);
    default: return text;
  }
}

function readNumber(field, text) {
  const value = Number(text);
  const least = field.least ?? field.min ?? -Infinity, most = field.most ?? field.max ?? Infinity;
  if (!Number.isFinite(value)) throw new FieldError(field.label, `${text} is no number`);
  if (field.kind === "integer" && !Number.isSafeInteger(value)) throw new FieldError(field.label, `${text} is no whole number`);
  if (value < least || value > most) throw new FieldError(field.label, most === Infinity ? `at least ${least}` : `from ${least} to ${most}`);
  return value;
}

function parse(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(label, `not valid JSON (${error.message})`);
  }
}

function formatOf({format, schema}) {
  if (format === "json_object") return {response_format: {type: "json_object"}};
  if (format !== "json_schema") return {};
  return {response_format: {type: "json_schema", json_schema: {name: "answer", strict: true, schema: parse("JSON schema", schema || "null")}}};
}

function toolsOf({tools, toolChoice, parallelToolCalls}) {
  if (!tools?.trim()) return {};
  const list = parse("Tools", tools);
  if (!Array.isArray(list)) throw new FieldError("Tools", "a list is wanted");
  if (!list.length) return {};
  const plain = ["auto", "none", "required"].includes(toolChoice ?? "auto");
  const choice = plain ? toolChoice ?? "auto" : {type: "function", function: {name: toolChoice}};
  return {tools: list, tool_choice: choice, ...(parallelToolCalls === false ? {parallel_tool_calls: false} : {})};
}
