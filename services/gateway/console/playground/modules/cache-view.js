// A compute replica's KV cache: how full it is, and which sequence holds which blocks. Blocks that several hold, a common prefix, look alike in all.

import {h, replace} from "./dom.js";
import {count, hueOf, shortReplica, shortRequest} from "./names.js";

const MOST_ROWS = 14, MOST_CELLS = 96;

export class CacheView {
  constructor() {
    this.element = h("div", {class: "caches"});
  }

  show({caches, replicas}) {
    const loads = new Map(replicas.map(({replica_id: id, load}) => [id, load]));
    replace(this.element, caches.length ? caches.map(each => cacheOf(each, loads.get(each.replica_id) ?? {})) : h("p", {class: "empty"}, "Waiting for a compute replica to show its cache."));
  }
}

function cacheOf(cache, load) {
  const {num_blocks: total, num_held_blocks: held, num_cached_blocks: kept, block_size: size} = cache;
  const running = cache.sequences.filter(each => each.num_blocks > 0);
  const holders = new Map();
  for (const sequence of running) for (const id of blocksOf(sequence)) holders.set(id, (holders.get(id) ?? 0) + 1);
  const rows = running.sort((a, b) => (a.block_runs[0] ?? 0) - (b.block_runs[0] ?? 0) || a.created_at - b.created_at).slice(0, MOST_ROWS);
  const hidden = cache.num_sequences - rows.length;
  return h("section", {class: "cache"},
    h("div", {class: "cache-head"}, h("h4", {}, `compute ${shortReplica(cache.replica_id)}`),
      h("p", {}, `${count(held)} blocks held, ${count(kept)} kept for prefixes, of ${count(total)}; ${size} tokens each`)),
    h("div", {class: "cache-bar", role: "img", "aria-label": `${percent(held, total)} held, ${percent(kept, total)} kept for prefixes`},
      h("span", {class: "held", style: {"flex-grow": held}}), h("span", {class: "kept", style: {"flex-grow": kept}}),
      h("span", {class: "free", style: {"flex-grow": Math.max(0, total - held - kept)}})),
    load.prefix_cache_queries > 0 && h("p", {class: "cache-found"}, foundIn(load)),
    rows.length ? h("ul", {class: "rows"}, rows.map(each => rowOf(each, holders, size))) : h("p", {class: "empty"}, "No sequence holds a block."),
    hidden > 0 && h("p", {class: "empty"}, `and ${count(hidden)} more sequences, which wait or are not shown`));
}

// Where the tokens of this replica's prompts were found.
function foundIn({prefix_cache_queries: asked, prefix_cache_hits: found, kv_disk_tokens: read, offered, stolen}) {
  const told = [`${percent(found, asked)} of its prompts' tokens were in the prefix cache`];
  if (read) told.push(`${percent(read, asked)} came from disk`);
  if (offered) told.push(`${count(offered)} prompts came for their prefix`);
  if (stolen) told.push(`${count(stolen)} were taken from another replica`);
  return told.join(", ");
}

function rowOf(sequence, holders, size) {
  const ids = blocksOf(sequence);
  const fromCache = Math.floor(sequence.num_cached_tokens / size);
  const written = Math.ceil(sequence.num_computed_tokens / size);
  const numShared = ids.filter(id => holders.get(id) > 1).length;
  const cells = ids.slice(0, MOST_CELLS).map((id, index) =>
    h("i", {class: holders.get(id) > 1 ? "cell is-shared" : index < fromCache ? "cell is-cached" : index < written ? "cell" : "cell is-reserved"}));
  const more = sequence.num_blocks - cells.length;
  const told = [`${count(sequence.num_prompt_tokens)} + ${count(sequence.num_output_tokens)} tokens`];
  if (numShared) told.push(`${count(numShared)} shared`);
  else if (fromCache) told.push(`${count(fromCache)} cached`);
  if (sequence.num_accepted_tokens) told.push(`${count(sequence.num_accepted_tokens)} drafted`);
  return h("li", {class: `row hue-${hueOf(sequence.request_id)}`},
    h("p", {class: "row-name", title: sequence.request_id}, h("code", {}, shortRequest(sequence.request_id)), h("span", {}, told.join(", "))),
    h("div", {class: "cells", role: "img", "aria-label": `${sequence.num_blocks} blocks, ${numShared} of them shared`}, cells, more > 0 && h("span", {class: "more"}, `+ ${count(more)}`)));
}

// The ids of the blocks that are told of.
function blocksOf({block_runs: runs}) {
  const ids = [];
  for (let at = 0; at < runs.length; at += 2) for (let each = 0; each < runs[at + 1]; each += 1) ids.push(runs[at] + each);
  return ids;
}

const percent = (part, whole) => `${Math.round((100 * part) / Math.max(1, whole))} %`;
