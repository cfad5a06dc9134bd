// What the page knows of the cluster: it begins empty, and takes in changes (core/scene.py).

export function nothing() {
  return { serial: 0, skewNs: 0, items: {}, rows: {} };
}

export function take(state, change, nowMs) {
  if (change.whole) {
    state.items = {};
    state.rows = {};
  }
  for (const [section, items] of Object.entries(change.put)) {
    const mine = (state.items[section] ??= {});
    for (const [key, value] of Object.entries(items)) {
      if (value === null) delete mine[key];
      else mine[key] = value;
    }
  }
  for (const [section, series] of Object.entries(change.add)) {
    const mine = (state.rows[section] ??= {});
    for (const [key, rows] of Object.entries(series)) {
      const known = (mine[key] ??= []);
      for (const row of rows) known.push(row);
      if (known.length > MOST_ROWS) known.splice(0, known.length - MOST_ROWS);
    }
  }
  state.serial = change.serial;
  state.skewNs = change.at_ns - nowMs * 1e6;
  return state;
}

const MOST_ROWS = 200000;

export function items(state, section) {
  return state.items[section] ?? {};
}

export function rows(state, section, key) {
  return state.rows[section]?.[key] ?? [];
}

// The text of a stream of server-sent events, piece by piece; `each` gets the data of every event.
export function eventReader(each) {
  let rest = "";
  return (text) => {
    rest += text;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const data = rest.slice(0, end).split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, ""))
        .join("\n");
      const comment = rest.slice(0, end).split("\n")
        .filter((line) => line.startsWith(":"))
        .map((line) => line.slice(1).trim())
        .join("\n");
      rest = rest.slice(end + 2);
      if (data || comment) each(data, comment);
    }
  };
}
