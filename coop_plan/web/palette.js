// Colours of a rectangle by its kind. They differ in lightness, too, for colour-blind readers.

export const KINDS = ["kept", "recomputed", "swapped", "workspace", "output"];

const LIGHT = ["#5b8fd6", "#e07b39", "#8a5bb5", "#9aa3ad", "#3f9d6b"];
const DARK = ["#6ea3ea", "#f0985c", "#ab82d4", "#7d8894", "#59bd87"];

export function colours() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const style = getComputedStyle(document.documentElement);
  return {
    kinds: dark ? DARK : LIGHT,
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
