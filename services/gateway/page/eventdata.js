// What an event's picture is made from. Times are seconds after the decision.
import { items, rows } from "./state.js";

// Everything that is known of an event; null: nothing. `fetched`: events that were asked for whole.
export function eventOf(state, id, fetched = {}) {
  const record = items(state, "events")[id] ?? fetched[id]?.record;
  if (!record) return null;
  const streamed = rows(state, "arrivals", id);
  const trail = items(state, "trails")[id];
  const known = trail && streamed.length ? { ...trail, arrivals: streamed } : fetched[id] ?? trail;
  const at = (ns) => (ns - record.decided_ns) / 1e9;
  const arrivals = (known?.arrivals ?? []).map(
    ([node, block, source, way, asked, first, finished, ready]) => ({
      node, block, source, way, asked: at(asked), first: at(first), finished: at(finished), ready: at(ready),
    }));
  const served = (known?.served ?? []).map((one) => ({
    instance: one.instance,
    stages: one.stages,
    kind: kindOf(one),
    began: at(one.began_ns),
    token: one.first_token_ns ? at(one.first_token_ns) : null,
    moving: one.moving_ns ? at(one.moving_ns) : null,
    ended: one.ended_ns ? at(one.ended_ns) : null,
  }));
  const over = record.ledger.length > 0;
  const end = at(record.history.at(-1)[1]);
  const known_to = Math.max(0.1, record.actual.all_complete_s ?? 0, over ? end : 0,
    ...arrivals.map((one) => one.ready), record.physical_limit_s ?? 0);
  return {
    record, arrivals, served, over, complete: Boolean(known), forgotten: known?.forgotten ?? 0,
    from: Math.min(0, at(record.waiting_ns || record.detected_ns)), to: known_to * 1.06,
    nodes: [...new Set([...record.sources, ...record.targets, ...arrivals.map((one) => one.node)])],
  };
}

// By node its arrivals, each with a lane in which it overlaps no other.
export function lanesOf(arrivals) {
  const found = new Map();
  for (const one of [...arrivals].sort((a, b) => a.first - b.first)) {
    const mine = found.get(one.node) ?? { ends: [], placed: [] };
    found.set(one.node, mine);
    let lane = mine.ends.findIndex((end) => end <= one.first + 1e-9);
    if (lane < 0) lane = mine.ends.length;
    mine.ends[lane] = one.finished;
    mine.placed.push({ arrival: one, lane });
  }
  return found;
}

// "replica", "group" (each of its nodes keeps a part of the model), or "path" (over nodes that load).
export function kindOf(instance) {
  if (instance.group) return "group";
  return instance.stages.length > 1 ? "path" : "replica";
}

// By node when it served, as [from, to, kind]. Sources did all along, and what has no end serves still.
export function rolesOf(event) {
  const found = new Map(event.nodes.map((node) => [node, []]));
  for (const one of event.served) {
    for (const [node] of one.stages) {
      found.get(node)?.push([one.began, one.ended ?? Infinity, one.kind]);
    }
  }
  for (const node of event.record.sources) {
    if (!event.record.targets.includes(node)) found.get(node)?.push([-Infinity, Infinity, "replica"]);
  }
  // What lasts is drawn over the paths that it follows.
  for (const list of found.values()) list.sort((a, b) => (b[2] === "path") - (a[2] === "path"));
  return found;
}

// The arrivals that each waited for the one before, up to the last: what to make faster first. A
// block waits for its source to have it, for its node to have taken the blocks before, and for the
// source to have sent others; the latest of these held it up.
export function criticalPath(arrivals) {
  const into = new Map();
  const outOf = new Map();
  const at = new Map();
  for (const one of [...arrivals].sort((a, b) => a.finished - b.finished)) {
    at.set(`${one.node} ${one.block}`, one);
    for (const [map, key] of [[into, one.node], [outOf, one.source]]) {
      if (!map.has(key)) map.set(key, []);
      map.get(key).push(one);
    }
  }
  const path = [];
  const seen = new Set();
  let here = arrivals.reduce((last, one) => (!last || one.ready > last.ready ? one : last), null);
  while (here && !seen.has(here)) {
    seen.add(here);
    path.unshift(here);
    const block = at.get(`${here.source} ${here.block}`);
    const before = (list) => list.findLast((one) => one !== here && one.finished <= here.first + SLACK_S);
    const candidates = [before(into.get(here.node) ?? []), before(outOf.get(here.source) ?? [])];
    // It may be sent on while it comes: then its source's arrival is what it waited for.
    if (block && block !== here && block.first <= here.first) candidates.push(block);
    here = candidates.filter(Boolean).filter((one) => !seen.has(one))
      .reduce((last, one) => (!last || one.finished > last.finished ? one : last), null);
  }
  return path;
}

const SLACK_S = 0.005;

// How many instances of these kinds the event had, as steps [time, count].
export function instancesOver(event, ...kinds) {
  const changes = event.served
    .filter((one) => kinds.includes(one.kind))
    .flatMap((one) => [[one.began, 1], ...(one.ended === null ? [] : [[one.ended, -1]])])
    .sort((a, b) => a[0] - b[0]);
  let sum = 0;
  return [[event.from, 0], ...changes.map(([t, change]) => [t, (sum += change)])];
}

// Into how many parts the model is cut, if it fits on no node; else 0.
export function partsOf(record) {
  return new Set(Object.values(record.parts ?? {}).map((part) => JSON.stringify(part))).size;
}

export function copiesOf(event) {
  const { record } = event;
  const all = record.actual.all_complete_s;
  const parts = partsOf(record) || 1;
  const whole = Math.max(1, Math.round(record.targets.length / parts));
  const over = parts > 1 ? ` over ${record.targets.length} nodes` : "";
  const copies = `${whole} ${whole === 1 ? "copy" : "copies"} of ${record.name}${over}`;
  if (record.state === "failed" || record.state === "cancelled") return `${copies}: ${record.state}`;
  return all === null ? `${copies}, arriving` : `${copies} in ${all.toFixed(2)} s`;
}
