// The web page: receives events from the coordinator, and draws tiles, facts and theme once per frame.

import { about, bytes, count, digits, el, put, rate } from "./format.js";
import { Plots } from "./plots.js";
import { departures, Table } from "./table.js";
import { Topology } from "./topology.js";
import { Timeline } from "./timeline.js";
import { Details } from "./details.js";

const STALE_S = 5;
const at = (id) => document.getElementById(id);
const state = { run: {}, columns: [], workers: new Map(), shape: { kind: "", size: 0, stages: 1, edges: [], ids: [] }, stride: 1 };
const details = new Details(token());
const open = (id) => details.open(state.workers.get(id));
const plots = new Plots(at("plots")), table = new Table(open), topology = new Topology(open), timeline = new Timeline();
let planned = false, heard_ms = 0, drawn_s = 0;

/** Taken from the address and removed there, so that it is not visible on the screen or in the history. */
function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

// -- events ------------------------------------------------------------------------------------------

function whole(told) {
  Object.assign(state, { run: told.run, columns: told.columns, shape: { ...state.shape, ...told.shape }, stride: told.stride });
  state.workers.clear();
  merge(told);
  plots.whole(told.point, { whole: told.whole, recent: told.recent });
  timeline.whole(told.events);
  drawn_s = 0;
  plan();
}

function tick(told) {
  Object.assign(state.run, told.run);
  if (told.shape) state.shape = told.shape;
  merge(told);
  for (const id of told.gone ?? []) state.workers.delete(id);
  if (told.points) plots.add(told.points, state.stride);
  if (told.events) { timeline.add(told.events); drawn_s = 0; }
  plan();
}

function merge({ who = [], rows = [] }) {
  for (const one of who) state.workers.set(one.id, Object.assign(state.workers.get(one.id) ?? {}, { departed_s: undefined }, one)); // it may be back
  for (const [id, ...values] of rows) {
    const worker = state.workers.get(id);
    if (worker) state.columns.forEach((name, i) => { worker[name] = values[i]; });
  }
}

function plan() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; render(); });
}

// -- drawing -----------------------------------------------------------------------------------------

function render() {
  const { run } = state;
  put(at("run"), run.run ?? "…");
  put(at("phase"), run.phase ?? "starting");
  at("phase").className = `badge ${run.alert ? "fault" : ["waiting", "training", "paused", "finished"].includes(run.phase) ? run.phase : ""}`;
  put(at("reason"), [run.alert, run.reason].filter(Boolean).join("; "));
  put(at("plan"), state.shape.ids.length ? run.plan_reason ?? "" : "");
  put(at("software"), run.software ?? "");
  document.title = run.run ? `${run.phase} ${count(run.step)} · ${run.run} · gridtrain` : "gridtrain";
  const workers = [...state.workers.values()];
  tiles(run, departures(workers));
  for (const worker of workers) worker.slowest = run.waited_for?.id === worker.id ? "the others wait for it" : undefined;
  table.render(workers, run.phase);
  if (state.workers.has(details.shown)) details.update(state.workers.get(details.shown));
  topology.render(state.shape, state.workers, run.waited_for, run.phase);
  const now_s = run.now_s ?? 0;
  if (now_s - drawn_s >= 5 || now_s < drawn_s) { timeline.draw(now_s); drawn_s = now_s; }
  facts(run.facts ?? {});
}

/** The figures at the top.  A rate that is not known now is replaced by its mean over the whole run. */
function tiles(run, left) {
  const active = run.workers?.active ?? 0, all = Object.values(run.workers ?? {}).reduce((sum, n) => sum + n, 0);
  const saved = run.exchanged_bytes > 0 && run.dense_bytes > 0 ? run.dense_bytes / run.exchanged_bytes : null;
  const dense = /^Dense/.test(run.facts?.exchange ?? "");
  const begun = run.step > 0, ended = run.phase === "finished", soon = "waiting for the first step";
  const loss = run.loss ?? plots.last("loss"), none = ended ? "no rate was measured" : "no rate yet";
  const steps = run.steps_per_s ?? plots.mean("steps_per_s"), samples = run.samples_per_s ?? plots.mean("samples_per_s");
  const mean = (now) => (now === null || now === undefined ? " on average" : "");
  const pace = steps === null ? none : `${digits(steps)} a second${mean(run.steps_per_s)}`;
  const remaining = typeof run.remaining_s === "number" ? `, ${about(run.remaining_s)} left` : "";
  const skipped = run.skipped_samples ? `, ${count(run.skipped_samples)} samples skipped` : "";
  const here = all ? (all === active ? "all active" : `of ${all}: ${others(run.workers)}`) : begun || left ? "present" : "none has joined yet";
  const lines = [
    ["Step", count(run.step), `${total(run)}${begun ? `${pace}${remaining}${skipped}` : "none is committed yet"}`],
    ["Loss", digits(loss, 4), loss === null ? (begun ? "no worker reports a loss" : soon) : loss === run.loss ? "mean of all workers" : "the last that was reported"],
    ["Samples/s", digits(run.samples_per_s), !begun ? soon : samples === null ? none : mean(run.samples_per_s) ? `${digits(samples)} on average` : "of all workers"],
    ["Workers", count(active), [here, left].filter(Boolean).join(all === active || !all ? ", " : "; ")],
    ["Sent", rate(run.sent_Bps), `${bytes(run.exchanged_bytes)} for exchanges`],
    ["Saved", saved === null ? "–" : dense ? "none" : `${digits(saved, 3)} ×`, dense ? "a dense exchange sends everything" : saved === null ? "against a dense ring" : `a dense ring: ${bytes(run.dense_bytes)}`],
    ["Generation", count(run.generation), `term ${count(run.term)}, replica divergences ${count(run.drifts)}`],
    ["Up", run.uptime_s === undefined ? "–" : about(run.uptime_s), "since the coordinator started"],
  ];
  const place = at("tiles");
  if (place.children.length !== lines.length) place.replaceChildren(...lines.map(() => el("div", {}, el("dt"), el("dd"), el("dd"))));
  lines.forEach((words, i) => words.forEach((text, j) => put(place.children[i].children[j], text)));
}

/** How long the whole run is, before the other words of the tile. */
function total(run) {
  if (run.total_steps) return `of ${count(run.total_steps)}; `;
  if (!run.total_samples || run.samples === null) return "";
  const part = Math.min(1, run.samples / run.total_samples), pass = Math.min(run.epochs, Math.floor(part * run.epochs) + 1);
  return `pass ${count(pass)} of ${count(run.epochs)} (${Math.floor(100 * part)} %); `;
}

function others(workers) {
  return Object.entries(workers).filter(([name]) => name !== "active").map(([name, n]) => `${n} ${name}`).join(", ");
}

function facts(told) {
  const key = JSON.stringify(told);
  if (at("facts").dataset.key === key) return;
  at("facts").dataset.key = key;
  at("facts").replaceChildren(...Object.entries(told).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// -- settings -----------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  put(at("theme"), `Theme: ${name}`);
  plots.redraw();
}

at("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  theme(next);
});
const chosen = () => { const name = localStorage.getItem("theme"); return THEMES.includes(name) ? name : "system"; };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.redraw());
for (const radio of document.querySelectorAll("input[type=radio]")) {
  radio.addEventListener("change", () => plots.choose(
    document.querySelector("input[name=x]:checked").value, document.querySelector("input[name=window]:checked").value));
}
theme(chosen());

// -- connection to the coordinator ---------------------------------------------------------------------

function alive(words, kind) {
  put(at("live"), words);
  at("live").className = `live ${kind}`;
}

const stream = new EventSource("api/v1/stream");
const heard = (use) => (event) => { heard_ms = performance.now(); age(); alive("live", "on"); use(JSON.parse(event.data)); };
stream.addEventListener("whole", heard(whole));
stream.addEventListener("tick", heard(tick));
stream.addEventListener("error", () => alive("no connection, trying again", "off"));
setInterval(age, 1000);

/** Shows values in grey, with their age, if no update has arrived recently. */
function age() {
  const age_s = (performance.now() - heard_ms) / 1000, old = heard_ms > 0 && age_s > STALE_S;
  document.body.classList.toggle("old", old);
  at("age").hidden = !old;
  if (old) put(at("age"), `values are ${about(age_s)} old`);
  if (old && stream.readyState === EventSource.OPEN) alive("no new data for a while", "");
}
