// Overhead over peak, with steps for each method and the proved lower bound as a shaded floor.

import { colours, onTheme } from "./palette.js";
import { bytes, element, percent, ticks } from "./units.js";

const MARGIN = { left: 62, right: 14, top: 12, bottom: 30 };
const HUES = [214, 24, 150, 280, 350, 50, 190, 100];

function hue(place) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${HUES[place % HUES.length]} 65% ${dark ? 66 : 40}%)`;
}

// The methods with their colours, as items of a list.
export function legendOf(methods) {
  const swatches = methods.map(() => element("span", { class: "swatch" }));
  const paint = () => swatches.forEach((swatch, i) => (swatch.style.background = hue(i)));
  paint();
  onTheme(paint);
  return methods.map((method, i) => element("li", {}, swatches[i], method));
}

export class Pareto {
  // `cells` have plans; `open(cell)` is called after a click on a point.
  constructor(cells, methods, open) {
    this.cells = cells;
    this.methods = methods;
    this.open = open;
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": "Overhead over peak bytes, steps for each method; the table below has the figures",
    });
    this.canvas.plot = this; // for tests
    this.canvas.addEventListener("click", (event) => {
      const cell = this.near(event);
      if (cell) this.open(cell);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const cell = this.near(event);
      this.canvas.style.cursor = cell ? "pointer" : "default";
      this.canvas.title = cell
        ? `${cell.method}, ${cell.asked}: ${bytes(cell.peak_bytes)}, ${percent(cell.overhead)}`
        : "";
    });
    this.node = element("div", {}, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.node);
    onTheme(() => this.draw());
  }

  show(cells) {
    this.cells = cells;
    this.draw();
  }

  near(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let least = 14;
    for (const cell of this.cells) {
      const far = Math.hypot(this.x(cell.peak_bytes) - at[0], this.y(cell.overhead) - at[1]);
      if (far < least) [least, best] = [far, cell];
    }
    return best;
  }

  x(value) {
    const { left, right } = MARGIN;
    const share = (value - this.from) / (this.to - this.from || 1);
    return left + share * (this.wide - left - right);
  }

  y(value) {
    const { top, bottom } = MARGIN;
    return this.tall - bottom - ((value - this.low) / (this.high - this.low)) * (this.tall - top - bottom);
  }

  draw() {
    this.wide = this.node.clientWidth;
    if (!this.wide || !this.cells.length) return;
    this.tall = Math.max(220, Math.min(380, this.wide * 0.4));
    const sharp = devicePixelRatio || 1;
    this.canvas.style.height = `${this.tall}px`;
    this.canvas.width = Math.round(this.wide * sharp);
    this.canvas.height = Math.round(this.tall * sharp);
    const pen = this.canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const peaks = this.cells.map((cell) => cell.peak_bytes);
    const room = (Math.max(...peaks) - Math.min(...peaks)) * 0.05 || Math.max(...peaks) * 0.05;
    this.from = Math.min(...peaks) - room;
    this.to = Math.max(...peaks) + room;
    this.low = Math.min(0, ...this.cells.map((cell) => cell.overhead));
    this.high = Math.max(0.01, ...this.cells.map((cell) => cell.overhead)) * 1.08;
    const paint = colours();
    pen.font = "11px system-ui, sans-serif";
    this.axes(pen, paint);
    this.floor(pen, paint);
    // Points of equal plans are rings around each other.
    this.methods.forEach((method, place) => {
      this.line(pen, method, hue(place), 4.5 + 1.5 * (this.methods.length - 1 - place));
    });
  }

  axes(pen, paint) {
    pen.strokeStyle = paint.line;
    pen.fillStyle = paint.soft;
    pen.textAlign = "right";
    for (const tick of ticks(this.high, 5, false)) {
      const y = this.y(tick);
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(this.wide - MARGIN.right, y);
      pen.stroke();
      pen.fillText(percent(tick), MARGIN.left - 6, y + 4);
    }
    const [, step] = ticks(this.to - this.from, Math.max(2, Math.floor(this.wide / 160)), true);
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = this.x(at);
      pen.textAlign = x > this.wide - MARGIN.right - 30 ? "right" : "center";
      pen.fillText(bytes(at), x, this.tall - 10);
    }
  }

  // A bound holds for its budget and for all smaller ones.
  floor(pen, paint) {
    const known = this.cells.filter((cell) => cell.bound != null);
    known.sort((a, b) => b.budget_bytes - a.budget_bytes);
    if (!known.length) return;
    const bottom = this.y(this.low);
    pen.beginPath();
    let height = this.low;
    const first = Math.min(this.x(known[0].budget_bytes), this.wide - MARGIN.right);
    pen.moveTo(first, bottom);
    for (const cell of known) {
      const x = Math.max(MARGIN.left, Math.min(this.x(cell.budget_bytes), this.wide - MARGIN.right));
      pen.lineTo(x, this.y(height));
      height = Math.max(height, cell.bound);
      pen.lineTo(x, this.y(height));
    }
    pen.lineTo(MARGIN.left, this.y(height));
    pen.lineTo(MARGIN.left, bottom);
    pen.globalAlpha = 0.18;
    pen.fillStyle = paint.alarm;
    pen.fill();
    pen.globalAlpha = 1;
  }

  line(pen, method, colour, radius) {
    const own = this.cells.filter((cell) => cell.method === method);
    own.sort((a, b) => a.peak_bytes - b.peak_bytes);
    pen.strokeStyle = colour;
    pen.fillStyle = colour;
    pen.beginPath();
    // A plan meets every larger budget too: steps, down to the next plan that costs less.
    let height = null;
    for (const cell of own) {
      const x = this.x(cell.peak_bytes);
      if (height != null) pen.lineTo(x, this.y(height));
      height = height == null ? cell.overhead : Math.min(height, cell.overhead);
      pen.lineTo(x, this.y(height));
    }
    pen.stroke();
    for (const cell of own) {
      pen.beginPath();
      pen.arc(this.x(cell.peak_bytes), this.y(cell.overhead), radius, 0, 2 * Math.PI);
      pen.fill();
    }
  }
}
