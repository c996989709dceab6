// Every parameter that the page can send, as docs/use/chat.md has them, and a body made of what was entered. An empty field is not sent: the default counts.

const number = (name, options = {}) => ({name, kind: "number", ...options});
const integer = (name, options = {}) => ({name, kind: "integer", step: 1, ...options});
const json = (name, hint, options = {}) => ({name, kind: "json", hint, ...options});
const lines = (name, hint) => ({name, kind: "lines", hint});
const flag = (name, hint, fallback = false) => ({name, kind: "flag", hint, fallback});
const choice = (name, values, hint) => ({name, kind: "choice", values, hint});

export const GROUPS = [
  {title: "Sampling", isOpen: true, fields: [
    number("temperature", {min: 0, max: 2, most: 100, step: 0.05, fallback: 1, hint: "0 takes the likeliest token"}),
    number("top_p", {min: 0.01, max: 1, step: 0.01, fallback: 1, hint: "the likeliest tokens whose share reaches it"}),
    integer("top_k", {min: 0, max: 200, most: 1e9, fallback: 0, hint: "the likeliest so many; 0: all"}),
    number("min_p", {min: 0, max: 1, step: 0.01, fallback: 0, hint: "at least so likely, relative to the likeliest"}),
    integer("max_tokens", {least: 1, placeholder: "as many as fit"}),
    integer("seed", {placeholder: "drawn", hint: "the same seed gives the same answer"}),
  ]},
  {title: "Tokens and logprobs", fields: [
    flag("logprobs", "show the answer's tokens, and how likely they were"),
    integer("top_logprobs", {min: 0, max: 20, fallback: 5, hint: "alternatives of each token"}),
    flag("skip_special_tokens", "leave special tokens out of the text", true),
    flag("parse_special_tokens", "special tokens that you spell are special"),
    flag("add_special_tokens", "add a beginning-of-text token"),
    integer("truncate_prompt_tokens", {least: -1, placeholder: "none", hint: "keep the prompt's last so many"}),
  ]},
  {title: "Penalties and bias", fields: [
    number("frequency_penalty", {min: -2, max: 2, step: 0.05, fallback: 0}),
    number("presence_penalty", {min: -2, max: 2, step: 0.05, fallback: 0}),
    number("repetition_penalty", {min: 0.5, max: 2, least: 0.01, most: 100, step: 0.01, fallback: 1}),
    json("logit_bias", '{"token id": -100 to 100}'),
    json("allowed_token_ids", "[token ids]: no others are drawn"),
    lines("bad_words", "one a line: the answer won't hold them"),
  ]},
  {title: "llama.cpp's samplers", fields: [
    number("top_n_sigma", {min: 0, max: 5, most: 1000, step: 0.1, fallback: 0, hint: "within so many standard deviations; 0: off"}),
    number("typical_p", {min: 0.01, max: 1, step: 0.01, fallback: 1, hint: "1: off"}),
    number("xtc_probability", {min: 0, max: 1, step: 0.05, fallback: 0, hint: "0: off"}),
    number("xtc_threshold", {min: 0, max: 0.5, most: 1, step: 0.01, fallback: 0.1}),
    number("dynatemp_range", {min: 0, max: 2, most: 100, step: 0.05, fallback: 0, hint: "0: off"}),
    number("dynatemp_exponent", {min: 0, max: 4, most: 100, step: 0.1, fallback: 1}),
  ]},
  {title: "DRY: no repetitions", fields: [
    number("dry_multiplier", {min: 0, max: 4, most: 100, step: 0.05, fallback: 0, hint: "0: off"}),
    number("dry_base", {min: 1, max: 4, most: 100, step: 0.05, fallback: 1.75}),
    integer("dry_allowed_length", {min: 0, max: 20, most: 1e6, fallback: 2}),
    integer("dry_penalty_last_n", {least: -1, placeholder: "-1: all"}),
    json("dry_sequence_breakers", '["\\n", ":"]'),
  ]},
  {title: "Where it ends", fields: [
    lines("stop", "stop strings, one a line"),
    json("stop_token_ids", "[token ids]"),
    integer("min_tokens", {least: 0, placeholder: "0"}),
    flag("ignore_eos", "go on after the model's own end"),
    flag("include_stop_str_in_output", "keep the stop string in the text"),
  ]},
  {title: "Reasoning and template", fields: [
    choice("reasoning_effort", ["none", "minimal", "low", "medium", "high"], "for templates that know it"),
    flag("include_reasoning", "show what the model thinks", true),
    json("chat_template_kwargs", '{"enable_thinking": false}'),
    json("documents", '[{"title": …, "text": …}]'),
  ]},
  {title: "Scheduling", fields: [
    integer("priority", {least: -100, most: 100, placeholder: "0", hint: "smaller is sooner"}),
    number("deadline_s", {least: 0, placeholder: "none", hint: "seconds within which it must begin"}),
    {name: "cache_salt", kind: "text", hint: "only chats with the same salt share a cached prefix"},
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
  constructor(name, message) {
    super(`${name}: ${message}`);
    this.field = name;
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
    case "json": return parse(field.name, text);
    case "number": case "integer": return readNumber(field, text);
    default: return text;
  }
}

function readNumber(field, text) {
  const value = Number(text);
  const least = field.least ?? field.min ?? -Infinity, most = field.most ?? field.max ?? Infinity;
  if (!Number.isFinite(value)) throw new FieldError(field.name, `${text} is no number`);
  if (field.kind === "integer" && !Number.isSafeInteger(value)) throw new FieldError(field.name, `${text} is no whole number`);
  if (value < least || value > most) throw new FieldError(field.name, most === Infinity ? `at least ${least}` : `from ${least} to ${most}`);
  return value;
}

function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `not valid JSON (${error.message})`);
  }
}

function formatOf({format, schema}) {
  if (format === "json_object") return {response_format: {type: "json_object"}};
  if (format !== "json_schema") return {};
  return {response_format: {type: "json_schema", json_schema: {name: "answer", strict: true, schema: parse("JSON schema", schema || "null")}}};
}

function toolsOf({tools, toolChoice, parallelToolCalls}) {
  if (!tools?.trim()) return {};
  const list = parse("tools", tools);
  if (!Array.isArray(list)) throw new FieldError("tools", "a list is wanted");
  if (!list.length) return {};
  const plain = ["auto", "none", "required"].includes(toolChoice ?? "auto");
  const choice = plain ? toolChoice ?? "auto" : {type: "function", function: {name: toolChoice}};
  return {tools: list, tool_choice: choice, ...(parallelToolCalls === false ? {parallel_tool_calls: false} : {})};
}
