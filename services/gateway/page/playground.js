// Asks a model, and shows over which nodes its tokens come.
import { h, section, table } from "./dom.js";
import { seconds } from "./format.js";
import { items, eventReader } from "./state.js";

const play = { prompt: "Once upon a time", model: "", most: 128, chat: false, text: "", error: "", running: null, waits: "", legs: [], sent: 0, first: null, tokens: 0, last: 0 };

export function playgroundView(state, ui) {
  const names = Object.entries(items(state, "models"))
    .filter(([, model]) => model.task === "text-generation" && !model.embeds).map(([name]) => name).sort();
  if (!names.includes(play.model)) play.model = names[0] ?? "";
  const busy = play.running !== null;
  const wait = play.first === null ? null : play.first - play.sent;
  const pace = play.tokens > 1 ? (play.last - play.first) / (play.tokens - 1) : null;
  return [
    h("h1", {}, "Playground"),
    h("form.play", { onsubmit: (e) => {
      e.preventDefault();
      if (!busy) run(ui);
    } },
    h("div.bar", {},
      h("label", {}, "model ", h("select", { onchange: (e) => { play.model = e.target.value; } },
        names.map((name) => h("option", { value: name, selected: name === play.model }, name)))),
      h("label", {}, "at most ", h("input", { type: "number", min: 1, max: 4096, value: play.most, onchange: (e) => { play.most = Number(e.target.value); } }), " tokens"),
      h("label", {}, h("input", { type: "checkbox", checked: play.chat, onchange: (e) => { play.chat = e.target.checked; } }), " as a chat")),
    h("label.prompt", {}, "Prompt", h("textarea", { rows: 4, oninput: (e) => { play.prompt = e.target.value; } }, play.prompt)),
    h("div.bar", {},
      h("button.main", { type: "submit", disabled: busy || !play.model }, "Ask"),
      h("button", { type: "button", disabled: !busy, onclick: () => play.running?.abort() }, "Stop"),
      h("span", { role: "status" }, play.waits))),
    play.error ? h("p.note", { role: "alert" }, play.error) : null,
    section("Answer", h("div.answer", { "aria-live": "off" }, play.legs.map((leg, at) =>
      h(`span.leg.leg-${at % 4}`, { title: leg.over }, leg.text))),
    h("p.lead", {}, `${play.tokens} tokens, first after ${seconds(wait)}, then one every ${seconds(pace)}`)),
    section("Over which nodes", table("Over which nodes", [
      { name: "nodes, with their blocks", wide: true, text: (leg) => [h(`i.patch.leg-${play.legs.indexOf(leg) % 4}`), " ", leg.over || "not known"] },
      { name: "tokens", num: true, text: (leg) => leg.tokens },
      { name: "from", num: true, text: (leg) => seconds(leg.at - play.sent) },
    ], play.legs, { empty: "no token yet" })),
  ];
}

async function run(ui) {
  Object.assign(play, { text: "", error: "", waits: "waiting", legs: [], sent: performance.now() / 1e3, first: null, tokens: 0, running: new AbortController() });
  ui.set({});
  const asked = play.chat ? { messages: [{ role: "user", content: play.prompt }] } : { prompt: play.prompt };
  try {
    const response = await fetch(`v1/${play.chat ? "chat/completions" : "completions"}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Show-Path": "true", ...ui.headers() },
      body: JSON.stringify({ model: play.model, max_tokens: play.most, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...asked }),
      signal: play.running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const read = eventReader((data, comment) => hear(data, comment));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      read(piece.value);
      ui.set({});
    }
    play.waits = "done";
  } catch (error) {
    play.waits = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") play.error = error.message;
  }
  play.running = null;
  ui.set({});
}

function hear(data, comment) {
  const now = performance.now() / 1e3;
  if (comment.startsWith("over ")) play.legs.push({ over: comment.slice(5), text: "", tokens: 0, at: now });
  else if (comment) play.waits = comment;
  if (!data || data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message);
  const tokens = chunk.usage?.completion_tokens ?? play.tokens;
  const [choice] = chunk.choices;
  if (!choice || tokens === play.tokens) return;
  if (!play.legs.length) play.legs.push({ over: "", text: "", tokens: 0, at: now });
  const leg = play.legs.at(-1);
  leg.text += choice.text ?? choice.delta?.reasoning_content ?? choice.delta?.content ?? "";
  leg.tokens += tokens - play.tokens;
  play.first ??= now;
  Object.assign(play, { tokens, last: now, waits: "streaming" });
}
