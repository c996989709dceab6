// Rates from counters that snapshots carry. Counters of a replica begin at 0 with it, so a replica that was replaced never counts backwards.

const WINDOW_S = 2.5;
const HISTORY = 120; // snapshots: a minute

export class Rates {
  #seen = new Map(); // [[time, count], …] by replica and counter
  history = []; // output tokens per second, all compute replicas together

  take({time, replicas}) {
    const alive = new Set();
    for (const {replica_id: id, load} of replicas) {
      for (const name of ["output_tokens", "prompt_tokens", "tokens", "requests", "steps"]) {
        if (load[name] === undefined) continue;
        const key = `${id} ${name}`;
        alive.add(key);
        const points = this.#seen.get(key) ?? [];
        points.push([time, load[name]]);
        while (points.length > 2 && time - points[0][0] > WINDOW_S) points.shift();
        this.#seen.set(key, points);
      }
    }
    for (const key of this.#seen.keys()) if (!alive.has(key)) this.#seen.delete(key);
    const computes = replicas.filter(each => each.stage === "compute");
    this.history.push(computes.reduce((sum, each) => sum + this.of(each.replica_id, "output_tokens"), 0));
    if (this.history.length > HISTORY) this.history.shift();
  }

  // Per second.
  of(id, name) {
    const points = this.#seen.get(`${id} ${name}`) ?? [];
    if (points.length < 2) return 0;
    const [[t0, n0], [t1, n1]] = [points[0], points.at(-1)];
    return t1 > t0 ? Math.max(0, (n1 - n0) / (t1 - t0)) : 0;
  }
}
