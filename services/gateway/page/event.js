// Scaling events: the list, one event, two compared.
import { between, frame, lines, timeAxis, vertical } from "./chart.js";
import { mark } from "./cluster.js";
import { asTable, colour, figures, h, picture, section, table } from "./dom.js";
import { copiesOf, criticalPath, eventOf, instancesOver, lanesOf, partsOf, rolesOf } from "./eventdata.js";
import { bytes, count, dayAndClock, number, seconds } from "./format.js";
import { items, rows } from "./state.js";

const WORDS = {
  evidence: "the planner hears that work waits",
  hold: "weak evidence has to last",
  room: "memory is freed",
  reserve: "targets and sources are chosen",
  plan: "the multicast is planned",
  form: "the group forms",
  orders: "a target asks for its first block",
  "first byte": "the first byte of any block comes",
  "first path": "a path over loading nodes can serve",
  "first token": "such a path serves a token",
  "last block": "the last block comes",
  attach: "the engine can run it",
  register: "the last node is known to be complete",
  grow: "further targets join",
  repair: "a trouble is answered",
};

// --- the list ---

export function eventsView(state, ui) {
  const list = Object.values(items(state, "events")).sort((a, b) => b.decided_ns - a.decided_ns);
  const chosen = ui.chosen.filter((id) => items(state, "events")[id]);
  return [
    h("h1", {}, "Scaling events"),
    h("p.lead", {}, "Each spreads a model's blocks to more nodes, which serve while they load."),
    h("div.bar", {},
      h("button", { type: "button", disabled: chosen.length !== 2, onclick: () => {
        location.hash = `compare/${chosen.join("/")}`;
      } }, "Compare the two chosen"),
      h("span", {}, `${chosen.length} of 2 chosen`)),
    table("Scaling events", [
      { name: "event", text: (e) => h("a", { href: `#event/${e.id}` }, h("code", {}, e.id)) },
      { name: "compare", text: (e) => h("input", {
        type: "checkbox", "aria-label": `compare ${e.id}`, checked: chosen.includes(e.id),
        onchange: (changed) => ui.set({ chosen: changed.target.checked
          ? [...chosen, e.id].slice(-2) : chosen.filter((id) => id !== e.id) }),
      }) },
      { name: "decided", text: (e) => dayAndClock(e.decided_ns), sort: (e) => e.decided_ns },
      { name: "model", text: (e) => e.name, sort: (e) => e.name },
      { name: "state", text: (e) => mark(e.state), sort: (e) => e.state },
      { name: "copies", num: true, text: (e) => e.targets.length, sort: (e) => e.targets.length },
      { name: "moved", num: true, text: (e) => bytes(e.bytes_moved), sort: (e) => e.bytes_moved },
      { name: "first token", num: true, text: (e) => seconds(e.actual.first_partial_token_s), sort: (e) => e.actual.first_partial_token_s ?? 1e9 },
      { name: "complete", num: true, text: (e) => seconds(e.actual.all_complete_s), sort: (e) => e.actual.all_complete_s ?? 1e9 },
      { name: "predicted", num: true, text: (e) => seconds(e.predicted.all_complete_s) },
      { name: "limit", num: true, text: (e) => seconds(e.physical_limit_s) },
      { name: "why", wide: true, text: (e) => e.cause },
    ], list, {
      key: (e) => e.id, sorted: ui.sorted.events, onsort: (name) => ui.sort("events", name),
      empty: "no event yet: one begins when requests wait, or with `lambdascale scale`",
    }),
  ];
}

// --- one event ---

export function eventView(state, ui, id) {
  const newest = Object.values(items(state, "events")).sort((a, b) => b.decided_ns - a.decided_ns)[0];
  const wanted = id === "last" ? newest?.id : id;
  const event = eventOf(state, wanted, ui.fetched);
  if (!event) {
    ui.fetch(wanted);
    return [h("h1", {}, wanted ?? "No event yet"), h("p.lead", {}, ui.failed[wanted] ?? "Asking the planner…")];
  }
  if (!event.complete || (!event.arrivals.length && event.over)) ui.fetch(event.record.id);
  return eventParts(state, ui, event);
}

export function eventParts(state, ui, event) {
  const { record } = event;
  return [
    h("h1", {}, copiesOf(event)),
    h("p.lead", {}, h("code", {}, record.id), ", ", mark(record.state), `, decided ${dayAndClock(record.decided_ns)}: ${record.cause}`),
    record.error ? h("p.note", {}, `It ended early: ${record.error}`) : null,
    record.growths.map((growth) => h("p.lead", {}, `Grew by ${growth.nodes.join(", ")}: ${growth.cause}`)),
    record.repairs.map((repair) => h("p.lead", {}, `Planned again for ${repair.nodes.join(", ")}: ${repair.why}`)),
    keyFigures(event),
    section("Blocks by node", matrix(event, ui)),
    h("div.columns", {},
      section("Where the time went", ledgerPart([event])),
      section("Predicted and actual", timingsTable([event])),
      section("Requests", loadPart(state, event)),
      section("Instances that the event made", instancesPart(event))),
  ];
}

function keyFigures({ record }) {
  const { actual, predicted } = record;
  const against = (value) => (value === null || value === undefined ? null : `predicted ${seconds(value)}`);
  const limit = record.physical_limit_s;
  const ratio = limit && actual.all_complete_s ? `${(actual.all_complete_s / limit).toFixed(2)} × the limit of ${seconds(limit)}` : null;
  return figures([
    ["first byte", seconds(actual.first_byte_s), against(predicted.first_byte_s)],
    ["first path can serve", seconds(actual.first_path_s), against(predicted.first_path_s)],
    ["first token over it", seconds(actual.first_partial_token_s), against(predicted.first_partial_token_s)],
    ["first copy complete", seconds(actual.first_complete_s), against(predicted.first_complete_s)],
    ["all complete", seconds(actual.all_complete_s), against(predicted.all_complete_s)],
    ["physical limit", seconds(limit), ratio ? ratio.replace(/ of .*/, "") : null],
    ["moved", bytes(record.bytes_moved), `${bytes(record.nbytes)} a copy, ${record.n_blocks} blocks`],
    ["plan", record.strategy, `${count(record.sources.length, "source")}, revision ${record.revision}`],
  ]);
}

function marksOf({ record }) {
  return [
    [0, "muted", [], "decided"],
    [record.actual.first_partial_token_s, "path-ink", [5, 3], "first token over a loading node"],
    [record.physical_limit_s, "ink", [1, 3], "physical limit"],
    [record.actual.all_complete_s, "replica-ink", [5, 3], "all complete"],
  ].filter(([at]) => at !== null && at !== undefined);
}

const POINT = "Point at a block, or use the arrow keys.";
const LABEL = 92;
const TALL = 46;

export function blockColour(block, blocks) {
  const share = blocks > 1 ? block / (blocks - 1) : 0;
  const [low, high] = [Number(colour("ramp-from")), Number(colour("ramp-to"))];
  return `oklch(${low + (high - low) * share} ${0.11 - 0.02 * share} ${262 - 82 * share})`;
}

export function matrix(event, ui, range = [event.from, event.to]) {
  const { record, nodes } = event;
  const lanes = lanesOf(event.arrivals);
  const roles = rolesOf(event);
  const critical = new Set(event.over ? criticalPath(event.arrivals) : []);
  const narrow = window.innerWidth < 600;
  const left = narrow ? 58 : LABEL;
  const tall = Math.max(2, Math.min(TALL, 900 / nodes.length));
  const height = Math.ceil(nodes.length * tall) + 32;
  const place = (width) => frame(width, height, ...range, 1, left);
  const summary = `${count(nodes.length, "node")}, ${count(event.arrivals.length, "block arrival")}; `
    + `${copiesOf(event)}. The table below has every arrival.`;
  const paint = (context, width) => {
    const at = place(width);
    const clipped = (from, to) => [Math.max(at.x(from), at.left), Math.min(at.x(to), at.right)];
    timeAxis(context, at, ...range, (t) => `${Number(t.toFixed(3))} s`);
    nodes.forEach((node, row) => {
      const top = at.top + row * tall;
      const gap = tall > 8 ? 3 : tall > 3 ? 1 : 0;
      for (const [from, to, kind] of roles.get(node)) {
        const [x0, x1] = clipped(from, to);
        context.fillStyle = colour(kind);
        context.fillRect(x0, top, Math.max(0, x1 - x0), tall - gap);
      }
      if (tall >= 11 || row % Math.ceil(14 / tall) === 0) {
        context.fillStyle = colour("ink");
        context.textAlign = "right";
        context.textBaseline = "middle";
        context.fillText(node, left - 8, top + (tall - gap) / 2, left - 10);
      }
      const mine = lanes.get(node);
      const deep = Math.max(tall > 30 ? 2 : 1, mine?.ends.length ?? 1);
      const each = (tall - gap) / deep;
      for (const { arrival, lane } of mine?.placed ?? []) {
        const [x0, x1] = clipped(arrival.first, arrival.finished);
        const y = top + lane * each;
        context.fillStyle = blockColour(arrival.block, record.n_blocks);
        context.fillRect(x0, y, Math.max(1, x1 - x0 - 1), Math.max(1, each - (each > 5 ? 1 : 0)));
        if (critical.has(arrival) && each < 4) {
          context.fillStyle = colour("bad");
          context.fillRect(x0, y, Math.max(2, x1 - x0 - 1), Math.max(2, each));
        } else if (critical.has(arrival)) {
          context.strokeStyle = colour("bad");
          context.lineWidth = 2;
          context.strokeRect(x0 + 1, y + 1, Math.max(1, x1 - x0 - 3), Math.max(1, each - 3));
          context.lineWidth = 1;
        }
        if (each > 11 && x1 - x0 > context.measureText(arrival.block).width + 5) {
          const share = record.n_blocks > 1 ? arrival.block / (record.n_blocks - 1) : 0;
          context.fillStyle = share < 0.5 ? "#fff" : "#10151a";
          context.textAlign = "center";
          context.textBaseline = "middle";
          context.fillText(arrival.block, (x0 + x1) / 2, y + each / 2);
        }
      }
      if (record.sources.includes(node) && !mine && tall > 14) {
        context.fillStyle = colour("replica-ink");
        context.textAlign = "left";
        context.textBaseline = "middle";
        context.fillText(narrow ? "source" : `source: has had ${partsOf(record) ? "its part" : "the whole model"} all along`, at.left + 10, top + (tall - gap) / 2);
      }
    });
    for (const [t, name, dash] of marksOf(event)) vertical(context, at, t, name, dash);
  };
  const ordered = [...event.arrivals].sort((a, b) => a.first - b.first || (a.node < b.node ? -1 : 1));
  // What was said last stays when the page is drawn anew.
  const say = (out, one) => {
    ui.told[record.id] = out.textContent = one
      ? `${one.node}, block ${one.block} from ${one.source === one.node ? "its own disk or memory" : `${one.source} over ${one.way}`}: `
        + `first byte at ${one.first.toFixed(3)} s, whole at ${one.finished.toFixed(3)} s, runs at ${one.ready.toFixed(3)} s`
        + (critical.has(one) ? "; on the critical path" : "")
      : POINT;
  };
  const hit = (canvas, x, y) => {
    const at = place(canvas.clientWidth);
    const node = nodes[Math.floor((y - at.top) / tall)];
    return (lanes.get(node)?.placed ?? []).map(({ arrival }) => arrival)
      .find((one) => x >= at.x(one.first) - 1 && x <= at.x(one.finished) + 1);
  };
  const canvas = picture(height, summary, paint, {
    tabindex: 0,
    onpointermove: (e) => say(e.target.parentElement.querySelector("output"), hit(e.target, e.offsetX, e.offsetY)),
    onkeydown: (e) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (!step || !ordered.length) return;
      e.preventDefault();
      ui.at = Math.min(Math.max((ui.at ?? -step) + step, 0), ordered.length - 1);
      say(e.target.parentElement.querySelector("output"), ordered[ui.at]);
    },
  });
  return [
    h("div.picture", {}, canvas, legend(event, critical.size),
      h("output", {}, ui.told[record.id] ?? POINT),
      event.forgotten ? h("p.lead", {}, `${number(event.forgotten)} arrivals are not known any more.`) : null),
    asTable("Arrivals", table("Arrivals", [
      { name: "node", text: (one) => one.node },
      { name: "block", num: true, text: (one) => one.block },
      { name: "from", text: (one) => one.source },
      { name: "over", text: (one) => one.way },
      { name: "asked", num: true, text: (one) => `${one.asked.toFixed(3)} s` },
      { name: "first byte", num: true, text: (one) => `${one.first.toFixed(3)} s` },
      { name: "whole", num: true, text: (one) => `${one.finished.toFixed(3)} s` },
      { name: "runs", num: true, text: (one) => `${one.ready.toFixed(3)} s` },
      { name: "critical", text: (one) => (critical.has(one) ? "yes" : "") },
    ], ordered, { most: 2000 })),
  ];
}

function legend(event, critical) {
  const blocks = event.record.n_blocks;
  const patch = (name, text) => h("span.key", {}, h(`i.patch.${name}`), text);
  return h("p.legend", {},
    patch("path", "serves in paths, with what it has"),
    patch("replica", "serves alone"),
    event.served.some((one) => one.kind === "group") ? patch("group", "serves with its part, in a group") : null,
    h("span.key", {}, h("i.patch.ramp"), `blocks 0 to ${blocks - 1}, from first byte to last`),
    critical ? patch("critical", "critical path: each waited for the one before") : null,
    marksOf(event).map(([at, name, , text]) => patch(`mark-${name}`, at ? `${text} (${seconds(at)})` : text)));
}

// --- where the time went ---

export function ledgerPart(events) {
  const longest = Math.max(...events.map(({ record }) => record.ledger.reduce((sum, one) => sum + one.seconds, 0)), 0.001);
  const phases = [...new Set(events.flatMap(({ record }) => record.ledger.map((one) => one.phase)))];
  if (!phases.length) return h("p.lead", {}, "The phases are known when the event is over.");
  const of = (event, phase) => event.record.ledger.find((one) => one.phase === phase);
  const shown = phases.filter((phase) => events.some((event) => of(event, phase)?.seconds > 0 || of(event, phase)?.predicted_s > 0));
  const tint = (phase) => blockColour(shown.indexOf(phase), shown.length);
  const bars = picture(events.length * 26 + 6, "The phases, one after the other; the table has the numbers", (context, width) => {
    events.forEach((event, row) => {
      let x = 0;
      for (const one of event.record.ledger) {
        const wide = (one.seconds / longest) * width;
        context.fillStyle = tint(one.phase);
        context.fillRect(x, row * 26 + 3, Math.max(0, wide - (wide > 3 ? 1 : 0)), 20);
        x += wide;
      }
    });
  });
  const name = (event) => (events.length > 1 ? `${event.record.id} ` : "");
  return [
    h("div.picture", {}, bars),
    table("Phases", [
      { name: "phase, up to when …", wide: true, text: (phase) => [h("i.patch", { tint: tint(phase) }), ` ${phase} `, h("small", {}, WORDS[phase] ?? "")] },
      ...events.flatMap((event) => [
        { name: `${name(event)}predicted`, num: true, text: (phase) => seconds(of(event, phase)?.predicted_s) },
        { name: `${name(event)}actual`, num: true, text: (phase) => seconds(of(event, phase)?.seconds) },
      ]),
    ], shown, { key: (phase) => phase }),
  ];
}

const TIMINGS = [
  ["reserved_s", "targets reserved"], ["planned_s", "planned"], ["sent_s", "plan sent"],
  ["asked_s", "first block asked for"], ["first_byte_s", "first byte"], ["first_path_s", "first path"],
  ["first_partial_token_s", "first token over it"], ["first_complete_s", "first copy complete"],
  ["last_block_s", "last block"], ["ready_s", "runs everywhere"], ["all_complete_s", "all complete"],
];

export function timingsTable(events) {
  const name = (event) => (events.length > 1 ? `${event.record.id} ` : "");
  const foretold = events.some(({ record }) => TIMINGS.some(([key]) => record.predicted[key] !== null));
  return [
    foretold ? null : h("p.lead", {}, "These times were not predicted, since the rates of the links are not known (",
      h("code", {}, "planner.link_bytes_per_s"), ")."),
    table("Seconds after the decision", [
      { name: "after the decision", text: ([, text]) => text },
      ...events.flatMap((event) => [
        foretold && { name: `${name(event)}predicted`, num: true, text: ([key]) => seconds(event.record.predicted[key]) },
        { name: `${name(event)}actual`, num: true, text: ([key]) => seconds(event.record.actual[key]) },
      ].filter(Boolean)),
    ], TIMINGS),
  ];
}

function loadPart(state, event) {
  const { record } = event;
  const at = (ns) => (ns - record.decided_ns) / 1e9;
  const counts = rows(state, "counts", record.name).map((row) => [at(row[0]), ...row.slice(1)]);
  const range = { from: event.from - 1, to: event.to * 1.6 + 1, text: (t) => `${t} s` };
  const points = (n) => between(counts.map((row) => [row[0], row[n]]), range.from, range.to);
  const rates = between(rows(state, "rates", "all").map(([ns, value]) => [at(ns), value]), range.from, range.to);
  if (!points(1).length) return h("p.lead", {}, "The loads of that time are not known any more.");
  const marks = marksOf(event).map(([t, name, dash]) => ({ at: t, colour: name, dash }));
  return [
    h("div.picture", {},
      lines(`Requests of ${record.name} that wait and run`, [
        { name: "waiting", colour: "third", points: points(1), step: true },
        { name: "running", colour: "accent", points: points(2), step: true },
      ], { ...range, marks }),
      keys([["third", "requests waiting"], ["accent", "requests running"]]),
      lines("Tokens a second, of all models", [{ name: "tokens", colour: "accent", points: rates, fill: true }], { ...range, marks, height: 120 }),
      keys([["accent", "tokens a second, of all models"]])),
  ];
}

export function keys(list) {
  return h("p.legend", {}, list.map(([name, text]) => h("span.key", {}, h(`i.patch.mark-${name}`), text)));
}

function instancesPart(event) {
  if (!event.served.length) return h("p.lead", {}, "None is known.");
  const range = { from: event.from, to: event.to, text: (t) => `${Number(t.toFixed(3))} s` };
  const span = (one) => one.stages.map(([node, start, stop]) => (one.stages.length > 1 ? `${node} ${start}–${stop - 1}` : node)).join(" → ");
  return [
    h("div.picture", {},
      lines("Paths over loading nodes, and replicas", [
        { name: "paths", colour: "path-ink", points: instancesOver(event, "path"), step: true },
        { name: "replicas", colour: "replica-ink", points: instancesOver(event, "replica", "group"), step: true },
      ], { ...range, height: 120 }),
      keys([["path-ink", "paths over loading nodes"], ["replica-ink", "new replicas"]])),
    asTable("Instances", table("Instances", [
      { name: "kind", text: (one) => one.kind },
      { name: "nodes, with their blocks", wide: true, text: span },
      { name: "began", num: true, text: (one) => seconds(one.began) },
      { name: "first token", num: true, text: (one) => seconds(one.token) },
      { name: "gave way", num: true, text: (one) => seconds(one.moving) },
      { name: "ended", num: true, text: (one) => seconds(one.ended) },
    ], event.served, { most: 500 })),
  ];
}

// --- two events ---

export function compareView(state, ui, ...ids) {
  const events = ids.map((id) => eventOf(state, id, ui.fetched));
  ids.forEach((id, at) => {
    if (!events[at]?.complete || !events[at].arrivals.length) ui.fetch(id);
  });
  const known = events.filter(Boolean);
  if (known.length < 2) return [h("h1", {}, "Two events"), h("p.lead", {}, "Asking the planner…")];
  return compareParts(ui, known);
}

export function compareParts(ui, events) {
  const range = [Math.min(...events.map((one) => one.from)), Math.max(...events.map((one) => one.to))];
  return [
    h("h1", {}, "Two events, in the same time"),
    events.map((event) => section(`${event.record.id}: ${copiesOf(event)}`,
      h("p.lead", {}, `${dayAndClock(event.record.decided_ns)}: ${event.record.cause}`), matrix(event, ui, range))),
    section("Where the time went", ledgerPart(events)),
    section("Predicted and actual", timingsTable(events)),
  ];
}
