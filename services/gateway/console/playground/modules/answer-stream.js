// One answer as a stream that outlives its connection: whatever breaks it, it goes on after the last position that came.

import {ApiError, call} from "./api.js";
import {readEvents} from "./sse.js";

const RESUME_WITHIN_S = 45; // the server keeps computing for so long without us
const PAUSE_MS = 1200; // after a connection was dropped on purpose, for all to see
const FIRST_RETRY_MS = 250, LONGEST_RETRY_MS = 2000;

export class AnswerStream {
  #controller = new AbortController();
  #isStopped = false;
  #isDropped = false;

  constructor(body) {
    this.body = {
      ...body,
      stream: true,
      stream_options: {include_usage: true, include_position: true, resume_within_s: RESUME_WITHIN_S},
    };
    this.responseId = null;
    this.position = null; // of the last event that came
    this.breaks = []; // {position, resumedAfterMs}
  }

  // The answer's chunks. Throws ApiError; ends early after stop().
  async *chunks() {
    let reply = await call("/v1/chat/completions", {method: "POST", body: this.body, signal: this.#controller.signal});
    for (;;) {
      try {
        for await (const {id, data} of readEvents(reply.body)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new ApiError(chunk.error.code === "gateway_draining" ? 503 : 0, chunk.error);
          this.responseId = chunk.id;
          this.position = id ?? this.position;
          yield chunk;
        }
      } catch (error) {
        if (this.#isStopped) return;
        if (error instanceof ApiError && error.status !== 503) throw error;
      }
      if (this.#isStopped) return;
      if (this.responseId === null) throw new ApiError(0, {message: "the connection broke before the answer began"});
      reply = await this.#resume();
      if (reply === null) return;
    }
  }

  // Cut the connection; chunks() resumes by itself.
  drop() {
    this.#isDropped = true;
    this.#controller.abort();
  }

  // End it here. The server cancels what nobody reads.
  stop() {
    this.#isStopped = true;
    this.#controller.abort();
  }

  // The rest of the answer from the next position on; null after stop(). Throws ApiError once the server has given it up.
  async #resume() {
    const brokeAt = performance.now();
    const pause = {position: this.position, resumedAfterMs: null};
    this.breaks.push(pause);
    this.onbreak?.(pause);
    if (this.#isDropped) await sleep(PAUSE_MS);
    this.#isDropped = false;
    for (let delay = FIRST_RETRY_MS; !this.#isStopped; delay = Math.min(2 * delay, LONGEST_RETRY_MS)) {
      this.#controller = new AbortController();
      try {
        const headers = this.position === null ? {} : {"Last-Event-ID": this.position};
        const reply = await call(`/v1/streams/${this.responseId}`, {headers, signal: this.#controller.signal});
        pause.resumedAfterMs = Math.round(performance.now() - brokeAt);
        this.onbreak?.(pause);
        return reply;
      } catch (error) {
        const isLasting = error instanceof ApiError && error.status < 500 && error.status !== 429;
        if (this.#isStopped) return null;
        if (isLasting || performance.now() - brokeAt > 1000 * RESUME_WITHIN_S) throw error;
      }
      await sleep(delay);
    }
    return null;
  }
}

const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));
