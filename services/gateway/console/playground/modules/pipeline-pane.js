// The pipeline live. Nothing is asked of the server while this is not shown.

import {call} from "./api.js";
import {sendBurst} from "./burst.js";
import {CacheView} from "./cache-view.js";
import {h, replace, svg, throttled} from "./dom.js";
import {watch} from "./live.js";
import {count, rate, shortReplica} from "./names.js";
import {NewsView} from "./news.js";
import {notify} from "./notices.js";
import {Rates} from "./rates.js";
import {StagesView} from "./stages.js";
import {TimelineView} from "./timeline-view.js";

const TAIL = 320; // characters of the running answer

export class PipelinePane {
  // getModel(): the name of the model that is asked.
  constructor(element, getModel) {
    this.getModel = getModel;
    this.rates = new Rates();
    this.stages = new StagesView({onkill: replica => this.#kill(replica)});
    this.cache = new CacheView();
    this.timeline = new TimelineView();
    this.news = new NewsView();
    this.state = h("p", {class: "live-state", role: "status"});
    this.totals = h("dl", {class: "totals"});
    this.spark = svg("svg", {class: "spark", viewBox: "0 0 120 32", preserveAspectRatio: "none", "aria-hidden": "true"}, svg("path", {}));
    this.tail = h("p", {class: "tail-text"});
    this.tailCard = h("section", {class: "panel tail", hidden: true}, h("h3", {}, "The answer"), this.tail);
    const burst = h("button", {type: "button", class: "secondary", onclick: () => this.#burst(burst)}, "Send eight prompts");
    replace(element, h("div", {class: "pipeline-body"},
      h("header", {class: "live-head"}, this.totals, this.spark, h("div", {class: "live-side"}, this.state, burst)),
      this.tailCard, this.stages.element,
      panel("Memory of the running answers (KV cache)", "Each square is a block of tokens. Striped: shared by several that begin alike. Pale: was there already.", this.cache.element),
      panel("Requests", null, this.timeline.element),
      panel("What happened", null, this.news.element)));
    this.drawTail = throttled(() => this.#drawTail());
    document.addEventListener("visibilitychange", () => this.#connect());
  }

  setShown(isShown) {
    this.isShown = isShown;
    this.#connect();
  }

  // The answer that is being written, for screens on which the chat is not beside.
  follow(message) {
    this.message = message;
    if (this.isShown) this.drawTail();
  }

  #connect() {
    const isWanted = this.isShown && !document.hidden;
    if (isWanted && !this.end) {
      this.#say(null, "connecting");
      this.end = watch(snapshot => this.#show(snapshot), problem => this.#say(problem, "live"));
    } else if (!isWanted && this.end) {
      this.end();
      this.end = null;
    }
  }

  #say(problem, otherwise) {
    this.state.classList.toggle("has-problem", problem !== null);
    if (this.state.textContent !== (problem ?? otherwise)) this.state.textContent = problem ?? otherwise;
  }

  #show(snapshot) {
    this.rates.take(snapshot);
    const computes = snapshot.replicas.filter(each => each.stage === "compute" && !each.is_killed);
    const sum = name => computes.reduce((total, each) => total + (each.load[name] ?? 0), 0);
    const figures = [["tokens/s", rate(this.rates.history.at(-1))], ["running", count(sum("running"))], ["in flight", count(snapshot.num_in_flight)]];
    replace(this.totals, figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.#drawSpark();
    this.stages.show(snapshot, this.rates);
    this.cache.show(snapshot);
    this.timeline.show(snapshot);
    this.news.show(snapshot);
    this.#drawTail();
  }

  #drawSpark() {
    const points = this.rates.history, top = Math.max(1, ...points);
    const line = points.map((value, index) => `${(120 * (index + 120 - points.length)) / 119},${(30 - (28 * value) / top).toFixed(1)}`);
    this.spark.firstElementChild.setAttribute("d", line.length > 1 ? `M${line.join("L")}` : "");
  }

  #drawTail() {
    const text = this.message?.content ?? "";
    this.tailCard.hidden = !text;
    this.tail.textContent = text.length > TAIL ? `… ${text.slice(-TAIL)}` : text;
  }

  async #kill({stage, replica_id: id}) {
    try {
      await call("/live/kill", {method: "POST", body: {replica_id: id}});
      this.news.tell(`${stage} ${shortReplica(id)} was killed`);
    } catch (error) {
      notify(error.message, {isError: true});
    }
  }

  async #burst(button) {
    const model = this.getModel();
    if (!model) return notify("No model is there yet", {isError: true});
    button.disabled = true;
    try {
      await sendBurst(model);
    } catch (error) {
      notify(error.message, {isError: true});
    }
    button.disabled = false;
  }
}

function panel(title, hint, content) {
  return h("section", {class: "panel"}, h("h3", {}, title), hint && h("p", {class: "panel-hint"}, hint), content);
}
