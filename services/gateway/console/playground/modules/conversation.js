// A chat as a tree of messages: what was edited or generated again is a sibling, and nothing is lost. Plain data, as it is stored.

const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint32Array(4)), each => each.toString(16)).join("-");

export function newChat(settings = {}) {
  const now = Date.now();
  return {id: newId(), title: "New chat", createdAt: now, changedAt: now, settings: structuredClone(settings), messages: {}, leaf: null};
}

// Append a message after `parent` (null: it begins the chat), and show it.
export function addMessage(chat, parent, message) {
  const added = {id: newId(), parent, createdAt: Date.now(), ...message};
  chat.messages[added.id] = added;
  chat.leaf = added.id;
  chat.changedAt = Date.now();
  if (chat.title === "New chat" && added.role === "user") chat.title = added.content.trim().split("\n")[0].slice(0, 60) || (added.images?.length ? "An image" : "New chat");
  return added;
}

// The messages shown, the first first.
export function path(chat, leaf = chat.leaf) {
  const found = [];
  for (let message = chat.messages[leaf]; message; message = chat.messages[message.parent]) found.unshift(message);
  return found;
}

// A message and those in its place, the oldest first.
export function versions(chat, message) {
  return Object.values(chat.messages).filter(each => each.parent === message.parent).sort((a, b) => a.createdAt - b.createdAt);
}

// Show another version, and what followed it last.
export function show(chat, message) {
  let leaf = message;
  for (;;) {
    const children = Object.values(chat.messages).filter(each => each.parent === leaf.id);
    if (!children.length) break;
    leaf = children.reduce((a, b) => (a.createdAt > b.createdAt ? a : b));
  }
  chat.leaf = leaf.id;
}

// The turns of a path, each from a user's message to the next, that the model still reads.
function turnsOf(shown) {
  const turns = [];
  for (const message of shown.filter(each => !each.isLeftOut)) {
    if (message.role === "user" || !turns.length) turns.push([]);
    turns.at(-1).push(message);
  }
  return turns;
}

export const canLeaveOut = shown => turnsOf(shown).length > 1;

// Leave the oldest turns out, one at least and never the last, until what is left takes about half of the model's window, by its letters.
export function leaveOut(shown, {numPrompt, numContext}) {
  const size = turn => turn.reduce((sum, each) => sum + each.content.length + 1, 0);
  const turns = turnsOf(shown);
  let rest = turns.reduce((sum, turn) => sum + size(turn), 0);
  const fits = (rest * numContext) / (2 * numPrompt);
  for (const [index, turn] of turns.slice(0, -1).entries()) {
    if (index && rest <= fits) return;
    for (const message of turn) message.isLeftOut = true;
    rest -= size(turn);
  }
}

// What the API takes of the path that ends with this message.
export function toMessages(chat, leaf) {
  const system = chat.settings.system?.trim();
  const said = path(chat, leaf).filter(each => !each.isLeftOut && (each.role !== "assistant" || each.content || each.toolCalls?.length));
  return [...(system ? [{role: "system", content: system}] : []), ...said.map(toMessage)];
}

function toMessage(message) {
  if (message.role === "tool") return {role: "tool", tool_call_id: message.toolCallId, content: message.content};
  if (message.images?.length) {
    const seen = message.images.map(url => ({type: "image_url", image_url: {url}}));
    return {role: message.role, content: [...seen, ...(message.content ? [{type: "text", text: message.content}] : [])]};
  }
  if (message.role === "user" || !message.toolCalls?.length) return {role: message.role, content: message.content};
  return {role: "assistant", content: message.content || null, tool_calls: message.toolCalls};
}
