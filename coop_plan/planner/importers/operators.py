"""
Which nodes of a trace are a step's ops, and what they do to storages.

Operators call operators. The op of a graph is the outermost one whose work is not all done by ops
below it: `aten::linear` leaves everything to `aten::addmm`, which itself only leaves the copy of
the bias to another. Work is what is read and what is written, so no list of names decides it.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from coop_plan.planner.importers.nodes import Node, Ref
from coop_plan.schemas.errors import InvalidInputError

Storage = tuple[str, int]

ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
"""Operators that make a storage and write nothing."""

OVERWRITERS = frozenset({"zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"})
"""In-place operators that do not read what they write."""

OPERATOR = re.compile(r"\w+::")
"""A name that an operator can have; frames and annotations have others."""

RANDOM = re.compile(r"bernoulli|dropout$|^rand|^normal|uniform_|exponential_|random_|multinomial")

COLLECTIVES = ("c10d::", "nccl:", "_c10d_functional::")


@dataclass
class Work:
    """What a node and all below it do, storage by storage."""

    node: Node
    phase: str
    below: list["Work"] = field(default_factory=list)
    reads: set[Storage] = field(default_factory=set)
    writes: set[Storage] = field(default_factory=set)
    is_op: bool = False

    @property
    def subtree(self) -> "list[Work]":
        """The node and all below it, in program order."""
        found, stack = [], [self]
        while stack:
            work = stack.pop()
            found.append(work)
            stack += reversed(work.below)
        return found


def base_name(name: str) -> str:
    """`aten::add_` without its library."""
    return name.rsplit("::", 1)[-1]


def mutated(node: Node) -> list[Ref]:
    """The arguments that the operator overwrites: what its schema marks, or by PyTorch's naming."""
    if "!" in node.schema:
        text = node.schema[node.schema.find("(") + 1 : node.schema.rfind(") ->")]
        marked = [i for i, part in enumerate(_split(text)) if "!" in part]
        return [ref for i in marked if i < len(node.inputs) for ref in node.inputs[i]]
    name = base_name(node.name)
    if name.endswith("_") and not name.endswith("__") and node.inputs:
        return node.inputs[0]
    return []


def _split(arguments: str) -> list[str]:
    """The arguments of a schema; `*` stands between them and is none."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(arguments):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(arguments[begin:at])
            begin = at + 1
    parts.append(arguments[begin:])
    return [part for part in parts if part.strip() not in ("*", "")]


def only_shape(name: str) -> bool:
    """Whether the operator takes the form of its input, and not its numbers."""
    base = base_name(name)
    return base.endswith("_like") or base.startswith("new_")


def operators(nodes: list[Node], device: str) -> list[Work]:
    """The nodes with what they do, the ops of `device` marked; nodes are in program order."""
    works: dict[int, Work] = {}
    for node in nodes:
        parent = works.get(node.parent)
        work = works[node.id] = Work(node, _phase(node, parent))
        if parent is not None:
            parent.below.append(work)
    for node in reversed(nodes):
        _judge(works[node.id], device)
    return list(works.values())


def _phase(node: Node, parent: Work | None) -> str:
    if node.name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if node.name.startswith("Optimizer.step"):
        return "optimizer"
    return parent.phase if parent is not None else "forward"


def last_step(works: list[Work]) -> tuple[list[Work], int]:
    """
    What ran in the last whole step, in program order, and how many steps the trace has.

    A step ends with its optimizer, or begins where `profiler.step()` was called; what nobody marks
    is one.
    """
    numbers = [work.node.id for work in works]
    ends = [
        max(inner.node.id for inner in work.subtree)
        for work in works
        if work.node.name.startswith("Optimizer.step")
    ]
    if ends:
        begin = bisect_right(numbers, ends[-2]) if len(ends) > 1 else 0
        return works[begin : bisect_right(numbers, ends[-1])], len(ends)
    begins = [
        at for at, work in enumerate(works) if work.node.name.startswith("ProfilerStep#")
    ] or [0]
    return works[begins[-1] :], len(begins)


def set_phases(works: list[Work]) -> None:
    """Between its first op and the optimizer all of a backward is one, hooks of it, too."""
    begun = False
    for work in works:
        begun = begun or work.phase == "backward"
        if begun and work.phase == "forward":
            work.phase = "backward"


def _judge(work: Work, device: str) -> None:
    """Whether a node is an op, once all below it are judged."""
    node = work.node
    done_reads: set[Storage] = set()
    done_writes: set[Storage] = set()
    for child in work.below:
        done_reads |= child.reads
        done_writes |= child.writes
    work.reads, work.writes = done_reads, done_writes
    if node.name.startswith("triton_"):
        message = (
            f"node {node.id} is a compiled kernel ({node.name[:60]}): what it writes is not in the"
            " trace; record the step without torch.compile"
        )
        raise InvalidInputError(message, node.place)
    if OPERATOR.match(node.name) is None or node.name.startswith(("autograd::", "torch::autograd")):
        return
    if base_name(node.name) in ALLOCATIONS or base_name(node.name) == "resize_":
        return
    inputs = {ref.storage for refs in node.inputs for ref in refs if ref.device == device}
    outputs = {ref.storage for ref in node.outputs if ref.device == device}
    changed = {ref.storage for ref in mutated(node) if ref.device == device}
    writes = outputs - inputs | changed
    reads = set() if only_shape(node.name) else inputs
    views = not changed and outputs <= inputs and outputs
    if not (reads or writes) or (views and not done_writes):
        return
    if work.below and writes <= done_writes and reads <= done_reads | done_writes:
        return
    work.is_op = True
    work.reads, work.writes = done_reads | reads, done_writes | writes


def chosen(works: list[Work]) -> list[Work]:
    """Works without those below an op, whose own they are."""
    below = {inner.node.id for work in works if work.is_op for inner in work.subtree[1:]}
    return [work for work in works if work.node.id not in below]


def main_device(nodes: list[Node]) -> str:
    """Where the step runs: the device of most bytes, one with a GPU before the host."""
    made: dict[str, int] = defaultdict(int)
    for node in nodes:
        for ref in node.outputs:
            made[ref.device] += ref.bytes
    if not made:
        raise InvalidInputError(
            "no node makes a tensor: nothing ran while it was recorded", "/nodes"
        )
    return max(made, key=lambda device: (device != "cpu", made[device], device))
