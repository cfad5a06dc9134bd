// The same views in a file of their own (services/cli/page_file.py): events, and why models scaled.
import { drawAll, h, patchChildren, section } from "./dom.js";
import { compareParts, eventParts, eventsView } from "./event.js";
import { eventOf } from "./eventdata.js";
import { poolView } from "./pool.js";
import { scalingParts } from "./scaling.js";
import { items, nothing, take } from "./state.js";

const told = take(nothing(), JSON.parse(document.getElementById("data").textContent), Date.now());
const shownIn = document.getElementById("content");
const still = {
  sorted: {},
  chosen: [],
  fetched: {},
  failed: {},
  told: {},
  fetch() {},
  set(change) {
    Object.assign(still, change);
    showReport();
  },
  sort(name, column) {
    const before = still.sorted[name];
    still.set({ sorted: { ...still.sorted, [name]: { name: column, down: before?.name === column && !before.down } } });
  },
};

function showReport() {
  const about = items(told, "about");
  const events = Object.values(items(told, "events")).sort((a, b) => b.decided_ns - a.decided_ns);
  const [view, ...ids] = location.hash.slice(1).split("/");
  const chosen = view === "event" || view === "compare" ? ids.map((id) => eventOf(told, id)).filter(Boolean) : [];
  const models = Object.keys(told.rows.counts ?? {}).sort();
  const parts = chosen.length === 2 ? compareParts(still, chosen)
    : chosen.length === 1 || events.length === 1
      ? eventParts(told, still, chosen[0] ?? eventOf(told, events[0].id)) : eventsView(told, still);
  const back = chosen.length && events.length > 1 ? h("p", {}, h("a", { href: "#events" }, "All events")) : null;
  patchChildren(shownIn, [...h("div", {}, back, parts,
    chosen.length && events.length > 1 ? null : models.map((model) =>
      section(`Replicas of ${model}`, scalingParts(told, model, about.from_ns, about.to_ns))),
    Object.keys(items(told, "models")).length ? poolView(told, still) : null).childNodes]);
  drawAll(shownIn);
}

window.addEventListener("hashchange", () => {
  showReport();
  window.scrollTo(0, 0);
});
window.addEventListener("resize", () => drawAll(shownIn));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(shownIn));
showReport();
