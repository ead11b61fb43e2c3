// Report of `coop-plan compare`: a plot, a table, and the memory map of the opened plan.

import { Pareto, legendOf } from "./pareto.js";
import { bytes, element, percent } from "./units.js";
import { mapsView } from "./views.js";

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const HEADS = ["budget", "method", "peak", "overhead", "at least", "fragmentation", "smallest", "time", "map"];

export function reportView(data) {
  const planned = data.cells.filter((cell) => cell.state === "planned");
  const methods = [...new Set(data.cells.map((cell) => cell.method))];
  const place = element("div", { class: "opened" });
  const rows = new Map();

  async function open(cell) {
    for (const row of rows.values()) row.classList.remove("open");
    rows.get(cell).classList.add("open");
    const title = `${cell.method} within ${cell.asked}`;
    if (!cell.map) {
      const why = "The map was left out to keep this file small; draw it by `coop-plan show`.";
      place.replaceChildren(element("p", {}, why));
      return;
    }
    const map = { ...(await unpacked(cell.map)), ...data.once };
    place.replaceChildren(mapsView([{ title, figures: cell.figures, map }]));
    place.scrollIntoView({ block: "nearest" });
    place.querySelector("canvas").focus({ preventScroll: true });
  }

  const body = element("tbody");
  for (const cell of data.cells) {
    const isPlanned = cell.state === "planned";
    const button = isPlanned
      ? element("button", { onclick: () => open(cell), "aria-label": `map of ${cell.method}, ${cell.asked}` }, "open")
      : cell.state;
    const values = [
      cell.asked,
      cell.method,
      isPlanned ? bytes(cell.peak_bytes) : "",
      isPlanned ? percent(cell.overhead) : "",
      cell.bound == null ? "" : percent(cell.bound),
      isPlanned ? percent(cell.fragmentation) : "",
      cell.least_bytes == null ? "" : bytes(cell.least_bytes),
      isPlanned ? `${cell.solve_seconds.toFixed(2)} s` : "",
      button,
    ];
    const row = element("tr", { title: cell.why || null }, ...values.map((value) => element("td", {}, value)));
    rows.set(cell, row);
    body.append(row);
  }
  const names = legendOf(methods);
  const failures = data.cells
    .filter((cell) => cell.why)
    .map((cell) => element("li", {}, `${cell.method} within ${cell.asked}: ${cell.why}`));
  const plot = element(
    "section",
    { class: "panel", "aria-label": "overhead over peak" },
    element("ul", { class: "legend" }, ...names),
    new Pareto(planned, methods, open).node,
    element("p", { class: "help" }, "No plan lies in the shaded area: it is below a proved bound. Click a point for its memory map."),
  );
  const head = element("tr", {}, ...HEADS.map((name) => element("th", { scope: "col" }, name)));
  return element(
    "div",
    {},
    planned.length ? plot : element("p", { class: "wrong" }, "No method has a plan within these budgets."),
    element(
      "section",
      { class: "panel scroll", tabindex: "0", "aria-label": "all plans" },
      element("table", {}, element("thead", {}, head), body),
      failures.length ? element("ul", { class: "help", "aria-label": "failures" }, ...failures) : null,
    ),
    place,
  );
}

export function start(data) {
  document.querySelector("main").append(reportView(data));
}
