// The web page's list of workers: columns, sorting, filter, rows on a page.  Rows are reused.

import { count, digits, el, moment, put, rate, seconds, svg } from "./format.js";

export const SPLIT = [["computing_s", "compute", "computing"], ["selecting_s", "select", "selecting"],
  ["communicating_s", "comm", "communicating"], ["waiting_s", "wait", "waiting"]];
const PAGE = 50;
const BAR = 150;

export const total_s = (worker) => SPLIT.reduce((sum, [name]) => sum + (worker[name] ?? 0), 0);

// `rare`: shown only if a worker has a value other than 0.
const COLUMNS = [
  { title: "Rank", key: "rank", text: (w) => (w.rank === null ? "–" : w.stage === null ? count(w.rank) : `${w.rank}, stage ${w.stage}`) },
  { title: "Worker", key: "name", left: true },
  { title: "State", key: "state", left: true },
  { title: "Device", key: "device", left: true },
  { title: "Share", key: "share", text: (w) => count(w.share) },
  { title: "Step", key: "step", text: (w) => count(w.step) },
  { title: "Step time", key: "total_s", left: true },
  { title: "Link", key: "sent_Bps", left: true },
  { title: "Loss", key: "loss", text: (w) => digits(w.loss, 4) },
  { title: "Heard", key: "heard_s", text: (w) => (w.departed_s ? `${w.state} ${moment(w.departed_s)}` : w.heard_s ? `${w.heard_s} s ago` : "now") },
  { title: "Missed", key: "missed_steps", text: (w) => count(w.missed_steps ?? 0), rare: true },
  { title: "Violations", key: "strikes", text: (w) => count(w.strikes), rare: true },
];

/** How many workers of the table are no longer there, in words; "" if all are there. */
export function departures(workers) {
  const gone = workers.filter((w) => w.departed_s), [lost, refused] = ["lost", "refused"].map((state) => gone.filter((w) => w.state === state).length);
  const left = gone.length - lost - refused, were = (n, what) => n && `${n} ${n === 1 ? "was" : "were"} ${what}`;
  return [left && `${left} ${left === 1 ? "has" : "have"} left`, were(lost, "lost"), were(refused, "refused")].filter(Boolean).join(", ");
}

export class Table {
  constructor(open) {
    this.open = open;
    this.head = document.getElementById("head");
    this.body = document.getElementById("body");
    this.find = document.getElementById("find");
    this.state = document.getElementById("state");
    this.sort = { key: "rank", down: false };
    this.page = 0;
    this.rows = [];
    this.workers = [];
    for (const column of COLUMNS) {
      const button = el("button", { type: "button", onclick: () => this.by(column.key) }, column.title);
      this.head.append(el("th", { scope: "col", className: column.left ? "l" : "", "data-key": column.key }, button));
    }
    for (const [, kind, word] of SPLIT) {
      document.getElementById("split-key").append(el("li", {}, svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" },
        svg("rect", { width: 18, height: 12, rx: 3, class: kind })), word));
    }
    this.find.addEventListener("input", () => { this.page = 0; this.render(this.workers); });
    this.state.addEventListener("change", () => { this.page = 0; this.render(this.workers); });
    document.getElementById("earlier").addEventListener("click", () => this.turn(-1));
    document.getElementById("later").addEventListener("click", () => this.turn(1));
  }

  by(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : ["total_s", "sent_Bps", "missed_steps", "strikes", "heard_s"].includes(key) };
    this.render(this.workers);
  }

  turn(by) {
    this.page += by;
    this.render(this.workers);
  }

  render(workers, phase = this.phase) {
    this.workers = workers;
    this.phase = phase;
    this.offer(workers);
    const table = document.getElementById("table");
    for (const { key, rare } of COLUMNS) if (rare) table.classList.toggle(`no-${key}`, !workers.some((w) => w[key]));
    const wanted = this.find.value.trim().toLowerCase(), state = this.state.value;
    const found = workers.filter((w) => (!state || w.state === state)
      && (!wanted || w.name.toLowerCase().includes(wanted) || w.peer.startsWith(wanted)));
    this.arrange(found);
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const shown = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    while (this.rows.length < shown.length) this.rows.push(this.row());
    while (this.rows.length > shown.length) this.rows.pop().tr.remove();
    shown.forEach((worker, at) => this.fill(this.rows[at], worker));
    const left = departures(workers), here = workers.filter((w) => !w.departed_s).length;
    put(document.getElementById("count"), found.length !== workers.length ? `${found.length} of ${workers.length}` : left ? `${here} present, ${left}` : `${here}`);
    const first = this.page * PAGE + 1;
    put(document.getElementById("page"), found.length ? `${first} to ${first + shown.length - 1} of ${found.length}`
      : workers.length ? "no such worker" : phase === "finished" ? "All workers have left." : "No worker is here; gridtrain invite prints an invitation.");
    for (const [id, over] of [["earlier", this.page === 0], ["later", this.page >= pages - 1]]) {
      document.getElementById(id).disabled = over;
      document.getElementById(id).hidden = pages === 1;
    }
    document.querySelector(".pager").hidden = pages === 1 && found.length > 0;
    for (const th of this.head.children) {
      const sorted = th.dataset.key === this.sort.key;
      if (sorted) th.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    }
  }

  offer(workers) {
    const states = [...new Set(workers.map((w) => w.state))].sort();
    const offered = [...this.state.options].slice(1).map((option) => option.value);
    if (states.join() === offered.join()) return;
    const chosen = this.state.value;
    this.state.replaceChildren(el("option", { value: "" }, "all"), ...states.map((s) => el("option", { value: s }, s)));
    this.state.value = states.includes(chosen) ? chosen : "";
  }

  arrange(workers) {
    const { key, down } = this.sort;
    const of = key === "total_s" ? total_s : (w) => w[key];
    const missing = (value) => value === null || value === undefined || value === "";
    workers.sort((a, b) => {
      const x = of(a), y = of(b);
      if (missing(x) || missing(y)) return missing(x) - missing(y) || a.id - b.id;
      const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return (down ? -order : order) || a.id - b.id;
    });
  }

  row() {
    const row = { cells: {}, bars: [], worker: null };
    row.name = el("button", { type: "button", className: "name", onclick: () => this.open(row.worker.id) });
    row.key = el("span", { className: "sub" });
    row.badge = el("span", { className: "badge" });
    row.reason = el("span", { className: "sub two" });
    row.time = el("span", { className: "sub" });
    row.device = el("span", { className: "two" });
    row.reach = el("span");
    row.rates = el("span", { className: "sub" });
    row.bar = svg("svg", { class: "split", viewBox: `0 0 ${BAR} 12`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...SPLIT.map(([, kind]) => (row.bars[row.bars.length] = svg("rect", { class: kind, height: 12, width: 0 }))));
    row.tr = el("tr", {}, ...COLUMNS.map((column) => {
      const inside = { name: [row.name, row.key], state: [row.badge, row.reason], total_s: [row.bar, row.time], device: [row.device], sent_Bps: [row.reach, row.rates] }[column.key] ?? [];
      const head = column.key === "name";
      const cell = el(head ? "th" : "td", { className: column.left ? "l" : "", "data-key": column.key, ...(head ? { scope: "row" } : {}) }, ...inside);
      if (head) cell.classList.add("who");
      return (row.cells[column.key] = cell);
    }));
    this.body.append(row.tr);
    return row;
  }

  fill(row, worker) {
    row.worker = worker;
    for (const column of COLUMNS) if (column.text) put(row.cells[column.key], column.text(worker));
    put(row.name, worker.name || "(no name)");
    if (row.name.title !== worker.name) row.name.title = worker.name;
    put(row.key, worker.peer.slice(0, 12));
    put(row.badge, worker.state);
    if (row.badge.dataset.state !== worker.state) { row.badge.dataset.state = worker.state; row.badge.className = `badge ${STATES.get(worker.state) ?? ""}`; }
    const reason = worker.slowest ?? worker.reason;
    put(row.reason, reason);
    if (row.reason.title !== reason) row.reason.title = reason;
    put(row.device, worker.device || "–");
    if (row.device.title !== worker.device) row.device.title = worker.device;
    put(row.reach, worker.reach || "–");
    put(row.rates, worker.sent_Bps === null ? "" : `↑ ${rate(worker.sent_Bps)} ↓ ${rate(worker.received_Bps)}`);
    this.split(row, worker);
  }

  split(row, worker) {
    const all_s = total_s(worker);
    let left = 0;
    SPLIT.forEach(([name], at) => {
      const width = all_s ? ((worker[name] ?? 0) / all_s) * BAR : 0;
      row.bars[at].setAttribute("x", left.toFixed(1));
      row.bars[at].setAttribute("width", width.toFixed(1));
      left += width;
    });
    put(row.time, all_s ? seconds(all_s) : "");
    const parts = SPLIT.map(([name, , words]) => `${words} ${seconds(worker[name])}`).join(", ");
    if (row.time.title !== parts) row.time.title = parts;
  }
}

// The colour of a state; a paused worker is not a fault.
const STATES = new Map([...["active", "suspect", "joining", "admitted", "lost", "left"].map((state) => [state, state]), ["catching up", "joining"], ["standby", "left"], ["removed", "left"], ["refused", "lost"], ["paused", "left"]]);
