"""A slow second opinion on plans: the arena as an array of bytes, contents computed symbolically.

It knows no versions: what a byte holds is `(value, index)`, where a value is the hash of an op and
of the values it read. `Machine.right` says that every op read what it reads in straight execution
and that the step's results are the straight ones; `Machine.clean` that the rules of a plan were
kept. A plan is good if both hold.
"""

from coop_plan.schemas import Compute, Free, Graph, Offload, Plan, Prefetch, TensorRead, Wait
from tests.support import on_host, outside_outputs

HOME = "home"
"""In place of the buffer of a copy: it overwrites the home of the buffer's tensor."""


def straight(graph: Graph):
    """Straight execution: by (op, tensor) the value read, and at the end by tensor."""
    values = {t.id: ("before", t.id) for t in graph.tensors if t.resident}
    read = {}
    for op in graph.ops:
        names = {t for variant in (op, *op.variants) for t in variant.inputs}
        read |= {(op.id, t): values[t] for t in names}
        inputs = tuple(values[t] for t in op.inputs)
        values |= {t: hash(("made", op.id, t, inputs)) for t in op.outputs}
        values |= {t: hash(("overwritten", op.id, t, inputs)) for t in op.mutates}
    return read, values


class Machine:
    """Runs a plan; figures are not looked at, except the arena's size and the budget."""

    def __init__(self, graph: Graph, plan: Plan):
        self.graph, self.plan = graph, plan
        self.ops = {op.id: op for op in graph.ops}
        self.tensors = {t.id: t for t in graph.tensors}
        self.expected, self.results = straight(graph)
        self.memory = [None] * plan.arena_bytes
        self.homes = {home.tensor: home.host_offset for home in plan.homes}
        before = {t.id: ("before", t.id) for t in graph.tensors if t.resident}
        self.at_home = {t: before[t] for t in self.homes}
        self.outside = {t: value for t, value in before.items() if t not in self.homes}
        overwritten = {t for op in graph.ops for t in op.mutates}
        self.read_outside = overwritten & outside_outputs(graph, plan.outputs)
        self.empty = {}  # what a buffer of no bytes would hold
        self.live, self.used = {}, {}  # buffer -> (tensor, offset, bytes); buffer -> tensor
        self.copying, self.arriving, self.host = {}, {}, {}
        self.slab = [None] * plan.host_arena_bytes
        for t, value in self.at_home.items():
            self.write_home(t, value)
        computes = [step for step in plan.steps if isinstance(step, Compute)]
        self.ops_on_host = {s.op for s in computes if on_host(self.ops.get(s.op), s.variant)}
        self.used_homes, self.read_on_host = set(), []
        self.left, self.ran = set(), []
        self.right = self.clean = True
        self.serial = 0
        for step in plan.steps:
            handler = {Compute: self.compute, Free: self.free, Offload: self.offload}
            handler |= {Prefetch: self.prefetch, Wait: self.wait}
            handler[type(step)](step)
        self.finish()

    @property
    def good(self):
        return self.right and self.clean

    def rule(self, kept):
        self.clean = self.clean and bool(kept)

    # memory

    def garbage(self):
        self.serial += 1
        return ("garbage", self.serial)

    def store(self, buffer, offset, size, value):
        if not size:
            self.empty[buffer] = value
        for index in range(offset, min(offset + size, len(self.memory))):
            self.memory[index] = (value, index - offset)

    def load(self, buffer, offset, size):
        if not size:
            return self.empty.get(buffer)
        held = self.memory[offset : offset + size]
        whole = [(held[0][0] if held and held[0] else None, index) for index in range(size)]
        return held[0][0] if held == whole else self.garbage()

    def check_range(self, offset, size):
        self.rule(offset % self.plan.alignment == 0)
        self.rule(offset + size <= self.plan.arena_bytes)

    def bytes_of(self, offset, size):
        return set(range(offset, offset + size))

    def occupied(self, but=()):
        return {
            index
            for number, (_, offset, size) in self.live.items()
            if number not in but
            for index in self.bytes_of(offset, size)
        }

    # steps

    def compute(self, step):
        op = self.ops.get(step.op)
        self.rule(op)
        if op is None:
            return
        variants = {None: op, **{v.name: v for v in op.variants}}
        self.rule(step.variant in variants)
        variant = variants.get(step.variant, op)
        self.rule(op.recomputable or op.id not in self.ran)
        once = [o.id for o in self.graph.ops if not o.recomputable and o.id not in self.ops_on_host]
        if not op.recomputable and op.id in once:
            self.rule(all(number in self.ran for number in once[: once.index(op.id)]))
        random_before = [o.id for o in self.graph.ops if o.rng]
        if op.rng and op.id not in self.ran:
            earlier = random_before[: random_before.index(op.id)]
            self.rule(all(number in self.ran for number in earlier))
        self.rule(
            len(step.reads) == len(variant.inputs) and len(step.writes) == len(variant.outputs)
        )
        self.rule(step.workspace.bytes == variant.workspace_bytes)
        self.ran.append(op.id)
        if on_host(op, step.variant):
            self.compute_on_host(op, variant, step)
            return

        # The kernel scribbles over its scratch and its outputs before it reads its inputs.
        scratch = self.bytes_of(step.workspace.offset, step.workspace.bytes)
        self.check_range(step.workspace.offset, step.workspace.bytes)
        read_buffers = {n for n in step.reads if not isinstance(n, TensorRead)}
        taken, claimed = {}, set()
        for write in step.writes:
            if write.offset is None or not write.bytes:
                continue
            for number in read_buffers & self.live.keys():
                t, offset, size = self.live[number]
                if offset == write.offset and size and number not in taken.values():
                    allowed = [write.tensor, t] in variant.inplace and t not in op.mutates
                    if allowed and write.bytes <= size:
                        taken[write.buffer] = number
        self.store(None, step.workspace.offset, step.workspace.bytes, self.garbage())
        for write in step.writes:
            if write.offset is not None and write.buffer not in taken:
                self.store(None, write.offset, write.bytes, self.garbage())

        mutable = {}
        for entry, t in zip(step.reads, variant.inputs, strict=False):
            if isinstance(entry, TensorRead):
                self.rule(entry.tensor == t and entry.tensor in self.outside)
                value = self.outside.get(entry.tensor)
            else:
                self.rule(entry in self.live and entry not in self.arriving)
                if entry not in self.live:
                    self.right = False
                    continue
                self.rule(self.live[entry][0] == t)
                self.rule(t not in self.read_outside)
                value = self.load(entry, *self.live[entry][1:])
            if value != self.expected[op.id, t]:
                self.right = False
            if t in op.mutates:
                self.rule(mutable.setdefault(t, entry) == entry)
                self.rule(isinstance(entry, TensorRead) or entry not in self.copying)
        inputs = tuple(self.expected[op.id, t] for t in op.inputs)
        if not self.right:
            inputs = self.garbage()
        for t, entry in mutable.items():
            value = hash(("overwritten", op.id, t, inputs))
            if isinstance(entry, TensorRead):
                self.outside[t] = value
            else:
                self.store(entry, *self.live[entry][1:], value)
        self.rule(set(op.mutates) <= mutable.keys())

        self.rule(not scratch & self.occupied())
        for write, t in zip(step.writes, variant.outputs, strict=False):
            value = hash(("made", op.id, t, inputs))
            self.rule(write.buffer not in self.used)
            self.rule(write.tensor == t and write.bytes == self.tensors[t].bytes)
            if write.buffer in self.used or write.tensor not in self.tensors:
                self.right = False
                continue
            first = write.tensor not in self.used.values()
            self.used[write.buffer] = write.tensor
            leaves = t in outside_outputs(self.graph, self.plan.outputs)
            self.rule((write.offset is None) == (leaves and first))
            if write.offset is None:
                self.outside[write.tensor] = value
                self.left.add(write.buffer)
                continue
            self.check_range(write.offset, write.bytes)
            mine = self.bytes_of(write.offset, write.bytes)
            others = self.occupied(but={taken[write.buffer]} if write.buffer in taken else ())
            self.rule(not mine & (others | scratch | claimed))
            claimed |= mine
            self.store(write.buffer, write.offset, write.bytes, value)
        for number in taken.values():
            self.rule(number not in self.copying)
            self.copying.pop(number, None)
            del self.live[number]
        for write in step.writes:
            if write.offset is not None:
                self.live[write.buffer] = (write.tensor, write.offset, write.bytes)

    def compute_on_host(self, op, variant, step):
        self.rule(not step.writes)
        for entry, t in zip(step.reads, variant.inputs, strict=False):
            if isinstance(entry, TensorRead):
                self.rule(entry.tensor == t and t in self.homes and not self.in_transfer(t))
                value = self.read_home(entry.tensor)
            else:
                copied = self.host.get(entry) or self.copying.get(entry)
                self.rule(copied and self.used.get(entry) == t and t not in op.mutates)
                self.rule(not copied or copied[1][0] is not HOME)
                value = copied[0] if copied else self.garbage()
                if copied:
                    self.read_on_host.append(copied)
            if value != self.expected[op.id, t]:
                self.right = False
        self.used_homes.update(variant.inputs)
        self.rule(set(op.mutates) <= set(variant.inputs))
        inputs = tuple(self.expected[op.id, t] for t in op.inputs)
        for t in self.homes.keys() & set(op.mutates):
            value = hash(("overwritten", op.id, t, inputs)) if self.right else self.garbage()
            self.write_home(t, value)

    def in_transfer(self, t):
        """True if a copy in flight reads or writes the home of a tensor."""
        read = {copy.tensor for copy, _ in self.arriving.values() if copy.from_ is None}
        written = {self.used[n] for n, (_, copy) in self.copying.items() if copy[0] is HOME}
        return t in read | written

    def write_home(self, t, value):
        self.at_home[t] = value
        self.write_host((HOME, self.homes[t], self.tensors[t].bytes, None), value)

    def read_home(self, t):
        if t not in self.homes:
            return self.garbage()
        value, offset, size = self.at_home[t], self.homes[t], self.tensors[t].bytes
        whole = self.slab[offset : offset + size] == [(value, index) for index in range(size)]
        return value if whole else self.garbage()

    def free(self, step):
        for number in step.buffers:
            self.rule(number in self.live)
            self.rule(number not in self.copying and number not in self.arriving)
            self.copying.pop(number, None)
            self.live.pop(number, None)

    def offload(self, step):
        number = step.buffer
        self.rule(number in self.live)
        self.rule(number not in self.copying and number not in self.arriving)
        self.rule(number not in [copy.from_ for copy, _ in self.arriving.values()])
        self.rule(self.graph.device.d2h_bytes_per_s)
        if number in self.live:
            self.host.pop(number, None)
            _, offset, size = self.live[number]
            at = step.host_offset
            self.rule(at is not None and at % self.plan.alignment == 0)
            self.rule(not size or (at or 0) + size <= len(self.slab))
            t = self.live[number][0]
            home = t in self.homes and at == self.homes[t]
            self.rule(not home or not (self.in_transfer(t) or t in self.used_homes))
            mine = self.bytes_of(at or 0, size)
            for other, begin in self.homes.items():
                free = not mine & self.bytes_of(begin, self.tensors[other].bytes)
                self.rule(free or (home and other == t))
            copy = (HOME if home else number, at or 0, size, self.garbage())
            self.write_host(copy, copy[3])
            self.copying[number] = (self.load(number, offset, size), copy)

    def prefetch(self, step):
        if step.from_ is None:
            written = {self.used[n] for n, (_, copy) in self.copying.items() if copy[0] is HOME}
            self.rule(step.tensor in self.homes and step.tensor not in written | self.used_homes)
        else:
            self.rule(step.from_ in self.host and self.used.get(step.from_) == step.tensor)
        self.rule(step.buffer not in self.used)
        self.rule(self.graph.device.h2d_bytes_per_s)
        t = self.tensors.get(step.tensor)
        self.rule(t and t.bytes == step.bytes)
        if step.buffer in self.used or t is None:
            self.right = False
            return
        self.check_range(step.offset, step.bytes)
        self.rule(not self.bytes_of(step.offset, step.bytes) & self.occupied())
        self.store(step.buffer, step.offset, step.bytes, self.garbage())
        self.used[step.buffer] = step.tensor
        self.live[step.buffer] = (step.tensor, step.offset, step.bytes)
        self.arriving[step.buffer] = (step, self.read_source(step))

    def read_source(self, step):
        return self.read_home(step.tensor) if step.from_ is None else self.read_host(step.from_)

    def write_host(self, copy, value):
        _, offset, size, _ = copy
        for index in range(offset, min(offset + size, len(self.slab))):
            self.slab[index] = (value, index - offset)

    def read_host(self, number):
        """What the copy of a buffer was made of, if nothing has been written over it since."""
        if number not in self.host:
            return self.garbage()
        value, (_, offset, size, _) = self.host[number]
        whole = self.slab[offset : offset + size] == [(value, index) for index in range(size)]
        self.rule(whole)
        return value if whole else self.garbage()

    def wait(self, step):
        number = step.buffer
        if number in self.copying:
            # The copy may have happened at any time since: it is good if nothing changed.
            value, copy = self.copying.pop(number)
            now = self.load(number, *self.live[number][1:])
            value = value if now == value else self.garbage()
            _, offset, size, mark = copy
            mine = [(mark, index) for index in range(size)]
            self.rule(self.slab[offset : offset + size] == mine)
            if copy[0] is HOME:
                self.write_home(self.used[number], value)
            else:
                self.host[number] = (value, copy)
                self.write_host(copy, value)
        elif number in self.arriving:
            copy, value = self.arriving.pop(number)
            if self.read_source(copy) != value:
                value = self.garbage()
            self.store(number, copy.offset, copy.bytes, value)
        else:
            self.rule(False)

    def finish(self):
        for value, (_, offset, size, _) in self.read_on_host:  # at any time until the end
            whole = [(value, index) for index in range(size)]
            self.rule(self.slab[offset : offset + size] == whole)
        self.rule(not self.copying and not self.arriving)
        self.rule(set(self.ran) == set(self.ops))
        outside = outside_outputs(self.graph, self.plan.outputs)
        for t in self.graph.tensors:
            held = [n for n, (tensor, _, _) in self.live.items() if tensor == t.id]
            in_arena = t.kind == "output" and t.id not in outside
            self.rule(len(held) == (1 if in_arena else 0))
            if in_arena:
                got = [self.load(n, *self.live[n][1:]) for n in held]
                self.right &= self.results[t.id] in got
            elif t.id in self.homes:
                self.right &= self.read_home(t.id) == self.results[t.id]
            elif t.kind == "output" or t.resident:
                self.right &= self.outside.get(t.id) == self.results[t.id]
