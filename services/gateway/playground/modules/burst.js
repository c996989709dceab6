// Eight requests at once that begin alike: something to see.

import {call, listModels} from "./api.js";

const COUNT = 8, MAX_TOKENS = 160;
const PREAMBLE = "You are a patient teacher of physics. Answer in plain words and short sentences, and give one example from daily life for each idea. ".repeat(3);
const TOPICS = ["heat", "light", "sound", "gravity", "electricity", "magnets", "waves", "pressure"];

// Resolves once all have ended.
export async function sendBurst() {
  const [model] = await listModels();
  const bodies = TOPICS.slice(0, COUNT).map((topic, seed) => ({
    model: model?.id, max_tokens: MAX_TOKENS, ignore_eos: true, seed,
    messages: [{role: "system", content: PREAMBLE}, {role: "user", content: `Explain ${topic}.`}],
  }));
  await Promise.all(bodies.map(async body => (await call("/v1/chat/completions", {method: "POST", body})).json()));
}
