// Memory map of one plan: addresses over steps or time, with a rectangle for each buffer.
// A canvas draws tens of thousands of rectangles; a grid of cells finds the one under the pointer.

import { KINDS, colours, onTheme } from "./palette.js";
import { Raster, manyPixels, pixel } from "./raster.js";
import { bytes, element, micros, ticks } from "./units.js";

const LEFT = 74;
const TOP = 8;
const CURVE = 70;
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
    this.node = element("div", { class: "map" }, this.canvas, this.tip, this.status);
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
    const tall = Math.max(280, Math.min(620, Math.round(box * 0.55)));
    const sharp = devicePixelRatio || 1;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.round(box * sharp);
    this.canvas.height = Math.round(tall * sharp);
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    this.width = box - LEFT - 10;
    this.bottom = tall - BELOW;
    this.height = this.bottom - TOP - CURVE - GAP;
    const budget = this.data.budget_arena;
    this.top = Math.max(this.data.arena, budget <= this.data.arena * 1.6 ? budget : 0, 1) * 1.02;
    const paint = colours();
    pen.font = "11px system-ui, sans-serif";
    this.axes(pen, paint);
    this.rectangles(pen, paint);
    this.curve(pen, paint);
    this.marks(pen, paint, budget);
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

  // Live bytes by moment; the maximum of the moments that share a pixel.
  curve(pen, paint) {
    const { live } = this.data;
    const most = Math.max(1, live[this.data.peak] ?? 0, this.data.arena);
    pen.beginPath();
    const floor = TOP + CURVE;
    pen.moveTo(LEFT, floor);
    const [from, to] = this.window;
    for (let m = from; m < to; ) {
      const x = this.x(m);
      let highest = live[m];
      let next = m + 1;
      for (; next < to && this.x(next) < x + 0.5; next += 1) highest = Math.max(highest, live[next]);
      const y = floor - (highest / most) * (CURVE - 12);
      pen.lineTo(x, y);
      pen.lineTo(this.x(next), y);
      m = next;
    }
    pen.lineTo(LEFT + this.width, floor);
    pen.globalAlpha = 0.25;
    pen.fillStyle = paint.accent;
    pen.fill();
    pen.globalAlpha = 1;
    pen.strokeStyle = paint.accent;
    pen.stroke();
    pen.fillStyle = paint.soft;
    pen.textAlign = "right";
    pen.fillText("live bytes", LEFT - 6, floor - 2);
    pen.fillText(bytes(most), LEFT - 6, TOP + 16);
  }

  marks(pen, paint, budget) {
    if (budget > 0 && budget <= this.top) {
      const y = this.y(budget);
      pen.strokeStyle = paint.alarm;
      pen.setLineDash([6, 4]);
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(LEFT + this.width, y);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = paint.alarm;
      pen.textAlign = "right";
      pen.fillText("budget", LEFT + this.width - 4, y - 4);
    }
    const peak = this.data.peak;
    if (peak >= this.window[0] && peak < this.window[1]) {
      const x = (this.x(peak) + this.x(peak + 1)) / 2;
      pen.strokeStyle = paint.text;
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(x, TOP);
      pen.lineTo(x, this.bottom);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = paint.text;
      pen.textAlign = x > LEFT + this.width - 130 ? "right" : "left";
      pen.fillText(` peak ${bytes(this.data.live[peak])} `, x, TOP + 8);
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
