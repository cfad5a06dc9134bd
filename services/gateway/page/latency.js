// How long calls took lately, by model and tenant.
import { h, table } from "./dom.js";
import { number, seconds } from "./format.js";
import { items } from "./state.js";

export function latencyView(state, ui) {
  const list = Object.values(items(state, "latencies"));
  const at = (name, key, n) => ({
    name, num: true, text: (one) => seconds(one[key][n]), sort: (one) => one[key][n] ?? -1,
  });
  return [
    h("h1", {}, "Latency"),
    h("p.lead", {}, "Calls that ended in the last ten minutes at this gateway, ",
      h("code", {}, items(state, "about").gateway ?? ""), ". ",
      "TTFT: to the first token, with the wait for an instance. TPOT: the mean time of a token after it."),
    table("Latency", [
      { name: "model", text: (one) => one.model, sort: (one) => one.model },
      { name: "tenant", text: (one) => one.tenant, sort: (one) => one.tenant },
      { name: "calls", num: true, text: (one) => number(one.calls), sort: (one) => one.calls },
      { name: "failed", num: true, text: (one) => number(one.failed), sort: (one) => one.failed },
      at("TTFT p50", "ttft_s", 0), at("p90", "ttft_s", 1), at("p99", "ttft_s", 2),
      at("wait p50", "queue_s", 0), at("wait p90", "queue_s", 1),
      at("TPOT p50", "tpot_s", 0), at("TPOT p90", "tpot_s", 1),
      { name: "tokens", num: true, text: (one) => number(one.generated), sort: (one) => one.generated },
      { name: "device seconds", num: true, text: (one) => number(one.device_s, 1), sort: (one) => one.device_s },
    ], list, {
      key: (one) => `${one.model} ${one.tenant}`, sorted: ui.sorted.latency,
      onsort: (name) => ui.sort("latency", name), empty: "no call has ended in this time",
    }),
  ];
}
