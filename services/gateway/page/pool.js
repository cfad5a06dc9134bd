// Where each model has its copies, and what the nodes have room for.
import { h, meter, section, table } from "./dom.js";
import { bytes } from "./format.js";
import { items } from "./state.js";

export function poolView(state, ui) {
  const models = Object.entries(items(state, "models")).sort(([a], [b]) => (a < b ? -1 : 1));
  const nodes = Object.entries(items(state, "nodes"));
  const lacking = models.filter(([, model]) => model.copies?.shortfall);
  const nodeList = (names) => (names.length > 6 ? `${names.slice(0, 6).join(", ")} and ${names.length - 6} more` : names.join(", ")) || "–";
  const used = ([part, whole]) => (whole ? meter(part, whole, `${bytes(part)} of ${bytes(whole)}`) : "–");
  return [
    h("h1", {}, "The pool"),
    h("p.lead", {}, lacking.length
      ? `${lacking.length} of ${models.length} models lack copies.` : "Every model has the copies that it should have."),
    lacking.map(([name, model]) => h("p.note", {}, `${name}: ${model.copies.shortfall}`)),
    section("Copies", table("Copies", [
      { name: "model", text: ([name]) => name },
      { name: "size", num: true, text: ([, model]) => bytes(model.nbytes) },
      { name: "runs on", wide: true, text: ([, model]) => nodeList(model.copies?.device ?? []) },
      { name: "in memory", wide: true, text: ([, model]) => nodeList(model.copies?.host ?? []) },
      { name: "durable", wide: true, text: ([, model]) => nodeList((model.copies?.durable ?? []).map(({ node, machine }) =>
        (node === machine ? node : `${node} (${machine})`))) },
      { name: "wanted durable", num: true, text: ([, model]) => model.copies?.wanted ?? "–" },
      { name: "under way", wide: true, text: ([, model]) => nodeList((model.copies?.under_way ?? []).map(
        ({ node, progress }) => `${node}: ${bytes(progress.done)} of ${bytes(progress.nbytes)}${progress.error ? `, failed: ${progress.error}` : ""}`)) },
    ], models, { key: ([name]) => name, empty: "no model is published" })),
    section("Room", table("Room", [
      { name: "node", text: ([name]) => name, sort: ([name]) => name },
      { name: "machine", text: ([, node]) => node.machine, sort: ([, node]) => node.machine },
      { name: "rack", text: ([, node]) => node.rack || "–", sort: ([, node]) => node.rack },
      { name: "for weights", text: ([, node]) => used(node.arena), sort: ([, node]) => node.arena[0] },
      { name: "host cache", text: ([, node]) => used(node.host ?? [0, 0]), sort: ([, node]) => node.host?.[0] ?? 0 },
      { name: "disk", text: ([, node]) => used(node.disk ?? [0, 0]), sort: ([, node]) => node.disk?.[0] ?? 0 },
    ], nodes, { key: ([name]) => name, sorted: ui.sorted.pool, onsort: (name) => ui.sort("pool", name), empty: "no node" })),
  ];
}
