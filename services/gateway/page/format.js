// Numbers and times as text.

export function seconds(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (Math.abs(value) >= 600) return `${(value / 60).toFixed(0)} min`;
  return `${value.toFixed(digits)} s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let left = value;
  while (left >= 1000 && at < units.length - 1) {
    left /= 1000;
    at += 1;
  }
  return `${left < 10 && at > 0 ? left.toFixed(1) : left.toFixed(0)} ${units[at]}`;
}

export function count(value, one, many = `${one}s`) {
  return `${number(value)} ${value === 1 ? one : many}`;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

export function clock(ns) {
  return new Date(ns / 1e6).toLocaleTimeString("en-GB");
}

export function dayAndClock(ns) {
  const date = new Date(ns / 1e6);
  const day = new Date().toDateString() === date.toDateString()
    ? "" : `${date.toLocaleDateString("en-CA")} `;
  return day + date.toLocaleTimeString("en-GB");
}

// Steps of an axis from `low` to `high`: 1, 2 or 5 times a power of ten apart, about `most` of them.
export function ticks(low, high, most) {
  const span = high - low || 1;
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    found.push(Number((n * step).toPrecision(12)));
  }
  return found;
}

const TIME_STEPS = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

// The same for seconds, which are counted in minutes and hours where there are many.
export function timeTicks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1);
  if (rough < 30) return ticks(low, high, most);
  const step = TIME_STEPS.find((size) => size >= rough) ?? TIME_STEPS.at(-1);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
  return found;
}
