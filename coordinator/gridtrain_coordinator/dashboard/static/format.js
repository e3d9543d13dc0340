// How the web page formats numbers, dates and units, and creates elements: text nodes only, no markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, attributes (`aria-...`, `data-...`, all those of SVG) and children. */
export function el(name, props = {}, ...children) {
  return fill(document.createElement(name), props, children);
}

export function svg(name, props = {}, ...children) {
  return fill(document.createElementNS(SVG, name), props, children, true);
}

function fill(node, props, children, all = false) {
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (all || key.includes("-") || !(key in node)) node.setAttribute(key === "className" ? "class" : key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Change a text only if it differs, which is rare. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // created once, because that is slow
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return known(value) ? WHOLE.format(value) : "–";
}

export function digits(value, most = 3) {
  if (!known(value)) return "–";
  return Math.abs(value) >= 1000 ? count(value) : String(Number(value.toPrecision(most)));
}

export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? Number(value.toPrecision(3)) : Math.round(value)} ${units[at]}`;
}

export const rate = (value) => (known(value) ? `${bytes(value)}/s` : "–");

/** The rate of a link, in bits. */
export function bits(value_Bps) {
  if (!known(value_Bps)) return "not measured";
  const value = value_Bps * 8;
  if (value >= 1e9) return `${digits(value / 1e9)} Gbit/s`;
  return value >= 1e6 ? `${digits(value / 1e6)} Mbit/s` : `${digits(value / 1e3)} kbit/s`;
}

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 0.9995) return `${Number((value * 1000).toPrecision(value < 0.00995 ? 2 : 3))} ms`;
  return value < 100 ? `${digits(value)} s` : span(value);
}

export function span(value) {
  if (!known(value)) return "–";
  const s = Math.round(value), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  if (d) return `${d} d ${h} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s % 60} s` : `${s} s`;
}

/** A duration in its largest unit. */
export function about(value) {
  return known(value) && value >= 60 ? span(value).split(" ").slice(0, 2).join(" ") : span(value);
}

export function clock(at_s) {
  return new Date(at_s * 1000).toLocaleTimeString("en-GB");
}

export function date(at_s) {
  return new Date(at_s * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

/** The time, with the date unless it is today. */
export function moment(at_s) {
  return date(at_s) === date(Date.now() / 1000) ? clock(at_s) : `${date(at_s)} ${clock(at_s)}`;
}

export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
