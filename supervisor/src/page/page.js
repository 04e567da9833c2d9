// Follows the supervisor's samples and shows the last hour of them.

import { clock, colour, drawLatency, drawStack, markOf, short, timeAt } from "./charts.js";

const HOUR = 3600e3;
const RETRY = 2000;
const MOST_MARKS = 500;
const COLOURS = [
  "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#b8a800", "#66a61e", "#7f7f7f",
];

const samples = [];
const marks = [];
const colours = new Map();
let minutes = 15;
let pointed;
let drawing = false;
let lostAt;

const by = (id) => document.getElementById(id);

// --- receiving samples ------------------------------------------------------------------------

async function follow() {
  const token = sessionStorage.getItem("token");
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch("events", { headers });
  if (answer.status === 401) {
    tell(token ? "the supervisor rejected this token" : "token required", Boolean(token));
    sessionStorage.removeItem("token");
    by("ask").hidden = false;
    await new Promise((resolve) => by("ask").addEventListener("submit", resolve, { once: true }));
    return;
  }
  if (answer.status === 503) throw new Error((await answer.text()).trim());
  if (!answer.ok) throw new Error(`the supervisor answered with status ${answer.status}`);
  by("ask").hidden = true;
  tell("live", false);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the supervisor exited, or this page fell too far behind");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    events.forEach((event) => take(JSON.parse(event.slice("data: ".length))));
    draw();
  }
}

async function followOn() {
  for (;;) {
    try {
      await follow();
    } catch (error) {
      lostAt ??= Date.now();
      tell(`no connection since ${clock(lostAt)} (${error.message}); retrying, the data below is old`, true);
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }
}

function tell(text, lost) {
  by("link").textContent = text;
  by("link").classList.toggle("lost", lost);
  document.querySelector("main").classList.toggle("stale", lost);
  if (!lost) lostAt = undefined;
}

// After a reconnection the supervisor sends all samples again, also those that this page has.
function take(sample) {
  const last = samples[samples.length - 1];
  if (last && sample.time <= last.time) return;
  sample.by = new Map(sample.models.map((model) => [model.name, model]));
  for (const name of sample.by.keys()) {
    if (!colours.has(name)) colours.set(name, nextColour(colours.size));
  }
  samples.push(sample);
  for (const mark of sample.marks ?? []) {
    marks.push({ ...mark, time: sample.time, colour: colours.get(mark.model) ?? colour("faint") });
  }
  while (samples[0].time < sample.time - HOUR) samples.shift();
  while (marks.length > MOST_MARKS || (marks.length > 0 && marks[0].time < samples[0].time)) marks.shift();
}

const nextColour = (place) => COLOURS[place] ?? `hsl(${(place * 137.5) % 360} 55% 50%)`;

// --- drawing ----------------------------------------------------------------------------------

function draw() {
  if (drawing || samples.length === 0) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawAll();
  });
}

function drawAll() {
  document.querySelector("main").hidden = false;
  const now = samples[samples.length - 1];
  const from = now.time - minutes * 60e3;
  const shown = samples.filter((sample) => sample.time >= from);
  const view = { from, to: now.time, pointed };
  const ready = now.ready ? "ready" : "not ready";
  by("host").textContent = `version ${now.version}, ${now.host === "serving" ? ready : now.host}, policy ${now.policy}`;
  by("in-time").textContent = `In SLO, ${minutes} min`;
  const models = now.models.filter((model) => isWanted(model.name));
  drawTable(models, shown);
  now.gpus.forEach((gpu, index) => drawGpu(gpu, index, now, shown, view));
  keep(by("charts"), models.map((model) => `chart-${model.name}`));
  models.forEach((model) => drawModel(model, shown, view));
  drawMarks(from);
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function swatch(own) {
  const made = element("span", undefined, "swatch");
  made.style.background = own;
  return made;
}

const isWanted = (name) => name.toLowerCase().includes(by("filter").value.trim().toLowerCase());

const rate = (model) => (model.in_time ?? 0) + (model.late ?? 0) + (model.refused ?? 0) + (model.failed ?? 0);

// Returns the part of the requests in the time range that was answered within the SLO.
function inTime(name, shown) {
  const sum = (of) => shown.reduce((all, sample) => all + of(sample.by.get(name) ?? {}), 0);
  const offered = sum(rate);
  return offered > 0 ? sum((model) => model.in_time ?? 0) / offered : undefined;
}

const isUnready = (model) => !["ready", "asleep", "unloading", "unloaded"].includes(model.state);
const hasMissed = (model, part) => part !== undefined && part * 100 < model.percentile;

// Models that are not ready or violate their SLO come first; the others keep the configuration's order.
function drawTable(models, shown) {
  const known = models.map((model) => ({ model, part: inTime(model.name, shown) }));
  const rank = ({ model, part }) => (isUnready(model) ? 0 : hasMissed(model, part) ? 1 : 2);
  const rows = known.sort((one, other) => rank(one) - rank(other)).map(({ model, part }) => {
    const idle = rate(model) === 0 && !model.queue;
    const row = element("tr");
    const name = element("td");
    name.append(swatch(colours.get(model.name)), model.name);
    const state = element("td", model.state);
    if (model.why) state.append(element("span", model.why, "why"));
    if (model.streams) state.append(element("span", model.streams, "why"));
    row.append(name, state);
    const inside = model.mechanism === "in-process" ? "inside" : model.mechanism;
    const ms = (value) => (value === undefined ? "-" : short(value));
    const cells = [
      `${model.share_percent}%${model.held ? " held" : ""}`,
      model.groups && model.groups !== "all" ? `${model.sms} (${model.groups})` : model.sms,
      inside,
      idle ? "idle" : short(model.rate ?? 0),
      ms(model.p50_ms),
      ms(model.p99_ms),
      short(model.slo_ms),
      part === undefined ? "-" : `${Math.floor(part * 1000) / 10}%`,
      model.queue ?? 0,
      model.refusals ? short(model.refusals) : "-",
      `${Math.floor((model.hour_percent ?? 0) * 10) / 10}%`,
    ];
    row.append(...cells.map((text) => element("td", text)));
    row.children[9].classList.toggle("missed", hasMissed(model, part));
    return row;
  });
  by("models").tBodies[0].replaceChildren(...rows);
}

// Returns the card of that name, and creates it on the first call.
function card(parent, id, canvases) {
  const known = by(id);
  if (known) return known;
  const made = element("article", undefined, "card");
  made.id = id;
  made.append(element("h3"));
  for (const [kind, entries] of canvases) {
    const canvas = element("canvas", undefined, kind);
    canvas.setAttribute("role", "img");
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerleave", leave);
    made.append(canvas);
    if (entries) made.append(legend(entries));
  }
  parent.append(made);
  return made;
}

// Removes the cards of removed models.
function keep(parent, ids) {
  for (const child of [...parent.children]) {
    if (!ids.includes(child.id)) child.remove();
  }
}

function title(of, name, more, own) {
  const head = of.querySelector("h3");
  head.replaceChildren(...(own ? [swatch(own)] : []), name, " ", element("small", more));
}

function drawGpu(gpu, index, now, shown, view) {
  const of = card(by("gpus"), `gpu-${index}`, [["tall", undefined]]);
  const more = [`${gpu.sms} SMs`];
  if (gpu.used_mib !== undefined) more.push(`${gib(gpu.used_mib)} of ${gib(gpu.total_mib)} GiB used`);
  if (gpu.watts !== undefined) more.push(`${gpu.watts} W`);
  if (gpu.busy_percent !== undefined) more.push(`busy ${gpu.busy_percent}%`);
  if (gpu.why) more.push(`accepts no workers: ${gpu.why}`);
  more.push("SMs by model; shared SMs are divided evenly");
  title(of, `GPU ${index}: ${gpu.name}`, more.join(", "));
  const there = [...colours.keys()].filter((name) => now.by.get(name)?.gpu === index);
  const layers = there.map((name) => ({
    colour: colours.get(name),
    of: (sample) => (sample.by.get(name)?.gpu === index ? sample.by.get(name).part_sms : 0),
  }));
  const canvas = of.querySelector("canvas");
  canvas.setAttribute("aria-label", there.map((name) => `${name}: ${now.by.get(name).sms} SMs`).join(", "));
  canvas.tip = (sample) => there.map((name) => {
    const model = sample.by.get(name);
    return model ? `${name}: ${model.share_percent}%, ${model.sms} SMs` : `${name}: -`;
  });
  const own = marks.filter((mark) => mark.time >= view.from && (!mark.model || there.includes(mark.model)));
  canvas.marks = own;
  drawStack(canvas, { ...view, marks: own }, shown, layers, gpu.sms, "SMs");
}

const gib = (mib) => (mib / 1024).toFixed(1);

function legend(entries) {
  const made = element("p", undefined, "legend");
  for (const [name, own] of entries) {
    const entry = element("span");
    entry.append(swatch(own), name);
    made.append(entry);
  }
  return made;
}

const OUTCOMES = [
  ["in SLO", "in_time", "in-time"], ["late", "late", "late"], ["refused", "refused", "refused"],
  ["failed", "failed", "failed"],
];

function drawModel(model, shown, view) {
  const { name } = model;
  const own = colours.get(name);
  const of = card(by("charts"), `chart-${name}`, [
    ["low", [["p99 ms", own], ["p50 ms", colour("faint")], ["SLO", colour("slo")]]],
    ["low", OUTCOMES.map(([text, , kind]) => [`${text}, requests/s`, colour(kind)])],
  ]);
  title(of, name, `SLO ${short(model.slo_ms)} ms for ${model.percentile}%`, own);
  const value = (key) => (sample) => sample.by.get(name)?.[key] ?? 0;
  const [latency, rates] = of.querySelectorAll("canvas");
  const marked = marks.filter((mark) => mark.time >= view.from && (!mark.model || mark.model === name));
  latency.marks = marked;
  rates.marks = marked;
  latency.tip = (sample) => [`p50 ${short(value("p50_ms")(sample))} ms, p99 ${short(value("p99_ms")(sample))} ms`];
  rates.tip = (sample) => OUTCOMES.map(([text, key]) => `${text}: ${short(value(key)(sample))}/s`);
  latency.setAttribute("aria-label", `${name}: p99 ${model.p99_ms ?? "-"} ms, SLO ${model.slo_ms} ms`);
  rates.setAttribute("aria-label", `${name}: ${short(rate(model))} requests per second`);
  const lines = [
    { of: value("p50_ms"), colour: colour("faint"), width: 1 },
    { of: value("p99_ms"), colour: own, width: 1.75 },
  ];
  drawLatency(latency, { ...view, marks: marked }, shown, lines, model.slo_ms);
  const top = Math.max(1, ...shown.map((sample) => rate(sample.by.get(name) ?? {})));
  const layers = OUTCOMES.map(([, key, kind]) => ({ of: value(key), colour: colour(kind) }));
  drawStack(rates, { ...view, marks: marked }, shown, layers, round(top), "1/s");
}

// Returns the next larger round number, for the top of an axis.
function round(top) {
  const unit = 10 ** Math.floor(Math.log10(top));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= top) * unit;
}

function drawMarks(from) {
  const wanted = (mark) => mark.time >= from && (!mark.model || isWanted(mark.model));
  const shown = marks.filter(wanted).reverse().slice(0, 200);
  const list = by("marks");
  const first = shown.length > 0 ? `${shown[0].time} ${from < marks[0].time}` : "none";
  const key = `${shown.length} ${first} ${by("filter").value}`;
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...shown.map((mark) => {
    const item = element("li");
    const kind = element("span", `${markOf(mark.kind)} ${mark.kind}`);
    kind.style.color = mark.colour;
    const of = element("span", mark.model ?? "host");
    item.append(element("time", clock(mark.time)), kind, of, element("span", mark.text));
    return item;
  }));
  if (shown.length === 0) list.append(element("li", "no events in this time range"));
}

// --- the pointer and other input --------------------------------------------------------------

function point(event) {
  const canvas = event.currentTarget;
  const now = samples[samples.length - 1];
  const view = { from: now.time - minutes * 60e3, to: now.time };
  pointed = timeAt(canvas, view, event.clientX);
  const near = (entries) => entries.reduce(
    (best, entry) => (Math.abs(entry.time - pointed) < Math.abs(best.time - pointed) ? entry : best),
    entries[0],
  );
  const sample = near(samples);
  const reach = ((view.to - view.from) / canvas.clientWidth) * 5;
  const told = canvas.marks.filter((mark) => Math.abs(mark.time - pointed) <= reach).slice(-5);
  const lines = told.map((mark) => `${markOf(mark.kind)} ${mark.model ?? "host"}: ${mark.text}`);
  const tip = by("tip");
  tip.textContent = [clock(sample.time), ...canvas.tip(sample), ...lines].join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  draw();
}

function leave() {
  pointed = undefined;
  by("tip").hidden = true;
  draw();
}

function choose(button) {
  minutes = Number(button.dataset.minutes);
  for (const other of by("ranges").children) other.setAttribute("aria-pressed", String(other === button));
  draw();
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", by("token").value.trim());
});
by("ranges").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement) choose(event.target);
});
by("filter").addEventListener("input", () => {
  const value = by("filter").value;
  history.replaceState(null, "", value ? `#${new URLSearchParams({ models: value })}` : location.pathname);
  draw();
});
function readFragment() {
  by("filter").value = new URLSearchParams(location.hash.slice(1)).get("models") ?? "";
  draw();
}
window.addEventListener("hashchange", readFragment);
window.addEventListener("resize", draw);
readFragment();
choose(by("ranges").children[1]);
followOn();
