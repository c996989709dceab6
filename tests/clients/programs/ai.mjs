// Vercel's ai: a stream with a tool, by each provider that speaks an API of ours. What docs/start/clients.md defines comes before.
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { question, report, weather } = JSON.parse(process.argv[2]);

for (const model of [compatible, responses, chat, messages]) {
  const asked = [];
  const get_weather = tool({
    description: "How the weather is.",
    inputSchema: z.object({ place: z.string() }),
    execute: async ({ place }) => { asked.push(place); return weather; },
  });
  const errors = [];
  const result = streamText({
    model, prompt: question, tools: { get_weather }, stopWhen: stepCountIs(3), maxRetries: 0, onError: ({ error }) => { errors.push(error); },
  });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  if (errors.length) throw errors[0];
  if (pieces.length < 2 || pieces.join("") !== report || asked.join() !== "Paris") throw new Error(`${model.provider}: ${JSON.stringify({ pieces, asked })}`);
}
