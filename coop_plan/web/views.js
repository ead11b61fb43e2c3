// Memory maps side by side, with a common legend, filter and horizontal axis.

import { MemoryMap } from "./map.js";
import { KINDS, MEANINGS, colours, onTheme } from "./palette.js";
import { bytes, element, micros, percent } from "./units.js";

export function figures(plan) {
  const rows = [
    ["method", plan.status === "optimal" ? `${plan.method} (optimal)` : plan.method],
    ["peak", bytes(plan.peak_bytes)],
    ["budget", bytes(plan.budget_bytes)],
    ["arena", bytes(plan.arena_bytes)],
    ["overhead", percent(plan.overhead)],
    ["cost", micros(plan.cost_us)],
    ["fragmentation", percent(plan.fragmentation)],
    ["recomputed ops", plan.recomputed_ops.toLocaleString("en")],
  ];
  if (plan.swapped_bytes) rows.push(["swapped", bytes(plan.swapped_bytes)]);
  return element(
    "dl",
    {},
    ...rows.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
}

export function legend() {
  const list = element("ul", { class: "legend", "aria-label": "colours" });
  const fill = () => {
    const paint = colours();
    list.replaceChildren(
      ...KINDS.map((kind, i) => {
        const swatch = element("span", { class: "swatch" });
        swatch.style.background = paint.kinds[i];
        return element("li", { title: MEANINGS[kind] }, swatch, kind);
      }),
    );
  };
  fill();
  onTheme(fill);
  return list;
}

// `drawings`: [{figures or null, map, title}].
export function mapsView(drawings) {
  const maps = drawings.map((drawing) => new MemoryMap(drawing.map, `Memory map of ${drawing.title}`));
  const filter = element("input", {
    type: "search",
    placeholder: "module, op or tensor",
    "aria-label": "filter by module, op or tensor",
    oninput: () => maps.forEach((map) => map.set({ filter: filter.value.trim() })),
  });
  const axis = element(
    "select",
    {
      "aria-label": "horizontal axis",
      onchange: () => maps.forEach((map) => map.set({ byTime: axis.value === "time" })),
    },
    element("option", { value: "step" }, "by step"),
    element("option", { value: "time" }, "by time"),
  );
  const timed = drawings.some((drawing) => drawing.map.begin_us.length);
  const bar = element(
    "div",
    { class: "row bar" },
    drawings.some((drawing) => drawing.map.kind) ? legend() : null,
    filter,
    timed ? axis : null,
  );
  const panels = drawings.map((drawing, i) =>
    element(
      "section",
      { class: "panel", "aria-label": drawing.title },
      element("h2", {}, drawing.title),
      drawing.figures ? figures(drawing.figures) : null,
      maps[i].node,
    ),
  );
  const help = element(
    "p",
    { class: "help" },
    "Point at a rectangle, or focus a map: arrows select, + and − zoom (so does Shift with the wheel), " +
      "a drag scrolls, Home shows everything. Above each map: all bytes that count towards the budget, and the peak.",
  );
  return element("div", {}, bar, element("div", { class: "side" }, ...panels), help);
}
