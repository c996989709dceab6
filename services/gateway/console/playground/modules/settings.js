// The settings of the chat: system prompt, parameters, what the answer must be, tools. What is entered is kept with the chat.

import {key} from "./api.js";
import {h, iconButton, replace} from "./dom.js";
import {EXAMPLE_SCHEMA, EXAMPLE_TOOLS, FieldError, GROUPS, read} from "./parameters.js";

export class SettingsPanel {
  // onchange(settings): they were changed. onclose(): the panel is to go. onkey(): the API key was changed.
  constructor(element, {onchange, onclose, onkey}) {
    this.element = element;
    this.onchange = onchange;
    this.onclose = onclose;
    this.onkey = onkey;
  }

  // usual: what a request gets that says nothing, by its parameters' names.
  show(settings, usual = {}) {
    this.settings = settings;
    this.usual = usual;
    settings.parameters ??= {};
    replace(this.element,
      h("header", {class: "pane-head"}, h("h2", {}, "Settings"), iconButton("close", "Close settings", this.onclose)),
      h("div", {class: "settings-body"},
        this.#text("system", "System prompt", {rows: 4, placeholder: "How the model is to behave"}),
        GROUPS.map(group => this.#group(group)),
        this.#format(),
        this.#tools(),
        this.#access()));
  }

  setUsual(usual = {}) {
    if (JSON.stringify(usual) !== JSON.stringify(this.usual)) this.show(this.settings, usual);
  }

  #changed() {
    this.onchange(this.settings);
  }

  #group({title, fields, isOpen}) {
    const isSet = fields.some(field => isGiven(this.settings.parameters[field.name]));
    return h("details", {class: "group", open: isOpen || isSet}, h("summary", {}, title), fields.map(field => this.#field(field)));
  }

  #field(field) {
    const {parameters} = this.settings;
    const id = `parameter-${field.name}`;
    const problem = h("p", {class: "problem", id: `${id}-problem`, hidden: true});
    let input, slider = null;
    const store = value => {
      if (isGiven(value)) parameters[field.name] = value;
      else delete parameters[field.name];
      check(field, value, problem, input);
      this.#changed();
    };
    if (field.kind === "flag") {
      input = h("input", {type: "checkbox", id, checked: parameters[field.name] ?? field.fallback, onchange: event => store(event.target.checked)});
      return flag(input, field);
    }
    const described = {id, "aria-describedby": `${id}-problem`, spellcheck: "false", autocomplete: "off"};
    const value = parameters[field.name] ?? "";
    if (field.kind === "json" || field.kind === "lines") {
      input = h("textarea", {...described, rows: 2, value, placeholder: field.kind === "json" ? field.hint : "", oninput: event => store(event.target.value)});
    } else if (field.kind === "choice") {
      const options = ["", ...field.values].map(each => h("option", {value: each, selected: each === value}, each || "default"));
      input = h("select", {...described, onchange: event => store(event.target.value)}, options);
    } else if (field.kind === "text") {
      input = h("input", {...described, type: "text", value, maxlength: 256, oninput: event => store(event.target.value)});
    } else {
      const fallback = this.usual[field.name] ?? field.fallback;
      const placeholder = String(fallback ?? field.placeholder);
      const place = text => { // a slider stays where it is for what is no number, and at its end for what is beyond it
        const wanted = text === "" ? fallback : Number(text);
        if (slider && Number.isFinite(wanted)) slider.value = wanted;
      };
      input = h("input", {...described, type: "text", inputmode: "decimal", value, placeholder, oninput: event => {
        store(event.target.value.trim());
        place(event.target.value.trim());
      }});
      if (field.max !== undefined) {
        slider = h("input", {type: "range", min: field.min, max: field.max, step: field.step, "aria-label": `${field.label}, slider`, tabindex: "-1",
          oninput: event => { input.value = event.target.value; store(event.target.value); }});
        place("");
        place(value);
      }
    }
    check(field, value, problem, input);
    const hint = field.kind === "json" ? null : field.hint;
    return h("div", {class: `field ${field.kind}`},
      named(id, field), input, slider, hint && h("p", {class: "hint"}, hint), problem);
  }

  #text(name, label, {rows, placeholder}) {
    const id = `setting-${name}`;
    return h("div", {class: "field lines"}, h("label", {for: id}, label),
      h("textarea", {id, rows, placeholder, value: this.settings[name] ?? "", oninput: event => {
        this.settings[name] = event.target.value;
        this.#changed();
      }}));
  }

  #format() {
    const {settings} = this;
    const schema = this.#json("schema", "JSON schema", EXAMPLE_SCHEMA);
    schema.hidden = settings.format !== "json_schema";
    const options = [["text", "Text"], ["json_object", "A JSON object"], ["json_schema", "JSON of a schema"]];
    const select = h("select", {id: "setting-format", onchange: event => {
      settings.format = event.target.value;
      schema.hidden = settings.format !== "json_schema";
      this.#changed();
    }}, options.map(([value, label]) => h("option", {value, selected: (settings.format ?? "text") === value}, label)));
    return h("details", {class: "group", open: Boolean(settings.format) && settings.format !== "text"}, h("summary", {}, "Structured output"),
      h("div", {class: "field choice"}, h("label", {for: "setting-format"}, "The answer is"), select), schema);
  }

  #tools() {
    const {settings} = this;
    const choice = h("select", {id: "setting-toolChoice", onchange: event => { settings.toolChoice = event.target.value; this.#changed(); }});
    const words = {auto: "what it likes", none: "nothing", required: "at least one"};
    const list = () => replace(choice, [...Object.keys(words), ...toolNames(settings.tools)].map(
      each => h("option", {value: each, selected: each === (settings.toolChoice ?? "auto")}, words[each] ?? each)));
    list();
    const parallel = h("input", {type: "checkbox", id: "setting-parallel", checked: settings.parallelToolCalls ?? true, onchange: event => {
      settings.parallelToolCalls = event.target.checked;
      this.#changed();
    }});
    return h("details", {class: "group", open: Boolean(settings.tools?.trim())}, h("summary", {}, "Tools"),
      this.#json("tools", "Functions", EXAMPLE_TOOLS, list),
      h("div", {class: "field choice"}, named("setting-toolChoice", {label: "The model calls", name: "tool_choice"}), choice),
      flag(parallel, {label: "Several at once", name: "parallel_tool_calls", hint: "Calls in one answer"}));
  }

  #json(name, label, example, onchange = () => {}) {
    const id = `setting-${name}`;
    const problem = h("p", {class: "problem", id: `${id}-problem`, hidden: true});
    const area = h("textarea", {id, rows: 8, spellcheck: "false", class: "code", "aria-describedby": `${id}-problem`, value: this.settings[name] ?? ""});
    const store = () => {
      this.settings[name] = area.value;
      check({label, kind: "json"}, area.value, problem, area);
      onchange();
      this.#changed();
    };
    area.addEventListener("input", store);
    const insert = h("button", {type: "button", class: "plain", onclick: () => { area.value = JSON.stringify(example, null, 2); store(); }}, "Insert an example");
    return h("div", {class: "field lines"}, h("div", {class: "label-row"}, h("label", {for: id}, label), insert), area, problem);
  }

  #access() {
    const input = h("input", {id: "setting-key", type: "password", autocomplete: "off", value: key.get(), placeholder: "none", onchange: event => {
      key.set(event.target.value.trim());
      this.onkey();
    }});
    return h("details", {class: "group", open: Boolean(key.get())}, h("summary", {}, "Access"),
      h("form", {class: "field text", onsubmit: event => event.preventDefault()}, h("label", {for: "setting-key"}, "API key"), input,
        h("p", {class: "hint"}, "Kept until this tab is closed, and sent to this server only.")));
  }
}

// A field's label: words, and small the name that it has in the API.
function named(id, {label, name}) {
  return h("label", {for: id, title: `${name} in the API`}, label, h("code", {class: "name"}, name));
}

function flag(input, {label, name, hint}) {
  return h("label", {class: "flag", for: input.id, title: `${name} in the API`}, input,
    h("span", {}, label, h("code", {class: "name"}, name), h("span", {class: "hint"}, hint)));
}

const isGiven = value => value !== undefined && value !== "" && value !== null;

function check(field, value, problem, input) {
  try {
    read(field, value);
    problem.hidden = true;
    input?.removeAttribute("aria-invalid");
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    problem.textContent = error.message;
    problem.hidden = false;
    input?.setAttribute("aria-invalid", "true");
  }
}

function toolNames(text) {
  try {
    return JSON.parse(text || "[]").map(each => each.function?.name).filter(name => typeof name === "string");
  } catch {
    return [];
  }
}
