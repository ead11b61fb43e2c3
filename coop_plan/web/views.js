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

// Kinds as switches that show and hide their rectangles; `toggled` gets the set of shown kinds.
export function legend(toggled) {
  const list = element("ul", { class: "legend", "aria-label": "kinds" });
  const shown = new Set(KINDS.keys());
  const buttons = KINDS.map((kind, i) => {
    const press = () => {
      if (!shown.delete(i)) shown.add(i);
      buttons[i].setAttribute("aria-pressed", shown.has(i));
      toggled(shown.size === KINDS.length ? null : new Set(shown));
    };
    const swatch = element("span", { class: "swatch" });
    return element("button", { onclick: press, title: MEANINGS[kind], "aria-pressed": "true" }, swatch, kind);
  });
  const fill = () => {
    const paint = colours();
    buttons.forEach((button, i) => (button.firstChild.style.background = paint.kinds[i]));
  };
  list.append(...buttons.map((button) => element("li", {}, button)));
  fill();
  onTheme(fill);
  return list;
}

// Search field with the number of matches, and buttons to the next and the previous one.
function search(maps, changed) {
  const count = element("output", { class: "help", "aria-live": "polite" });
  const field = element("input", {
    type: "search",
    placeholder: "module, op or tensor",
    "aria-label": "search for a module, op or tensor",
    oninput: () => set(field.value),
    onkeydown: (event) => event.key === "Enter" && step(event.shiftKey ? -1 : 1),
  });
  const tell = () => {
    if (!field.value.trim()) return count.replaceChildren();
    const matches = maps[0].matches();
    const at = matches.indexOf(maps[0].chosen) + 1;
    count.textContent = at ? `${at} of ${matches.length}` : `${matches.length} found`;
  };
  const set = (text) => {
    field.value = text;
    for (const map of maps) map.set({ filter: text.trim() });
    tell();
    changed();
  };
  const step = (by) => {
    for (const map of maps) {
      const matches = map.matches();
      if (!matches.length) continue;
      const at = matches.indexOf(map.chosen);
      map.select(matches[(Math.max(at, by < 0 ? 0 : -1) + by + matches.length) % matches.length]);
    }
    tell();
  };
  const button = (text, by, name) => element("button", { onclick: () => step(by), "aria-label": name }, text);
  const node = element("span", { class: "search" }, field, count, button("‹", -1, "previous match"), button("›", 1, "next match"));
  return { node, set, value: () => field.value };
}

export function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function downloads(map, title) {
  const name = title.replace(/[^\w.-]+/g, "-");
  const picture = () => map.canvas.toBlob((blob) => download(`${name}.png`, blob));
  const data = () => download(`${name}.json`, new Blob([JSON.stringify(map.data)], { type: "application/json" }));
  return element(
    "div",
    { class: "row" },
    element("button", { onclick: picture }, "picture"),
    element("button", { onclick: data }, "data"),
  );
}

// Tensors whose buffers are not of the same kinds in all maps.
function differences(maps) {
  const found = maps.map((map) => map.kindsOfTensors());
  const all = new Set(found.flatMap((kinds) => [...kinds.keys()]));
  return new Set([...all].filter((t) => found.some((kinds) => kinds.get(t) !== found[0].get(t))));
}

// State of the maps in the address, so that a link leads to the same view.
function linked(maps, controls) {
  let due = 0; // a change of the address costs as much as a frame: one, when the view rests
  const keep = () => {
    clearTimeout(due);
    due = setTimeout(write, 150);
  };
  const write = () => {
    const [map] = maps;
    const state = new URLSearchParams();
    if (map.window[1] - map.window[0] < map.moments) state.set("steps", map.window.join("-"));
    if (map.pinned >= 0) state.set("at", map.pinned);
    if (controls.search.value()) state.set("search", controls.search.value());
    if (map.byTime) state.set("axis", "time");
    const text = state.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  const restore = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    const whole = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : -1);
    const [from, to] = (state.get("steps") ?? "").split("-").map(whole);
    if (state.get("axis") === "time") controls.byTime(true);
    if (state.get("search")) controls.search.set(state.get("search"));
    if (from >= 0 && to > from && to <= maps[0].moments) maps[0].set({ window: [from, to] });
    if (whole(state.get("at")) >= 0) maps[0].pin(Math.min(whole(state.get("at")), maps[0].moments - 1));
  };
  return { keep, restore };
}

// `drawings`: [{figures or null, map, title}]; `options.link` keeps the view in the address.
export function mapsView(drawings, { link = false } = {}) {
  const controls = {};
  let busy = false; // other maps follow the one whose window was set
  const follow = (map, options) => {
    if (busy || controls.search === undefined) return;
    if ("window" in options) {
      busy = true;
      const [from, to] = map.window.map((moment) => moment / map.moments);
      for (const other of maps) {
        if (other !== map) other.set({ window: [Math.floor(from * other.moments), Math.max(1, Math.ceil(to * other.moments))] });
      }
      busy = false;
    }
    if (link) state.keep();
  };
  const maps = drawings.map((drawing) => new MemoryMap(drawing.map, `Memory map of ${drawing.title}`, follow));
  const state = linked(maps, controls);
  const set = (options) => maps.forEach((map) => map.set(options));
  const found = search(maps, () => link && state.keep());
  const axis = element(
    "select",
    { "aria-label": "horizontal axis", onchange: () => set({ byTime: axis.value === "time" }) },
    element("option", { value: "step" }, "by step"),
    element("option", { value: "time" }, "by time"),
  );
  const apart = element("input", {
    type: "checkbox",
    onchange: () => set({ only: apart.checked ? differences(maps) : null }),
  });
  const [first] = drawings;
  const sameGraph = maps.length > 1 && drawings.every(({ map }) => map.kind && map.names.length === first.map.names.length);
  controls.search = found;
  controls.byTime = (chosen) => {
    axis.value = chosen ? "time" : "step";
    set({ byTime: chosen });
  };
  const bar = element(
    "div",
    { class: "row bar" },
    found.node,
    drawings.some((drawing) => drawing.map.begin_us.length) ? axis : null,
    sameGraph ? element("label", {}, apart, " differences only") : null,
    drawings.some((drawing) => drawing.map.kind) ? legend((kinds) => set({ kinds })) : null,
  );
  const panels = drawings.map((drawing, i) =>
    element(
      "section",
      { class: "panel", "aria-label": drawing.title },
      element("h2", {}, drawing.title),
      drawing.figures ? figures(drawing.figures) : null,
      maps[i].node,
      downloads(maps[i], drawing.title),
    ),
  );
  const help = element(
    "p",
    { class: "help" },
    "Click or tap a moment for a table of what is in memory then; point at a rectangle for its tensor. " +
      "The wheel zooms (with Alt, the addresses), a drag scrolls, Shift with a drag zooms into a box, two fingers zoom, " +
      "a double click shows everything. By keyboard: arrows select, Enter pins, + and − zoom (with Alt, the addresses), " +
      "Home shows everything, Escape ends. Above each map: all bytes that count towards the budget, and the peak.",
  );
  if (link && maps.length) state.restore();
  return element("div", {}, bar, element("div", { class: "side" }, ...panels), help);
}
