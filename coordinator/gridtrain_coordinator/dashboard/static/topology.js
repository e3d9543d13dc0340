// The web page's graph of a generation: which members exchange with each other.  Above 40 members, dots without edges.

import { bits, el, put, seconds, svg } from "./format.js";
import { total_s } from "./table.js";

const NARROW = 480;
let WIDTH = 640, HEIGHT = 440, NAMED = 16, LABELLED = 10; // of the drawing; smaller on a phone, so that text keeps its size
const KEYS = {
  edges: [["edge", "wider: a faster link"], ["edge slow", "slowest link"], ["edge relay", "through a relay"]],
  nodes: [["arc busy", "computing"], ["arc", "waiting and communicating"], ["halo", "the others wait for it"]],
};

export class Topology {
  constructor(open) {
    this.open = open;
    this.place = document.getElementById("topology");
    this.drawn = "";
    this.nodes = new Map();
  }

  get narrow() {
    return this.place.clientWidth < NARROW;
  }

  render(shape, workers, waited, phase) {
    this.place.closest("section").hidden = phase === "finished" && !shape.ids.length;
    const drawing = JSON.stringify([this.narrow, shape.kind, shape.size, shape.edges, shape.ids, shape.ids.map((id) => workers.get(id)?.name)]);
    if (drawing !== this.drawn) {
      this.drawn = drawing;
      this.draw(shape, workers);
    }
    for (const [id, node] of this.nodes) this.colour(node, workers.get(id), waited?.id === id);
    const name = workers.get(waited?.id)?.name;
    put(document.getElementById("waited"), name ? `The others wait for ${name}: it ${waited.reason}.` : phase === "training" && shape.size > 1 ? "Nobody stands out: no worker delays the others." : "");
    put(document.getElementById("shape"), !shape.size ? "" : shape.kind === "stages" && shape.size % shape.stages === 0 ? `${shape.stages} stages × ${shape.size / shape.stages} workers` : `${shape.kind} of ${shape.size}`);
  }

  draw(shape, workers) {
    this.nodes.clear();
    [WIDTH, HEIGHT, NAMED, LABELLED] = this.narrow ? [390, 400, 8, 0] : [640, 440, 16, 10];
    const many = shape.ids.length > 40;
    const label = `${shape.kind} of ${shape.ids.length} workers; the tables below have the same as text`;
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
    if (many) this.dots(picture, shape, workers);
    else if (shape.ids.length) this.graph(picture, shape, workers);
    this.place.replaceChildren(shape.ids.length ? picture : el("p", { className: "muted" }, "The members appear here when training begins."));
    this.key(many, shape);
    this.table(shape);
  }

  dots(picture, shape, workers) {
    const size = shape.ids.length, columns = Math.ceil(Math.sqrt((size * WIDTH) / HEIGHT)), rows = Math.ceil(size / columns);
    const gap = Math.min(WIDTH / columns, HEIGHT / rows), left = (WIDTH - gap * columns) / 2, top = (HEIGHT - gap * rows) / 2;
    shape.ids.forEach((id, rank) => {
      const x = left + gap * ((rank % columns) + 0.5), y = top + gap * (Math.floor(rank / columns) + 0.5);
      const body = svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: (gap * 0.36).toFixed(1), class: "dot hit", onclick: () => this.open(id) });
      const title = svg("title", {}, `rank ${rank}: ${workers.get(id)?.name ?? ""}`);
      body.append(title);
      const halo = svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: (gap * 0.44).toFixed(1), class: "halo", visibility: "hidden" });
      picture.append(body, halo);
      this.nodes.set(id, { body, halo, dot: true });
    });
  }

  graph(picture, shape, workers) {
    const places = placed(shape);
    const rates = shape.edges.map((edge) => edge[2]).filter((rate) => rate !== null);
    const slowest = Math.min(...rates), fastest = Math.max(...rates);
    const lines = svg("g"), labels = svg("g"), nodes = svg("g");
    for (const [a, b, rate_Bps, rtt_s, relay] of shape.edges) {
      const [x1, y1] = places[a], [x2, y2] = places[b];
      const width = rate_Bps === null ? 1.5 : 1.5 + (shape.edges.length > 60 ? 1.5 : 4) * Math.min(1, Math.log10(rate_Bps / slowest + 1e-9) / 1.5);
      const slow = rate_Bps !== null && rate_Bps === slowest && fastest > 1.5 * slowest;
      const way = relay === null ? "" : relay < 0 ? ", relayed by the coordinator" : `, relayed by rank ${relay}`;
      lines.append(svg("line", { x1, y1, x2, y2, "stroke-width": width.toFixed(1), class: `edge${slow ? " slow" : ""}${relay === null ? "" : " relay"}` },
        svg("title", {}, `rank ${a} – ${b}: ${bits(rate_Bps)}, ${seconds(rtt_s)} round trip${way}`)));
      if (shape.ids.length <= LABELLED && shape.kind === "ring" && rate_Bps !== null) labels.append(this.label(shape, x1, y1, x2, y2, bits(rate_Bps)));
    }
    shape.ids.forEach((id, rank) => nodes.append(this.node(id, rank, places[rank], shape, workers)));
    picture.append(lines, labels, nodes);
    if (shape.kind === "stages" && shape.ids.length % shape.stages === 0) {
      for (let stage = 0; stage < shape.stages; stage += 1)
        picture.append(svg("text", { x: ((stage + 0.5) * WIDTH) / shape.stages, y: 16, class: "stage" }, `stage ${stage}`));
    }
  }

  label(shape, x1, y1, x2, y2, words) {
    // Two workers: beside the only edge; a ring: on the edge, moved a little inwards.
    const x = (x1 + x2) / 2 + (WIDTH / 2 - (x1 + x2) / 2) * 0.16, y = (y1 + y2) / 2 + (HEIGHT / 2 - (y1 + y2) / 2) * 0.16;
    return backed(x, y + 4.5, words, "dim");
  }

  node(id, rank, [x, y], shape, workers) {
    const radius = shape.ids.length <= NAMED ? (WIDTH < 500 ? 17 : 20) : WIDTH < 500 ? 9 : 15, around = 2 * Math.PI * (radius - 1);
    const body = svg("circle", { cx: x, cy: y, r: radius + 3, class: workers.has(id) ? "node" : "node suspect" });
    const wait = svg("circle", { cx: x, cy: y, r: radius - 1, class: "arc" });
    const busy = svg("circle", { cx: x, cy: y, r: radius - 1, class: "arc busy", transform: `rotate(-90 ${x} ${y})`, "stroke-dasharray": `0 ${around}` });
    const halo = svg("circle", { cx: x, cy: y, r: radius + 7, class: "halo", visibility: "hidden" });
    const title = svg("title", {}, workers.has(id) ? "" : "not connected");
    const group = svg("g", { class: "hit", onclick: () => this.open(id) }, title, body, wait, busy, halo,
      svg("text", { x, y, class: "rank" }, String(rank)));
    if (shape.ids.length <= NAMED) group.append(named(x, y, radius, shape, workers.get(id)?.name ?? ""));
    this.nodes.set(id, { body, busy, halo, title, around });
    return group;
  }

  colour(node, worker, slowest) {
    if (!worker) return;
    const kind = `${node.dot ? "dot hit" : "node"}${worker.state === "suspect" ? " suspect" : ""}`;
    if (node.body.getAttribute("class") !== kind) node.body.setAttribute("class", kind);
    const seen = slowest ? "visible" : "hidden";
    if (node.halo.getAttribute("visibility") !== seen) node.halo.setAttribute("visibility", seen);
    const all_s = total_s(worker), busy = all_s ? ((worker.computing_s ?? 0) + (worker.selecting_s ?? 0)) / all_s : 0;
    if (node.dot) {
      const opacity = (0.35 + 0.65 * busy).toFixed(1);
      if (node.body.getAttribute("fill-opacity") !== opacity) node.body.setAttribute("fill-opacity", opacity);
      return;
    }
    node.busy.setAttribute("stroke-dasharray", `${(busy * node.around).toFixed(1)} ${node.around.toFixed(1)}`);
    put(node.title, `${worker.name}: ${worker.state}, ${seconds(all_s)} a step, ${Math.round(100 * busy)} % computing`);
  }

  key(many, shape) {
    const edges = shape.edges.length ? KEYS.edges : [];
    const lines = many
      ? [["dot", "one dot for each rank, fainter: it waits more"], ["dot suspect", "suspect"], ["halo", "the others wait for it"]]
      : [...KEYS.nodes, ...edges];
    document.getElementById("topology-key").replaceChildren(...(shape.ids.length ? lines : []).map(([kind, words]) => {
      const sample = kind.startsWith("edge") || kind.startsWith("arc") ? svg("line", { x1: 0, x2: 18, y1: 6, y2: 6, "stroke-width": 4, class: kind })
        : svg("circle", { cx: 9, cy: 6, r: 4.5, class: kind });
      return el("li", {}, svg("svg", { viewBox: "0 0 18 12", "aria-hidden": "true" }, sample), words);
    }));
  }

  table(shape) {
    document.getElementById("links").hidden = !shape.edges.length;
    document.getElementById("links-body").replaceChildren(...shape.edges.map(([a, b, rate_Bps, rtt_s, relay]) => el("tr", {},
      ...[`${a} – ${b}`, bits(rate_Bps), seconds(rtt_s), relay === null ? "direct" : relay < 0 ? "through the coordinator" : `through rank ${relay}`]
        .map((words) => el("td", {}, words)))));
  }
}

/** The name beside a node, on the side where there is room. */
function named(x, y, radius, shape, name) {
  const letters = [...name], most = WIDTH < 500 ? 9 : shape.kind === "stages" && shape.stages > 6 ? 8 : 14;
  const short = letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : name;
  const flat = shape.kind === "tree" || shape.kind === "stages";
  if (!flat && Math.abs(x - WIDTH / 2) > 60) {
    const right = x > WIDTH / 2;
    return svg("text", { x: right ? x + radius + 12 : x - radius - 12, y: y + 4.5, "text-anchor": right ? "start" : "end" }, short);
  }
  const below = flat || y > HEIGHT / 2;
  return backed(x, below ? y + radius + 24 : y - radius - 14, short, "");
}

/** Text that stays legible over the lines below it. */
function backed(x, y, words, kind) {
  const wide = [...words].length * 7.4 + 8;
  return svg("g", {}, svg("rect", { x: x - wide / 2, y: y - 14.5, width: wide, height: 20, rx: 5, class: "backing" }),
    svg("text", { x, y, "text-anchor": "middle", class: kind }, words));
}

function placed(shape) {
  const size = shape.ids.length;
  if (shape.kind === "stages" && size % shape.stages === 0) return staged(size, shape.stages);
  if (shape.kind === "tree") return treed(size, shape.edges);
  const around = shape.kind === "star" ? size - 1 : size, middle = [WIDTH / 2, HEIGHT / 2];
  const narrow = WIDTH < 500;
  const wide = size <= NAMED ? (narrow ? 92 : 170) : WIDTH / 2 - 40, high = size <= NAMED ? HEIGHT / 2 - 65 : HEIGHT / 2 - 28;
  const on = (at) => {
    const turn = (2 * Math.PI * at) / Math.max(around, 1) - Math.PI / 2;
    return [round(middle[0] + wide * Math.cos(turn)), round(middle[1] + high * Math.sin(turn))];
  };
  const ids = shape.ids.map((_, rank) => rank);
  if (shape.kind === "star") return ids.map((rank) => (rank ? on(rank - 1) : middle));
  return size === 1 ? [middle] : size === 2 ? [[WIDTH / 2 - WIDTH / 5, HEIGHT / 2], [WIDTH / 2 + WIDTH / 5, HEIGHT / 2]] : ids.map(on);
}

function staged(size, stages) {
  const replicas = size / stages;
  return Array.from({ length: size }, (_, rank) => [
    round(((Math.floor(rank / replicas) + 0.5) * WIDTH) / stages), round(20 + ((rank % replicas) + 0.45) * ((HEIGHT - 20) / replicas))]);
}

function treed(size, edges) {
  const near = Array.from({ length: size }, () => []);
  for (const [a, b] of edges) { near[a].push(b); near[b].push(a); }
  const level = Array(size).fill(-1), order = [0], levels = [];
  level[0] = 0;
  for (const rank of order) {
    (levels[level[rank]] ??= []).push(rank);
    for (const other of near[rank]) if (level[other] < 0) { level[other] = level[rank] + 1; order.push(other); }
  }
  const places = Array(size).fill([WIDTH / 2, HEIGHT / 2]);
  levels.forEach((ranks, depth) => ranks.forEach((rank, at) => {
    places[rank] = [round(((at + 0.5) * WIDTH) / ranks.length), round(34 + (depth * (HEIGHT - 90)) / Math.max(levels.length - 1, 1))];
  }));
  return places;
}

const round = (value) => Math.round(value * 10) / 10;
