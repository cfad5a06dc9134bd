// Why a model has as many replicas as it has.
import { between, lines } from "./chart.js";
import { keys } from "./event.js";
import { h, section, table } from "./dom.js";
import { clock, count, dayAndClock } from "./format.js";
import { items, rows } from "./state.js";

const WINDOWS = [[2, "2 minutes"], [10, "10 minutes"], [60, "1 hour"], [600, "10 hours"]];

export function scalingView(state, ui, chosen) {
  const names = Object.keys(state.rows.counts ?? {}).sort();
  const name = chosen ?? names[0];
  if (!name) return [h("h1", {}, "Scaling"), h("p.lead", {}, "No model is published.")];
  const nowNs = Date.now() * 1e6 + state.skewNs;
  return [
    h("h1", {}, `Replicas of ${name}`),
    h("div.bar", {},
      h("label", {}, "model ", h("select", { onchange: (e) => {
        location.hash = `scaling/${encodeURIComponent(e.target.value)}`;
      } }, names.map((one) => h("option", { value: one, selected: one === name }, one)))),
      h("label", {}, "the last ", h("select", { onchange: (e) => ui.set({ minutes: Number(e.target.value) }) },
        WINDOWS.map(([minutes, text]) => h("option", { value: minutes, selected: minutes === ui.minutes }, text))))),
    scalingParts(state, name, nowNs - ui.minutes * 60e9, nowNs),
  ];
}

export function scalingParts(state, name, fromNs, toNs) {
  const counts = rows(state, "counts", name);
  const at = (ns) => ns / 1e9;
  const long = toNs - fromNs >= 600e9;
  const range = { from: at(fromNs), to: at(toNs), text: (t) => clock(t * 1e9).slice(0, long ? 5 : 8) };
  const points = (n) => between(counts.map((row) => [at(row[0]), row[n]]), range.from, range.to);
  const marks = Object.values(items(state, "events"))
    .filter((event) => event.name === name)
    .map((event) => ({ at: at(event.decided_ns), colour: "muted", dash: [2, 3] }));
  const fixed = items(state, "models")[name];
  return [
    fixed ? h("p.lead", {}, limits(fixed)) : null,
    h("div.picture", {},
      lines(`Replicas of ${name}: wanted, granted, serving`, [
        { name: "serving", colour: "replica-ink", points: points(3), step: true, fill: true },
        { name: "granted", colour: "second", points: points(4), step: true },
        { name: "wanted", colour: "third", points: points(5), step: true, dash: [5, 4] },
      ], { ...range, marks, height: 190 }),
      keys([["third", "wanted: what the load asks for, whatever room there is"],
        ["second", "granted: serving or on their way"], ["replica-ink", "serving"], ["muted", "an event was decided"]]),
      lines(`Requests of ${name}: waiting, running`, [
        { name: "waiting", colour: "third", points: points(1), step: true },
        { name: "running", colour: "accent", points: points(2), step: true },
      ], { ...range, marks, height: 150 }),
      keys([["third", "requests waiting"], ["accent", "requests running"]])),
    section("Decisions", table("Decisions", [
      { name: "when", text: (one) => dayAndClock(one.at_ns) },
      { name: "decision", text: (one) => one.verdict },
      { name: "had", num: true, text: (one) => one.replicas },
      { name: "wanted", num: true, text: (one) => one.wanted },
      { name: "why", wide: true, text: (one) => one.why },
      { name: "nodes", wide: true, text: (one) => (one.nodes ?? []).join(", ") },
      { name: "event", text: (one) => (one.event ? h("a", { href: `#event/${one.event}` }, one.event) : "") },
    ], rows(state, "decisions", name).filter((one) => one.at_ns >= fromNs).reverse(), {
      empty: "none in this time",
    })),
  ];
}

function limits(model) {
  const most = model.most ? `at most ${model.most}` : "no limit";
  return `At least ${count(model.least, "replica")}, ${most}`
    + (model.ttft_s ? `; first token within ${model.ttft_s} s` : "")
    + (model.tpot_s ? `; a token every ${model.tpot_s} s` : "") + ".";
}
