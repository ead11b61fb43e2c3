// The memory map of one plan: addresses upwards, steps or time to the right, a rectangle a buffer.
// A canvas, since tens of thousands of rectangles are drawn; a grid of cells finds what is pointed at.

import { KINDS, colours, onTheme } from "./palette.js";
import { bytes, element, micros, ticks } from "./units.js";

const LEFT = 74;
const TOP = 8;
const CURVE = 70;
const GAP = 14;
const BELOW = 26;
const CELLS = 256;

export class MemoryMap {
  // `data` is what planner/look/drawing.py writes: columns of rectangles and of moments.
  constructor(data, title) {
    this.data = data;
    this.count = data.offset.length;
    this.moments = data.live.length;
    this.byTime = false;
    this.filter = "";
    this.window = [0, this.moments];
    this.chosen = -1;
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": title });
    this.canvas.map = this; // for whoever looks into the page
    this.tip = element("div", { class: "tip", hidden: true });
    this.told = element("p", { class: "told", "aria-live": "polite" });
    this.node = element("div", { class: "map" }, this.canvas, this.tip, this.told);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.choose(-1));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.order = Array.from({ length: this.count }, (_, i) => i).sort(
      (a, b) => data.begin[a] - data.begin[b] || data.offset[a] - data.offset[b],
    );
    this.index();
    this.shown = new Uint8Array(this.count).fill(1);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.node);
    onTheme(() => this.draw());
  }

  // By cell of moments the rectangles in it: what is pointed at is found among a few.
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
    if ("filter" in options) this.shown = this.shown.map((_, i) => (this.matches(i) ? 1 : 0));
    this.draw();
  }

  matches(i) {
    if (!this.filter) return true;
    return this.label(i).toLowerCase().includes(this.filter.toLowerCase());
  }

  label(i) {
    const { ops, names, sources } = this.data;
    const op = this.data.op[i];
    const tensor = this.data.tensor[i] < 0 ? "workspace" : names[this.data.tensor[i]];
    return op < 0 ? tensor : `${tensor} · ${ops[op]} · ${sources[op] || ""}`;
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

  // Only what is chosen has changed: the picture is there.
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
    const shown = this.shown;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP + CURVE, this.width, this.bottom - TOP - CURVE);
    pen.clip();
    for (let pass = 0; pass < (kind ? KINDS.length : 1); pass += 1) {
      pen.fillStyle = paint.kinds[pass];
      for (const i of this.order) {
        if ((kind && kind[i] !== pass) || end[i] <= this.window[0] || begin[i] >= this.window[1]) continue;
        const x = this.x(begin[i]);
        const y = this.y(offset[i] + size[i]);
        const wide = Math.max(0.6, this.x(end[i]) - x);
        const high = Math.max(0.6, this.y(offset[i]) - y);
        if (!kind) pen.fillStyle = `hsl(${Math.round(i * 222.5) % 360} 50% 60%)`;
        pen.globalAlpha = shown[i] ? 1 : 0.1;
        // A seam between neighbours, where there is room for one.
        pen.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, high > 3 ? high - 0.6 : high);
      }
    }
    pen.restore();
  }

  curve(pen, paint) {
    const most = Math.max(1, ...[this.data.live[this.data.peak] ?? 0, this.data.arena]);
    pen.beginPath();
    const floor = TOP + CURVE;
    pen.moveTo(LEFT, floor);
    for (let m = this.window[0]; m < this.window[1]; m += 1) {
      const y = floor - (this.data.live[m] / most) * (CURVE - 12);
      pen.lineTo(this.x(m), y);
      pen.lineTo(this.x(m + 1), y);
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

  point(event) {
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
      this.told.textContent = lines.join("; ");
    } else this.told.textContent = "";
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

  // Arrows walk through the rectangles in the order they are made, + and - zoom, Home shows all.
  key(event) {
    const from = this.chosen < 0 ? -1 : this.order.indexOf(this.chosen);
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 };
    if (event.key in steps) {
      let to = from;
      do to += steps[event.key];
      while (to >= 0 && to < this.count && !this.shown[this.order[to]]);
      if (to >= 0 && to < this.count) this.choose(this.order[to]);
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5, this.centre());
    else if (event.key === "-") this.zoom(2, this.centre());
    else if (event.key === "Home") this.set({ window: [0, this.moments] });
    else if (event.key === "Escape") this.choose(-1);
    else return;
    event.preventDefault();
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
    const wide = Math.max(4, Math.min(this.moments, (this.window[1] - this.window[0]) * factor));
    const share = (around - this.window[0]) / (this.window[1] - this.window[0]);
    const from = Math.max(0, Math.min(this.moments - wide, Math.round(around - wide * share)));
    this.set({ window: [Math.floor(from), Math.min(this.moments, Math.ceil(from + wide))] });
  }
}
