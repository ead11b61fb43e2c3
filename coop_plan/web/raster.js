// Rasterizer for tens of thousands of rectangles, most of them smaller than a pixel.

export class Raster {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.pen = this.canvas.getContext("2d");
    this.image = null;
    this.small = new Int32Array(1 << 12);
  }

  // Clear the picture, and set its size in pixels.
  clear(wide, high) {
    if (this.wide !== wide || this.high !== high) {
      [this.canvas.width, this.canvas.height] = [this.wide, this.high] = [wide, high];
      this.image = this.pen.createImageData(wide, high);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else this.pixels.fill(0);
    this.count = 0; // entries of `small` in use
  }

  // Paint a rectangle by its edges in pixels (y downwards); one without a pixel is left to `done`.
  paint(left, right, top, bottom, colour) {
    const from = Math.max(0, Math.round(left));
    const to = Math.min(this.wide, Math.round(right));
    const high = Math.max(0, Math.round(top));
    const low = Math.min(this.high, Math.round(bottom));
    if (to <= from || low <= high) {
      if (this.count + 5 > this.small.length) {
        const more = new Int32Array(2 * this.small.length);
        more.set(this.small);
        this.small = more;
      }
      const { small, count } = this;
      small[count] = from;
      small[count + 1] = to;
      small[count + 2] = high;
      small[count + 3] = low;
      small[count + 4] = colour;
      this.count += 5;
      return;
    }
    // Leave a seam between neighbours that are wide enough.
    this.fill(from, to - (to - from > 3), high, low - (low - high > 3), colour);
  }

  fill(from, to, high, low, colour) {
    const { pixels, wide } = this;
    for (let row = high * wide; row < low * wide; row += wide) {
      if (to - from > 16) pixels.fill(colour, row + from, row + to);
      else for (let at = row + from; at < row + to; at += 1) pixels[at] = colour;
    }
  }

  // Paint rectangles that are smaller than a pixel on empty pixels, and return the canvas.
  done() {
    const { small, pixels, count } = this;
    for (let i = 0; i < count; i += 5) {
      const from = Math.min(small[i], this.wide - 1);
      const to = Math.max(from + 1, small[i + 1]);
      const high = Math.min(small[i + 2], this.high - 1);
      const low = Math.max(high + 1, small[i + 3]);
      const middle = ((high + low) >> 1) * this.wide + ((from + to) >> 1);
      if (pixels[middle]) continue;
      if (to - from === 1 && low - high === 1) pixels[high * this.wide + from] = small[i + 4];
      else this.fill(from, to, high, low, small[i + 4]);
    }
    this.pen.putImageData(this.image, 0, 0);
    return this.canvas;
  }
}

// A colour (#rrggbb, opacity 0 to 1) as a pixel value.
export function pixel(colour, alpha = 1) {
  const [red, green, blue] = [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
  const bytesOf = new Uint8ClampedArray([red, green, blue, 255 * alpha]);
  return new Uint32Array(bytesOf.buffer)[0];
}

// Colours of buffers without a kind; consecutive ones differ.
export function manyPixels(count, alpha = 1) {
  return Array.from({ length: count }, (_, i) => {
    const angle = (i * 222.5) / 60;
    const part = (shift) => 0.6 + 0.2 * Math.max(-1, Math.min(1, 2 * Math.cos(((angle + shift) * Math.PI) / 3)));
    const hex = [0, -2, 2].map((shift) => Math.round(255 * part(shift)).toString(16).padStart(2, "0"));
    return pixel(`#${hex.join("")}`, alpha);
  });
}
