// The web page's timeline: generations as bands, faults and joins as marks, and all events as a list of sentences.

import { date, el, moment, svg } from "./format.js";

const BAND = 26, TOP = 8, HEIGHT = 104, LISTED = 100;
let WIDTH = 640;
const LANES = { worker: 54, fault: 78 };
const KEY = [["t-band", "a generation"], ["t-change", "the run's phase"], ["t-worker", "a worker joins or leaves"], ["t-fault", "a fault"]];

export class Timeline {
  constructor() {
    this.list = document.getElementById("events");
    this.kinds = document.getElementById("kinds");
    this.place = document.getElementById("timeline");
    this.events = [];
    this.kinds.addEventListener("change", () => this.relist());
    document.getElementById("timeline-key").append(...KEY.map(([kind, words]) => el("li", {},
      svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, mark(kind, 9, 6)), words)));
  }

  whole(events) {
    this.events = events;
    this.relist();
  }

  add(events) {
    this.events.push(...events);
    if (this.events.length > 600) this.events.splice(0, this.events.length - 600);
    for (const event of events) if (this.wanted(event)) this.list.prepend(line(event));
    while (this.list.children.length > LISTED) this.list.lastChild.remove();
  }

  wanted(event) {
    return !this.kinds.value || event.kind === this.kinds.value;
  }

  relist() {
    const shown = this.events.filter((event) => this.wanted(event)).slice(-LISTED).reverse();
    this.list.replaceChildren(...shown.map(line));
    if (!shown.length) this.list.append(el("li", {}, el("span", { className: "muted" }, "Nothing yet.")));
  }

  /** The strip, from the first event to now, or to the end of the run. */
  draw(now_s) {
    if (date(now_s) !== this.today) { this.today = date(now_s); this.relist(); } // times get a date at midnight
    if (!this.events.length) { this.place.replaceChildren(); return; }
    WIDTH = Math.max(this.place.clientWidth, 280);
    const from = this.events[0].at_s, end = this.events.find((event) => event.event === "finished");
    const to = Math.max(end ? this.events.at(-1).at_s : now_s, from + 10);
    const x = (at_s) => Number((6 + ((WIDTH - 12) * (at_s - from)) / (to - from)).toFixed(1));
    const generations = this.events.filter((event) => event.event === "generation");
    const faults = this.events.filter((event) => event.kind === "fault").length;
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label":
      `${generations.length} generations and ${faults} faults since ${moment(from)}; the list below has the same as text` });
    picture.append(svg("line", { x1: 6, x2: WIDTH - 6, y1: HEIGHT - 12, y2: HEIGHT - 12, class: "t-axis" }));
    generations.forEach((event, at) => {
      const x1 = x(event.at_s), x2 = at + 1 < generations.length ? x(generations[at + 1].at_s) : x(end?.at_s ?? to);
      picture.append(svg("rect", { x: x1, y: TOP, width: Math.max(x2 - x1, 1), height: BAND, rx: 3, class: `t-band${at % 2 ? " odd" : ""}` },
        svg("title", {}, event.text)));
      const words = String(event.fields.generation);
      if (x2 - x1 > words.length * 8 + 8) picture.append(svg("text", { x: (x1 + x2) / 2, y: TOP + 18, "text-anchor": "middle" }, words));
    });
    for (const event of this.events) {
      if (!(event.kind in LANES) && !(event.kind === "change" && event.event !== "generation" && event.event !== "freeze")) continue;
      const kind = event.kind === "change" ? "t-change" : `t-${event.kind}`;
      picture.append(mark(kind, x(event.at_s), LANES[event.kind] ?? TOP + BAND + 6, event.text));
    }
    this.place.replaceChildren(picture);
  }
}

function mark(kind, x, y, words = null) {
  const title = words === null ? [] : [svg("title", {}, words)];
  if (kind === "t-band") return svg("rect", { x: x - 8, y: y - 5, width: 16, height: 10, rx: 2, class: kind });
  if (kind === "t-fault") return svg("path", { d: `M${x} ${y - 7}l6.5 12h-13z`, class: kind }, ...title);
  if (kind === "t-change") return svg("rect", { x: x - 1.5, y: y - 6, width: 3, height: 12, class: kind }, ...title);
  return svg("circle", { cx: x, cy: y, r: 5, class: kind }, ...title);
}

function line(event) {
  const time = el("time", { dateTime: new Date(event.at_s * 1000).toISOString() }, moment(event.at_s));
  const words = el("span");
  if (event.kind === "fault") words.append(el("span", { className: "badge fault" }, "fault"), " ");
  words.append(event.text);
  return el("li", {}, time, words);
}
