"""
Arenas drawn by hand for the online simulator, and its compiled parts made callable from Python.

The one door of the tests to the names inside `planner.online`: what moves there is followed here.
"""

from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import numba
import numpy as np

from coop_plan.planner import Problem, plan
from coop_plan.planner.core.arrays import to_arrays
from coop_plan.planner.method import Request
from coop_plan.planner.online import neighbours, simulator, space, state, window
from coop_plan.planner.online.run import simulate_arena
from tests.support import make_graph

WINDOW, SINGLE = state.Rule(window=True), state.Rule()
SINGLE_WITH_NEIGHBOURS = state.Rule(counts_neighbours=True)
NO_ROOM = space.NO_ROOM

MANY_EVENTS = 64


# Parts without a wrapper for Python are called through these. They are compiled anew in each
# process: a kept one would hide a change of what it calls.
@numba.njit
def _window(s, size):
    return window.cheapest_window(s, size)


@numba.njit
def _single(s, rule):
    return window.cheapest_tensor(s, rule)


@numba.njit
def _make_room(a, s, size, owner, op, rule):
    return simulator._allocate(a, s, size, owner, op, rule)


@numba.njit
def _pin(a, s, goal):
    simulator._pin_closure(a, s, goal)


@numba.njit
def _allocate(s, size, owner, right):
    return space.allocate(s, size, owner, right)


@numba.njit
def _release(s, offset):
    space.release(s, offset)


@numba.njit
def _evicted(s, t):
    neighbours.mark_evicted(s, t)


@numba.njit
def _computed(s, t):
    neighbours.mark_resident(s, t)


@numba.njit
def _closure_cost(s, t):
    return neighbours.neighbour_cost(s, t)


class Block(NamedTuple):
    """A tensor: bytes, µs of the op that makes it, µs since it was last touched."""

    name: str
    size: int = 1
    cost: float = 1.0
    age: float = 1.0
    pinned: bool = False
    evictable: bool = True


class Memory:
    """
    An arena whose blocks lie as listed, tensors as `Block`s and free bytes as numbers.

    `gone` are tensors that are not in it, `edges` what is made from what: "ab bc" says that b is
    made from a and c from b; `dependents` as in `state.empty_arena`. Every tensor has a reader to
    come, the op of index `reader`.
    """

    def __init__(self, *layout, gone=(), edges="", dependents=True):
        self.blocks = [block for block in layout if isinstance(block, Block)] + list(gone)
        number = {block.name: t for t, block in enumerate(self.blocks)}
        self.names = list(number)
        sources = {
            t: [number[source] for source, made in edges.split() if made == block.name]
            for t, block in enumerate(self.blocks)
        }
        ops = [
            {
                "inputs": sources[t],
                "outputs": [t],
                "cost_us": self.blocks[t].cost,
                "recomputable": self.blocks[t].evictable,
            }
            for t in TopologicalSorter(sources).static_order()
        ]
        self.reader = len(ops)
        ops.append({"inputs": list(number.values()), "outputs": []})
        tensors = {t: ("activation", block.size) for t, block in enumerate(self.blocks)}
        problem = Problem.from_graph(make_graph(tensors, ops), 1)
        sizes = [block.size if isinstance(block, Block) else block for block in layout]
        how = {"partition": False, "dependents": dependents}
        s = state.empty_arena(problem, sum(sizes), MANY_EVENTS, **how)
        self.arrays, self.s = to_arrays(problem), s
        owners = [number[b.name] if isinstance(b, Block) else state.FREE for b in layout]
        starts = np.cumsum([0, *sizes])[:-1]
        blocks = zip(sizes, starts, owners, strict=True)
        holes = sorted((size, at) for size, at, owner in blocks if owner == state.FREE)
        s.now.blocks, s.now.holes = len(sizes), len(holes)
        block, hole = s.block[: len(sizes)], s.hole[: len(holes)]
        block["offset"], block["bytes"], block["owner"] = starts, sizes, owners
        hole["bytes"], hole["offset"] = np.array(holes, dtype=np.int64).reshape(-1, 2).T
        s.now.clock_us = 1000.0
        s.tensor["last_access_us"] = [1000.0 - block.age for block in self.blocks]
        s.tensor["pins"] = [block.pinned for block in self.blocks]
        for at, owner in zip(starts, owners, strict=True):
            if owner != state.FREE:
                s.tensor[owner].is_live, s.tensor[owner].offset = True, at
        for block in gone:
            self.evict(block.name)

    def window(self, size):
        """The names of Coop's victims for a request of `size` bytes."""
        return self._victims(_window(self.s, size))

    def single(self, *, neighbours=False):
        """The names (one or none) of DTR's victim; with the free `neighbours` counted, DTE's."""
        return self._victims(_single(self.s, SINGLE_WITH_NEIGHBOURS if neighbours else SINGLE))

    def _victims(self, count):
        return "".join(self.names[t] for t in self.s.victims[:count])

    def make_room(self, size, rule):
        """Allocate for nobody, evicting; the offset and the names of what was evicted, in order."""
        owner = len(self.names)
        at = _make_room(self.arrays, self.s, size, owner, self.reader, rule)
        dropped = self.s.drop["tensor"][: self.s.now.drops]
        return at, "".join(self.names[t] for t in dropped)

    def allocate(self, size, *, right=False):
        """The offset of `size` bytes for nobody, `NO_ROOM` if no free block holds them."""
        return _allocate(self.s, size, len(self.names), right)

    def release(self, name):
        """Free the block of a tensor."""
        _release(self.s, self.s.tensor[self.names.index(name)].offset)

    def evict(self, name):
        """Tell e* that the tensor has gone."""
        _evicted(self.s, self.names.index(name))

    def compute(self, name):
        """Tell e* that the tensor is there again."""
        _computed(self.s, self.names.index(name))

    def closure_cost(self, name):
        """DTR's e* of a tensor, µs."""
        return _closure_cost(self.s, self.names.index(name))

    def layout(self):
        """Sizes in address order: (name, "?" for nobody's or "" for free, bytes)."""
        block = self.s.block[: self.s.now.blocks]
        owner, size = block["owner"].tolist(), block["bytes"].tolist()
        self.check(owner, size)
        names = [*self.names, "?", ""]  # the last one is FREE's
        return [(names[t], bytes_) for t, bytes_ in zip(owner, size, strict=True)]

    def check(self, owner, size):
        """What holds of any arena: blocks tile it, no two free ones touch, holes are listed."""
        s = self.s
        starts = np.cumsum([0, *size])
        assert s.block["offset"][: len(size)].tolist() == starts[:-1].tolist()
        assert starts[-1] == s.capacity
        assert (state.FREE, state.FREE) not in list(pairwise(owner))
        ends = zip(owner, size, starts[:-1], strict=True)
        free = [(bytes_, at) for t, bytes_, at in ends if t == state.FREE]
        holes = s.hole[["bytes", "offset"]][: s.now.holes]
        assert holes.tolist() == sorted(free)


class Step:
    """
    A graph written op by op with tensors called by name, run in the simulator and through `plan`.

    Each op is `make(name, reads, …)`; a name in capitals leaves the step (an output outside the
    arena, or in it if `outputs` says so). What no op makes is there before it.
    """

    def __init__(self, outputs="outside"):
        self.outputs = outputs
        self.ids = {}
        self.tensors = {}
        self.ops = []

    def make(self, names, reads="", size=1, cost=1.0, inplace="", **fields):
        """
        Append an op that makes `names` from the tensors `reads`, one letter each.

        `inplace` lists pairs: "ba" says that b may take over a's address.
        """
        inputs = [self._tensor(read, "input", 0) for read in reads]
        kinds = ["output" if name.isupper() else "activation" for name in names]
        outputs = [self._tensor(*made, size) for made in zip(names, kinds, strict=True)]
        pairs = [[self.ids[out], self.ids[source]] for out, source in inplace.split()]
        made = {"inputs": inputs, "outputs": outputs, "cost_us": cost, "inplace": pairs}
        self.ops.append(made | fields)
        return self

    def _tensor(self, name, kind, size):
        if name not in self.ids:
            self.ids[name] = len(self.ids)
            self.tensors[self.ids[name]] = (kind, size)
        return self.ids[name]

    def graph(self):
        return make_graph(self.tensors, self.ops)

    def problem(self):
        return Problem.from_graph(self.graph(), 1, self.outputs)

    def name(self, tensor):
        return next(name for name, number in self.ids.items() if number == tensor)

    def closure_pins(self, goal, live):
        """The pins of each tensor, by name, when op `goal` is at hand and `live` are there."""
        problem = self.problem()
        s = state.empty_arena(problem, 1, MANY_EVENTS, partition=False)
        for name in live:
            s.tensor[self.ids[name]].is_live = True
        _pin(to_arrays(problem), s, goal)
        pins = s.tensor["pins"].tolist()
        return {self.name(t): count for t, count in enumerate(pins) if count}

    def expensive(self):
        """The names of what is allocated from the right end."""
        problem = self.problem()
        arena = state.empty_arena(problem, 1, MANY_EVENTS, partition=True)
        right = arena.op["from_right"]
        return "".join(self.name(problem.op_outputs[op][0]) for op in np.flatnonzero(right))

    def run(self, arena, rule=WINDOW, *, partition=False, inplace=False, **how):
        """The simulator's run in `arena` bytes; `DoesNotFitError` if an op finds no room."""
        how |= {"partition": partition, "inplace": inplace}
        return simulate_arena(self.problem(), Request(arena), rule, **how)

    def components(self, run):
        """
        The names of what is in a component of evicted tensors at the end of a run.

        And the names of what is in one though it is there, or in none though it has gone.
        """
        tensor = run.state.tensor
        node, live, written = tensor["node"], tensor["is_live"], tensor["is_written"]
        wrong = written & ((node >= 0) == live) & ~np.array(self.problem().outside)
        return tuple(
            "".join(sorted(self.name(t) for t in np.flatnonzero(chosen)))
            for chosen in (node >= 0, wrong)
        )

    def placed(self, run):
        """By name: the last offset at which a run made a tensor in the arena."""
        record = run.state.offsets[: run.state.now.offsets].tolist()
        return dict(zip(self._made_in_arena(run), record, strict=True))

    def _made_in_arena(self, run):
        outside = {self.name(t) for t in np.flatnonzero(self.problem().outside)}
        for _, name in self._makes(run):
            if name in outside:  # the first time only
                outside.remove(name)
            else:
                yield name

    def _makes(self, run):
        """Event and name of all that a run made."""
        ops = run.state.event["what"][: run.state.now.events].tolist()
        for event, op in enumerate(ops):
            for t in self.problem().op_outputs[op]:
                yield event, self.name(t)

    def evictable(self, run):
        """The names of what may still be evicted at the end of a run."""
        flags = run.state.tensor["is_evictable"]
        return "".join(self.name(t) for t in np.flatnonzero(flags))

    def told(self, run):
        """
        A run in words: what was made in order and, after a minus, what went.

        "b=a" is b in a's place.
        """
        s = run.state
        inplace, drops = s.inplace[: s.now.inplace].tolist(), s.drop[: s.now.drops].tolist()
        source = {(event, self.name(out)): self.name(t) for event, out, t in inplace}
        words = [
            (event, 0, f"{name}={source[event, name]}" if (event, name) in source else name)
            for event, name in self._makes(run)
        ]
        words += [(event, 1, "-" + self.name(t)) for event, t in drops]
        return " ".join(word for _, _, word in sorted(words, key=lambda word: word[:2]))

    def planned(self, method, arena, **switches):
        """The plan within `arena` bytes of arena, told as a run is."""
        words, live = [], {}
        for step in self._plan(method, arena, switches).steps:
            if step.do == "free":
                words += ["-" + self.name(live.pop(buffer)[0]) for buffer in step.buffers]
                continue
            for write in step.writes:
                word = self.name(write.tensor)
                if write.offset is not None:
                    for read in step.reads:
                        if read in live and live[read][1] == write.offset:
                            word += "=" + self.name(live.pop(read)[0])
                    live[write.buffer] = (write.tensor, write.offset)
                words.append(word)
        return " ".join(words)

    def offsets(self, method, arena, **switches):
        """By name: where the plan first puts a tensor in the arena."""
        found = {}
        for step in self._plan(method, arena, switches).steps:
            for write in step.writes if step.do == "compute" else ():
                if write.offset is not None:
                    found.setdefault(self.name(write.tensor), write.offset)
        return found

    def _plan(self, method, arena, switches):
        off = {name.replace("_", "-"): on for name, on in switches.items()}
        outside = sum(size for kind, size in self.tensors.values() if kind == "output")
        return plan(self.graph(), arena + outside, method=method, alignment=1, switches=off)
