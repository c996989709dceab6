// Recent requests on their way, as bars on one clock: what they waited for, and where they were computed.

import {h, replace} from "./dom.js";
import {count, shortReplica, shortRequest} from "./names.js";

const SHORTEST_S = 10, LONGEST_S = 60, MOST_ROWS = 12;
const PHASES = {tokenizing: "gateway and tokenizer", waiting: "waits for compute", prefill: "reads the prompt", decode: "writes the answer", lost: "its process died"};

export class TimelineView {
  constructor() {
    this.rows = h("ul", {class: "recent-requests"});
    this.axis = h("div", {class: "axis", "aria-hidden": "true"});
    this.element = h("div", {class: "timeline"},
      h("p", {class: "phases"}, Object.entries(PHASES).map(([phase, text]) => h("span", {}, h("i", {class: `phase of-${phase}`}), text))), this.rows, this.axis);
  }

  show({time, recent_requests: requests}) {
    const shown = requests.filter(request => request.spans.length && time - request.spans.at(-1).ended_at < LONGEST_S).slice(0, MOST_ROWS);
    if (!shown.length) {
      replace(this.rows, h("li", {class: "empty"}, "No request in the last minute."));
      replace(this.axis);
      return;
    }
    const oldest = Math.min(...shown.map(request => request.spans[0].started_at));
    const length = Math.min(LONGEST_S, Math.max(SHORTEST_S, time - oldest));
    replace(this.rows, shown.map(request => rowOf(request, time - length, length)));
    const step = length > 30 ? 10 : length > 15 ? 5 : 2;
    const marks = Array.from({length: Math.floor(length / step) + 1}, (_, index) => index * step);
    replace(this.axis, marks.map(ago => h("span", {style: {left: `${100 - (100 * ago) / length}%`}}, ago ? `−${ago} s` : "now")));
  }
}

function rowOf(request, from, length) {
  const place = seconds => Math.max(0, Math.min(100, (100 * (seconds - from)) / length));
  const bars = request.spans.filter(span => span.ended_at > from).map(span => {
    const left = place(span.started_at), width = Math.max(0.4, place(span.ended_at) - left);
    const text = `${PHASES[span.phase]}${span.replica_id ? `, compute ${shortReplica(span.replica_id)}` : ""}, ${(span.ended_at - span.started_at).toFixed(3)} s`;
    const label = span.phase === "decode" && width > 14 ? shortReplica(span.replica_id) : "";
    return h("span", {class: `span of-${span.phase}`, title: text, style: {left: `${left}%`, width: `${width}%`}}, label);
  });
  const told = `${request.num_prompt_tokens ? `${count(request.num_prompt_tokens)} + ` : ""}${count(request.num_output_tokens)} tokens`;
  const replicas = [...new Set(request.spans.map(span => span.replica_id).filter(Boolean).map(shortReplica))];
  const said = `Request ${shortRequest(request.request_id)}, ${told}, at compute ${replicas.join(", then ") || "none yet"}${request.is_over ? ", over" : ", running"}`;
  return h("li", {class: `recent-request${request.is_over ? " is-over" : ""}`},
    h("p", {class: "row-name", title: request.request_id}, h("code", {}, shortRequest(request.request_id)), h("span", {}, told)),
    h("div", {class: "track", role: "img", "aria-label": said}, bars));
}
