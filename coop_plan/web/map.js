// Memory map of one plan: addresses over steps or time, with a rectangle for each buffer.
// A canvas draws tens of thousands of rectangles; a grid of cells finds the one under the pointer.

import { KINDS, colours, onTheme } from "./palette.js";
import { Raster, manyPixels, pixel } from "./raster.js";
import { bytes, element, micros, ticks } from "./units.js";

const LEFT = 74;
const TOP = 8;
const CURVE = 130;
const GAP = 14;
const BELOW = 26;
const CELLS = 256;

export class MemoryMap {
  // `data` is what planner/inspect/drawing.py writes: columns of rectangles and of moments.
  constructor(data, title) {
    this.data = data;
    this.count = data.offset.length;
    this.moments = data.live.length;
    this.byTime = false;
    this.filter = "";
    this.window = [0, this.moments];
    this.chosen = -1;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.canvas.map = this; // for tests
    this.tip = element("div", { class: "tip", hidden: true });
    this.status = element("p", { class: "status", "aria-live": "polite" });
    this.sum = element("p", { class: "help" }, this.composition());
    this.node = element("div", { class: "map" }, this.canvas, this.tip, this.sum, this.status);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.choose(-1));
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointerup", () => (this.held = null));
    this.canvas.addEventListener("pointercancel", () => (this.held = null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.order = Array.from({ length: this.count }, (_, i) => i).sort(
      (a, b) => data.begin[a] - data.begin[b] || data.offset[a] - data.offset[b],
    );
    this.index();
    this.shown = new Uint8Array(this.count).fill(1);
    this.raster = new Raster();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.node);
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
    if ("filter" in options) this.match();
    this.draw();
  }

  // Rectangles whose tensor, op, module or source line contains the filter.
  match() {
    const { ops, names, sources, op, tensor } = this.data;
    const pattern = this.filter.toLowerCase();
    const has = (text) => text.toLowerCase().includes(pattern);
    const [byName, scratch] = [names.map(has), has("workspace")];
    const byOp = ops.map((name, i) => has(`${name} ${sources[i] || ""}`));
    for (let i = 0; i < this.count; i += 1) {
      const named = tensor[i] < 0 ? scratch : byName[tensor[i]];
      this.shown[i] = named || (op[i] >= 0 && byOp[op[i]]) ? 1 : 0;
    }
  }

  at(moment) {
    return this.byTime ? this.data.begin_us[moment] ?? this.data.end_us : moment;
  }

  x(moment) {
    const [from, to] = this.window;
    const first = this.at(from);
    return LEFT + ((this.at(moment) - first) / (this.at(to) - first || 1)) * this.width;
  }

  y(address) {
    return this.bottom - (address / this.top) * this.height;
  }

  moment(x) {
    let low = this.window[0];
    let high = this.window[1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.x(middle) <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  draw() {
    const box = this.node.clientWidth;
    if (!box) return;
    const tall = Math.max(340, Math.min(680, Math.round(box * 0.6)));
    const sharp = devicePixelRatio || 1;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.round(box * sharp);
    this.canvas.height = Math.round(tall * sharp);
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    this.width = box - LEFT - 10;
    this.bottom = tall - BELOW;
    this.height = this.bottom - TOP - CURVE - GAP;
    this.top = Math.max(this.data.arena, 1) * 1.02;
    const paint = colours();
    pen.font = "11px system-ui, sans-serif";
    this.axes(pen, paint);
    this.rectangles(pen, paint);
    this.curve(pen, paint);
    this.marks(pen, paint);
    this.drawn = this.drawn ?? document.createElement("canvas");
    [this.drawn.width, this.drawn.height] = [this.canvas.width, this.canvas.height];
    this.drawn.getContext("2d").drawImage(this.canvas, 0, 0);
    if (this.chosen >= 0) this.outline(pen, paint, this.chosen);
  }

  // Redraw the chosen rectangle on the finished picture.
  mark() {
    const pen = this.canvas.getContext("2d");
    pen.save();
    pen.resetTransform();
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.drawn, 0, 0);
    pen.restore();
    if (this.chosen >= 0) this.outline(pen, colours(), this.chosen);
  }

  axes(pen, paint) {
    pen.strokeStyle = paint.line;
    pen.fillStyle = paint.soft;
    pen.textAlign = "right";
    for (const tick of ticks(this.top, 6, true)) {
      const y = Math.round(this.y(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(LEFT + this.width, y);
      pen.stroke();
      pen.fillText(bytes(tick), LEFT - 6, y + 4);
    }
    pen.textAlign = "left";
    const [from, to] = this.window;
    const words = this.byTime
      ? [micros(this.at(from)), micros(this.at(to))]
      : [`step ${from}`, `step ${to}`];
    pen.fillText(words[0], LEFT, this.bottom + 16);
    pen.textAlign = "right";
    pen.fillText(words[1], LEFT + this.width, this.bottom + 16);
  }

  rectangles(pen, paint) {
    const { begin, end, offset, size, kind } = this.data;
    const { shown, raster, window } = this;
    const sharp = devicePixelRatio || 1;
    raster.clear(Math.round(this.width * sharp), Math.round(this.height * sharp));
    const { wide, high } = raster;
    const [low, past] = window;
    const [first, last] = [this.at(low), this.at(past)];
    const [scaleX, scaleY] = [wide / (last - first || 1), high / this.top];
    const colour = [0.1, 1].map((alpha) =>
      kind ? paint.kinds.map((one) => pixel(one, alpha)) : manyPixels(72, alpha),
    );
    for (let i = 0; i < this.count; i += 1) {
      if (end[i] <= low || begin[i] >= past) continue;
      raster.paint(
        (this.at(begin[i]) - first) * scaleX,
        (this.at(end[i]) - first) * scaleX,
        high - (offset[i] + size[i]) * scaleY,
        high - offset[i] * scaleY,
        colour[shown[i]][kind ? kind[i] : i % 72],
      );
    }
    pen.imageSmoothingEnabled = false;
    pen.drawImage(raster.done(), LEFT, this.bottom - this.height, this.width, this.height);
  }

  // All bytes that count, as [name, colour, bytes at a moment], from the bottom upwards. The arena
  // counts whole: its live bytes are drawn, and above them the rest of it.
  layers(paint) {
    const { resident, live, arena, outside } = this.data;
    const fixed = resident.map(([kind, size], i) => [`${kind}s`, paint.resident[i % 3], () => size]);
    return [
      ...fixed,
      ["arena, live", paint.accent, (m) => live[m]],
      ["arena, free", paint.line, (m) => Math.max(0, arena - live[m])],
      ["outputs outside", paint.kinds[KINDS.indexOf("output")], (m) => outside[m]],
    ].filter(([, , size]) => live.some((_, m) => size(m)));
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
    const { live, outside, budget, peak } = this.data;
    const most = Math.max(1, this.used(peak), budget);
    const floor = TOP + CURVE;
    this.level = (size) => floor - (size / most) * (CURVE - 14);
    const [from, to] = this.window;
    const at = [];
    for (let m = from; m < to; ) {
      const x = this.x(m);
      let fullest = m;
      let next = m + 1;
      for (; next < to && this.x(next) < x + 0.5; next += 1) {
        if (live[next] + outside[next] > live[fullest] + outside[fullest]) fullest = next;
      }
      at.push([x, this.x(next), fullest]);
      m = next;
    }
    const below = at.map(() => 0);
    pen.textAlign = "right";
    for (const [name, colour, size] of this.layers(paint)) {
      const [low, high] = [below[0], below[0] + size(at[0]?.[2] ?? 0)].map((part) => this.level(part));
      pen.fillStyle = paint.soft;
      if (low - high > 9) pen.fillText(name, LEFT - 6, (low + high) / 2 + 4);
      pen.beginPath();
      at.forEach(([x, past, m], i) => {
        const low = this.level(below[i]);
        below[i] += size(m);
        pen.rect(x, this.level(below[i]), past - x, low - this.level(below[i]));
      });
      pen.fillStyle = colour;
      pen.fill();
    }
    pen.fillStyle = paint.soft;
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
    const address = ((this.bottom - y) / this.height) * this.top;
    const { begin, end, offset, size } = this.data;
    const cell = this.cells[Math.min(CELLS - 1, Math.floor((moment * CELLS) / this.moments))];
    for (const i of cell ?? []) {
      const inside = offset[i] <= address && address < offset[i] + size[i];
      if (inside && begin[i] <= moment && moment < end[i]) return i;
    }
    return -1;
  }

  // Start to drag the window with the pointer.
  grab(event) {
    if (event.button !== 0) return;
    this.held = { x: event.clientX, window: this.window };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const [from, to] = this.held.window;
    const moved = Math.round(((this.held.x - event.clientX) * (to - from)) / this.width);
    this.show(from + moved, to - from);
  }

  // Show `wide` moments from `from` on, shifted into the range.
  show(from, wide) {
    const first = Math.max(0, Math.min(this.moments - wide, Math.round(from)));
    if (first !== this.window[0] || wide !== this.window[1] - first) {
      this.set({ window: [first, first + wide] });
    }
  }

  point(event) {
    if (this.held) return this.drag(event);
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    this.choose(this.find(x, y));
    if (this.chosen < 0) return;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, box.width - 300))}px`;
    this.tip.style.top = `${y + 16}px`;
    this.tip.hidden = false;
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
    if (changed && this.drawn) this.mark();
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

  // Arrows select rectangles in the order of their start, + and - zoom, Home shows all.
  key(event) {
    const from = this.chosen < 0 ? -1 : this.order.indexOf(this.chosen);
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 };
    if (event.key in steps) {
      let to = from;
      do to += steps[event.key];
      while (to >= 0 && to < this.count && !this.shown[this.order[to]]);
      if (to >= 0 && to < this.count) this.select(this.order[to]);
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5, this.centre());
    else if (event.key === "-") this.zoom(2, this.centre());
    else if (event.key === "Home") this.set({ window: [0, this.moments] });
    else if (event.key === "Escape") this.choose(-1);
    else return;
    event.preventDefault();
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

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    this.zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, this.moment(event.clientX - box.left));
  }

  zoom(factor, around) {
    const [first, last] = this.window;
    const wide = Math.ceil(Math.max(4, (last - first) * factor));
    const share = (around - first) / (last - first);
    this.show(around - wide * share, Math.min(this.moments, wide));
  }
}
