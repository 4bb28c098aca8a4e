"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const D = JSON.parse($("data").textContent);
function make(tag, text, parent) {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
}
const two = (n) => String(n).padStart(2, "0");
function duration(s) {
  if (s > 0 && s < 0.01) return `${+(s * 1000).toPrecision(3)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const m = Math.floor(Math.round(s) / 60), h = Math.floor(m / 60);
  if (h < 1) return `${m}m${two(Math.round(s) % 60)}s`;
  return h < 48 ? `${h}h${two(m % 60)}m` : `${Math.floor(h / 24)}d${two(h % 24)}h`;
}
function clock(us, step) {  // job time, as fine as `step` asks for
  const s = us / 1e6, digits = Math.max(0, Math.min(6, Math.ceil(6 - Math.log10(step) - 1e-9)));
  if (D.wall < 12e7) return `${s.toFixed(digits)} s`;
  const whole = Math.floor(s + 1e-9), rest = digits ? (s - whole).toFixed(digits).slice(1) : "";
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}${rest}`;
}

// --- tooltip and highlight
const tip = $("tip");
let lit = null;
function show(x, y, title, lines, colour) {
  tip.replaceChildren();
  tip.style.setProperty("--c", colour);
  tip.classList.toggle("plain", !colour);
  make("b", title, tip);
  for (const line of lines) make("div", line, tip);
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  const below = y + 18 + tip.offsetHeight < innerHeight;
  tip.style.top = `${below ? y + 18 : Math.max(8, y - tip.offsetHeight - 12)}px`;
}
const hide = () => { tip.hidden = true; };
function over(event) {
  const e = event.target.closest?.("[data-key]"), key = e ? e.dataset.key : null;
  if (key !== lit) {
    lit = key;
    for (const part of document.querySelectorAll(".bar i, .group li"))
      part.classList.toggle("off", lit !== null && part.dataset.key !== lit);
    draw();
  }
  if (e?.dataset.title) {
    const box = e.getBoundingClientRect();
    const [x, y] = event.type === "pointermove" ? [event.clientX, event.clientY] : [box.left, box.bottom - 8];
    show(x, y, e.dataset.title, [e.dataset.text, key], e.style.getPropertyValue("--c"));
  } else if (event.target !== canvas) hide();
}

// --- timeline: what is in view
const rows = D.rows.map(([rank, flat, about]) => {  // with `about`: a publisher, beside the ranks
  const ends = new Float64Array(flat.length / 2), keys = new Uint16Array(flat.length / 2);
  for (let i = 0, t = 0; i < ends.length; i++) { ends[i] = t += flat[2 * i]; keys[i] = flat[2 * i + 1]; }
  return { rank, ends, keys, about };
});
const trained = rows.filter((row) => !row.about).length;
const nodes = new Map(D.ranks.map((r) => [r[0], D.nodes[r[1]]]));
const canvas = $("gantt"), ctx = canvas.getContext("2d"), plot = { x: 0, y: 0, w: 1, h: 1, d: 1 };
const LEFT = 52, TOP = 36, BOTTOM = 24, all = { t0: 0, t1: Math.max(D.wall, 1), r0: 0, r1: rows.length };
let view = { ...all }, cursor = null, drag = null, queued = false;
canvas.style.height = `${TOP + BOTTOM + Math.min(Math.max(rows.length * (rows.length > 24 ? 14 : 24), 48), 560)}px`;
const X = (t) => plot.x + (t - view.t0) / (view.t1 - view.t0) * plot.w;
const T = (x) => view.t0 + (x - plot.x) / plot.w * (view.t1 - view.t0);
const Y = (r) => plot.y + (r - view.r0) / (view.r1 - view.r0) * plot.h;
const R = (y) => view.r0 + (y - plot.y) / plot.h * (view.r1 - view.r0);
const start = (row, i) => (i ? row.ends[i - 1] : 0);
function look(t0, t1, r0, r1) {  // false if that is what was in view already
  const before = { ...view }, held = (low, size, whole) => Math.max(0, Math.min(low, whole - size));
  const dt = Math.min(Math.max(t1 - t0, 10), all.t1), dr = Math.min(Math.max(r1 - r0, 4), all.r1);
  t0 = held(t0, dt, all.t1);
  r0 = held(r0, dr, all.r1);
  view = { t0, t1: t0 + dt, r0, r1: r0 + dr };
  draw();
  return Object.keys(view).some((edge) => view[edge] !== before[edge]);
}
function zoom(by, t, r) {  // by > 1 shows less; an axis without a point stays
  const near = (low, high, at) => (at === undefined ? [low, high] : [at - (at - low) / by, at + (high - at) / by]);
  return look(...near(view.t0, view.t1, t), ...near(view.r0, view.r1, r));
}

// --- timeline: drawing, in device pixels
function piece(row, t) {  // the first that ends after t
  let low = 0, high = row.ends.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (row.ends[mid] > t) high = mid; else low = mid + 1;
  }
  return low;
}
function longest(row, i, t0, t1) {  // which piece from i on takes most of a stretch, and how many are in it
  let best = i, most = -1, count = 0;
  for (; i < row.ends.length && start(row, i) < t1; i++, count++) {
    const took = Math.min(row.ends[i], t1) - Math.max(start(row, i), t0);
    if (took > most) [most, best] = [took, i];
  }
  return [best, count];
}
function drawRow(row, y, h) {
  const n = row.ends.length, stop = plot.x + plot.w;
  for (let x = plot.x, i = piece(row, view.t0); x < stop && i < n;) {
    const end = Math.min(X(row.ends[i]), stop), alone = end >= x + 1 && X(start(row, i)) <= x;
    const to = alone ? Math.floor(end + 1e-6) : x + 1;
    const [, bucket, , colour] = D.keys[row.keys[alone ? i : longest(row, i, T(x), T(x + 1))[0]]];
    if (colour) {
      ctx.globalAlpha = lit && lit !== bucket ? 0.16 : 1;
      ctx.fillStyle = colour;
      ctx.fillRect(x, y, to - x, h);
    }
    x = to;
    while (i < n && X(row.ends[i]) <= x + 1e-6) i++;
  }
}
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500].flatMap((s) => [s, s * 1e3]).sort((a, b) => a - b).concat(
  [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].map((s) => s * 1e6));
function draw() { if (!queued) queued = !!requestAnimationFrame(paint); }
function paint() {
  queued = false;
  const d = devicePixelRatio || 1, styles = getComputedStyle(document.documentElement);
  const fill = (name) => { ctx.fillStyle = ctx.strokeStyle = styles.getPropertyValue(`--${name}`); };
  const W = Math.round(canvas.clientWidth * d), H = Math.round(canvas.clientHeight * d);
  if (canvas.width !== W || canvas.height !== H) [canvas.width, canvas.height] = [W, H];
  const x = Math.round(LEFT * d), y = Math.round(TOP * d);
  Object.assign(plot, { x, y, w: W - x, h: H - y - Math.round(BOTTOM * d), d });
  const bottom = plot.y + plot.h, high = plot.h / (view.r1 - view.r0), last = Math.min(Math.ceil(view.r1), rows.length);
  ctx.clearRect(0, 0, W, H);
  ctx.font = `${11.5 * d}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  if (high < 1) for (let y = plot.y; y < bottom; y++) drawRow(rows[Math.min(Math.floor(R(y + 0.5)), last - 1)], y, 1);
  else for (let r = Math.floor(view.r0); r < last; r++) {
    const top = Math.max(Math.round(Y(r)), plot.y), under = Math.min(Math.round(Y(r + 1)), bottom);
    drawRow(rows[r], top, Math.max(under - top - (high > 5 * d ? d : 0), 1));
  }
  ctx.globalAlpha = 1;
  drawAxes(W, bottom, high, last, fill);
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.x, 0, plot.w, H);
  ctx.clip();
  drawEvents(W, bottom, fill);
  ctx.restore();
}
function drawAxes(W, bottom, high, last, fill) {
  const { d } = plot, span = view.t1 - view.t0;
  let every = 1;
  while (every * high < 14 * d) every *= 2;
  fill("dim");
  ctx.textAlign = "right";
  ctx.fillText("rank", plot.x - 8 * d, 9 * d);
  const lower = every === 1 ? high / 2 : 4 * d;
  for (let r = Math.ceil(view.r0 / every) * every; r < last; r += every)
    ctx.fillText(rows[r].rank, plot.x - 8 * d, Math.max(Y(r) + lower, plot.y + 5 * d));
  ctx.textAlign = "center";
  const step = STEPS.find((s) => s / span * plot.w > 96 * d) ?? Math.ceil(span / 8 / 864e8) * 864e8;
  for (let t = Math.ceil(view.t0 / step) * step; t <= view.t1; t += step) {
    const text = clock(t, step), half = ctx.measureText(text).width / 2;
    ctx.fillRect(Math.round(X(t)), bottom, d, 4 * d);
    ctx.fillText(text, Math.max(plot.x + half, Math.min(X(t), W - half)), bottom + 15 * d);
  }
  const [from, to] = [view.r0, last - 1].map((r) => rows[Math.min(Math.floor(r), trained - 1)].rank);
  $("range").textContent = `${clock(view.t0, step)} to ${clock(view.t1, step)}, ` +
    (from === to ? `rank ${from}` : `ranks ${from} to ${to}`) + (last > trained ? " and publishing" : "");
}
function drawEvents(W, bottom, fill) {
  const { d } = plot;
  ctx.textAlign = "left";
  for (const [t0, t1, title, outcome] of D.attempts) {
    const left = Math.max(X(t0), plot.x), right = Math.min(X(t1), W);
    if (right <= left) continue;
    fill("soft");
    ctx.fillRect(left, 0, Math.max(right - left - d, d), 18 * d);
    fill(outcome === "failed" ? "bad" : "dim");
    const words = [title, title.split(" (")[0], title.split(" ")[1]];
    const fits = words.find((text) => ctx.measureText(text).width < right - left - 12 * d);
    if (fits) ctx.fillText(fits, left + 7 * d, 9.5 * d);
  }
  for (const [t, what] of D.marks) {
    const x = Math.round(X(t)), [flat, tip] = what === "restored" ? [32, 24] : [24, 32];
    fill({ failed: "bad", saved: "good", restored: "info" }[what]);
    if (what === "failed") ctx.fillRect(x - d, 0, 2 * d, bottom);
    ctx.beginPath();
    ctx.moveTo(x - 4 * d, flat * d);
    ctx.lineTo(x + 4 * d, flat * d);
    ctx.lineTo(x, tip * d);
    ctx.fill();
  }
  if (cursor) {
    const top = Math.max(Y(cursor.r), plot.y), under = Math.min(Y(cursor.r + 1), bottom);
    fill("ink");
    ctx.lineWidth = 2 * d;
    ctx.strokeRect(X(cursor.t) - 3 * d, top - d, 6 * d, Math.max(under - top, 4 * d) + d);
  }
}

// --- timeline: asking and moving
function told(row, i, count) {  // what a piece is: title, lines, colour
  const begin = start(row, i), end = row.ends[i], fine = Math.max(Math.min((end - begin) / 2, 1e6), 1);
  const [label, bucket, stage, colour] = D.keys[row.keys[i]];
  const lines = [`${duration((end - begin) / 1e6)}, from ${clock(begin, fine)} to ${clock(end, fine)}`];
  if (row.about) lines.push(row.about);
  else lines.push(`rank ${row.rank} on ${nodes.get(row.rank)}`,
    D.attempts.findLast((a) => a[0] <= (begin + end) / 2)[2]);
  if (bucket) lines.push(bucket);
  if (count > 1) lines.push(`the longest of ${count} here: zoom in for the others`);
  const none = row.about ? "nobody published" : "not part of this attempt";
  return [(label || none) + (stage && `: ${stage.replaceAll("_", " ")}`), lines, colour];
}
function spot(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * plot.d, (event.clientY - box.top) * plot.d];
}
function hover(event) {
  const [x, y] = spot(event), t = T(x), row = rows[Math.floor(R(y))], px = Math.floor(x);
  const tell = (...what) => show(event.clientX, event.clientY, ...what);
  if (x < plot.x || y >= plot.y + plot.h || !row && y >= plot.y) return hide();
  if (y < plot.y) {
    const away = (mark) => Math.abs(X(mark[0]) - x);
    const mark = D.marks.reduce((a, b) => (a && away(a) <= away(b) ? a : b), null);
    const attempt = D.attempts.find((a) => a[0] <= t && t < a[1]);
    if (mark && away(mark) < 6 * plot.d) return tell(mark[2], [`at ${clock(mark[0], 1e5)}`]);
    return attempt ? tell(attempt[2], [duration((attempt[1] - attempt[0]) / 1e6)]) : hide();
  }
  const i = piece(row, T(px));
  return i < row.ends.length ? tell(...told(row, ...longest(row, i, T(px), T(px + 1)))) : hide();
}
function walk(along, down) {
  cursor ??= { r: Math.floor(view.r0), t: view.t0 };
  cursor.r = Math.max(0, Math.min(rows.length - 1, cursor.r + down));
  const row = rows[cursor.r], last = row.ends.length - 1, near = 3 * (view.t1 - view.t0) / plot.w;
  const centre = (i) => (start(row, i) + row.ends[i]) / 2;
  if (last < 0) return;
  let i = Math.min(piece(row, cursor.t), last);
  if (along) {
    do i = Math.max(0, Math.min(last, i + along)); while (i > 0 && i < last && Math.abs(centre(i) - cursor.t) < near);
    cursor.t = centre(i);
  }
  const dt = view.t1 - view.t0, dr = view.r1 - view.r0, { r, t } = cursor;
  const t0 = t < view.t0 || t > view.t1 ? t - dt / 2 : view.t0;
  const r0 = r < view.r0 ? r : r + 1 > view.r1 ? r + 1 - dr : view.r0;
  look(t0, t0 + dt, r0, r0 + dr);
  const box = canvas.getBoundingClientRect(), [title, lines, colour] = told(row, i, 1);
  show(box.left + X(t) / plot.d, box.top + Y(r + 1) / plot.d - 8, title, lines, colour);
  $("said").textContent = `${title}, ${lines.join(", ")}`;
}
const centre = () => (cursor && cursor.t > view.t0 && cursor.t < view.t1 ? cursor.t : (view.t0 + view.t1) / 2);
const whole = () => look(0, all.t1, 0, all.r1);
const acts = { "+": () => zoom(2, centre()), "-": () => zoom(0.5, centre()), "0": whole,
  "]": () => zoom(2, undefined, (view.r0 + view.r1) / 2), "[": () => zoom(0.5, undefined, (view.r0 + view.r1) / 2),
  ArrowLeft: () => walk(-1, 0), ArrowRight: () => walk(1, 0), ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1) };
const on = (name, what, options) => canvas.addEventListener(name, what, options);
on("keydown", (event) => {
  const act = acts[event.key === "=" ? "+" : event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
on("wheel", (event) => {
  const [x, y] = spot(event), by = Math.exp(-(event.deltaY || event.deltaX) / 400);
  // Once all is in view, the wheel scrolls the page again.
  if (event.shiftKey ? zoom(by, undefined, R(y)) : zoom(by, T(x))) { event.preventDefault(); hover(event); }
}, { passive: false });
on("pointerdown", (event) => {
  drag = { x: event.clientX, y: event.clientY, ...view };
  canvas.setPointerCapture(event.pointerId);
});
on("pointermove", (event) => {
  if (!drag) return hover(event);
  hide();
  canvas.classList.add("drag");
  const dt = (drag.x - event.clientX) * plot.d / plot.w * (drag.t1 - drag.t0);
  const dr = (drag.y - event.clientY) * plot.d / plot.h * (drag.r1 - drag.r0);
  look(drag.t0 + dt, drag.t1 + dt, drag.r0 + dr, drag.r1 + dr);
});
const drop = () => { drag = null; canvas.classList.remove("drag"); };
on("pointerup", drop);
on("pointercancel", drop);
on("pointerleave", hide);
on("dblclick", whole);
on("blur", () => { cursor = null; draw(); });
$("tools").addEventListener("click", (event) => acts[event.target.dataset.do]?.());
for (const button of document.querySelectorAll("#tools .many")) button.hidden = rows.length <= 64;

// --- table of ranks
const FIXED = ["rank", "node", "wall", "ETT"];
let by = 0, falling = false, shown = 32;
function tabulate() {
  const table = $("ranks"), value = (r) => (by === 1 ? D.nodes[r[1]] : r[by]);
  table.replaceChildren();
  const head = make("tr", "", make("thead", "", table)), body = make("tbody", "", table);
  [...FIXED, ...D.columns.map((column) => column[0])].forEach((name, at) => {
    const th = make("th", "", head);
    th.style.setProperty("--c", D.columns[at - FIXED.length]?.[2] ?? "transparent");
    if (at === by) th.ariaSort = falling ? "descending" : "ascending";
    make("button", name, th).onclick = () => {
      [falling, by] = [by === at ? !falling : at >= FIXED.length, at];
      tabulate();
    };
  });
  const order = (a, b) => (value(a) > value(b)) - (value(a) < value(b));
  for (const r of [...D.ranks].sort((a, b) => (falling ? order(b, a) : order(a, b)) || a[0] - b[0]).slice(0, shown)) {
    const tr = make("tr", "", body);
    for (const text of [r[0], D.nodes[r[1]], duration(r[2]), `${r[3].toFixed(1)}%`]) make("td", text, tr).title = text;
    D.columns.forEach(([label, , colour], at) => {
      const s = r[FIXED.length + at], share = 100 * s / (r[2] || 1), td = make("td", s ? duration(s) : "0", tr);
      td.title = `${label}: ${share.toFixed(1)}% of the time of rank ${r[0]}`;
      if (s) td.style.background = `color-mix(in srgb, ${colour} ${Math.min(8 + share * 0.6, 60)}%, transparent)`;
      else td.className = "zero";
    });
  }
  $("more").hidden = shown >= D.ranks.length;
  $("more").textContent = `Show ${Math.min(256, D.ranks.length - shown)} more of ${D.ranks.length} ranks`;
}
$("more").onclick = () => { shown += 256; tabulate(); };

document.addEventListener("pointermove", over);
document.addEventListener("focusin", over);
document.addEventListener("focusout", () => { hide(); over({ target: document.body }); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") { cursor = null; hide(); draw(); } });
document.addEventListener("scroll", hide, { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(draw).observe(canvas);
tabulate();
draw();
})();
