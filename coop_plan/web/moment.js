// Table of all that is in memory at one moment of a memory map.

import { KINDS } from "./palette.js";
import { bytes, element, percent, splitSource } from "./units.js";

const FIRST = 100; // rows that are shown at first
const COLUMNS = ["tensor", "bytes", "share", "state", "op", "module", "line"];
const NUMBERS = new Set(["bytes", "share"]);

// Rows of the table: residents, outputs outside the arena, its buffers, and the rest of it. Their
// bytes are all that count towards the budget at the moment.
export function rowsAt(data, moment, rectangles) {
  const { arena, resident = [], outside = [], names, ops, sources, op, tensor, size, kind } = data;
  const rows = resident.map(([name, amount]) => ({ tensor: `all ${name}s`, state: "resident", bytes: amount }));
  if (outside[moment]) {
    rows.push({ tensor: "outputs so far", state: "outside the arena", bytes: outside[moment] });
  }
  for (const i of rectangles) {
    const [module, line] = op[i] < 0 ? ["", ""] : splitSource(sources[op[i]] ?? "");
    rows.push({
      tensor: tensor[i] < 0 ? "workspace" : names[tensor[i]],
      state: kind ? KINDS[kind[i]] : "buffer",
      op: op[i] < 0 ? "" : ops[op[i]],
      module,
      line,
      bytes: size[i],
      rectangle: i,
    });
  }
  const free = rectangles.reduce((rest, i) => rest - size[i], arena);
  if (free > 0) rows.push({ tensor: "rest of the arena", state: "free", bytes: free });
  const total = rows.reduce((sum, row) => sum + row.bytes, 0) || 1;
  return rows.map((row) => ({ op: "", module: "", line: "", ...row, share: row.bytes / total }));
}

// One row a module, with the bytes of all its rows.
export function byModule(rows) {
  const found = new Map();
  for (const row of rows) {
    const name = row.module || row.line || row.tensor;
    const sum = found.get(name) ?? { state: "", op: "", module: name, line: "", bytes: 0, share: 0, count: 0 };
    sum.bytes += row.bytes;
    sum.share += row.share;
    sum.count += 1;
    sum.tensor = sum.count === 1 ? row.tensor : `${sum.count} tensors`;
    found.set(name, sum);
  }
  return [...found.values()];
}

function shown(row, column) {
  if (column === "bytes") return bytes(row.bytes);
  return column === "share" ? percent(row.share) : row[column];
}

export class MomentTable {
  // `select` is called with the rectangle of a row that was clicked.
  constructor(title, select) {
    this.select = select;
    this.column = "bytes";
    this.rising = false;
    this.all = false;
    this.summed = false;
    this.rows = [];
    this.node = element("section", { class: "moment", "aria-label": title, hidden: true });
  }

  show(heading, rows) {
    this.heading = heading;
    this.rows = rows;
    this.all = false;
    this.node.hidden = false;
    this.draw();
  }

  close() {
    this.node.hidden = true;
    this.node.replaceChildren();
  }

  // Rows as they are shown, in order.
  sorted() {
    const rows = this.summed ? byModule(this.rows) : [...this.rows];
    const { column, rising } = this;
    const order = NUMBERS.has(column)
      ? (a, b) => a[column] - b[column]
      : (a, b) => String(a[column]).localeCompare(String(b[column]), "en", { numeric: true });
    rows.sort((a, b) => (rising ? order(a, b) : order(b, a)));
    return rows;
  }

  // All rows as tab-separated text, sizes in bytes.
  text() {
    const lines = this.sorted().map((row) => COLUMNS.map((column) => row[column]).join("\t"));
    return [COLUMNS.join("\t"), ...lines].join("\n");
  }

  async copy(button) {
    try {
      await navigator.clipboard.writeText(this.text());
      button.textContent = "copied";
    } catch {
      button.textContent = "the browser refused to copy";
    }
  }

  draw() {
    const rows = this.sorted();
    const part = this.all ? rows : rows.slice(0, FIRST);
    const heads = COLUMNS.map((column) => {
      const sort = this.column === column ? (this.rising ? "ascending" : "descending") : "none";
      const press = () => {
        this.rising = this.column === column ? !this.rising : !NUMBERS.has(column);
        this.column = column;
        this.draw();
      };
      return element("th", { scope: "col", "aria-sort": sort }, element("button", { onclick: press }, column));
    });
    const body = part.map((row) => {
      const cells = COLUMNS.map((column) => element("td", {}, shown(row, column)));
      const known = row.rectangle !== undefined;
      const press = () => known && this.select(row.rectangle);
      return element("tr", { onclick: press, class: known ? "known" : null }, ...cells);
    });
    const sums = element("input", {
      type: "checkbox",
      onchange: () => {
        this.summed = sums.checked;
        this.draw();
      },
    });
    sums.checked = this.summed;
    const copy = element("button", { onclick: () => this.copy(copy) }, "copy");
    const rest = rows.length - part.length;
    const more = element(
      "button",
      {
        onclick: () => {
          this.all = true;
          this.draw();
        },
      },
      `show ${rest} more`,
    );
    this.node.replaceChildren(
      element("h3", {}, this.heading),
      element("div", { class: "row bar" }, element("label", {}, sums, " sums by module"), copy),
      element(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": this.heading },
        element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body)),
      ),
      rest > 0 ? more : "",
    );
  }
}
