// From chunks to a message: text, thoughts, calls, logprobs, and how long it took. Knows nothing of the page.

import {AnswerStream} from "./answer-stream.js";

// Fill `message` as the answer comes, and call onchange after each change. Returns the stream at once, with `done`, a promise that never rejects.
export function generate(body, message, onchange) {
  const stream = new AnswerStream(body);
  const startedAt = performance.now();
  stream.onbreak = () => {
    message.breaks = stream.breaks.map(each => ({...each}));
    onchange();
  };
  stream.done = (async () => {
    try {
      for await (const chunk of stream.chunks()) {
        take(chunk, message, performance.now() - startedAt);
        message.position = stream.position;
        onchange();
      }
      message.finishReason ??= "stopped";
    } catch (error) {
      const {message: text, code, numPrompt, numContext} = error;
      message.error = {message: text, code, numPrompt, numContext};
      message.finishReason = "error";
    }
    message.isRunning = false;
    onchange();
  })();
  return stream;
}

// Take in a chunk that came elapsedMs after the request.
function take(chunk, message, elapsedMs) {
  message.responseId = chunk.id;
  message.model = chunk.model;
  const timing = (message.timing ??= {firstMs: null, lastMs: null, numOutput: 0, numPrompt: null, numCached: null});
  if (chunk.usage) {
    timing.numOutput = chunk.usage.completion_tokens;
    timing.numPrompt = chunk.usage.prompt_tokens;
    timing.numCached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const {delta} = choice;
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    timing.firstMs ??= elapsedMs;
    timing.lastMs = elapsedMs;
  }
  if (delta.content) message.content += delta.content;
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) takeCall(call, (message.toolCalls ??= []));
  for (const entry of choice.logprobs?.content ?? []) (message.tokens ??= []).push(tokenOf(entry));
  if (choice.finish_reason) message.finishReason = choice.finish_reason;
}

function takeCall(delta, calls) {
  const call = (calls[delta.index] ??= {id: "", type: "function", function: {name: "", arguments: ""}});
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.function.name += delta.function.name;
  if (delta.function?.arguments) call.function.arguments += delta.function.arguments;
}

function tokenOf({token, logprob, top_logprobs}) {
  return {token, logprob, top: top_logprobs.map(each => ({token: each.token, logprob: each.logprob}))};
}

// Tokens per second after the first; null for fewer than two, or where all came at once.
export function speedOf(timing) {
  const seconds = timing && timing.firstMs !== null ? (timing.lastMs - timing.firstMs) / 1000 : 0;
  return seconds > 0 && timing.numOutput > 1 ? (timing.numOutput - 1) / seconds : null;
}
