// Colours of a rectangle by its kind. They differ in lightness, too, for colour-blind readers.

export const KINDS = ["kept", "evicted", "recomputed", "offloaded", "prefetched", "workspace", "output"];

const LIGHT = ["#5b8fd6", "#b9a227", "#e07b39", "#8a5bb5", "#c25b8e", "#9aa3ad", "#3f9d6b"];
const DARK = ["#6ea3ea", "#d9c24f", "#f0985c", "#ab82d4", "#e38ab5", "#7d8894", "#59bd87"];

// What each kind of rectangle is, for the legend.
export const MEANINGS = {
  kept: "written by a first run, and kept until its last use",
  evicted: "written by a first run, evicted before its last use and recomputed",
  recomputed: "written by a rerun",
  offloaded: "copied to the host",
  prefetched: "copied back from the host",
  workspace: "scratch of one op",
  output: "leaves the step",
};

const DARKNESS = matchMedia("(prefers-color-scheme: dark)");

let known = null; // colours of the theme

// Colours of the theme, the same object until the system switches.
export function colours() {
  known ??= ofTheme(DARKNESS.matches);
  return known;
}

function ofTheme(dark) {
  const style = getComputedStyle(document.documentElement);
  return {
    kinds: dark ? DARK : LIGHT,
    resident: dark ? ["#5b6672", "#78838f", "#95a0ab"] : ["#8d97a2", "#aab3bc", "#c6cdd4"],
    text: style.getPropertyValue("--text").trim(),
    soft: style.getPropertyValue("--soft").trim(),
    line: style.getPropertyValue("--line").trim(),
    back: style.getPropertyValue("--panel").trim(),
    alarm: style.getPropertyValue("--alarm").trim(),
    accent: style.getPropertyValue("--accent").trim(),
  };
}

// Call `draw` when the system switches between dark and light.
export function onTheme(draw) {
  DARKNESS.addEventListener("change", () => {
    known = null;
    draw();
  });
}
