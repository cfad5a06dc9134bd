// The cluster as it is now: models, nodes, instances.
import { colour, figures, h, meter, picture, section, table } from "./dom.js";
import { kindOf } from "./eventdata.js";
import { bytes, count, number, percent } from "./format.js";
import { items, rows } from "./state.js";

const MANY_NODES = 40;
const TIERS = { gpu: "runs", host: "asleep", cache: "in host memory", disk: "on disk" };

export function clusterView(state, ui) {
  const nodes = Object.entries(items(state, "nodes"));
  const models = Object.entries(items(state, "models"));
  const instances = Object.entries(items(state, "instances"));
  const running = Object.values(items(state, "events")).filter((event) => !event.ledger.length);
  return [
    h("h1", {}, "Cluster"),
    running.map((event) => h("p.note", {},
      h("a", { href: `#event/${event.id}` }, `A scaling event of ${event.name} runs`),
      `: ${event.cause}`)),
    strip(state, nodes, models, instances),
    section("Models", modelTable(state, models, instances)),
    section("Nodes", nodePart(state, nodes, instances, ui)),
    section("Instances", instanceTable(instances, ui)),
  ];
}

export function lastCount(state, model) {
  return rows(state, "counts", model).at(-1) ?? [0, 0, 0, 0, 0, 0];
}

function strip(state, nodes, models, instances) {
  const serving = new Set(instances.flatMap(([, i]) => i.stages.map(([node]) => node)));
  const counts = models.map(([name]) => lastCount(state, name));
  const sum = (at) => counts.reduce((total, row) => total + row[at], 0);
  const rate = rows(state, "rates", "all").at(-1);
  const loading = nodes.filter(([, node]) => node.event).length;
  const served = new Set(instances.map(([, instance]) => instance.model)).size;
  const groups = ofKind(instances, "group").length;
  return [
    figures([
      ["nodes", number(nodes.length), `${serving.size} serve, ${loading} reserved`],
      ["models", number(models.length), `${served} served`],
      ["replicas", number(sum(3)), `${number(sum(4))} granted, ${number(sum(5))} wanted`],
      ...(groups ? [["of these groups", number(groups), "over nodes with a part each"]] : []),
      ["paths", number(ofKind(instances, "path").length), "over nodes that load"],
      ["running", number(sum(2)), "requests"],
      ["waiting", number(sum(1)), "requests"],
      ["tokens", number(rate ? rate[1] : 0), "a second"],
    ]),
  ];
}

function ofKind(instances, kind) {
  return instances.filter(([, instance]) => kindOf(instance) === kind);
}

function modelTable(state, models, instances) {
  const of = (name) => instances.filter(([, instance]) => instance.model === name);
  return table("Models", [
    { name: "model", text: ([name]) => h("a", { href: `#scaling/${encodeURIComponent(name)}` }, name) },
    { name: "size", num: true, text: ([, model]) => bytes(model.nbytes) },
    { name: "blocks", num: true, text: ([, model]) => model.n_blocks },
    { name: "serving", num: true, text: ([name]) => lastCount(state, name)[3] },
    { name: "granted", num: true, text: ([name]) => lastCount(state, name)[4] },
    { name: "wanted", num: true, text: ([name]) => lastCount(state, name)[5] },
    { name: "paths", num: true, text: ([name]) => ofKind(of(name), "path").length },
    { name: "running", num: true, text: ([name]) => lastCount(state, name)[2] },
    { name: "waiting", num: true, text: ([name]) => lastCount(state, name)[1] },
    { name: "lacking", wide: true, text: ([, model]) => model.copies?.shortfall || "nothing" },
  ], models.sort(([a], [b]) => (a < b ? -1 : 1)), {
    key: ([name]) => name,
    empty: "no model is published: `lambdascale model add` publishes one",
  });
}

// --- nodes ---

export function nodeState(name, node, instances) {
  if (node.unfit) return "unfit";
  const mine = instances.filter(([, i]) => i.stages.some(([stage]) => stage === name));
  for (const [kind, words] of [["replica", "serves"], ["group", "serves in a group"], ["path", "serves in paths"]]) {
    if (ofKind(mine, kind).length) return words;
  }
  if (node.event) return "loads";
  if (node.duty !== "all") return node.duty;
  return node.holds.some(([, tier]) => tier !== "disk") ? "keeps copies" : "idle";
}

const STATE_COLOURS = {
  serves: "replica-ink", "serves in a group": "group-ink", "serves in paths": "path-ink", loads: "accent", unfit: "bad",
  "keeps copies": "second", idle: "idle",
};

function nodePart(state, nodes, instances, ui) {
  const models = items(state, "models");
  const states = new Map(nodes.map(([name, node]) => [name, nodeState(name, node, instances)]));
  const wanted = nodes.filter(([name, node]) =>
    !ui.filter || `${name} ${node.machine} ${node.rack} ${states.get(name)}`.includes(ui.filter));
  const holds = (node) => node.holds
    .map(([model, tier, blocks]) => {
      const all = models[model]?.n_blocks;
      const part = all && blocks < all ? ` ${blocks}/${all}` : "";
      return `${model}${part} ${TIERS[tier]}`;
    }).join(", ");
  const columns = [
    { name: "node", text: ([name]) => name, sort: ([name]) => name },
    { name: "machine", text: ([, node]) => node.machine + (node.rack ? ` (${node.rack})` : ""), sort: ([, node]) => node.machine },
    { name: "state", text: ([name, node]) => mark(states.get(name), node.unfit), sort: ([name]) => states.get(name) },
    { name: "weights", text: ([, node]) => meter(...node.arena, `${bytes(node.arena[0])} of ${bytes(node.arena[1])}`), sort: ([, node]) => node.arena[0] },
    { name: "KV", text: ([, node]) => (node.kv[1] ? meter(...node.kv, percent(...node.kv)) : "–"), sort: ([, node]) => node.kv[0] },
    { name: "running", num: true, text: ([, node]) => node.running, sort: ([, node]) => node.running },
    { name: "holds", wide: true, text: ([, node]) => holds(node) },
  ];
  return [
    nodes.length > MANY_NODES ? tiles(nodes, states) : null,
    nodes.length > MANY_NODES ? h("label.filter", {}, "Only nodes with ",
      h("input", { type: "search", value: ui.filter, oninput: (event) => ui.set({ filter: event.target.value }) })) : null,
    table("Nodes", columns, wanted, {
      key: ([name]) => name, most: 100, sorted: ui.sorted.nodes,
      onsort: (name) => ui.sort("nodes", name), empty: "no node",
    }),
  ];
}

export function mark(text, title = "") {
  return h(`span.mark.${text.replaceAll(" ", "-")}`, { title: title || null }, text);
}

// A square for each node, in the order of their names, coloured as the mark of its state.
function tiles(nodes, states) {
  const counts = {};
  for (const state of states.values()) counts[state] = (counts[state] ?? 0) + 1;
  const told = Object.entries(counts).map(([state, n]) => `${n} ${state}`).join(", ");
  const size = nodes.length > 400 ? 10 : 14;
  const perRow = Math.max(10, Math.floor((document.querySelector("main")?.clientWidth ?? 800) / size) - 4);
  const height = Math.ceil(nodes.length / perRow) * size;
  return [
    picture(height, `${count(nodes.length, "node")}: ${told}`, (context, width) => {
      const columns = Math.max(1, Math.floor(width / size));
      nodes.forEach(([name], at) => {
        context.fillStyle = colour(STATE_COLOURS[states.get(name)] ?? "muted");
        context.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - 2, size - 2);
      });
    }),
    h("p.legend", {}, Object.entries(counts).map(([state, n]) => h("span", {}, mark(state), ` ${n}`))),
  ];
}

function instanceTable(instances, ui) {
  const stages = (instance) => instance.stages
    .map(([node, start, stop]) => (instance.stages.length > 1 ? `${node} ${start}–${stop - 1}` : node))
    .join(" → ");
  return table("Instances", [
    { name: "instance", text: ([id]) => h("code", {}, id), sort: ([id]) => id },
    { name: "model", text: ([, i]) => i.model, sort: ([, i]) => i.model },
    { name: "kind", text: ([, i]) => kindOf(i), sort: ([, i]) => kindOf(i) },
    { name: "state", text: ([, i]) => mark(i.state), sort: ([, i]) => i.state },
    { name: "requests", num: true, text: ([, i]) => `${i.running} of ${i.slots}`, sort: ([, i]) => i.running },
    { name: "nodes, with their blocks", wide: true, text: ([, i]) => stages(i), sort: ([, i]) => i.stages.length },
  ], instances, {
    key: ([id]) => id, most: 100, sorted: ui.sorted.instances,
    onsort: (name) => ui.sort("instances", name), empty: "nothing serves",
  });
}
