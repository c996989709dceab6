// The stream of snapshots: kept open while the pipeline is shown, opened again when it breaks.

import {ApiError, call} from "./api.js";
import {readEvents} from "./sse.js";

const FIRST_RETRY_MS = 300, LONGEST_RETRY_MS = 3000;

// Calls onsnapshot(snapshot) and onstate(null or what is wrong, in words). Returns what ends it.
export function watch(onsnapshot, onstate) {
  const controller = new AbortController();
  run(controller.signal, onsnapshot, onstate);
  return () => controller.abort();
}

async function run(signal, onsnapshot, onstate) {
  let delay = FIRST_RETRY_MS;
  while (!signal.aborted) {
    try {
      const reply = await call("/live", {signal});
      for await (const {data} of readEvents(reply.body)) {
        const snapshot = JSON.parse(data);
        onstate(snapshot.problem ?? null);
        if (!snapshot.problem) onsnapshot(snapshot);
        delay = FIRST_RETRY_MS;
      }
    } catch (error) {
      if (signal.aborted) return;
      onstate(error instanceof ApiError ? error.message : "The gateway does not answer; trying again");
    }
    await new Promise(resolve => setTimeout(resolve, delay));
    delay = Math.min(2 * delay, LONGEST_RETRY_MS);
  }
}
