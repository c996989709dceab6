// What has changed between two snapshots, in words: who came, who died, what moved.

import {h, replace} from "./dom.js";
import {shortReplica, shortRequest} from "./names.js";

const MOST = 30;

export class NewsView {
  constructor() {
    this.list = h("ol", {class: "news", role: "log", "aria-live": "polite", "aria-label": "What happened"});
    this.element = this.list;
    this.before = null;
    replace(this.list, h("li", {class: "empty"}, "Nothing has happened yet."));
  }

  show(snapshot) {
    const before = this.before;
    this.before = snapshot;
    if (before === null) return;
    for (const text of changes(before, snapshot)) this.tell(text, snapshot.time);
  }

  tell(text, time = Date.now() / 1000) {
    this.list.querySelector(".empty")?.remove();
    this.list.prepend(h("li", {}, h("time", {}, new Date(1000 * time).toLocaleTimeString("en-GB")), h("span", {}, text)));
    while (this.list.children.length > MOST) this.list.lastElementChild.remove();
  }
}

function changes(before, now) {
  const named = each => `${each.stage} ${shortReplica(each.replica_id)}`;
  const old = new Map(before.replicas.map(each => [each.replica_id, each]));
  const present = new Map(now.replicas.map(each => [each.replica_id, each]));
  const found = [];
  for (const each of now.replicas) {
    if (!old.has(each.replica_id)) found.push(`${named(each)} has started`);
  }
  for (const each of before.replicas) if (!present.has(each.replica_id)) found.push(`${named(each)} is gone`);
  const earlier = new Map(before.recent_requests.map(request => [request.request_id, request]));
  for (const request of now.recent_requests) {
    const last = request.spans.at(-1), was = earlier.get(request.request_id);
    if (!was || !last || !was.spans.length) continue;
    const lastCompute = was.spans.filter(span => span.replica_id).at(-1)?.replica_id;
    if (last.phase === "lost" && was.spans.at(-1).phase !== "lost") found.push(`request ${shortRequest(request.request_id)} lost its process; its ${request.num_output_tokens} tokens are safe in Redis`);
    if (last.replica_id && lastCompute && last.replica_id !== lastCompute) found.push(`request ${shortRequest(request.request_id)} goes on at compute ${shortReplica(last.replica_id)}`);
    if (request.sampler_id && was.sampler_id && request.sampler_id !== was.sampler_id) found.push(`request ${shortRequest(request.request_id)} has sampler ${shortReplica(request.sampler_id)} now`);
    if (request.num_preemptions > was.num_preemptions) found.push(`request ${shortRequest(request.request_id)} waits until there is room for it again`);
  }
  return found;
}
