// Bands below a memory map: phases, modules, and one lane for each engine of the machine.

import { splitSource } from "./units.js";

const PHASE = 10;
const MODULE = 14;
const LANE = 9;
const LANES = ["compute", "to host", "from host", "on host"];
const COMPUTE = 0;
// Lane by engine, in the order of planner/inspect/buffers.py; a wait stalls compute.
const WAIT = 3;
const LANE_OF = [0, 1, 2, 0, 3];

// The same labels, equal ones as one string, which is faster to compare.
function shared(labels) {
  const found = new Map();
  for (const text of labels) if (!found.has(text)) found.set(text, text);
  return labels.map((text) => found.get(text));
}

export class Bands {
  // `map` is the memory map above, whose window and horizontal axis the bands follow.
  constructor(map) {
    const { data } = map;
    this.map = map;
    this.phases = data.phases ?? [];
    const modules = (data.sources ?? []).map((source) => splitSource(source)[0].split("."));
    const depth = modules.reduce((most, path) => Math.max(most, path.length), 1);
    // By depth and op: the first parts of the op's module.
    this.modules = Array.from({ length: depth }, (_, i) => shared(modules.map((path) => path.slice(0, i + 1).join("."))));
    this.runs = data.runs ?? [];
    this.copies = (data.engine ?? []).flatMap((engine, m) => (engine === COMPUTE ? [] : [m]));
    const used = (data.engine ?? []).map((engine) => LANE_OF[engine]);
    this.lanesUsed = LANES.slice(0, used.includes(3) ? 4 : 3);
    const hasModules = this.runs.length > 0 && this.modules[0].some(Boolean);
    this.heights = [
      this.phases.some((phase) => phase !== this.phases[0]) && this.runs.length ? PHASE : 0,
      hasModules ? MODULE : 0,
      this.copies.length ? LANE * this.lanesUsed.length : 0,
    ];
    this.height = this.heights.reduce((sum, height) => sum + height, 0);
  }

  // Stretches of pixels with equal, non-empty labels of ops, as [from, to, label]. A pixel has the
  // label of the latest op that ran up to its moment.
  stretches(labels) {
    const { columns, width } = this.map;
    const found = [];
    let last = null;
    for (let pixel = 0; pixel < width; pixel += 1) {
      const op = this.runs[columns[pixel]] ?? -1;
      const text = op < 0 ? "" : labels[op];
      if (last?.[2] === text) last[1] = pixel + 1;
      else found.push((last = [pixel, pixel + 1, text]));
    }
    return found.filter(([, , text]) => text);
  }

  // The deepest level of modules of which a stretch is still wide enough for a name.
  moduleStretches() {
    let found = [];
    for (const labels of this.modules) {
      const deeper = this.stretches(labels);
      if (found.length && deeper.length > this.map.width / 36) break;
      found = deeper;
    }
    return found;
  }

  draw(pen, paint, top) {
    const [phases, modules, lanes] = this.heights;
    let y = top;
    if (phases) this.band(pen, paint, y, PHASE, this.stretches(this.phases));
    y += phases;
    if (modules) this.band(pen, paint, y, MODULE, this.moduleStretches());
    y += modules;
    if (lanes) this.lanes(pen, paint, y);
  }

  band(pen, paint, y, height, stretches) {
    const { left } = this.map;
    pen.font = `${Math.min(10, height - 1)}px system-ui, sans-serif`;
    pen.textAlign = "left";
    stretches.forEach(([from, to, text], i) => {
      pen.fillStyle = i % 2 ? paint.line : paint.back;
      pen.fillRect(left + from, y + 1, to - from, height - 2);
      pen.strokeStyle = paint.line;
      pen.strokeRect(left + from + 0.5, y + 1.5, to - from - 1, height - 3);
      if (to - from < 10) return;
      const short = pen.measureText(text).width < to - from - 4 ? text : text.split(".").at(-1);
      if (pen.measureText(short).width > to - from - 4) return;
      pen.fillStyle = paint.text;
      pen.fillText(short, left + from + 3, y + height - 3);
    });
  }

  // Copies in their lanes; stalls, in which an op waits for a copy, in the lane of computation.
  lanes(pen, paint, y) {
    const { map } = this;
    const { engine, begin_us: began, done_us: done } = map.data;
    const kinds = [paint.line, paint.kinds[3], paint.kinds[4], paint.alarm, paint.line];
    pen.font = "9px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillStyle = paint.soft;
    this.lanesUsed.forEach((name, lane) => pen.fillText(name, map.left - 6, y + (lane + 1) * LANE - 1));
    pen.save();
    pen.beginPath();
    pen.rect(map.left, y, map.width, LANE * this.lanesUsed.length);
    pen.clip();
    pen.fillStyle = kinds[0];
    pen.fillRect(map.left, y + 1, map.width, LANE - 2);
    for (const m of this.copies) {
      const stall = engine[m] === WAIT;
      if (stall && done[m] <= began[m]) continue;
      const [from, to] = map.byTime ? [map.xOf(began[m]), map.xOf(done[m])] : [map.x(m), map.x(m + 1)];
      pen.fillStyle = kinds[engine[m]];
      pen.fillRect(from, y + LANE_OF[engine[m]] * LANE + 1, Math.max(1, to - from), LANE - 2);
    }
    pen.restore();
  }
}
