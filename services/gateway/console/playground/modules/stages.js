// The stages and their replicas, in the order in which a request passes them.

import {h, replace, svg} from "./dom.js";
import {count, duration, rate, shortReplica} from "./names.js";

const STAGES = [
  ["gateway", "HTTP in and out"],
  ["tokenizer", "text to tokens"],
  ["compute", "runs the model"],
  ["sampler", "chooses each token"],
];

export class StagesView {
  // onkill(replica) is called for a replica that may be killed.
  constructor({onkill}) {
    this.onkill = onkill;
    this.cards = new Map();
    this.columns = new Map(STAGES.map(([stage, text]) => {
      const list = h("ul", {class: "replicas"});
      return [stage, {list, element: h("section", {class: "stage", data: {stage}}, h("h3", {}, stage), h("p", {class: "stage-role"}, text), list)}];
    }));
    this.queues = new Map();
    this.element = h("div", {class: "stages"}, STAGES.flatMap(([stage], index) => [
      index > 0 && this.#link(stage),
      this.columns.get(stage).element,
    ]).filter(Boolean), h("p", {class: "way-back"}, h("span", {}, "Each chosen token goes back to compute, to the gateway, and into the log in Redis.")));
  }

  show({replicas, queues}, rates) {
    for (const [stage, {list}] of this.columns) {
      const present = replicas.filter(each => each.stage === stage);
      const cards = present.map(each => this.#card(each, rates));
      if (!cards.length) cards.push(h("li", {class: "replica is-missing"}, h("p", {}, "none is running")));
      if (cards.length !== list.children.length || cards.some((each, index) => each !== list.children[index])) replace(list, cards);
      const waiting = queues.filter(queue => queue.stage === stage).reduce((sum, queue) => sum + queue.num_waiting, 0);
      const label = this.queues.get(stage);
      if (label) {
        label.textContent = waiting ? `${count(waiting)} queued` : "";
        label.parentElement.classList.toggle("is-queued", waiting > 0);
      }
    }
    const alive = new Set(replicas.map(each => each.replica_id));
    for (const id of this.cards.keys()) if (!alive.has(id)) this.cards.delete(id);
  }

  #link(stage) {
    const label = h("span", {class: "queue"});
    if (stage !== "sampler") this.queues.set(stage, label);
    const arrow = svg("svg", {viewBox: "0 0 24 12", "aria-hidden": "true"}, svg("path", {d: "M1 6h20M17 2l4 4-4 4"}));
    return h("div", {class: "stage-link"}, label, arrow, h("span", {class: "stream"}, {tokenizer: "requests", compute: "prompts", sampler: "candidates"}[stage]));
  }

  #card(replica, rates) {
    let card = this.cards.get(replica.replica_id);
    if (!card) {
      const parts = {state: h("span", {class: "state"}), figures: h("dl", {class: "replica-figures"}), foot: h("p", {class: "replica-foot"})};
      const kill = h("button", {type: "button", class: "kill", onclick: () => this.onkill(replica), hidden: true}, "Kill");
      const element = h("li", {class: "replica"}, h("div", {class: "replica-name", title: replica.replica_id}, parts.state, h("strong", {}, shortReplica(replica.replica_id)), parts.foot, kill),
        parts.figures);
      card = {element, kill, ...parts};
      this.cards.set(replica.replica_id, card);
    }
    const isStuck = replica.idle_s > 10;
    const state = replica.is_killed ? "killed" : replica.problem ? replica.problem : isStuck ? "silent" : "";
    card.element.className = `replica${replica.is_killed ? " is-killed" : ""}${replica.problem || isStuck ? " has-problem" : ""}${replica.up_s < 6 ? " is-new" : ""}`;
    card.state.title = state || "alive";
    card.kill.hidden = !replica.can_kill;
    card.kill.setAttribute("aria-label", `Kill ${replica.replica_id}`);
    replace(card.figures, (replica.is_killed ? [] : figuresOf(replica, rates)).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    card.foot.textContent = replica.is_killed ? "killed; another takes over in a few seconds" : state || `${replica.num_ranks > 1 ? `${replica.num_ranks} ranks · ` : ""}pid ${replica.pid} · up ${duration(replica.up_s)}`;
    return card.element;
  }
}

function figuresOf({stage, replica_id: id, load}, rates) {
  switch (stage) {
    case "tokenizer": return [["requests", count(load.requests ?? 0)]];
    case "compute": return [
      ["running", `${count(load.running ?? 0)}${load.waiting ? ` + ${count(load.waiting)} waiting` : ""}`],
      ["tokens/s", rate(rates.of(id, "output_tokens"))],
      ["prompt tokens/s", rate(rates.of(id, "prompt_tokens"))],
    ];
    case "sampler": return [["sequences", count(load.sequences ?? 0)], ["tokens/s", rate(rates.of(id, "tokens"))]];
    default: return [];
  }
}
