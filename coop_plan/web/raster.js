// Rasterizer for tens of thousands of rectangles, most of them smaller than a pixel.

// Pixels of a part of a canvas, 0 where nothing is painted.
export class Raster {
  // Empty all pixels, and set their number.
  clear(wide, high) {
    if (this.wide !== wide || this.high !== high) {
      [this.wide, this.high] = [wide, high];
      this.image = new ImageData(wide, high);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else this.pixels.fill(0);
  }

  fill(from, to, high, low, colour) {
    const { pixels, wide } = this;
    for (let row = high * wide; row < low * wide; row += wide) {
      if (to - from > 16) pixels.fill(colour, row + from, row + to);
      else for (let at = row + from; at < row + to; at += 1) pixels[at] = colour;
    }
  }

  // Paint the empty pixels of a row.
  under(row, colour) {
    const { pixels, wide } = this;
    for (let at = row * wide; at < (row + 1) * wide; at += 1) pixels[at] ||= colour;
  }

  // Paint each column of pixels from a row downwards.
  below(rows, colour) {
    const { pixels, wide, high } = this;
    const first = rows.reduce((least, row) => Math.min(least, row), high);
    for (let row = Math.max(0, first), at = row * wide; row < high; row += 1) {
      for (let x = 0; x < wide; x += 1, at += 1) if (rows[x] <= row) pixels[at] = colour;
    }
  }

  // Replace the pixels of the canvas from (x, y) on.
  put(pen, x, y) {
    pen.putImageData(this.image, x, y);
  }
}

// Columns of rectangles, in the order of their begin. A frame looks at each of those in view.
export class Rectangles {
  constructor({ begin, end, offset, size }, order) {
    this.order = order;
    this.begin = Int32Array.from(order, (i) => begin[i]);
    this.end = Int32Array.from(order, (i) => end[i]);
    this.low = Float64Array.from(order, (i) => offset[i]);
    this.past = Float64Array.from(order, (i) => offset[i] + size[i]);
    let latest = 0;
    this.latest = this.end.map((moment) => (latest = Math.max(latest, moment))); // end up to each
    this.code = new Uint8Array(order.length); // index of the colour
    this.top = new Int16Array(order.length); // row of pixels, downwards
    this.bottom = new Int16Array(order.length); // row past the last one
    this.tall = new Uint8Array(order.length); // 0: not in view, 1: less than a pixel high, 2: more
    this.middle = new Int32Array(order.length); // first pixel of the middle row
  }

  // Set the rows of pixels of all rectangles. They change only with the addresses in view.
  rows({ wide, high }, lowest, highest) {
    const view = `${lowest} ${highest} ${wide} ${high}`;
    if (this.view === view) return;
    this.view = view;
    const scale = high / (highest - lowest);
    for (let i = 0; i < this.begin.length; i += 1) {
      const inView = this.low[i] < highest && this.past[i] > lowest;
      const top = Math.round(Math.max(0, high - (this.past[i] - lowest) * scale));
      const bottom = Math.round(Math.min(high, high - (this.low[i] - lowest) * scale));
      this.tall[i] = inView ? 1 + (bottom > top) : 0;
      this.top[i] = Math.min(top, high - 1);
      this.bottom[i] = Math.max(bottom, this.top[i] + 1);
      this.middle[i] = ((this.top[i] + this.bottom[i]) >> 1) * wide;
    }
  }

  // Set the begins and ends by the places of all moments on the horizontal axis.
  places(axis) {
    if (this.axis === axis) return;
    this.axis = axis;
    this.start = Float64Array.from(this.begin, (moment) => axis[moment]);
    this.stop = Float64Array.from(this.end, (moment) => axis[moment]);
  }

  // Paint the rectangles of the moments [from, to). One of less than a pixel is painted as a pixel,
  // if that is empty.
  paint(raster, from, to, colours) {
    const { start, stop, top, bottom, tall, middle, code } = this;
    const { pixels, wide } = raster;
    const first = this.axis[from];
    const scale = wide / (this.axis[to] - first || 1);
    const last = firstAbove(this.begin, to - 1) - 1;
    for (let i = firstAbove(this.latest, from); i <= last; i += 1) {
      const past = (stop[i] - first) * scale;
      if (past <= 0 || !tall[i]) continue;
      const x = (start[i] - first) * scale;
      let left = x > 0 ? (x + 0.5) | 0 : 0;
      let right = past < wide ? (past + 0.5) | 0 : wide;
      if (right > left && tall[i] > 1) {
        // Leave a seam between neighbours that are wide enough.
        const low = bottom[i] - (bottom[i] - top[i] > 3 ? 1 : 0);
        raster.fill(left, right - (right - left > 3 ? 1 : 0), top[i], low, colours[code[i]]);
        continue;
      }
      if (left >= wide) left = wide - 1;
      if (right <= left) right = left + 1;
      const at = middle[i] + ((left + right) >> 1);
      if (pixels[at]) continue;
      if (right - left === 1 && tall[i] === 1) pixels[at] = colours[code[i]];
      else raster.fill(left, right, top[i], bottom[i], colours[code[i]]);
    }
  }
}

// Position of the first of ascending values above a limit.
function firstAbove(values, limit) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const at = (low + high) >> 1;
    if (values[at] > limit) high = at;
    else low = at + 1;
  }
  return low;
}

// A colour (#rrggbb, opacity 0 to 1) as a pixel value.
export function pixel(colour, alpha = 1) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
  const bytesOf = new Uint8ClampedArray([red, green, blue, 255 * alpha]);
  return new Uint32Array(bytesOf.buffer)[0];
}

// Colours of buffers without a kind; consecutive ones differ.
export const ANY = Array.from({ length: 72 }, (_, i) => {
  const angle = (i * 222.5) / 60;
  const part = (shift) => 0.6 + 0.2 * Math.max(-1, Math.min(1, 2 * Math.cos(((angle + shift) * Math.PI) / 3)));
  const hex = [0, -2, 2].map((shift) => Math.round(255 * part(shift)).toString(16).padStart(2, "0"));
  return `#${hex.join("")}`;
});
