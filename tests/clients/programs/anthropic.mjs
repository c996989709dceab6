// Anthropic's package for Node: its tool runner, whole and streamed, with its default settings. What docs/start/clients.md defines comes before.
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const { model, question, report, weather } = JSON.parse(process.argv[2]);
const asked = [];
const get_weather = betaTool({
  name: "get_weather",
  description: "How the weather is.",
  inputSchema: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
  run: ({ place }) => { asked.push(place); return weather; },
});

for (const stream of [false, true]) {
  const messages = [{ role: "user", content: question }];
  const final = await client.beta.messages.toolRunner({ model, max_tokens: 200, messages, tools: [get_weather], stream }).runUntilDone();
  if (final.content[0].text !== report) throw new Error(JSON.stringify(final));
}
if (asked.join() !== "Paris,Paris") throw new Error(JSON.stringify(asked));
