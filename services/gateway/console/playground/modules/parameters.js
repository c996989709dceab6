// Every parameter that the page can send, as docs/use/chat.md has them: the API's name, and words. An empty field is not sent: the default counts.

const number = (name, label, options = {}) => ({name, label, kind: "number", ...options});
const integer = (name, label, options = {}) => ({name, label, kind: "integer", step: 1, ...options});
const json = (name, label, hint) => ({name, label, kind: "json", hint});
const lines = (name, label, hint) => ({name, label, kind: "lines", hint});
const flag = (name, label, hint, fallback = false) => ({name, label, kind: "flag", hint, fallback});
const choice = (name, label, values, hint) => ({name, label, kind: "choice", values, hint});

export const GROUPS = [
  {title: "Sampling", isOpen: true, fields: [
    number("temperature", "Temperature", {min: 0, max: 2, most: 100, step: 0.05, fallback: 1, hint: "Higher varies more; 0 always takes the likeliest token"}),
    number("top_p", "Top share", {min: 0.01, max: 1, step: 0.01, fallback: 1, hint: "Draw from the likeliest tokens that together reach this share"}),
    integer("top_k", "Top tokens", {min: 0, max: 200, most: 1e9, fallback: 0, hint: "Draw from so many of the likeliest tokens; 0: from all"}),
    number("min_p", "Least likelihood", {min: 0, max: 1, step: 0.01, fallback: 0, hint: "Relative to the likeliest token"}),
    integer("max_tokens", "Longest answer", {least: 1, placeholder: "no limit", hint: "In tokens, of some four letters each"}),
    integer("seed", "Seed", {placeholder: "random", hint: "The same seed gives the same answer"}),
  ]},
  {title: "Tokens and likelihoods", fields: [
    flag("logprobs", "Show each token", "And how likely it was"),
    integer("top_logprobs", "Alternatives", {min: 0, max: 20, fallback: 5, hint: "So many other tokens are shown at each place"}),
    flag("skip_special_tokens", "Hide special tokens", "Leave them out of the text", true),
    flag("parse_special_tokens", "Read special tokens", "Those that you spell in a message are special"),
    flag("add_special_tokens", "Mark the beginning", "Add a token for the beginning of the text"),
    integer("truncate_prompt_tokens", "Cut the prompt", {least: -1, placeholder: "no", hint: "Keep so many of its last tokens"}),
  ]},
  {title: "Penalties and bias", fields: [
    number("frequency_penalty", "Frequency", {min: -2, max: 2, step: 0.05, fallback: 0, hint: "Against a token, for each time that the answer has it"}),
    number("presence_penalty", "Presence", {min: -2, max: 2, step: 0.05, fallback: 0, hint: "Against every token that the answer has"}),
    number("repetition_penalty", "Repetition", {min: 0.5, max: 2, least: 0.01, most: 100, step: 0.01, fallback: 1, hint: "Against tokens of the prompt, too; 1: off"}),
    json("logit_bias", "Bias of tokens", '{"token id": -100 to 100}'),
    json("allowed_token_ids", "Allowed tokens", "[token ids]: no others are drawn"),
    lines("bad_words", "Forbidden words", "One a line"),
  ]},
  {title: "llama.cpp's samplers", fields: [
    number("top_n_sigma", "Top deviations", {min: 0, max: 5, most: 1000, step: 0.1, fallback: 0, hint: "Within so many standard deviations of the likeliest; 0: off"}),
    number("typical_p", "Typical share", {min: 0.01, max: 1, step: 0.01, fallback: 1, hint: "1: off"}),
    number("xtc_probability", "XTC chance", {min: 0, max: 1, step: 0.05, fallback: 0, hint: "How often the likeliest tokens are left out; 0: off"}),
    number("xtc_threshold", "XTC threshold", {min: 0, max: 0.5, most: 1, step: 0.01, fallback: 0.1}),
    number("dynatemp_range", "Temperature range", {min: 0, max: 2, most: 100, step: 0.05, fallback: 0, hint: "0: off"}),
    number("dynatemp_exponent", "Temperature exponent", {min: 0, max: 4, most: 100, step: 0.1, fallback: 1}),
  ]},
  {title: "Repeated phrases (DRY)", fields: [
    number("dry_multiplier", "Strength", {min: 0, max: 4, most: 100, step: 0.05, fallback: 0, hint: "0: off"}),
    number("dry_base", "Growth", {min: 1, max: 4, most: 100, step: 0.05, fallback: 1.75, hint: "For each further token of a phrase"}),
    integer("dry_allowed_length", "Allowed length", {min: 0, max: 20, most: 1e6, fallback: 2, hint: "Of a phrase, in tokens"}),
    integer("dry_penalty_last_n", "Looks back", {least: -1, placeholder: "to the start", hint: "So many tokens; -1: to the start"}),
    json("dry_sequence_breakers", "Phrases end at", '["\\n", ":"]'),
  ]},
  {title: "Where it ends", fields: [
    lines("stop", "Stop at texts", "One a line"),
    json("stop_token_ids", "Stop at tokens", "[token ids]"),
    integer("min_tokens", "Shortest answer", {least: 0, placeholder: "0", hint: "In tokens"}),
    flag("ignore_eos", "Never end by itself", "Go on after the model's own end"),
    flag("include_stop_str_in_output", "Keep the stop text", "At the answer's end"),
  ]},
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
