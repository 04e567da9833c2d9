// Draws samples into canvases. A chart knows the time range and the values of its samples, and
// nothing else about models.

// A gap between two samples, in ms, across which nothing is drawn.
const GAP = 7000;

// The margins of the plot, in px: on the left for the axis' numbers, on top for the events' marks.
const LEFT = 44;
const TOP = 14;
const BOTTOM = 16;

const MARKS = { change: "▼", failure: "▽", death: "✖", refusals: "●", state: "◆" };

export const markOf = (kind) => MARKS[kind] ?? "◆";

const style = getComputedStyle(document.documentElement);
export const colour = (name) => style.getPropertyValue(`--${name}`).trim();

// Clears a canvas at the screen's resolution. Returns it with the functions from a time to x and
// from a part of the height to y.
function plot(canvas, view) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.clearRect(0, 0, width, height);
  ink.font = "11px system-ui, sans-serif";
  const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * (width - LEFT - 2);
  const y = (part) => height - BOTTOM - part * (height - TOP - BOTTOM);
  return { ink, width, height, x, y };
}

export function timeAt(canvas, view, clientX) {
  const box = canvas.getBoundingClientRect();
  const part = (clientX - box.left - LEFT) / (box.width - LEFT - 2);
  return view.from + Math.min(1, Math.max(0, part)) * (view.to - view.from);
}

function axes({ ink, width, x, y }, view, ticks, unit) {
  ink.lineWidth = 1;
  ink.strokeStyle = colour("line");
  ink.fillStyle = colour("faint");
  ink.textAlign = "right";
  ink.textBaseline = "middle";
  for (const { part, text } of ticks) {
    line(ink, LEFT, y(part), width, y(part));
    ink.fillText(text, LEFT - 5, y(part));
  }
  ink.textBaseline = "top";
  ink.textAlign = "left";
  ink.fillText(unit, 0, 1);
  const step = (view.to - view.from) / 5;
  for (let place = 0; place <= 5; place += 1) {
    const time = view.from + place * step;
    ink.textAlign = place === 0 ? "left" : place === 5 ? "right" : "center";
    ink.fillText(clock(time).slice(0, 5), x(time), y(0) + 3);
  }
}

function line(ink, fromX, fromY, toX, toY) {
  ink.beginPath();
  ink.moveTo(fromX, Math.round(fromY) + 0.5);
  ink.lineTo(toX, Math.round(toY) + 0.5);
  ink.stroke();
}

export const clock = (time) => new Date(time).toLocaleTimeString([], { hour12: false });

function marks({ ink, x, y }, view) {
  ink.textAlign = "center";
  ink.textBaseline = "top";
  for (const { time, kind, colour: own } of view.marks) {
    ink.fillStyle = own;
    ink.strokeStyle = own;
    ink.globalAlpha = 0.45;
    ink.beginPath();
    ink.moveTo(x(time), y(1));
    ink.lineTo(x(time), y(0));
    ink.stroke();
    ink.globalAlpha = 1;
    ink.fillText(markOf(kind), x(time), 1);
  }
  if (view.pointed !== undefined) {
    ink.strokeStyle = colour("faint");
    ink.beginPath();
    ink.moveTo(x(view.pointed), y(1));
    ink.lineTo(x(view.pointed), y(0));
    ink.stroke();
  }
}

// Splits samples into runs without a gap in them.
function runs(samples) {
  const all = [];
  let run = [];
  for (const sample of samples) {
    if (run.length > 0 && sample.time - run[run.length - 1].time > GAP) {
      all.push(run);
      run = [];
    }
    run.push(sample);
  }
  if (run.length > 0) {
    all.push(run);
  }
  return all;
}

function area(ink, points) {
  ink.beginPath();
  points.forEach(([left, top], place) => (place === 0 ? ink.moveTo(left, top) : ink.lineTo(left, top)));
  ink.closePath();
  ink.fill();
}

// Draws stacked layers, up to `top`. Each layer has a colour and a function from a sample to a value.
export function drawStack(canvas, view, samples, layers, top, unit) {
  const on = plot(canvas, view);
  axes(on, view, [0, 0.5, 1].map((part) => ({ part, text: short(top * part) })), unit);
  for (const run of runs(samples)) {
    let below = run.map(() => 0);
    for (const layer of layers) {
      const above = run.map((sample, place) => below[place] + layer.of(sample));
      const edge = (heights) => run.map((sample, place) => [on.x(sample.time), on.y(heights[place] / top)]);
      on.ink.fillStyle = layer.colour;
      on.ink.globalAlpha = 0.85;
      area(on.ink, edge(above).concat(edge(below).reverse()));
      on.ink.globalAlpha = 1;
      below = above;
    }
  }
  marks(on, view);
}

// Draws lines of latencies in ms on a logarithmic scale, with the SLO as a dashed line.
export function drawLatency(canvas, view, samples, lines, slo) {
  const on = plot(canvas, view);
  const all = lines.flatMap((one) => samples.map(one.of)).filter((ms) => ms > 0);
  const low = Math.log10(Math.min(slo, ...all) / 1.5);
  const high = Math.log10(Math.max(slo, ...all) * 1.5);
  const part = (ms) => (Math.log10(ms) - low) / (high - low);
  axes(on, view, decades(low, high).map((ms) => ({ part: part(ms), text: short(ms) })), "ms");
  const { ink } = on;
  ink.strokeStyle = colour("slo");
  ink.setLineDash([5, 4]);
  line(ink, LEFT, on.y(part(slo)), on.width, on.y(part(slo)));
  ink.setLineDash([]);
  for (const { of, colour: own, width } of lines) {
    ink.strokeStyle = own;
    ink.lineWidth = width;
    for (const run of runs(samples.filter((sample) => of(sample) > 0))) {
      ink.beginPath();
      run.forEach((sample, place) => {
        const at = [on.x(sample.time), on.y(part(of(sample)))];
        // A run of one sample becomes a dot.
        if (place === 0) ink.moveTo(at[0] - 0.5, at[1]);
        ink.lineTo(...at);
      });
      ink.stroke();
    }
  }
  ink.lineWidth = 1;
  marks(on, view);
}

function decades(low, high) {
  const all = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
    for (const step of high - low > 2.2 ? [1] : high - low > 1.2 ? [1, 3] : [1, 2, 5]) {
      const ms = step * 10 ** power;
      if (Math.log10(ms) >= low && Math.log10(ms) <= high) all.push(ms);
    }
  }
  return all;
}

// Formats a number with three significant digits.
export function short(value) {
  if (value >= 100000) return `${Math.round(value / 1000)}k`;
  return String(Number(value.toPrecision(3)));
}
