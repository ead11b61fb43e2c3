"""
Training steps that no method was tuned for: graphs by family and seed, with autograd's gradients.

A family draws a forward program on a tape; the tape is differentiated as PyTorch's autograd does:
nodes in the reverse of the order in which they were made, each reading what its formula saves, and
gradients of one tensor added up one after the other. Gradients of sums and concatenations are views
of what came in, so they are no op. `unrolled` differentiates inner steps within the program, and
then through them.

Sizes and costs are log-normal mixtures, fitted by eye to the traces in `../shared/data/graphs`
(below); everything else is drawn as well: widths, depths, what is saved, workspace, whether
gradients leave the step or update their parameters in place, whether routing may run once only.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coop_plan.schemas import Graph, parse_graph

LARGE_BITS = (22.5, 1.2), 1.3
"""
log2 of large tensors' bytes: a graph's mean is drawn (mean, deviation), its tensors lie around it.

Medians of the traces: unroll_gan 11 to 20, transformer 21.3, lstm 21.7, unet 24.2, resnet32 25.4;
the middle half of a trace spans 2 to 5 bits.
"""

SMALL_BITS = 9.0, 2.5
"""log2 of statistics', masks' and scalars' bytes; 5 % to 40 % of a trace's tensors (lstm, unet)."""

LAUNCH_US = 25.0, 0.25
"""Smallest cost of an op: median, and deviation of the logarithm (unroll_gan: 22, 0.38)."""

NS_PER_KIB = {"map": (2.5, 0.4), "linear": (12.0, 0.7)}
"""
Additional cost of traffic by kind: median, and deviation of the logarithm.

Lower quartiles and medians of traces against upper ones: transformer 2.9 and 21, unet 2.3 and 10,
resnet32 1.8 and 10, roofline_gpt2_12 0.9 and 4.
"""

NOISE = 0.3
"""Deviation of a cost's logarithm between equal ops."""

FORWARD_SHARE = 0.36
"""Share of the requested ops that the forward program has."""


@dataclass(frozen=True)
class _Node:
    """Autograd node of an op: its differentiable inputs, its result, and its saved tensors."""

    kind: str
    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...]


class Tape:
    """A step under construction: tensors by number, ops in order, and nodes to differentiate."""

    def __init__(self, family: str, seed: int, ops: int) -> None:
        self.random = np.random.default_rng([zlib.crc32(family.encode()), seed])
        self.wanted = int(ops * FORWARD_SHARE)
        self.tensors: list[dict[str, Any]] = []
        self.ops: list[dict[str, Any]] = []
        self.phase = "forward"
        self._nodes: list[_Node] = []
        self._needs_gradient: set[int] = set()
        self.parameters: list[int] = []
        self._middle = self.random.normal(*LARGE_BITS[0])
        self._rates = {
            kind: median * np.exp(self.random.normal(0, spread))
            for kind, (median, spread) in NS_PER_KIB.items()
        }
        self.workspace_chance = float(self.random.choice([0.0, 0.3]))
        self.updates = bool(self.random.random() < 0.5)

    @property
    def short(self) -> bool:
        """True until the forward program has its ops."""
        return len(self.ops) < self.wanted

    def large(self, spread: float = LARGE_BITS[1]) -> int:
        """Bytes of an activation."""
        bits = np.clip(self.random.normal(self._middle, spread), 12, 29)
        return int(2 ** (round(2 * bits) / 2)) // 512 * 512  # few sizes, as models have

    def small(self) -> int:
        """Bytes of statistics or a mask."""
        return int(2 ** np.clip(self.random.normal(*SMALL_BITS), 2, 16))

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return int(self.random.integers(low, high + 1))

    def tensor(self, size: int, kind: str = "activation") -> int:
        """A tensor of so many bytes."""
        self.tensors.append({"id": len(self.tensors), "bytes": size, "kind": kind})
        return len(self.tensors) - 1

    def parameter(self, size: int) -> int:
        """A parameter, whose gradient the step makes."""
        made = self.tensor(size, "parameter")
        self.parameters.append(made)
        self._needs_gradient.add(made)
        return made

    def weight(self) -> int:
        """A parameter, smaller than the activations beside it by what a batch is larger than 1."""
        return self.parameter(max(512, self.large() >> self.between(2, 5)))

    def bytes(self, t: int) -> int:
        """Size of a tensor."""
        return int(self.tensors[t]["bytes"])

    def _made_here(self, t: int) -> bool:
        return bool(self.tensors[t]["kind"] == "activation")

    def op(self, name: str, inputs: Iterable[int], *sizes: int, **fields: Any) -> list[int]:
        """Append an op that makes tensors of these bytes; returns them."""
        inputs = list(dict.fromkeys(inputs))
        outputs = [self.tensor(size) for size in sizes]
        kib = sum(self.bytes(t) for t in (*inputs, *outputs)) / 1024
        rate = self._rates["linear" if name.startswith("linear") else "map"]
        launch = LAUNCH_US[0] * np.exp(self.random.normal(0, LAUNCH_US[1]))
        cost = launch + kib * rate / 1e3 * np.exp(self.random.normal(0, NOISE))
        workspace = 0
        if name.startswith("linear") and self.random.random() < self.workspace_chance:
            workspace = self.large()
        about = {"id": len(self.ops), "name": name, "phase": self.phase}
        costs = {"cost_us": round(float(cost), 3), "workspace_bytes": workspace}
        self.ops.append({**about, "inputs": inputs, "outputs": outputs, **costs, **fields})
        return outputs

    def _apply(
        self,
        kind: str,
        inputs: Sequence[int],
        size: int,
        *more: int,
        extra: tuple[int, ...] = (),
        saves: Callable[[list[int]], tuple[int, ...]] = lambda made: (),
        over: int | None = None,
        **fields: Any,
    ) -> int:
        """A differentiable op: it reads `inputs` and `extra`, and may overwrite `over`."""
        number = len(self.tensors)
        if over is not None and self.bytes(over) == size and self._made_here(over):
            fields["inplace"] = [[number, over]]
        made = self.op(kind, (*inputs, *extra), size, *more, **fields)
        if not self._needs_gradient.isdisjoint(inputs):
            self._needs_gradient.add(made[0])
            self._nodes.append(_Node(kind, tuple(inputs), made[0], saves(made)))
        return made[0]

    def linear(self, x: int, w: int, size: int) -> int:
        """A matrix product or a convolution, of a parameter or of another activation."""
        return self._apply("linear", (x, w), size)

    def map(self, x: int, *, overwrites: bool | None = None) -> int:
        """One tensor to one of its size; the kind that may overwrite saves its result."""
        if overwrites is None:
            overwrites = bool(self.random.random() < 0.5)
        if overwrites:
            return self._apply("map", (x,), self.bytes(x), saves=lambda made: (made[0],), over=x)
        return self._apply("map", (x,), self.bytes(x), saves=lambda made: (x,))

    def add(self, x: int, y: int) -> int:
        """A sum, of the size of `x`."""
        return self._apply("add", (x, y), self.bytes(x), over=x)

    def product(self, x: int, y: int, size: int | None = None) -> int:
        """Element by element, of the size of `x` or another."""
        return self._apply("product", (x, y), self.bytes(x) if size is None else size)

    def cat(self, *xs: int) -> int:
        """One after the other."""
        return self._apply("cat", xs, sum(map(self.bytes, xs)))

    def norm(self, x: int) -> int:
        """A normalization, which saves its input and small statistics."""
        statistics = self.small()
        return self._apply("norm", (x,), self.bytes(x), statistics, saves=lambda m: (x, m[1]))

    def dropout(self, x: int) -> int:
        """Random; saves its mask."""
        mask = max(1, self.bytes(x) // 4)
        return self._apply("dropout", (x,), self.bytes(x), mask, saves=lambda m: (m[1],), rng=True)

    def pick(self, x: int, index: int, size: int, **fields: Any) -> int:
        """Rows of `x`, or rows put to where they belong among others."""
        return self._apply(
            "pick", (x,), size, extra=(index,), saves=lambda made: (index,), **fields
        )

    def reduce(self, x: int) -> int:
        """To a scalar; the gradient is as large as `x`."""
        return self._apply("reduce", (x,), 8)

    def layer(self, x: int, size: int | None = None) -> int:
        """One of the usual short sequences from `x` to a tensor of this size, or of that of `x`."""
        size = self.bytes(x) if size is None else size
        y = self.linear(x, self.weight(), size)
        for follow in (self.norm, self.map, self.dropout):
            if self.random.random() < (0.15 if follow == self.dropout else 0.6):
                y = follow(y)
        return y

    def sum(self, xs: Sequence[int]) -> int:
        """All of them, one after the other."""
        total = xs[0]
        for x in xs[1:]:
            total = self.add(total, x)
        return total

    def gradients(self, of: int, by: Iterable[int]) -> dict[int, int]:
        """
        Differentiate the tape: the gradients of `of` by these tensors, and by what lies between.

        What that takes are ops on the tape like all others, where they are differentiable.
        """
        between = set(by)
        nodes = []
        for node in self._nodes:
            if not between.isdisjoint(node.inputs):
                between.add(node.output)
                nodes.append(node)
        found = {of: self.op("ones", (), self.bytes(of))[0]}
        for node in reversed(nodes):
            g = found.get(node.output)
            if g is None:
                continue
            for x, gradient in self._formulas(node, g, between):
                known = found.get(x)
                found[x] = gradient if known is None else self._accumulate(known, gradient)
        return found

    def _accumulate(self, known: int, gradient: int) -> int:
        if self.bytes(known) < self.bytes(gradient):  # views of larger storages
            known, gradient = gradient, known
        return self.add(known, gradient)

    def _formulas(self, node: _Node, g: int, wanted: set[int]) -> Iterable[tuple[int, int]]:
        """Inputs of a node that are wanted, with their gradients; `g` is that of its result."""
        x = node.inputs[0]
        other = node.inputs[-1]
        for here, it in ((x, other), (other, x)) if node.kind in ("linear", "product") else ():
            if here in wanted:
                made = self.linear(g, it, self.bytes(here))
                if node.kind == "product":
                    self.ops[-1]["name"] = "product"
                yield here, made
        if node.kind == "map":
            yield x, self._apply("product", (g, *node.saved), self.bytes(x), over=g)
        elif node.kind in ("add", "cat"):
            yield from ((t, g) for t in node.inputs if t in wanted)
        elif node.kind in ("norm", "dropout", "pick", "reduce"):
            fields = {"inplace": [[len(self.tensors), g]]} if node.kind == "dropout" else {}
            name = f"{node.kind}_backward"
            yield x, self.op(name, (g, *node.saved), self.bytes(x), **fields)[0]

    def finish(self, name: str, loss: int) -> Graph:
        """The graph of the step: backward of `loss`, and updates where there are any."""
        self.tensors[loss]["kind"] = "output"
        self.phase = "backward"
        found = self.gradients(loss, self.parameters)
        self.phase = "optimizer"
        for p in self.parameters:
            if p in found and self.updates:
                self.op("update", (p, found[p]), mutates=[p], recomputable=False)
            elif p in found:
                self.tensors[found[p]]["kind"] = "output"
        return parse_graph(
            {"schema": "coop-plan/graph/1", "name": name, "tensors": self.tensors, "ops": self.ops}
        )


def _series_parallel(tape: Tape) -> int:
    def block(x: int, depth: int) -> int:
        if depth == 0:
            return tape.layer(x) if tape.random.random() < 0.7 else tape.map(x)
        if tape.random.random() < 0.5:
            return block(block(x, depth - 1), depth - 1)
        size = tape.bytes(x)
        branches = [block(x, tape.between(0, depth - 1)) for _ in range(tape.between(2, 4))]
        if tape.random.random() < 0.5:
            return tape.sum(branches)
        return tape.layer(tape.cat(*branches), size)

    x = tape.layer(tape.tensor(tape.large(), "input"))
    while tape.short:
        x = block(x, tape.between(1, 3))
        if tape.random.random() < 0.3:
            x = tape.layer(x, tape.large())
    return x


def _layered(tape: Tape) -> int:
    width = tape.between(3, 12)
    size = tape.large()
    there = [tape.layer(tape.tensor(size, "input"), size) for _ in range(width)]
    unread = dict.fromkeys(there)
    while tape.short:
        far = tape.random.random() < 0.15
        among = there if far else there[-2 * width :]
        some = [among[tape.between(0, len(among) - 1)] for _ in range(tape.between(1, 3))]
        for x in some:
            unread.pop(x, None)
        size = tape.large(0.7)
        made = tape.sum([tape.layer(x, size) for x in dict.fromkeys(some)])
        there.append(made)
        unread[made] = None
    size = tape.small()
    return tape.sum([tape.linear(x, tape.weight(), size) for x in unread])


def _skips(tape: Tape) -> int:
    x = tape.tensor(tape.large(0.5), "input")
    size, first = tape.bytes(x), None
    while tape.short:
        kept = []
        depth = tape.between(2, 6)
        for level in range(depth):
            x = tape.layer(tape.layer(x, max(512, size >> level)))
            kept.append(x)
        for level in reversed(range(depth)):
            x = tape.layer(tape.cat(x, kept[level]), max(512, size >> level))
        if first is None:
            first = x
        elif tape.random.random() < 0.5:  # over whole hourglasses, from the first of them
            x = tape.add(x, first)
    return x


def _recurrent(tape: Tape) -> int:
    size = tape.large(0.7)
    layers = tape.between(1, 3)
    weights = [(tape.weight(), tape.weight()) for _ in range(layers)]
    hidden = [tape.op("zeros", (), size)[0] for _ in range(layers)]
    cells = [tape.op("zeros", (), size)[0] for _ in range(layers)]
    every, last_only = [], tape.random.random() < 0.5
    while tape.short:
        x = tape.tensor(size, "input")
        for layer, (of_input, of_hidden) in enumerate(weights):
            gates = tape.add(
                tape.linear(x, of_input, 4 * size), tape.linear(hidden[layer], of_hidden, 4 * size)
            )
            index = tape.tensor(8, "constant")
            i, f, o, g = (
                tape.map(tape.pick(gates, index, size), overwrites=True) for _ in range(4)
            )
            cells[layer] = tape.add(tape.product(f, cells[layer]), tape.product(i, g))
            hidden[layer] = x = tape.product(o, tape.map(cells[layer], overwrites=True))
        every.append(x)
    return x if last_only else tape.sum([tape.reduce(x) for x in every])


def _experts(tape: Tape) -> int:
    size = tape.large(0.7)
    experts = tape.between(4, 12)
    once = {"recomputable": bool(tape.random.random() < 0.5)}  # tokens may come over a network
    x = tape.layer(tape.tensor(size, "input"), size)
    while tape.short:
        n = tape.norm(x)
        scores = tape.map(tape.linear(n, tape.parameter(tape.small()), tape.small()))
        (index,) = tape.op("top_k", (scores,), tape.small())
        shares = tape.random.dirichlet([0.6] * experts)
        made = []
        for share in shares:
            rows = max(512, int(2 * size * share) // 512 * 512)
            tokens = tape.pick(n, index, rows, **once)
            h = tape.map(tape.linear(tokens, tape.weight(), 4 * rows))
            out = tape.linear(h, tape.weight(), rows)
            made.append(tape.pick(tape.product(out, scores), index, size, **once))
        x = tape.add(x, tape.sum(made))
    return x


def _unrolled(tape: Tape) -> int:
    layers, size = tape.between(2, 4), tape.large(0.7)
    weights = [tape.weight() for _ in range(layers)]
    rate = tape.parameter(8)

    def loss_of(weights: list[int]) -> int:
        x = tape.tensor(size, "input")
        for w in weights:
            x = tape.map(tape.linear(x, w, size))
        return tape.product(x, x, 8)

    while tape.short:
        found = tape.gradients(loss_of(weights), weights)
        weights = [tape.add(w, tape.product(found[w], rate)) for w in weights]
    return loss_of(weights)


def _fan_out(tape: Tape) -> int:
    x = tape.layer(tape.tensor(tape.large(), "input"))
    while tape.short:
        tied = tape.weight()
        readers = []
        for _ in range(tape.between(8, 64)):
            own = tape.weight() if tape.random.random() < 0.5 else tied
            y = tape.linear(x, own, tape.large(0.7))
            readers.append(tape.map(y) if tape.random.random() < 0.5 else y)
        size = tape.bytes(x)
        x = tape.layer(tape.sum([tape.linear(y, tied, size) for y in readers]), tape.large())
    return x


def _tiny(tape: Tape) -> int:
    there = [tape.map(tape.parameter(tape.small()))]
    while tape.short:
        x, y = there[-1], there[-tape.between(1, min(6, len(there)))]
        draw = tape.random.random()
        if draw < 0.12:
            there.append(tape.linear(x, tape.parameter(tape.small()), tape.large(0.5)))
        elif draw < 0.2:
            there.append(tape.product(tape.map(tape.parameter(tape.small())), x))
        elif draw < 0.45:
            there.append(tape.product(x, y, max(tape.bytes(x), tape.bytes(y))))
        elif draw < 0.65:
            there.append(tape.add(x, y))
        elif draw < 0.67:
            there.append(tape.reduce(x))
        else:
            there.append(tape.map(x))
    return tape.sum([tape.reduce(x) for x in there[-6:]])


FAMILIES: dict[str, Callable[[Tape], int]] = {
    "series-parallel": _series_parallel,
    "layered": _layered,
    "skips": _skips,
    "recurrent": _recurrent,
    "experts": _experts,
    "unrolled": _unrolled,
    "fan-out": _fan_out,
    "tiny": _tiny,
}
"""Each draws a forward program on a tape, and returns the tensor to minimise."""


def hard_graph(family: str, seed: int, ops: int = 400) -> Graph:
    """
    A training step of about so many ops.

    Args:
        family: one of `FAMILIES`.
        seed: of all that is drawn; equal arguments make equal graphs.

    Raises:
        KeyError: there is no such family.
    """
    draw = FAMILIES[family]
    tape = Tape(family, seed, ops)
    return tape.finish(f"hard:{family}:{seed}:{ops}", tape.reduce(draw(tape)))


def parse_name(name: str) -> Graph:
    """
    The graph of a name like `hard:recurrent:3`, or `hard:recurrent:3:10000` with a number of ops.

    Raises:
        ValueError: no such family, or no number where one belongs.
    """
    head, *rest = name.split(":")
    numbers = rest[1:]
    well = head == "hard" and 1 <= len(numbers) <= 2 and all(n.isdigit() for n in numbers)
    if not well or rest[0] not in FAMILIES:
        raise ValueError(
            f"{name}: a hard graph is hard:FAMILY:SEED or hard:FAMILY:SEED:OPS,"
            f" with one of {', '.join(FAMILIES)}"
        )
    return hard_graph(rest[0], *map(int, numbers))
