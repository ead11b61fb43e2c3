// Formats of sizes (binary units) and times.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? size.toFixed(2) : size} ${UNITS[unit]}`;
}

export function micros(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} s`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(2)} ms`;
  return `${value.toFixed(1)} µs`;
}

export function percent(share) {
  return `${(Math.round(share * 1e4) / 100 + 0).toFixed(2)} %`;
}

// Round numbers for about `count` ticks from 0 to `limit`; bytes in powers of two.
export function ticks(limit, count, binary) {
  if (!(limit > 0)) return [0];
  const base = binary ? 2 : 10;
  let step = base ** Math.floor(Math.log(limit / count) / Math.log(base));
  const grow = binary ? [1, 2, 4] : [1, 2, 5, 10];
  step *= grow.find((factor) => limit / (step * factor) <= count) ?? grow[grow.length - 1];
  const found = [];
  for (let at = 0; at <= limit; at += step) found.push(at);
  return found;
}

// Module path and `file:line` of an op's source; each is "" if missing.
export function splitSource(source) {
  const comma = source.indexOf(", ");
  if (comma >= 0) return [source.slice(0, comma), source.slice(comma + 2)];
  return source.includes(":") ? ["", source] : [source, ""];
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}
