// The web page's curves (loss, speed, traffic) against time, steps or bytes, drawn by uPlot.

import { bytes, clock, count, cssColour, date, digits, el, moment, put } from "./format.js";

const PLOTS = [
  { name: "Loss", series: [["loss", "--accent", "loss"]], value: (v) => digits(v, 4), lasting: true,
    nothing: "No worker reports a loss. In the script: grid.report(loss=loss.item())" },
  { name: "Throughput", series: [["samples_per_s", "--good", "samples/s"]], value: (v) => digits(v, 3), floor: 0,
    nothing: "No rate has been measured." },
  { name: "Sent by all workers", series: [["bytes", "--accent", "sent"], ["dense_bytes", "--comm", "a dense ring"]],
    value: bytes, nothing: "Nothing is exchanged.", log: true },
];
const X = { time: "at_s", step: "step", bytes: "bytes" };
const AXIS = { time: moment, step: count, bytes };

/** Hours and minutes, and seconds if ticks are less than a minute apart; at midnight the date. */
const hours = (_, ticks) => ticks.map((v) => {
  const time = clock(v);
  return time === "00:00:00" ? date(v) : ticks.length > 1 && ticks[1] - ticks[0] < 60 ? time : time.slice(0, 5);
});

/** Only 1, 10, 100 on a logarithmic axis; otherwise there would be a line for each digit. */
function tens(_chart, _axis, low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) if (10 ** power >= low) found.push(10 ** power);
  return found;
}

export class Plots {
  constructor(place) {
    this.place = place;
    this.x = "time";
    this.plots = PLOTS.map((plot) => this.frame(plot));
    this.columns = null;
    this.data = { whole: [], recent: [] };
    this.window = "whole";
    new ResizeObserver(() => this.resize()).observe(place);
  }

  frame(plot) {
    const readout = el("span", { className: "muted" });
    const canvas = el("div", { className: "canvas", role: "img", "aria-label": plot.name });
    const empty = el("div", { className: "empty" });
    canvas.append(empty);
    this.place.append(el("figure", { className: "plot" }, el("figcaption", {}, el("b", {}, plot.name), readout), canvas));
    return { ...plot, canvas, readout, empty, chart: null };
  }

  whole(columns, data) {
    this.columns = Object.fromEntries(columns.map((name, at) => [name, at]));
    this.data = data;
    this.redraw();
  }

  /** The latest value that is known; null if there is none. */
  last(name) {
    const at = this.columns?.[name];
    return [this.data.recent, this.data.whole].map((rows) => rows.findLast((row) => row[at] !== null)?.[at]).find((value) => value !== undefined) ?? null;
  }

  /** The mean over the whole run; null if no value is known. */
  mean(name) {
    const values = this.data.whole.map((row) => row[this.columns[name]]).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  }

  /** Points of the latest second; the server thins the whole run, so only its end is updated. */
  add(points, stride) {
    for (const point of points) {
      this.data.recent.push(point);
      if (this.data.recent.length > 600) this.data.recent.shift();
      const whole = this.data.whole;
      this.open = (this.open ?? 0) + 1;
      if (this.open >= stride || whole.length < 2) { whole.push(point); this.open = 0; } else whole[whole.length - 1] = point;
      if (whole.length > 2000) this.data.whole = whole.filter((_, at) => at % 2 === 0 || at === whole.length - 1);
    }
    this.update();
  }

  choose(x, window) {
    this.x = x;
    this.window = window;
    this.redraw();
  }

  table(plot) {
    const column = this.columns[X[this.x]];
    const rows = this.data[this.window].filter((row) => row[column] !== null);
    const sorted = this.x === "time" ? rows : monotonic(rows, column);
    const line = (at) => sorted.map((row) => (plot.log && row[at] <= 0 ? null : row[at]));
    return [sorted.map((row) => row[column]), ...plot.series.map(([name]) => line(this.columns[name]))];
  }

  redraw() {
    if (!this.columns) return;
    for (const plot of this.plots) {
      plot.chart?.destroy();
      plot.chart = new uPlot(this.options(plot), this.table(plot), plot.canvas);
      this.say(plot);
    }
  }

  update() {
    if (!this.columns) return;
    for (const plot of this.plots) {
      plot.chart?.setData(this.table(plot));
      this.say(plot);
    }
  }

  resize() {
    if (this.place.clientWidth === this.wide) return; // a longer caption changes the height only
    this.wide = this.place.clientWidth;
    for (const plot of this.plots) plot.chart?.setSize(this.size(plot));
  }

  size(plot) {
    return { width: Math.max(plot.canvas.clientWidth, 120), height: Math.max(plot.canvas.clientHeight, 120) };
  }

  /** The values under the pointer, or the latest (for the loss, the latest known), as text that everyone can read. */
  say(plot, at = null) {
    const [x, ...lines] = plot.chart.data;
    const here = at ?? x.length - 1;
    const of = (line) => line[at === null && plot.lasting ? line.findLastIndex((value) => value !== null) : here];
    const shown = plot.series.map(([, , label], i) => [label, of(lines[i])]).filter(([, v]) => v !== null && v !== undefined);
    const latest = this.data.recent.at(-1) ?? this.data.whole.at(-1);
    put(plot.empty, latest?.[this.columns.step] > 0 ? plot.nothing : "Waiting for the first step.");
    const any = lines.some((line) => line.some((value) => value !== null && value !== 0));
    plot.empty.hidden = any;
    plot.empty.style.display = any ? "none" : "";
    plot.chart.root.style.visibility = any ? "" : "hidden";
    const words = any ? shown.map(([label, v]) => `${label} ${plot.value(v)}`).join(", ") : "";
    const where = at === null || x[here] === undefined ? "" : ` at ${this.x === "step" ? "step " : ""}${AXIS[this.x](x[here])}`;
    put(plot.readout, words + where);
    plot.canvas.setAttribute("aria-label", `${plot.name} against ${this.x}: ${words || plot.empty.textContent}`);
  }

  options(plot) {
    const muted = cssColour("--muted"), line = cssColour("--line");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    return {
      ...this.size(plot),
      padding: [8, 28, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: this.x === "time" },
        y: plot.log ? { distr: 3 } : plot.floor === 0 ? { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } : {},
      },
      axes: [
        { ...axis, space: 74, size: 32, values: this.x === "time" ? hours : (_, ticks) => ticks.map((v) => AXIS[this.x](v)) },
        { ...axis, size: 64, ...(plot.log ? { splits: tens, filter: (_, ticks) => ticks } : {}), values: (_, ticks) => ticks.map((v) => (v === null ? "" : plot.value(v))) },
      ],
      series: [{}, ...plot.series.map(([, colour, label], at) => ({
        label, stroke: cssColour(colour), width: 2, dash: at ? [6, 5] : undefined, spanGaps: false,
        points: { size: 6, show: (chart, line) => chart.data[line].filter((value) => value !== null).length < 3 }, // a line needs two
      }))],
      hooks: { setCursor: [(chart) => chart === plot.chart && this.say(plot, chart.cursor.idx)] },
    };
  }
}

/** A plot's x values must increase: after a rollback, or if nothing was sent, the later point counts. */
function monotonic(rows, column) {
  const kept = [];
  for (const row of rows) {
    while (kept.length && kept[kept.length - 1][column] >= row[column]) kept.pop();
    kept.push(row);
  }
  return kept;
}
