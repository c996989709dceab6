// Eight sequences at once that begin alike: something to see. One request, for a browser has six connections to a server.

import {call} from "./api.js";

const MAX_TOKENS = 160;
const PREAMBLE = "You are a patient teacher of physics. Answer in plain words and short sentences, and give one example from daily life for each idea. ".repeat(3);
const TOPICS = ["heat", "light", "sound", "gravity", "electricity", "magnets", "waves", "pressure"];

// Resolves once all have ended.
export async function sendBurst(model) {
  const prompt = TOPICS.map(topic => `${PREAMBLE}Explain ${topic}.`);
  await (await call("/v1/completions", {method: "POST", body: {model, prompt, max_tokens: MAX_TOKENS, ignore_eos: true, seed: 1}})).json();
}
