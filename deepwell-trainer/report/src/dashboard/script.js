"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const find = (query, within = document) => within.querySelector(query);
const all = (query, within = document) => [...within.querySelectorAll(query)];
const H = 240, LEFT = 60, RIGHT = 20, TOP = 8, BOTTOM = 36, WIDTH_MIN = 260;
const PALETTE = 6;
const state = { axis: "step", filter: "", smooth: 0, from: null, to: null, log: new Set(),
  off: new Set() };

const sums = (differences) => {
  let at = 0;
  return differences.map((difference) => (at += difference));
};
data.runs.forEach((run, index) => {
  run.times.x = sums(run.times.x);
  for (const curve of run.curves) if (curve && curve.x) curve.x = sums(curve.x);
  run.color = data.runs.length <= PALETTE ? `var(--s${index})`
    : `hsl(${(index * 137.508) % 360} 62% var(--run-light))`;
});
const rows = all("table.runs tbody tr");
const rowOf = new Map(rows.map((row) => [Number(row.dataset.run), row]));
data.runs.forEach((run, index) => {
  const row = rowOf.get(index);
  find(".swatch", row).style.color = run.color;
  run.text = `${run.name} ${row.textContent} ${run.settings}`.toLowerCase();
});

// Positions on the horizontal axis.
const interpolate = (xs, ys, x) => {
  const last = xs.length - 1;
  if (last < 0) return NaN;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[last]) return ys[last];
  let low = 0, high = last;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
};
const place = (run, step) => {
  if (state.axis === "step") return step;
  if (state.axis === "tokens") return run.tokens === null ? NaN : step * run.tokens;
  return interpolate(run.times.x, run.times.y, step);
};
const placeCache = new Map();
const curveOf = (index, chart) => {
  const run = data.runs[index];
  const own = run.curves[chart];
  if (!own) return null;
  const factor = own.x ? 1 : own.by;
  const source = own.x ? own : run.curves[own.of];
  if (!source || !source.x) return null;
  const key = `${state.axis} ${index} ${chart}`;
  let found = placeCache.get(key);
  if (!found) {
    found = { x: source.x.map((step) => place(run, step)),
      y: factor === 1 ? source.y : source.y.map((y) => y === null ? null : y * factor) };
    placeCache.set(key, found);
  }
  return found;
};

// Which runs are shown.
const matches = (run) => state.filter.toLowerCase().split(/\s+/).filter(Boolean).every((word) =>
  word.length > 1 && word[0] === "-" ? !run.text.includes(word.slice(1)) : run.text.includes(word));
const shown = () => data.runs.map((_, index) => index)
  .filter((index) => !state.off.has(index) && matches(data.runs[index]));

const showRows = () => {
  let count = 0;
  data.runs.forEach((run, index) => {
    const isThere = matches(run);
    for (const element of all(`[data-run="${index}"]`)) element.classList.toggle("hidden", !isThere);
    rowOf.get(index).classList.toggle("off", state.off.has(index));
    find("input", rowOf.get(index)).checked = !state.off.has(index);
    if (isThere) count += 1;
  });
  find("#count").textContent = `${count} of ${data.runs.length} runs`;
};

// Numbers and ticks.
const short = (value) => {
  const size = Math.abs(value);
  if (size === 0) return "0";
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${+(value / (name === "k" ? 1e3 : unit)).toPrecision(4)}${name}`;
  }
  if (size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  return String(+value.toPrecision(5));
};
const duration = (seconds) => {
  const size = Math.abs(seconds);
  if (size < 120) return `${+seconds.toPrecision(3)} s`;
  if (size < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  if (size < 172800) return `${+(seconds / 3600).toPrecision(3)} h`;
  return `${+(seconds / 86400).toPrecision(3)} d`;
};
const label = (x) => state.axis === "time" ? duration(x) : short(x);
const ticks = (low, high, count) => {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((it) => it >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-300; i += 1) {
    if (values.length > 20) break;
    values.push(+(i * step).toPrecision(12));
  }
  return values;
};
// Ticks of time are whole seconds, minutes, hours or days.
const xTicks = (low, high, count) => {
  if (state.axis !== "time") return ticks(low, high, count);
  const size = Math.max(Math.abs(low), Math.abs(high));
  const unit = size < 120 ? 1 : size < 7200 ? 60 : size < 172800 ? 3600 : 86400;
  return ticks(low / unit, high / unit, count).map((value) => value * unit);
};
const logTicks = (low, high) => {
  if (high - low < 1) return ticks(10 ** low, 10 ** high, 5);
  const every = Math.floor((high - low) / 6) + 1;
  const values = [];
  for (let power = Math.ceil(low); power <= high; power += every) values.push(10 ** power);
  return values;
};

const smoothed = (ys) => {
  let mean = null;
  return ys.map((y) => {
    if (y === null) return null;
    mean = mean === null ? y : state.smooth * mean + (1 - state.smooth) * y;
    return mean;
  });
};

// One chart.
const frameOf = (curves, isLog, width) => {
  let left = Infinity, right = -Infinity;
  for (const { x, y } of curves) for (let i = 0; i < x.length; i += 1) {
    if (y[i] === null || !Number.isFinite(x[i])) continue;
    left = Math.min(left, x[i]);
    right = Math.max(right, x[i]);
  }
  if (state.from !== null) left = state.from;
  if (state.to !== null) right = state.to;
  let low = Infinity, high = -Infinity;
  for (const { x, y } of curves) for (let i = 0; i < x.length; i += 1) {
    if (y[i] === null || x[i] < left || x[i] > right || (isLog && y[i] <= 0)) continue;
    low = Math.min(low, y[i]);
    high = Math.max(high, y[i]);
  }
  if (!(left <= right) || !(low <= high)) return null;
  if (left === right) { left -= 1; right += 1; }
  if (isLog) { low = Math.log10(low); high = Math.log10(high); }
  const room = high > low ? 0.06 * (high - low) : 0.05 * Math.abs(low) || 1;
  low -= room;
  high += room;
  const xPixel = (x) => LEFT + (x - left) / (right - left) * (width - LEFT - RIGHT);
  const yPixel = (y) => H - BOTTOM
    - ((isLog ? Math.log10(y) : y) - low) / (high - low) * (H - TOP - BOTTOM);
  return { left, right, low, high, xPixel, yPixel, isLog, width };
};
const pathOf = (x, y, frame) => {
  let path = "", isDown = false;
  for (let i = 0; i < x.length; i += 1) {
    const isPoint = y[i] !== null && Number.isFinite(x[i]) && !(frame.isLog && y[i] <= 0);
    // A neighbour outside the window stays, so that lines go on to its edge.
    const isInside = isPoint && (i + 1 >= x.length || !(x[i + 1] < frame.left))
      && (i === 0 || !(x[i - 1] > frame.right));
    if (!isInside) { isDown = false; continue; }
    path += `${isDown ? "L" : "M"}${frame.xPixel(x[i]).toFixed(1)} ${frame.yPixel(y[i]).toFixed(1)}`;
    isDown = true;
  }
  return path;
};
const single = (y) => y.filter((value) => value !== null).length === 1;
const draw = (figure) => {
  const chart = Number(figure.dataset.chart);
  const canvas = find(".canvas", figure);
  const isLog = find(".log", figure).checked;
  const drawn = shown().map((index) => ({ index, ...curveOf(index, chart) })).filter((it) => it.x);
  const W = Math.max(WIDTH_MIN, canvas.clientWidth);
  const frame = frameOf(drawn, isLog, W);
  figure.frame = frame;
  figure.drawn = drawn;
  if (!frame) {
    const why = data.runs.some((run) => run.curves[chart]) ? "No values here for the shown runs."
      : "No run has recorded these values.";
    canvas.innerHTML = `<p class="empty">${why}</p>`;
    return;
  }
  const { title, y: yLabel, noisy } = data.charts[chart];
  let grid = "", lines = "";
  for (const value of isLog ? logTicks(frame.low, frame.high) : ticks(frame.low, frame.high, 5)) {
    const y = frame.yPixel(value).toFixed(1);
    grid += `<path class="grid" d="M${LEFT} ${y}H${W - RIGHT}"/>`
      + `<text x="${LEFT - 6}" y="${+y + 4}" text-anchor="end">${short(value)}</text>`;
  }
  grid += `<path class="axis" d="M${LEFT} ${H - BOTTOM}H${W - RIGHT}"/>`;
  for (const value of xTicks(frame.left, frame.right, W / 75)) {
    grid += `<text x="${frame.xPixel(value).toFixed(1)}" y="${H - BOTTOM + 15}"`
      + ` text-anchor="middle">${label(value)}</text>`;
  }
  const names = { step: "step", tokens: "tokens", time: "time since the start" };
  grid += `<text x="${(LEFT + W - RIGHT) / 2}" y="${H - 4}" text-anchor="middle">`
    + `${names[state.axis]}</text><text transform="translate(11 ${(H - BOTTOM) / 2}) rotate(-90)"`
    + ` text-anchor="middle">${yLabel}</text>`;
  for (const { index, x, y } of drawn) {
    const run = data.runs[index];
    const isSmooth = noisy && state.smooth > 0;
    let parts = `<path class="line${isSmooth ? " raw" : ""}" d="${pathOf(x, y, frame)}"/>`;
    if (isSmooth) parts += `<path class="line" d="${pathOf(x, smoothed(y), frame)}"/>`;
    if (single(y)) {
      const at = y.findIndex((value) => value !== null);
      parts += `<circle class="dot" r="3" cx="${frame.xPixel(x[at])}" cy="${frame.yPixel(y[at])}"/>`;
    }
    for (const step of run.events) {
      const at = place(run, step);
      if (!(at >= frame.left && at <= frame.right)) continue;
      parts += `<path class="event" d="M${frame.xPixel(at).toFixed(1)} ${H - BOTTOM}v-8"/>`;
    }
    lines += `<g data-of="${index}" style="color:${run.color}">${parts}</g>`;
  }
  const clip = `clip-${chart}`;
  canvas.innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img"`
    + ` aria-label="${title}, ${drawn.length} runs"><clipPath id="${clip}">`
    + `<rect x="${LEFT}" y="${TOP}" width="${W - LEFT - RIGHT}" height="${H - TOP - BOTTOM}"/>`
    + `</clipPath>${grid}<g clip-path="url(#${clip})">${lines}</g></svg>`;
};

// Charts outside the window are drawn when they come into view.
const figures = all("figure.plot");
const inView = new Set();
const drawVisible = () => figures.forEach((figure) => {
  figure.isStale = true;
  if (inView.has(figure)) { figure.isStale = false; draw(figure); }
});
const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  if (isIntersecting) inView.add(target); else inView.delete(target);
  if (isIntersecting && target.isStale) { target.isStale = false; draw(target); }
}), { rootMargin: "200px" });
figures.forEach((figure) => { figure.isStale = true; watcher.observe(figure); });

let resized = 0;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(drawVisible, 150);
});

// The state of the page is in its address, so that it survives a reload.
const save = () => {
  const words = new URLSearchParams();
  if (state.axis !== "step") words.set("axis", state.axis);
  if (state.filter) words.set("filter", state.filter);
  if (state.smooth) words.set("smooth", state.smooth);
  if (state.from !== null) words.set("from", state.from);
  if (state.to !== null) words.set("to", state.to);
  if (state.off.size) words.set("off", [...state.off].map((it) => data.runs[it].name).join("\n"));
  if (state.log.size) words.set("log", [...state.log].join(" "));
  try { history.replaceState(null, "", `#${words}`); } catch { /* A page without an address. */ }
};
const number = (text) => text !== null && text !== "" && Number.isFinite(Number(text))
  ? Number(text) : null;
const load = () => {
  const words = new URLSearchParams(location.hash.slice(1));
  if (["step", "tokens", "time"].includes(words.get("axis"))) state.axis = words.get("axis");
  state.filter = words.get("filter") || "";
  state.smooth = Math.min(0.99, Math.max(0, number(words.get("smooth")) || 0));
  state.from = number(words.get("from"));
  state.to = number(words.get("to"));
  const off = new Set((words.get("off") || "").split("\n"));
  data.runs.forEach((run, index) => { if (off.has(run.name)) state.off.add(index); });
  state.log = new Set((words.get("log") || "").split(" ").filter(Boolean).map(Number));
};
const show = () => {
  find("#axis").value = state.axis;
  find("#filter").value = state.filter;
  find("#smooth").value = state.smooth;
  find("#from").value = state.from === null ? "" : state.from;
  find("#to").value = state.to === null ? "" : state.to;
  figures.forEach((figure) => {
    find(".log", figure).checked = state.log.has(Number(figure.dataset.chart));
  });
  showRows();
  drawVisible();
};
const change = (changes) => { Object.assign(state, changes); save(); show(); };

find("#controls").addEventListener("submit", (event) => event.preventDefault());
find("#filter").addEventListener("input", (event) => change({ filter: event.target.value }));
find("#axis").addEventListener("change", (event) =>
  change({ axis: event.target.value, from: null, to: null }));
find("#smooth").addEventListener("input", (event) => change({ smooth: Number(event.target.value) }));
find("#from").addEventListener("change", (event) => change({ from: number(event.target.value) }));
find("#to").addEventListener("change", (event) => change({ to: number(event.target.value) }));
find("#reset").addEventListener("click", () =>
  change({ from: null, to: null, filter: "", smooth: 0, off: new Set(), log: new Set() }));
figures.forEach((figure) => find(".log", figure).addEventListener("change", (event) => {
  const log = new Set(state.log);
  if (event.target.checked) log.add(Number(figure.dataset.chart));
  else log.delete(Number(figure.dataset.chart));
  change({ log });
}));
find("table.runs .all").addEventListener("change", (event) =>
  change({ off: new Set(event.target.checked ? [] : data.runs.map((_, index) => index)) }));
rows.forEach((row) => {
  const index = Number(row.dataset.run);
  find("input", row).addEventListener("change", (event) => {
    const off = new Set(state.off);
    if (event.target.checked) off.delete(index); else off.add(index);
    change({ off });
  });
  const focus = (isOn) => all(`.canvas [data-of="${index}"]`)
    .forEach((element) => element.classList.toggle("focus", isOn));
  row.addEventListener("mouseenter", () => focus(true));
  row.addEventListener("mouseleave", () => focus(false));
  find("a", row).addEventListener("click", (event) => {
    event.preventDefault();
    const details = document.getElementById(`run-${index}`);
    details.open = true;
    details.scrollIntoView();
  });
});

// Sorting.
const valueOf = (row, column) => {
  const cell = row.cells[column];
  if (cell.classList.contains("missing")) return null;
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};
all("table.runs thead button").forEach((button, at) => button.addEventListener("click", () => {
  const heading = button.parentElement, column = at + 1;
  const isDown = heading.getAttribute("aria-sort") === "ascending";
  all("table.runs thead th").forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const compare = (a, b) => {
    const [x, y] = [valueOf(a, column), valueOf(b, column)];
    // Rows without a value are last in both directions.
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" && typeof y === "number" ? x - y
      : String(x).localeCompare(String(y), undefined, { numeric: true });
    return isDown ? -order : order;
  };
  find("table.runs tbody").append(...rows.slice().sort(compare));
}));

// Values under the pointer, and zoom.
const TIP_ROWS = 10;
const tip = document.createElement("div");
tip.className = "tip";
const cursorOf = (figure, event) => {
  const box = find("svg", figure).getBoundingClientRect();
  const { left, right, width } = figure.frame;
  const wide = width - LEFT - RIGHT;
  const x = (event.clientX - box.left) * width / box.width;
  const y = (event.clientY - box.top) * H / box.height;
  const share = Math.min(1, Math.max(0, (x - LEFT) / wide));
  return { x, y, value: left + share * (right - left), pixel: LEFT + share * wide };
};
const nearest = (xs, ys, x) => {
  let best = -1;
  for (let i = 0; i < xs.length; i += 1) {
    if (ys[i] === null || !Number.isFinite(xs[i])) continue;
    if (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  }
  return best;
};
const overlay = (figure, markup) => {
  const svg = find("svg", figure);
  const former = find(".over", svg);
  if (former) former.remove();
  svg.insertAdjacentHTML("beforeend", `<g class="over">${markup}</g>`);
};
const escaped = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const point = (figure, event) => {
  if (!figure.frame) return;
  const at = cursorOf(figure, event);
  if (figure.dragFrom) {
    const [a, b] = [figure.dragFrom.pixel, at.pixel].sort((x, y) => x - y);
    overlay(figure, `<rect class="range" x="${a}" y="${TOP}" width="${b - a}"`
      + ` height="${H - TOP - BOTTOM}"/>`);
    return;
  }
  overlay(figure, `<path class="cursor" d="M${at.pixel} ${TOP}V${H - BOTTOM}"/>`);
  const values = figure.drawn.map(({ index, x, y }) => {
    const i = nearest(x, y, at.value);
    return i < 0 ? null : { index, x: x[i], y: y[i], away: Math.abs(figure.frame.yPixel(y[i]) - at.y) };
  }).filter(Boolean).sort((a, b) => a.away - b.away);
  const lines = values.slice(0, TIP_ROWS).map(({ index, x, y }) => {
    const run = data.runs[index];
    return `<div><span class="swatch" style="color:${run.color}"></span> ${escaped(run.name)} `
      + `<b>${short(y)}</b> at ${label(x)}</div>`;
  });
  const more = values.length - lines.length;
  tip.innerHTML = lines.join("") + (more > 0 ? `<div>and ${more} more</div>` : "");
  if (tip.parentElement !== figure) figure.append(tip);
  const box = figure.getBoundingClientRect();
  const left = event.clientX - box.left + 14;
  tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${event.clientY - box.top + 14}px`;
};
figures.forEach((figure) => {
  const canvas = find(".canvas", figure);
  canvas.addEventListener("pointermove", (event) => point(figure, event));
  canvas.addEventListener("pointerleave", () => {
    tip.remove();
    const over = find(".over", figure);
    if (over && !figure.dragFrom) over.remove();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (!figure.frame || event.button !== 0) return;
    figure.dragFrom = cursorOf(figure, event);
    tip.remove();
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const from = figure.dragFrom;
    figure.dragFrom = null;
    if (!from || !figure.frame) return;
    const to = cursorOf(figure, event);
    if (Math.abs(to.pixel - from.pixel) < 6) return;
    const [low, high] = [from.value, to.value].sort((a, b) => a - b);
    change({ from: +low.toPrecision(6), to: +high.toPrecision(6) });
  });
  canvas.addEventListener("dblclick", () => change({ from: null, to: null }));
});

figures.forEach((figure) => {
  if (figure.getBoundingClientRect().top < window.innerHeight) inView.add(figure);
});
load();
show();
// Milliseconds from the start of loading until the first charts are in place, for tests.
document.documentElement.dataset.ready = Math.round(performance.now());
})();
