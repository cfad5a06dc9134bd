// The page: which view is shown, and the stream of changes that it is made from.
import { clusterView } from "./cluster.js";
import { drawAll, h, patchChildren } from "./dom.js";
import { compareView, eventsView, eventView } from "./event.js";
import { latencyView } from "./latency.js";
import { playgroundView } from "./playground.js";
import { poolView } from "./pool.js";
import { scalingView } from "./scaling.js";
import { eventReader, nothing, take } from "./state.js";

// By the name in the address: what the link to it says (none: it has no link), and what is shown.
const VIEWS = {
  cluster: ["Cluster", clusterView],
  events: ["Events", eventsView],
  event: ["", eventView],
  compare: ["", compareView],
  scaling: ["Scaling", scalingView],
  latency: ["Latency", latencyView],
  pool: ["Pool", poolView],
  playground: ["Playground", playgroundView],
};
const KEY = "lambdascale-key";
const AGAIN_MS = 1500;
const SILENT_MS = 12000;
const state = nothing();
const content = document.getElementById("content");
let due = false;
let drawnAt = 0;
let tookMs = 0;
let connection = "connecting";

const ui = {
  filter: "",
  sorted: {},
  chosen: [],
  fetched: {},
  failed: {},
  told: {},
  asked: {},
  minutes: 10,
  set(change) {
    Object.assign(ui, change);
    show();
  },
  sort(name, column) {
    const before = ui.sorted[name];
    const down = before?.name === column && !before.down;
    ui.set({ sorted: { ...ui.sorted, [name]: { name: column, down } } });
  },
  // Asks for an event that the stream does not bring, once.
  async fetch(id) {
    if (!id || ui.asked[id]) return;
    ui.asked[id] = true;
    try {
      const response = await fetch(`cluster/events/${encodeURIComponent(id)}`, { headers: ui.headers(), cache: "no-store" });
      const told = await response.json();
      if (response.ok) ui.fetched[id] = told;
      else ui.failed[id] = told.error.message;
    } catch (error) {
      ui.failed[id] = String(error);
    }
    show();
  },
  headers() {
    const key = sessionStorage.getItem(KEY);
    return key ? { Authorization: `Bearer ${key}` } : {};
  },
};

function place() {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  return VIEWS[name] ? [name, rest] : ["cluster", []];
}

function show() {
  if (due) return;
  due = true;
  // A large picture takes long to draw; most of the time stays for the person.
  setTimeout(requestAnimationFrame, Math.max(0, drawnAt + 3 * tookMs - performance.now()), () => {
    due = false;
    const began = performance.now();
    const [name, rest] = place();
    const [, view] = VIEWS[name];
    const fresh = h("div", {}, connection === "key" ? keyForm() : view(state, ui, ...rest));
    patchChildren(content, [...fresh.childNodes]);
    drawAll(content);
    drawnAt = performance.now();
    tookMs = drawnAt - began;
  });
}

function navigation() {
  const [name] = place();
  const shown = { event: "events", compare: "events" }[name] ?? name;
  const links = Object.entries(VIEWS).filter(([, [title]]) => title);
  patchChildren(document.getElementById("views"), [h("ul", {}, links.map(([key, [title]]) =>
    h("li", {}, h("a", { href: `#${key}`, "aria-current": key === shown ? "page" : null }, title))))]);
}

function tell(next, text = next) {
  connection = next;
  const shown = document.getElementById("state");
  shown.className = next;
  if (shown.textContent !== text) shown.textContent = text;
  show();
}

function keyForm() {
  return h("form.key", { onsubmit: (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, new FormData(event.target).get("key"));
    connect();
  } },
  h("h1", {}, "A key is needed"),
  h("p", {}, "This cluster has API keys. Enter an administrator's (", h("code", {}, "lambdascale key add --admin"),
    "). It stays in this tab, and is sent to this gateway only."),
  h("label", {}, "API key ", h("input", { name: "key", type: "password", autocomplete: "off", required: true })),
  h("button", { type: "submit" }, "Show the cluster"));
}

async function connect() {
  for (;;) {
    tell("connecting");
    const stop = new AbortController();
    let heard = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const response = await fetch("cluster", { headers: ui.headers(), signal: stop.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        sessionStorage.removeItem(KEY);
        tell("key", "no key");
        return;
      }
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      state.serial = 0;
      const read = eventReader((data) => {
        if (data) take(state, JSON.parse(data), Date.now());
      });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
        clearTimeout(heard);
        heard = setTimeout(() => stop.abort(), SILENT_MS);
        read(piece.value);
        const missing = Object.keys(state.items.about?.missing ?? {});
        if (missing.length) tell("degraded", `no answer from the ${missing.join(" and the ")}`);
        else tell("live");
      }
    } catch (error) {
      console.info(error);
    } finally {
      clearTimeout(heard);
    }
    tell("lost", "no connection: trying again");
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

window.addEventListener("hashchange", () => {
  navigation();
  show();
  content.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
window.addEventListener("resize", () => drawAll(content));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(content));
navigation();
connect();
