// Names and numbers, short enough to be read at a glance.

// The end of a replica's id, by which it differs from its siblings.
export const shortReplica = id => id.replace(/^(gateway|tokenizer|compute|sampler)-/, "").slice(0, 6);

// Of a request's id, "chatcmpl-8f…21.0": its last four, and its choice.
export function shortRequest(id) {
  const [response, index] = [id.slice(0, id.lastIndexOf(".")), id.slice(id.lastIndexOf(".") + 1)];
  return `${response.slice(-4)}${index === "0" ? "" : `.${index}`}`;
}

export const count = value => Math.round(value).toLocaleString("en");
export const rate = value => (value >= 10 ? count(value) : value.toFixed(1));

export function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

// One of eight hues, always the same for a request.
export function hueOf(id) {
  let hash = 0;
  for (const character of id) hash = (31 * hash + character.codePointAt(0)) >>> 0;
  return hash % 8;
}
