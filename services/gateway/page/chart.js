// Lines over time, on a canvas.
import { colour, picture } from "./dom.js";
import { number, ticks, timeTicks } from "./format.js";

const LEFT = 44;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;

// The place of the plot, and how values become places in it.
export function frame(width, height, from, to, top, left = LEFT) {
  const area = { left, right: width - RIGHT, top: TOP, bottom: height - BOTTOM };
  const x = (t) => area.left + ((t - from) / (to - from || 1)) * (area.right - area.left);
  const y = (v) => area.bottom - (v / (top || 1)) * (area.bottom - area.top);
  return { ...area, x, y };
}

export function timeAxis(context, place, from, to, label) {
  const most = Math.max(2, Math.floor((place.right - place.left) / 90));
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const t of timeTicks(from, to, most)) {
    const at = Math.round(place.x(t)) + 0.5;
    if (at < place.left - 1 || at > place.right + 1) continue;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(at, place.top);
    context.lineTo(at, place.bottom);
    context.stroke();
    context.fillStyle = colour("muted");
    const half = context.measureText(label(t)).width / 2;
    context.fillText(label(t), Math.min(at, place.right + RIGHT - half), place.bottom + 6);
  }
}

// series: [{name, colour, points: [[time, value]], step, fill, dash}], times in seconds.
export function lines(label, series, { from, to, height = 160, text, marks = [] }) {
  return picture(height, label, (context, width) => {
    const values = series.flatMap(({ points }) => points.map(([, value]) => value));
    const steps = ticks(0, Math.max(...values, 1) * 1.05, 4);
    const top = Math.max(...values, 1) * 1.08;
    const place = frame(width, height, from, to, top);
    timeAxis(context, place, from, to, text);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of steps) {
      const at = Math.round(place.y(value)) + 0.5;
      context.strokeStyle = colour("line");
      context.beginPath();
      context.moveTo(place.left, at);
      context.lineTo(place.right, at);
      context.stroke();
      context.fillStyle = colour("muted");
      context.fillText(number(value, value % 1 ? 1 : 0), place.left - 6, at);
    }
    context.save();
    context.beginPath();
    context.rect(place.left, 0, place.right - place.left, height);
    context.clip();
    for (const { at, colour: name, dash } of marks) vertical(context, place, at, name, dash);
    for (const one of series) line(context, place, one, to);
    context.restore();
  });
}

export function vertical(context, place, at, name, dash = []) {
  context.strokeStyle = colour(name);
  context.setLineDash(dash);
  context.lineWidth = 1.5;
  context.beginPath();
  context.moveTo(place.x(at), place.top);
  context.lineTo(place.x(at), place.bottom);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
}

function line(context, place, { points, colour: name, step, fill, dash = [] }, to) {
  if (!points.length) return;
  const path = new Path2D();
  path.moveTo(place.x(points[0][0]), place.y(points[0][1]));
  points.forEach(([t, value], at) => {
    if (at && step) path.lineTo(place.x(t), place.y(points[at - 1][1]));
    path.lineTo(place.x(t), place.y(value));
  });
  if (step) path.lineTo(place.x(to), place.y(points.at(-1)[1]));
  if (fill) {
    const area = new Path2D(path);
    area.lineTo(place.x(step ? to : points.at(-1)[0]), place.bottom);
    area.lineTo(place.x(points[0][0]), place.bottom);
    context.globalAlpha = 0.15;
    context.fillStyle = colour(name);
    context.fill(area);
    context.globalAlpha = 1;
  }
  context.strokeStyle = colour(name);
  context.lineWidth = 1.6;
  context.setLineDash(dash);
  context.stroke(path);
  context.setLineDash([]);
  context.lineWidth = 1;
}

// The points of a series between two times, with the last one before them.
export function between(points, from, to) {
  const first = points.findLastIndex(([t]) => t <= from);
  const found = points.slice(Math.max(first, 0)).filter(([t]) => t <= to);
  return found.map(([t, value]) => [Math.max(t, from), value]);
}
