// Elements. Views make what they show anew; `patch` changes the page to that, so that what has the
// focus or was opened stays.

export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on") || key === "draw" || key === "value") element[key] = value;
    else if (key === "tint") element.style.backgroundColor = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

// What the page itself has set since: whether something is open, and the size of a picture.
const KEPT = new Set(["open", "style", "width", "height"]);

export function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.getAttribute("data-key") !== fresh.getAttribute("data-key")) {
    old.replaceWith(fresh);
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !KEPT.has(name)) old.setAttribute(name, value);
  }
  old.style.backgroundColor = fresh.style.backgroundColor;
  for (const key of ["onclick", "onchange", "oninput", "onkeydown", "onsubmit", "onpointermove",
    "onpointerleave", "onfocus", "ontoggle", "draw"]) {
    if (old[key] !== fresh[key]) old[key] = fresh[key];
  }
  patchChildren(old, [...fresh.childNodes]);
}

export function patchChildren(parent, fresh) {
  const old = [...parent.childNodes];
  fresh.forEach((child, at) => {
    if (at < old.length) patch(old[at], child);
    else parent.append(child);
  });
  for (const child of old.slice(fresh.length)) child.remove();
}

// Draws every canvas below an element that knows how.
export function drawAll(root) {
  for (const canvas of root.querySelectorAll("canvas")) canvas.draw?.(canvas);
}

// A canvas of this height in CSS pixels, as wide as its place. `paint(context, width, height)`.
export function picture(height, label, paint, more = {}) {
  const draw = (canvas) => {
    const width = canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    paint(context, width, height);
  };
  return h("canvas", { role: "img", "aria-label": label, draw, ...more });
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A table. Columns: {name, text(row), sort?(row), num?, head?}. Rows beyond `most` are counted only.
export function table(caption, columns, rowsOf, options = {}) {
  const { most = 200, empty = "nothing yet", key = null, sorted = null, onsort = null } = options;
  let shown = rowsOf;
  const by = sorted && columns.find((column) => column.name === sorted.name);
  if (by) {
    const value = by.sort ?? by.text;
    shown = [...rowsOf].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (sorted.down ? -1 : 1);
    });
  }
  const head = columns.map((column) => {
    const state = by === column ? (sorted.down ? "descending" : "ascending") : null;
    const inside = onsort && column.sort
      ? h("button.sort", { type: "button", onclick: () => onsort(column.name) }, column.name)
      : column.name;
    return h(column.num ? "th.num" : "th", { scope: "col", "aria-sort": state }, inside);
  });
  const body = shown.slice(0, most).map((row) =>
    h("tr", { "data-key": key ? key(row) : null }, columns.map((column, at) => {
      const content = column.text(row);
      const cell = column.num ? "td.num" : column.wide ? "td.wide" : "td";
      return at === 0 && column.head !== false
        ? h(column.wide ? "th.wide" : "th", { scope: "row" }, content) : h(cell, {}, content);
    })));
  const rest = shown.length - most;
  return h("div.table", { tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
    shown.length === 0 ? h("p.empty", {}, empty) : null,
    rest > 0 ? h("p.empty", {}, `and ${rest} more`) : null);
}

// A bar of what is used of a whole, with its numbers as text.
export function meter(used, whole, text) {
  const share = whole ? Math.min(used / whole, 1) : 0;
  return h("span.meter", {},
    h("progress", { max: 1, value: share, "aria-label": text }), h("span", {}, text));
}

// Figures in a row: [name, value, hint].
export function figures(list) {
  return h("dl.figures", {}, list.map(([name, value, hint]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, hint ? h("small", {}, hint) : null))));
}

export function section(title, ...children) {
  return h("section", {}, h("h2", {}, title), ...children);
}

// The same numbers as a table, for who cannot see the picture or wants them.
export function asTable(name, content) {
  return h("details", {}, h("summary", {}, `${name} as a table`), content);
}
