// Gestures on a memory map, by mouse, pen, touch and wheel.
//
// A drag scrolls, with Shift it draws a box to zoom into; two fingers zoom. A click or a tap pins a
// moment; a double click shows everything. The wheel zooms along the steps, with Alt along the
// addresses.

const STILL = 5; // pixels that a click may move

export class Gestures {
  constructor(map) {
    this.map = map;
    this.pointers = new Map();
    this.start = null;
    const on = (name, act, options) => map.canvas.addEventListener(name, act, options);
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    on("pointerup", (event) => this.up(event, true));
    on("pointercancel", (event) => this.up(event, false));
    on("pointerleave", () => !this.pointers.size && map.choose(-1));
    on("dblclick", () => map.fit());
    on("wheel", (event) => this.wheel(event), { passive: false });
  }

  place(event) {
    const box = this.map.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (event.button !== 0) return;
    this.map.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.place(event));
    const { window, addresses } = this.map;
    const at = [...this.pointers.values()];
    this.start = { at, window, addresses, box: event.shiftKey, moved: at.length > 1 };
  }

  move(event) {
    const at = this.place(event);
    if (!this.pointers.has(event.pointerId)) return this.map.point(...at);
    this.pointers.set(event.pointerId, at);
    const now = [...this.pointers.values()];
    const [[x, y]] = this.start.at;
    if (now.length === 1 && Math.hypot(at[0] - x, at[1] - y) < STILL) return;
    this.start.moved = true;
    if (now.length > 1) this.pinch(now);
    else if (this.start.box) this.map.mark([x, y, ...at]);
    else this.drag(at);
  }

  up(event, done) {
    const at = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!at || !this.start || this.pointers.size) return;
    const { start, map } = this;
    this.start = null;
    if (!done) return;
    if (!start.moved) map.click(...at);
    else if (start.box) map.zoomTo(...start.at[0], ...at);
  }

  drag([x, y]) {
    const { map, start } = this;
    const [from, to] = start.window;
    map.show(from + Math.round(((start.at[0][0] - x) * (to - from)) / map.width), to - from);
    const [low, high] = start.addresses;
    map.showAddresses(low + ((y - start.at[0][1]) * (high - low)) / map.height, high - low);
  }

  // The moments under both fingers stay under them.
  pinch(now) {
    const { map, start } = this;
    if (start.at.length < 2) return;
    const [from, to] = start.window;
    const [a, b] = [Math.min(start.at[0][0], start.at[1][0]), Math.max(start.at[0][0], start.at[1][0])];
    const [c, d] = [Math.min(now[0][0], now[1][0]), Math.max(now[0][0], now[1][0])];
    const perPixel = (to - from) / map.width;
    const scale = (Math.max(1, b - a) / Math.max(1, d - c)) * perPixel;
    const wide = Math.max(4, Math.min(map.moments, Math.round(scale * map.width)));
    map.show(from + (a - map.left) * perPixel - (c - map.left) * scale, wide);
  }

  wheel(event) {
    const { map } = this;
    event.preventDefault();
    const [x, y] = this.place(event);
    const turned = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (turned && !event.shiftKey) {
      const [from, to] = map.window;
      map.show(from + (event.deltaX * (to - from)) / map.width, to - from);
      return;
    }
    const factor = event.deltaY + event.deltaX > 0 ? 1.25 : 0.8;
    if (event.altKey) map.zoomAddresses(factor, map.address(y));
    else map.zoom(factor, map.moment(x));
  }
}
