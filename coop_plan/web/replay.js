// Columns of a plan's memory map, the same as those of planner/inspect/drawing.py.

import { KINDS } from "./palette.js";

const ENGINES = ["compute", "offload", "prefetch", "wait", "host"];

export function replay(graph, plan) {
  const opAt = new Map(graph.ops.map((op, i) => [op.id, i]));
  const tensorAt = new Map(graph.tensors.map((tensor, i) => [tensor.id, i]));
  const held = [];
  const live = new Map();
  const still = new Map(); // by moment: bytes of a buffer that a smaller one overwrites in place
  const ran = new Set();
  const begin = [];
  const done = [];
  const engine = []; // by moment: compute, offload, prefetch, wait, host
  const runs = []; // by moment: the op that runs, or that ran last
  const left = []; // by moment: bytes of outputs outside the arena
  let now = 0;
  let clock = 0;
  let outside = 0;
  let copies = false;
  const kind = (name) => KINDS.indexOf(name);
  const hold = (tensor, op, offset, size, what, buffer) => {
    const made = { tensor, op, offset, size, begin: now, end: now + 1, kind: kind(what) };
    held.push(made);
    if (buffer != null) live.set(buffer, made);
  };
  for (const step of plan.steps) {
    if (step.do === "free") {
      for (const buffer of step.buffers) {
        live.get(buffer).end = now;
        live.delete(buffer);
      }
      continue;
    }
    begin.push(clock);
    const variants = step.do === "compute" && step.variant ? graph.ops[opAt.get(step.op)].variants : [];
    const onHost = variants.some((v) => v.name === step.variant && v.engine === "host");
    engine.push(ENGINES.indexOf(onHost ? "host" : step.do));
    copies ||= onHost;
    runs.push(step.do === "compute" && !onHost ? opAt.get(step.op) : (runs.at(-1) ?? -1));
    if (step.do === "compute") {
      const at = opAt.get(step.op);
      const op = graph.ops[at];
      const variant = step.variant ? op.variants.find((v) => v.name === step.variant) : op;
      clock += variant.cost_us;
      const scratch = step.workspace;
      if (scratch?.bytes) hold(-1, at, scratch.offset, scratch.bytes, "workspace");
      const dying = new Map();
      for (const read of step.reads) if (live.get(read)?.size) dying.set(live.get(read).offset, read);
      for (const write of step.writes) {
        if (write.offset == null) {
          outside += write.bytes;
          continue;
        }
        if (write.bytes && dying.has(write.offset)) {
          const taken = dying.get(write.offset);
          live.get(taken).end = now; // in place: the overwritten buffer ends
          still.set(now, (still.get(now) ?? 0) + Math.max(0, live.get(taken).size - write.bytes));
          live.delete(taken);
          dying.delete(write.offset);
        }
        const tensor = tensorAt.get(write.tensor);
        const made = ran.has(step.op) ? "recomputed" : "kept";
        const what = graph.tensors[tensor].kind === "output" ? "output" : made;
        hold(tensor, at, write.offset, write.bytes, what, write.buffer);
      }
      ran.add(step.op);
    } else {
      copies = true;
      if (step.do === "offload") live.get(step.buffer).kind = kind("offloaded");
      if (step.do === "prefetch") {
        hold(tensorAt.get(step.tensor), -1, step.offset, step.bytes, "prefetched", step.buffer);
      }
    }
    now += 1;
    done.push(clock);
    left.push(outside);
  }
  // A first run's buffer is evicted if its tensor has a later one.
  const last = new Map();
  for (const made of held) {
    const before = made.tensor < 0 ? null : last.get(made.tensor);
    if (before && [kind("kept"), kind("output")].includes(before.kind)) before.kind = kind("evicted");
    last.set(made.tensor, made);
  }
  const resident = new Map();
  const homes = new Set((plan.homes ?? []).map((home) => home.tensor));
  for (const tensor of graph.tensors) {
    if (tensor.kind !== "activation" && tensor.kind !== "output" && !homes.has(tensor.id)) {
      resident.set(tensor.kind, (resident.get(tensor.kind) ?? 0) + tensor.bytes);
    }
  }
  for (const made of live.values()) made.end = now;
  const change = new Array(now + 1).fill(0);
  for (const made of held) {
    change[made.begin] += made.size;
    change[made.end] -= made.size;
  }
  let total = 0;
  const bytes = change.slice(0, now).map((step, m) => (total += step) + (still.get(m) ?? 0));
  const column = (name) => held.map((made) => made[name]);
  return {
    offset: column("offset"),
    size: column("size"),
    begin: column("begin"),
    end: column("end"),
    kind: column("kind"),
    op: column("op"),
    tensor: column("tensor"),
    live: bytes,
    engine: copies ? [] : engine, // only the planner's timeline has the times of copies
    runs,
    begin_us: copies ? [] : begin,
    done_us: copies ? [] : done,
    end_us: clock,
    outside: left,
    resident: [...resident],
    peak: left.reduce((best, value, i) => (value > left[best] ? i : best), 0),
    arena: plan.arena_bytes,
    budget: plan.budget_bytes,
    names: graph.tensors.map((tensor) => tensor.name || `tensor ${tensor.id}`),
    ops: graph.ops.map((op) => op.name),
    sources: graph.ops.map((op) => op.source ?? ""),
    phases: graph.ops.map((op) => op.phase ?? "forward"),
  };
}
