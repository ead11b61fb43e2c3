"""Plans made the plainest way, independent of the planner: what the verifier must accept."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec

from coop_plan.schemas import (
    Compute,
    Free,
    Graph,
    Home,
    Offload,
    Op,
    Plan,
    Prefetch,
    TensorRead,
    Variant,
    Wait,
    Workspace,
    Write,
    fingerprint,
    parse_graph,
    parse_plan,
)


def run_together(
    arguments: list[str], count: int, cwd: Path, environment: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Output and errors of Python processes that print "ready", and go on at once by a line."""
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate() for process in processes]


def make_graph(tensors: dict[int, tuple[str, int]], ops: list[dict], **fields) -> Graph:
    """A graph from `{id: (kind, bytes)}` and op dicts; costs are 1 µs, ids positions by default."""
    document = {
        "schema": "coop-plan/graph/1",
        "tensors": [{"id": t, "kind": kind, "bytes": size} for t, (kind, size) in tensors.items()],
        "ops": [
            {"id": number, "name": "op", "inputs": [], "outputs": [], "cost_us": 1.0, **op}
            for number, op in enumerate(ops)
        ],
        **fields,
    }
    return parse_graph(msgspec.to_builtins(document))


def needed_versions(graph: Graph) -> dict[tuple[int, int], int]:
    """By (op id, tensor id): the version the op reads, the number of mutators before it."""
    version: dict[int, int] = {}
    needed = {}
    for op in graph.ops:
        for variant in (op, *op.variants):
            for t in variant.inputs:
                needed[op.id, t] = version.get(t, 0)
        for t in set(op.mutates):
            version[t] = version.get(t, 0) + 1
    return needed


def final_versions(graph: Graph) -> dict[int, int]:
    """By tensor id: the version at the end of the step."""
    return {t.id: sum(t.id in op.mutates for op in graph.ops) for t in graph.tensors}


def outside_outputs(graph: Graph, outputs: str) -> set[int]:
    """Ids of the outputs whose first production belongs outside the arena."""
    kinds = {t.id: t.kind for t in graph.tensors}
    made = {t: op.phase for op in graph.ops for t in op.outputs}
    found = {t for t, kind in kinds.items() if kind == "output"}
    if outputs == "gradients":
        return {t for t in found if made.get(t, "forward") == "forward"}
    return found if outputs == "outside" else set()


def make_plan(graph: Graph, steps: list, *, outputs="outside", alignment=1, **figures) -> Plan:
    """The plan of these steps with figures measured here; `figures` overrides any field."""
    measured = measure(graph, steps, outputs, figures.get("homes", ()))
    document = {
        "schema": "coop-plan/plan/1",
        "graph": fingerprint(graph),
        "method": "test",
        "status": "feasible",
        "budget_bytes": measured["peak_bytes"],
        "solve_seconds": 0.0,
        "alignment": alignment,
        "outputs": outputs,
        "steps": steps,
        **measured,
        **figures,
    }
    return parse_plan(msgspec.to_builtins(document))


def measure(graph: Graph, steps: list, outputs: str, homes: Sequence[Home] = ()) -> dict:
    """A plan's figures from its steps, by brute force; any steps at all get some figures."""
    size = {t.id: t.bytes for t in graph.tensors}
    ops = {op.id: op for op in graph.ops}
    at_home = {home.tensor for home in homes}
    resident = sum(t.bytes for t in graph.tensors if t.resident and t.id not in at_home)
    outside = sum(size[t] for t in outside_outputs(graph, outputs))
    live: dict[int, tuple[int, int]] = {}
    runs: list[int] = []
    ends: dict[int, float] = {}
    now = up = down = computed = base = 0.0
    latency = graph.device.copy_latency_us
    blocks, launched = graph.device.kind == "cpu", [0.0, 0.0]  # in the step, and of every op once

    def launch(us: float, clock: int = 0) -> float:
        """When what the host launches in this time may begin, at the earliest."""
        launched[clock] = us + (
            max(launched[clock], (now, base)[clock]) if blocks else launched[clock]
        )
        return launched[clock]

    arena = peak = swapped = 0
    ends_of_homes = (h.host_offset + size[h.tensor] for h in homes if size[h.tensor])
    host = max(ends_of_homes, default=0)
    stalls = {Offload: 0.0, Prefetch: 0.0}
    kinds: dict[int, type] = {}
    for step in steps:
        ranges: list[tuple[int, int]] = []
        if isinstance(step, Compute) and on_host(ops.get(step.op), step.variant):
            away = [ends[read] for read in step.reads if kinds.get(read) is Offload]
            cost_us = next(v.cost_us for v in ops[step.op].variants if v.name == step.variant)
            if cost_us:
                sent = launch(graph.device.copy_launch_us)
                now = sent if blocks else now
                away.append(sent)
            computed = max([now, computed, *away]) + cost_us
            runs.append(step.op)
        elif isinstance(step, Compute):
            made = {w.buffer: (w.offset, w.bytes) for w in step.writes if w.offset is not None}
            space = (step.workspace.offset, step.workspace.bytes)
            ranges = [*live.values(), *made.values(), space]
            taken = {offset for offset, length in made.values() if length}
            for read in step.reads:
                if live.get(read, (-1, 0))[0] in taken and live[read][1]:
                    del live[read]
            live |= made
            runs.append(step.op)
            if step.op in ops:
                variants = {v.name: v.cost_us for v in ops[step.op].variants}
                cost_us = variants.get(step.variant, ops[step.op].cost_us)
                now = max(now, launch(graph.device.launch_us) if cost_us else now) + cost_us
        elif isinstance(step, Free):
            for number in step.buffers:
                live.pop(number, None)
        elif isinstance(step, Offload):
            length = live.get(step.buffer, (0, 0))[1]
            swapped += length
            host = max(host, (step.host_offset or 0) + length if length else 0)
            kinds[step.buffer] = Offload
            sent = launch(graph.device.copy_launch_us)
            now = sent if blocks else now
            down = max(down, now, sent) + latency
            down += length * 1e6 / (graph.device.d2h_bytes_per_s or 1)
            ends[step.buffer] = down
        elif isinstance(step, Prefetch):
            live[step.buffer] = (step.offset, step.bytes)
            ranges = list(live.values())
            kinds[step.buffer] = Prefetch
            swapped += step.bytes
            sent = launch(graph.device.copy_launch_us)
            now = sent if blocks else now
            up = max(up, now, sent) + latency
            up += step.bytes * 1e6 / (graph.device.h2d_bytes_per_s or 1)
            ends[step.buffer] = up
        elif step.buffer in ends:
            stalls[kinds[step.buffer]] += max(0.0, ends[step.buffer] - now)
            now = max(now, ends[step.buffer])
        arena = max([arena, *(offset + length for offset, length in ranges if length)])
        peak = max(peak, _union(ranges))
    now = max(now, computed)
    for op in graph.ops:
        if op.cost_us:
            base = max(base, launch(graph.device.launch_us, 1)) + op.cost_us
    assert set(size) >= {t for op in graph.ops for t in op.outputs}
    return {
        "resident_bytes": resident,
        "arena_bytes": arena,
        "host_arena_bytes": host,
        "peak_bytes": resident + arena + outside,
        "base_cost_us": base,
        "cost_us": now,
        "overhead": now / base - 1 if base else 0.0,
        "fragmentation": 1 - peak / arena if arena else 0.0,
        "recomputed_ops": len(runs) - len(set(runs)),
        "swapped_bytes": swapped,
        "prefetch_stall_us": stalls[Prefetch],
        "offload_stall_us": stalls[Offload],
    }


def on_host(op: Op | None, variant: str | None) -> bool:
    """True if this variant of an op runs on the host."""
    return op is not None and any(v.name == variant and v.engine == "host" for v in op.variants)


def _union(ranges: list[tuple[int, int]]) -> int:
    total = reach = 0
    for offset, length in sorted(ranges):
        total += max(0, offset + length - max(reach, offset))
        reach = max(reach, offset + length)
    return total


def naive_plan(graph: Graph, *, outputs="outside", alignment=1, **figures) -> Plan:
    """Keep everything until its last use, every buffer at an address of its own."""
    writer = PlanWriter(graph, outputs, alignment)
    for position, op in enumerate(graph.ops):
        writer.run(op)
        writer.free_dead(graph.ops[position + 1 :])
    writer.finish()
    return make_plan(graph, writer.steps, outputs=outputs, alignment=alignment, **figures)


def random_plan(graph: Graph, random: Random, *, outputs="outside", alignment=1) -> Plan:
    """Any valid plan: random order, evictions, recomputation, swaps, in-place, reused addresses."""
    for eagerness in (random.random(), 0.2, 0.0):
        writer = PlanWriter(graph, outputs, alignment, random)
        try:
            order = _random_order(graph, random)
            for position, op in enumerate(order):
                writer.run(op, variant=writer.any_variant(op), evict=eagerness)
                writer.stir(order[position + 1 :], eagerness)
            writer.finish()
        except StuckError:
            continue
        return make_plan(graph, writer.steps, outputs=outputs, alignment=alignment)
    raise AssertionError("without evictions nothing can get stuck")


def _random_order(graph: Graph, random: Random) -> list[Op]:
    """A first-computation order that respects data, overwrites and the generator's stream."""
    waiting = list(graph.ops)
    done: list[Op] = []
    while waiting:
        ready = []
        for index, op in enumerate(waiting):
            before = waiting[:index]
            touched = {t for v in (op, *op.variants) for t in v.inputs}
            if not any(
                touched & {*b.outputs, *b.mutates}
                or set(op.mutates) & {t for v in (b, *b.variants) for t in v.inputs}
                or (op.rng and b.rng)
                or not (op.recomputable or b.recomputable)
                for b in before
            ):
                ready.append(index)
        done.append(waiting.pop(ready[0] if random.random() < 0.5 else random.choice(ready)))
    return done


class StuckError(Exception):
    """Something was evicted that cannot be computed again."""


class PlanWriter:
    """Writes steps one by one and knows what is live.

    Without a `random` every buffer gets fresh addresses; with one, addresses are reused and
    in-place pairs, duplicated buffers and swaps occur.
    """

    def __init__(self, graph: Graph, outputs="outside", alignment=1, random=None):
        self.graph = graph
        self.outputs = outputs
        self.alignment = alignment
        self.random: Random | None = random
        self.tensors = {t.id: t for t in graph.tensors}
        self.needed = needed_versions(graph)
        self.final = final_versions(graph)
        self.producer = {t: op for op in graph.ops for t in op.outputs}
        self.mutators = {t: [op for op in graph.ops if t in op.mutates] for t in self.tensors}
        self.outside = {t.id: 0 for t in graph.tensors if t.resident}
        self.live: dict[int, tuple[int, int, int, int]] = {}  # tensor, version, offset, bytes
        self.copying: set[int] = set()
        self.host: dict[int, tuple[int, int]] = {}
        self.slab: dict[int, tuple[int, int]] = {}  # by buffer: where its copy lies
        self.done: set[int] = set()
        self.steps: list = []
        self.next_buffer = 7
        self.top = 0

    def chance(self, share: float) -> bool:
        return self.random is not None and self.random.random() < share

    def any_variant(self, op: Op) -> str | None:
        names = [None, *(v.name for v in op.variants)]
        return self.random.choice(names) if self.random else None

    def buffer(self) -> int:
        self.next_buffer += 1
        return self.next_buffer

    def place(self, size: int, taken: list[tuple[int, int]]) -> int:
        """An aligned offset where `size` bytes overlap neither `taken` nor anything live."""
        busy = [*taken, *((offset, length) for _, _, offset, length in self.live.values())]
        offset = 0 if self.chance(0.8) else self.top
        while size and any(o < offset + size and offset < o + n for o, n in busy if n):
            offset += self.alignment
        if not size:
            offset = 0
        self.top = max(self.top, -(-(offset + size) // self.alignment) * self.alignment)
        return offset

    def find(self, t: int, version: int) -> int | TensorRead | None:
        """Where that version of the tensor can be read, preferring outside the arena."""
        if self.outside.get(t) == version:
            return TensorRead(tensor=t)
        if self.mutators[t] and t in outside_outputs(self.graph, self.outputs):
            return None  # it is read there only
        held = [b for b, (tensor, v, _, _) in self.live.items() if (tensor, v) == (t, version)]
        if not held:
            return None
        return self.random.choice(held) if self.random else held[0]

    def produce(self, t: int, version: int, depth: int) -> None:
        copies = [b for b, held in self.host.items() if held == (t, version)]
        if copies:
            size = self.tensors[t].bytes
            offset, number = self.place(size, []), self.buffer()
            copy = {"buffer": number, "tensor": t, "offset": offset, "bytes": size}
            self.steps += [Prefetch(**copy, from_=copies[0]), Wait(buffer=number)]
            self.live[number] = (t, version, offset, size)
            return
        op = self.mutators[t][version - 1] if version else self.producer.get(t)
        if op is None or op.id not in self.done or not op.recomputable:
            raise StuckError
        self.run(op, depth=depth + 1)

    def run(self, op: Op, *, variant=None, evict=0.0, depth=0) -> None:
        """Compute `op`, first whatever it needs."""
        if depth > 12 or len(self.steps) > 100 * len(self.graph.ops) + 100:
            raise StuckError
        name, variant = variant, next((v for v in op.variants if v.name == variant), op)
        needs = [(t, self.needed[op.id, t]) for t in variant.inputs]
        for _ in range(3):
            for t, version in needs:
                if self.find(t, version) is None:
                    self.produce(t, version, depth)
            places = {t: self.find(t, version) for t, version in needs}
            if None not in places.values():
                break
        else:
            raise StuckError
        for t in op.mutates:
            if places[t] in self.copying:
                self.wait(places[t])
        reads = [places[t] for t in variant.inputs]
        taken: list[tuple[int, int]] = []
        writes: list[Write] = []
        ended: list[int] = []
        for t in variant.outputs:
            size = self.tensors[t].bytes
            leaves = t in outside_outputs(self.graph, self.outputs)
            if leaves and t not in self.outside:
                offset = None
            else:
                offset = (
                    self.take_over(op, variant, t, places, ended) if self.chance(evict) else None
                )
                if offset is None:
                    offset = self.place(size, taken)
                taken.append((offset, size))
            writes.append(Write(buffer=self.buffer(), tensor=t, offset=offset, bytes=size))
        scratch = variant.workspace_bytes
        self.steps.append(
            Compute(
                op=op.id,
                variant=name,
                reads=reads,
                writes=writes,
                workspace=Workspace(offset=self.place(scratch, taken), bytes=scratch),
            )
        )
        self.done.add(op.id)
        for t in set(op.mutates):
            number = places[t]
            if isinstance(number, TensorRead):
                self.outside[t] += 1
            else:
                _, version, offset, size = self.live[number]
                self.live[number] = (t, version + 1, offset, size)
        for number in ended:
            del self.live[number]
        for write in writes:
            if write.offset is None:
                self.outside[write.tensor] = 0
            else:
                self.live[write.buffer] = (write.tensor, 0, write.offset, write.bytes)

    def take_over(
        self, op: Op, variant: Op | Variant, t: int, places: dict, ended: list[int]
    ) -> int | None:
        for out, source in variant.inplace:
            number = places.get(source)
            if out != t or number not in self.live or number in ended or number in self.copying:
                continue
            size, held = self.tensors[t].bytes, self.live[number]
            if source not in op.mutates and 0 < size <= held[3] and not self.is_output(number):
                ended.append(number)
                return held[2]
        return None

    def is_output(self, number: int) -> bool:
        """Whether the buffer is, or will by overwriting become, an output in the arena."""
        t = self.live[number][0]
        return self.tensors[t].kind == "output" and t not in outside_outputs(
            self.graph, self.outputs
        )

    def offload(self, number: int) -> None:
        self.host.pop(number, None)
        self.slab.pop(number, None)
        for other in list(self.host):
            if self.chance(0.3):  # its copy is not asked for again
                del self.host[other], self.slab[other]
        size, offset = self.live[number][3], 0
        while any(o < offset + size and offset < o + n for o, n in self.slab.values() if n):
            offset += self.alignment
        self.slab[number] = (offset, size)
        self.steps.append(Offload(buffer=number, host_offset=offset))
        self.copying.add(number)

    def wait(self, number: int) -> None:
        self.steps.append(Wait(buffer=number))
        self.copying.discard(number)
        self.host[number] = self.live[number][:2]

    def free(self, number: int) -> None:
        if number in self.copying:
            self.wait(number)
        if self.steps and isinstance(self.steps[-1], Free) and self.chance(0.5):
            self.steps[-1] = Free(buffers=[*self.steps[-1].buffers, number])
        else:
            self.steps.append(Free(buffers=[number]))
        del self.live[number]

    def dead(self, coming: list[Op]) -> list[int]:
        wanted = {(t, self.needed[op.id, t]) for op in coming for t in op.inputs}
        return [
            number
            for number, (t, version, _, _) in self.live.items()
            if (t, version) not in wanted and not self.is_output(number)
        ]

    def free_dead(self, coming: list[Op]) -> None:
        """Free what none of the ops to come reads."""
        for number in self.dead(coming):
            self.free(number)

    def stir(self, coming: list[Op], eagerness: float) -> None:
        """Free, evict, offload and wait at random."""
        dead = self.dead(coming)
        swaps = self.graph.device.h2d_bytes_per_s and self.graph.device.d2h_bytes_per_s
        for number in list(self.live):
            if number in self.copying:
                if self.chance(0.4):
                    self.wait(number)
            elif swaps and self.chance(0.15):
                self.offload(number)
            if not self.is_output(number) and self.chance(
                0.7 if number in dead else eagerness * 0.5
            ):
                self.free(number)

    def finish(self) -> None:
        """Wait for every transfer, free all but one final buffer of each output in the arena."""
        for number in list(self.copying):
            self.wait(number)
        kept: set[int] = set()
        for number, (t, version, _, _) in list(self.live.items()):
            if self.is_output(number) and version == self.final[t] and t not in kept:
                kept.add(t)
            else:
                self.free(number)


def edit(plan: Plan, change: Callable[[dict], None]) -> Plan:
    """The plan after `change` of its decoded document."""
    document = plan.to_dict()
    change(document)
    return parse_plan(document)
