// Minimap: live bytes over the whole plan, with the window of the memory map, which a drag moves.

import { colours, onTheme } from "./palette.js";
import { element } from "./units.js";

const TALL = 34;

export class Minimap {
  constructor(map) {
    this.map = map;
    this.canvas = element("canvas", { class: "minimap", "aria-hidden": "true" });
    this.back = document.createElement("canvas");
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.centre(event);
    });
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.centre(event));
    onTheme(() => (this.wide = 0));
  }

  // Centre the window at the pointer.
  centre(event) {
    const box = this.canvas.getBoundingClientRect();
    const [from, to] = this.map.window;
    const share = (event.clientX - box.left - this.map.left) / this.map.width;
    this.map.show(share * this.map.moments - (to - from) / 2, to - from);
  }

  // The curve is drawn once for each width; then only the window moves.
  draw() {
    const { map } = this;
    const sharp = devicePixelRatio || 1;
    const wide = map.left + map.width + 10;
    if (wide !== this.wide) {
      this.wide = wide;
      this.canvas.style.height = `${TALL}px`;
      for (const canvas of [this.canvas, this.back]) {
        [canvas.width, canvas.height] = [Math.round(wide * sharp), Math.round(TALL * sharp)];
        canvas.getContext("2d").scale(sharp, sharp);
      }
      this.curve(this.back.getContext("2d"));
    }
    const pen = this.canvas.getContext("2d");
    const paint = colours();
    pen.clearRect(0, 0, wide, TALL);
    pen.drawImage(this.back, 0, 0, wide, TALL);
    const [from, to] = map.window.map((moment) => map.left + (moment / map.moments) * map.width);
    pen.fillStyle = paint.accent;
    pen.globalAlpha = 0.18;
    pen.fillRect(from, 0, Math.max(2, to - from), TALL);
    pen.globalAlpha = 1;
    pen.strokeStyle = paint.accent;
    pen.strokeRect(from + 0.5, 0.5, Math.max(2, to - from) - 1, TALL - 1);
  }

  curve(pen) {
    const { live } = this.map.data;
    const paint = colours();
    const most = live.reduce((best, size) => Math.max(best, size), 1);
    pen.clearRect(0, 0, this.wide, TALL);
    pen.fillStyle = paint.soft;
    pen.beginPath();
    for (let pixel = 0; pixel < this.map.width; pixel += 1) {
      const first = Math.floor((pixel / this.map.width) * live.length);
      const past = Math.max(first + 1, Math.floor(((pixel + 1) / this.map.width) * live.length));
      let size = 0;
      for (let m = first; m < past; m += 1) size = Math.max(size, live[m] ?? 0);
      const high = (size / most) * (TALL - 4);
      pen.rect(this.map.left + pixel, TALL - high, 1, high);
    }
    pen.fill();
  }
}
