// Memory map of one plan: addresses over steps or time, with a rectangle for each buffer.
// A canvas draws tens of thousands of rectangles; a grid of cells finds the one under the pointer.

import { Bands } from "./bands.js";
import { Gestures } from "./gestures.js";
import { Minimap } from "./minimap.js";
import { MomentTable, rowsAt } from "./moment.js";
import { KINDS, colours, onTheme } from "./palette.js";
import { ANY, Raster, Rectangles, pixel } from "./raster.js";
import { bytes, element, micros, ticks } from "./units.js";

const LEFT = 74;
const TOP = 8;
const CURVE = 130;
const GAP = 14;
const BELOW = 26;
const CELLS = 256;
const NARROWEST = 4; // moments of the narrowest window

export class MemoryMap {
  // `data` is what planner/inspect/drawing.py writes: columns of rectangles and of moments.
  // `changed` is called with the map and what was set, or `pinned`, after each change.
  constructor(data, title, changed = () => {}) {
    this.data = data;
    this.count = data.offset.length;
    this.moments = data.live.length;
    this.byTime = false;
    this.filter = "";
    this.kinds = null; // indices of the kinds that are shown, null for all
    this.only = null; // positions of the tensors that are shown, null for all
    this.left = LEFT;
    this.top = Math.max(data.arena, 1) * 1.02;
    this.window = [0, this.moments];
    this.addresses = [0, this.top];
    this.chosen = -1;
    this.pinned = -1;
    this.changed = changed;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.canvas.map = this; // for tests
    this.tip = element("div", { class: "tip", hidden: true });
    this.status = element("p", { class: "status", "aria-live": "polite" });
    this.sum = element("p", { class: "help" }, this.composition());
    this.bands = new Bands(this);
    this.minimap = new Minimap(this);
    this.table = new MomentTable(`in memory: ${title}`, (i) => this.select(i));
    this.drawing = element("div", { class: "map" }, this.canvas, this.minimap.canvas, this.tip, this.sum, this.status);
    this.node = element("div", { class: "answers" }, this.drawing, this.table.node);
    this.gestures = new Gestures(this);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.order = Array.from({ length: this.count }, (_, i) => i).sort(
      (a, b) => data.begin[a] - data.begin[b] || data.offset[a] - data.offset[b],
    );
    this.index();
    this.hasOutside = data.outside.some(Boolean);
    this.moving = Float64Array.from(data.live, (size, moment) => size + data.outside[moment]);
    this.shown = new Uint8Array(this.count).fill(1);
    this.raster = new Raster();
    this.curveRaster = new Raster();
    this.rectangles = new Rectangles(data, this.order);
    this.encode();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.drawing);
    onTheme(() => this.draw());
  }

  // The rectangles of each cell of moments, so that `find` looks at a few.
  index() {
    this.cells = Array.from({ length: CELLS }, () => []);
    const across = CELLS / Math.max(1, this.moments);
    for (let i = 0; i < this.count; i += 1) {
      const last = Math.min(CELLS - 1, Math.floor((this.data.end[i] - 1) * across));
      for (let c = Math.floor(this.data.begin[i] * across); c <= last; c += 1) this.cells[c].push(i);
    }
  }

  set(options) {
    Object.assign(this, options);
    if ("filter" in options || "kinds" in options || "only" in options) this.match();
    this.draw();
    this.changed(this, options);
  }

  // Rectangles whose tensor, op, module or source line contains the filter, of the kinds and
  // tensors that are shown.
  match() {
    const { ops, names, sources, op, tensor, kind } = this.data;
    const { kinds, only } = this;
    const pattern = this.filter.toLowerCase();
    const has = (text) => text.toLowerCase().includes(pattern);
    const [byName, scratch] = [names.map(has), has("workspace")];
    const byOp = ops.map((name, i) => has(`${name} ${sources[i] || ""}`));
    for (let i = 0; i < this.count; i += 1) {
      const named = tensor[i] < 0 ? scratch : byName[tensor[i]];
      const found = named || (op[i] >= 0 && byOp[op[i]]);
      this.shown[i] = found && (!kinds || kinds.has(kind[i])) && (!only || only.has(tensor[i])) ? 1 : 0;
    }
    this.encode();
  }

  // Set the colours of rectangles: those of `pixels`, hidden ones first.
  encode() {
    const { kind } = this.data;
    const colours = kind ? KINDS.length : ANY.length;
    this.order.forEach((i, k) => {
      this.rectangles.code[k] = this.shown[i] * colours + (kind ? kind[i] : i % colours);
    });
  }

  // Colours of rectangles as pixels, of the theme: hidden ones, then shown ones.
  pixels(paint) {
    if (this.pixelsOf !== paint) {
      this.pixelsOf = paint;
      const kinds = this.data.kind ? paint.kinds : ANY;
      this.pixelsFound = Uint32Array.from([0.1, 1].flatMap((alpha) => kinds.map((one) => pixel(one, alpha))));
    }
    return this.pixelsFound;
  }

  // Rectangles that the filter, kinds and tensors leave, in the order of their begin.
  matches() {
    return this.order.filter((i) => this.shown[i]);
  }

  // Places of all moments and of the end on the horizontal axis: steps, or times in µs.
  axis() {
    if (this.axisByTime !== this.byTime) {
      this.axisByTime = this.byTime;
      const { begin_us: us, end_us: end } = this.data;
      const at = this.byTime ? (moment) => us[moment] ?? end : (moment) => moment;
      this.axisFound = Float64Array.from({ length: this.moments + 1 }, (_, moment) => at(moment));
    }
    return this.axisFound;
  }

  at(moment) {
    return this.axis()[moment];
  }

  x(moment) {
    return this.xOf(this.at(moment));
  }

  // Horizontal place of a value of the axis: a step, or a time in µs.
  xOf(value) {
    const [from, to] = this.window;
    const first = this.at(from);
    return LEFT + ((value - first) / (this.at(to) - first || 1)) * this.width;
  }

  y(address) {
    const [low, high] = this.addresses;
    return this.bottom - ((address - low) / (high - low)) * this.height;
  }

  address(y) {
    const [low, high] = this.addresses;
    return low + ((this.bottom - y) / this.height) * (high - low);
  }

  moment(x) {
    const axis = this.axis();
    let [low, high] = this.window;
    const value = axis[low] + ((x - LEFT) / this.width) * (axis[high] - axis[low]);
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (axis[middle] <= value) low = middle;
      else high = middle;
    }
    return low;
  }

  draw() {
    const box = this.drawing.clientWidth;
    if (!box) return;
    const below = BELOW + this.bands.height;
    const tall = Math.max(340, Math.min(680, Math.round(box * 0.6))) + this.bands.height;
    const sharp = devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    const [wide, high] = [Math.round(box * sharp), Math.round(tall * sharp)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.style.height = `${tall}px`;
      [this.canvas.width, this.canvas.height] = [wide, high];
    }
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, box, tall);
    this.sharp = sharp;
    this.width = box - LEFT - 10;
    this.bottom = tall - below;
    this.height = this.bottom - TOP - CURVE - GAP;
    const paint = colours();
    pen.font = "11px system-ui, sans-serif";
    this.columns ??= [];
    this.columns.length = Math.ceil(this.width) + 1;
    for (let i = 0; i < this.columns.length; i += 1) this.columns[i] = this.moment(LEFT + i + 0.5);
    this.addressesAndBuffers(pen, paint);
    this.curve(pen, paint);
    this.marks(pen, paint);
    this.bands.draw(pen, paint, this.bottom + BELOW);
    this.minimap.draw();
    this.copied = false;
    if (this.pinned >= 0 || this.chosen >= 0) this.copy();
    this.overlay(pen, paint);
  }

  // Copy the picture while nothing lies on it: at the first overlay, not at each frame.
  copy() {
    if (this.copied) return;
    this.copied = true;
    this.drawn = this.drawn ?? document.createElement("canvas");
    [this.drawn.width, this.drawn.height] = [this.canvas.width, this.canvas.height];
    this.drawn.getContext("2d").drawImage(this.canvas, 0, 0);
  }

  // Redraw what lies on the finished picture, with the corners of a box that is being drawn.
  mark(box = null) {
    this.copy();
    const pen = this.canvas.getContext("2d");
    pen.save();
    pen.resetTransform();
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.drawn, 0, 0);
    pen.restore();
    const paint = colours();
    this.overlay(pen, paint);
    if (!box) return;
    pen.strokeStyle = paint.text;
    pen.setLineDash([3, 3]);
    pen.strokeRect(box[0], box[1], box[2] - box[0], box[3] - box[1]);
    pen.setLineDash([]);
  }

  // The pinned moment and the chosen rectangle.
  overlay(pen, paint) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, this.width, this.bottom - TOP);
    pen.clip();
    if (this.pinned >= 0) {
      pen.fillStyle = paint.text;
      pen.globalAlpha = 0.55;
      const x = this.x(this.pinned);
      pen.fillRect(x, TOP, Math.max(1, Math.min(2, this.x(this.pinned + 1) - x)), this.bottom - TOP);
      pen.globalAlpha = 1;
    }
    if (this.chosen >= 0) this.outline(pen, paint, this.chosen);
    pen.restore();
  }

  // The rectangles with the lines and labels of the axes.
  addressesAndBuffers(pen, paint) {
    const { raster, rectangles, sharp, window } = this;
    const [lowest, highest] = this.addresses;
    raster.clear(Math.round(this.width * sharp), Math.round(this.height * sharp));
    rectangles.rows(raster, lowest, highest);
    rectangles.places(this.axis());
    rectangles.paint(raster, ...window, this.pixels(paint));
    const space = ticks(highest - lowest, 6, true)[1] || highest - lowest;
    const labels = [];
    for (let tick = Math.ceil(lowest / space) * space; tick <= highest; tick += space) {
      const row = Math.floor(raster.high * (1 - (tick - lowest) / (highest - lowest)));
      raster.under(Math.min(row, raster.high - 1), pixel(paint.line));
      labels.push(tick);
    }
    raster.put(pen, Math.round(LEFT * sharp), Math.round(this.bottom * sharp) - raster.high);
    pen.fillStyle = paint.soft;
    pen.textAlign = "right";
    for (const tick of labels) pen.fillText(bytes(tick), LEFT - 6, Math.round(this.y(tick)) + 4.5);
    pen.textAlign = "left";
    const [from, to] = window;
    const words = this.byTime
      ? [micros(this.at(from)), micros(this.at(to))]
      : [`step ${from}`, `step ${to}`];
    pen.fillText(words[0], LEFT, this.bottom + 16);
    pen.textAlign = "right";
    pen.fillText(words[1], LEFT + this.width, this.bottom + 16);
  }

  // All bytes that count, as [name, colour, base, column]: up to base, or to base and the bytes of
  // the column at a moment. The fullest is first, and each covers a part of the one before. The
  // arena counts whole: its live bytes are drawn, and above them the rest of it.
  layers(paint) {
    const { resident, live, arena, outside } = this.data;
    let base = 0;
    const fixed = resident.map(([kind, size], i) => {
      base += size;
      return [`${kind}s`, paint.resident[i % 3], base];
    });
    return [
      ["outputs outside", paint.kinds[KINDS.indexOf("output")], base + arena, outside],
      ["arena, free", paint.line, base + arena],
      ["arena, live", paint.accent, base, live],
      ...fixed.reverse(),
    ].slice(this.hasOutside ? 0 : 1);
  }

  // The peak, its moment and its parts, in words.
  composition() {
    const { peak, resident, arena, outside } = this.data;
    if (peak < 0) return "";
    const parts = resident.map(([kind, size]) => `${kind}s ${bytes(size)}`);
    parts.push(`arena ${bytes(arena)}`);
    if (outside[peak]) parts.push(`outputs outside it ${bytes(outside[peak])}`);
    return `peak ${bytes(this.used(peak))}, first at step ${peak}: ${parts.join(", ")}`;
  }

  // Bytes that count towards the budget at a moment.
  used(moment) {
    const { resident, arena, outside } = this.data;
    return resident.reduce((sum, [, size]) => sum + size, arena + (outside[moment] ?? 0));
  }

  // The stacked curve of all that counts, on one axis with the budget. Of the moments that share a
  // pixel the fullest is drawn.
  curve(pen, paint) {
    const { budget, peak } = this.data;
    const { columns, moving, curveRaster: raster, sharp, window } = this;
    const most = Math.max(1, this.used(peak), budget);
    const floor = TOP + CURVE;
    this.level = (size) => floor - (size / most) * (CURVE - 14);
    raster.clear(Math.round(this.width * sharp), Math.round(CURVE * sharp));
    const fullest = new Int32Array(raster.wide);
    for (let first = 0; first < columns.length - 1; ) {
      let past = first + 1;
      while (past < columns.length - 1 && columns[past] === columns[first]) past += 1;
      const next = past < columns.length - 1 ? columns[past] : Math.max(columns[first] + 1, window[1]);
      let found = columns[first];
      for (let m = found + 1; m < next; m += 1) if (moving[m] > moving[found]) found = m;
      fullest.fill(found, Math.round(first * sharp), Math.round(past * sharp));
      first = past;
    }
    const row = (size) => Math.round((this.level(size) - TOP) * sharp);
    const rows = new Int16Array(raster.wide);
    const layers = this.layers(paint);
    const height = (i, m) => (layers[i] ? layers[i][2] + (layers[i][3]?.[m] ?? 0) : 0);
    pen.textAlign = "right";
    pen.fillStyle = paint.soft;
    layers.forEach(([name, colour, base, column], i) => {
      if (column) {
        for (let x = 0; x < rows.length; x += 1) rows[x] = row(base + column[fullest[x]]);
        raster.below(rows, pixel(colour));
      } else raster.fill(0, raster.wide, row(base), raster.high, pixel(colour));
      const [high, low] = [height(i, fullest[0]), height(i + 1, fullest[0])].map((size) => this.level(size));
      if (low - high > 9) pen.fillText(name, LEFT - 6, (low + high) / 2 + 4);
    });
    raster.put(pen, Math.round(LEFT * sharp), Math.round(TOP * sharp));
    if (!budget) pen.fillText(bytes(most), LEFT - 6, this.level(most) + 4);
  }

  // The budget as a line of the curve's axis, and the peak at its moment.
  marks(pen, paint) {
    const { budget, peak, live } = this.data;
    if (budget > 0) {
      const y = this.level(budget);
      pen.strokeStyle = paint.alarm;
      pen.setLineDash([6, 4]);
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(LEFT + this.width, y);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = paint.alarm;
      pen.textAlign = "left";
      pen.fillText(`budget ${bytes(budget)}`, LEFT + 4, y - 4);
    }
    if (peak >= this.window[0] && peak < this.window[1] && live.length) {
      const x = (this.x(peak) + this.x(peak + 1)) / 2;
      pen.strokeStyle = paint.text;
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, TOP + CURVE);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = paint.text;
      pen.textAlign = x > LEFT + this.width - 130 ? "right" : "left";
      pen.fillText(` peak ${bytes(this.used(peak))} `, x, TOP + CURVE + 11);
    }
  }

  outline(pen, paint, i) {
    const { begin, end, offset, size } = this.data;
    const x = this.x(begin[i]);
    const y = this.y(offset[i] + size[i]);
    pen.strokeStyle = paint.text;
    pen.lineWidth = 2;
    pen.strokeRect(x, y, Math.max(2, this.x(end[i]) - x), Math.max(2, this.y(offset[i]) - y));
    pen.lineWidth = 1;
  }

  find(x, y) {
    if (x < LEFT || x > LEFT + this.width || y < TOP + CURVE || y > this.bottom) return -1;
    const moment = this.moment(x);
    const address = this.address(y);
    const { begin, end, offset, size } = this.data;
    const cell = this.cells[Math.min(CELLS - 1, Math.floor((moment * CELLS) / this.moments))];
    for (const i of cell ?? []) {
      const inside = offset[i] <= address && address < offset[i] + size[i];
      if (inside && begin[i] <= moment && moment < end[i]) return i;
    }
    return -1;
  }

  // Show `wide` moments from `from` on, shifted into the range.
  show(from, wide) {
    const first = Math.max(0, Math.min(this.moments - wide, Math.round(from)));
    if (first !== this.window[0] || wide !== this.window[1] - first) {
      this.set({ window: [first, first + wide] });
    }
  }

  // Show `tall` bytes of addresses from `low` on, shifted into the arena.
  showAddresses(low, tall) {
    const first = Math.max(0, Math.min(this.top - tall, low));
    if (first !== this.addresses[0] || first + tall !== this.addresses[1]) {
      this.set({ addresses: [first, first + tall] });
    }
  }

  fit() {
    this.set({ window: [0, this.moments], addresses: [0, this.top] });
  }

  // Choose the rectangle at a place of the canvas, and describe it beside the pointer.
  point(x, y) {
    this.choose(this.find(x, y));
    if (this.chosen < 0) return;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, this.canvas.clientWidth - 300))}px`;
    this.tip.style.top = `${y + 16}px`;
    this.tip.hidden = false;
  }

  // Pin the moment at a place of the canvas, and choose the rectangle there.
  click(x, y) {
    if (x < LEFT || x > LEFT + this.width) return;
    this.pin(this.moment(x));
    this.point(x, y);
  }

  // Pin a moment, whose contents the table lists; -1 for none.
  pin(moment) {
    this.pinned = moment;
    if (moment < 0 || moment >= this.moments) this.table.close();
    else {
      const { begin, end, begin_us: us } = this.data;
      const cell = this.cells[Math.min(CELLS - 1, Math.floor((moment * CELLS) / this.moments))];
      const there = (cell ?? []).filter((i) => begin[i] <= moment && moment < end[i]);
      const rows = rowsAt(this.data, moment, there);
      const total = rows.reduce((sum, row) => sum + row.bytes, 0);
      const when = us.length ? `, ${micros(us[moment])}` : "";
      this.table.show(`In memory at step ${moment}${when}: ${bytes(total)}`, rows);
    }
    if (this.columns) this.mark();
    this.changed(this, { pinned: moment });
  }

  choose(i) {
    if (i === this.chosen && i >= 0) return;
    const changed = this.chosen !== i;
    this.chosen = i;
    this.tip.hidden = true;
    if (i >= 0) {
      const lines = this.words(i);
      this.tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
      this.status.textContent = lines.join("; ");
    } else this.status.textContent = "";
    if (changed && this.columns) this.mark();
  }

  words(i) {
    const { begin, end, offset, size, kind, ops, sources, names, op, tensor } = this.data;
    const by = op[i];
    const lines = [tensor[i] < 0 ? "workspace" : names[tensor[i]]];
    if (kind) lines[0] += ` (${KINDS[kind[i]]})`;
    if (by >= 0) lines.push(`made by ${ops[by]}`);
    if (by >= 0 && sources[by]) lines.push(sources[by]);
    lines.push(`${bytes(size[i])} at ${offset[i].toLocaleString("en")}`);
    lines.push(`steps ${begin[i]} to ${end[i] - 1}`);
    return lines;
  }

  // Arrows select rectangles in the order of their begin, Enter pins the moment of the selected one,
  // + and - zoom, with Alt the addresses, Home shows all, Escape ends selection and pin.
  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 };
    const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key in steps) this.walk(steps[event.key]);
    else if (factor && event.altKey) this.zoomAddresses(factor, this.middle());
    else if (factor) this.zoom(factor, this.centre());
    else if (event.key === "Home") this.fit();
    else if (event.key === "Enter") this.pin(this.chosen < 0 ? Math.round(this.centre()) : this.data.begin[this.chosen]);
    else if (event.key === "Escape") {
      this.choose(-1);
      this.pin(-1);
    } else return;
    event.preventDefault();
  }

  // Select the rectangle that lies `steps` behind the chosen one, among those shown.
  walk(steps) {
    const from = this.chosen < 0 ? -1 : this.order.indexOf(this.chosen);
    let to = from;
    do to += steps;
    while (to >= 0 && to < this.count && !this.shown[this.order[to]]);
    if (to >= 0 && to < this.count) this.select(this.order[to]);
  }

  // Choose a rectangle, and scroll it into view.
  select(i) {
    const [from, to] = this.window;
    const outside = this.data.end[i] <= from || this.data.begin[i] >= to;
    if (outside) this.show(this.data.begin[i] - (to - from) / 2, to - from);
    this.choose(i);
  }

  centre() {
    if (this.chosen >= 0) return this.data.begin[this.chosen];
    return (this.window[0] + this.window[1]) / 2;
  }

  // Address about which the keyboard zooms.
  middle() {
    const { offset, size } = this.data;
    if (this.chosen >= 0) return offset[this.chosen] + size[this.chosen] / 2;
    return (this.addresses[0] + this.addresses[1]) / 2;
  }

  zoom(factor, around) {
    const [first, last] = this.window;
    const wide = Math.min(this.moments, Math.ceil(Math.max(NARROWEST, (last - first) * factor)));
    const share = (around - first) / (last - first);
    this.show(around - wide * share, wide);
  }

  zoomAddresses(factor, around) {
    const [low, high] = this.addresses;
    const tall = Math.min(this.top, Math.max(this.top / 4096, (high - low) * factor));
    this.showAddresses(around - (tall * (around - low)) / (high - low), tall);
  }

  // Zoom to the box between two places of the canvas.
  zoomTo(x, y, right, above) {
    const [from, to] = [this.moment(Math.min(x, right)), this.moment(Math.max(x, right)) + 1];
    const low = Math.max(0, this.address(Math.max(y, above)));
    const high = Math.min(this.top, this.address(Math.min(y, above)));
    const tall = Math.max(this.top / 4096, high - low);
    this.set({
      window: [from, Math.min(this.moments, Math.max(to, from + NARROWEST))],
      addresses: high > low ? [low, low + tall] : this.addresses,
    });
  }

  // By tensor the kinds of its buffers, in the order of their begin.
  kindsOfTensors() {
    const found = new Map();
    const { tensor, kind } = this.data;
    for (const i of this.order) if (tensor[i] >= 0) found.set(tensor[i], `${found.get(tensor[i]) ?? ""} ${kind?.[i]}`);
    return found;
  }
}
