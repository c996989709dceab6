// Elements are made, never parsed: no text of a model or a user becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

// h("button", {class: "plain", onclick: f, "aria-label": "Copy"}, "Copy"). null and false leave a property or a child out.
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (["value", "checked", "disabled", "hidden", "open", "selected", "indeterminate"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

// Put these children in place of the present ones.
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
}

// Call f at most once a frame, and rest four times as long as it took: drawing never takes more than a fifth of the time.
export function throttled(f) {
  let isDue = false, restsUntil = 0;
  const run = () => {
    const startedAt = performance.now();
    isDue = false;
    f();
    restsUntil = performance.now() + 4 * (performance.now() - startedAt);
  };
  return () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => requestAnimationFrame(run), Math.max(0, restsUntil - performance.now()));
  };
}

const ICONS = {
  menu: "M3 6h18M3 12h18M3 18h18",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 12a8 8 0 1 1-2.3-5.6M20 4v4h-4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  previous: "M14 7l-5 5 5 5",
  next: "M10 7l5 5-5 5",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  drop: "M5 12h4M15 12h4M10 8v8M14 8v8",
  key: "M14 10a4 4 0 1 0-3 3.9L13 16h2v2h2v2h3v-3l-6.1-6.1z",
  theme: "M12 4a8 8 0 1 0 8 8c-5 2-10-3-8-8z",
  skull: "M13 3L5 14h6l-1 7 8-11h-6z",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15 9h.01",
  down: "M12 5v14M6 13l6 6 6-6",
};

// A 24 px line icon, of no meaning to who listens: its button has the words.
export function icon(name) {
  return svg("svg", {class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true"}, svg("path", {d: ICONS[name]}));
}

export function iconButton(name, label, onclick, properties = {}) {
  return h("button", {type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...properties}, icon(name));
}
