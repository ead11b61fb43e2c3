"""Selection of the nodes of a trace that become ops, with the storages that they read and write.

Operators call operators. A graph's op is the outermost call whose reads and writes are not all
those of ops below it. `aten::linear` leaves all of them to `aten::addmm`, which leaves only the
copy of the bias to another operator. Reads and writes decide, not a list of names.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from coop_plan.planner.importers.nodes import Node, Ref
from coop_plan.schemas.errors import InvalidInputError

Storage = tuple[str, int]

ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
"""Operators that allocate a storage without writing it."""


@dataclass
class Call:
    """A node of the call tree, with the storages that it and its children read and write."""

    node: Node
    phase: str
    children: list["Call"] = field(default_factory=list)
    reads: set[Storage] = field(default_factory=set)
    writes: set[Storage] = field(default_factory=set)
    is_op: bool = False
    parent: "Call | None" = field(default=None, repr=False)

    @property
    def scope(self) -> str:
        """Path of the frames and operators around the call; without any, its own name."""
        names: list[str] = []
        call = self.parent
        while call is not None:
            name = call.node.name.removeprefix("autograd::engine::evaluate_function: ")
            if not name.startswith(("[pytorch|", "ProfilerStep#")) and names[-1:] != [name]:
                names.append(name)
            call = call.parent
        return "/".join(reversed(names or [self.node.name])).replace(", ", ",")

    @property
    def subtree(self) -> "list[Call]":
        """The call and all calls below it, in program order."""
        found, stack = [], [self]
        while stack:
            call = stack.pop()
            found.append(call)
            stack += reversed(call.children)
        return found


def base_name(name: str) -> str:
    """The name without its library: `add_` of `aten::add_`."""
    return name.rsplit("::", 1)[-1]


def is_operator(name: str) -> bool:
    """True for operators, False for frames around them: annotations and autograd's."""
    return bool(re.match(r"\w+::", name)) and not name.startswith(("autograd::", "torch::autograd"))


def is_random(name: str) -> bool:
    """True for operators that draw random numbers."""
    names = "bernoulli|dropout$|^rand|^normal|uniform_|exponential_|random_|multinomial"
    return bool(re.search(names, base_name(name)))


def is_collective(name: str) -> bool:
    """True for operators that communicate with other ranks."""
    return name.startswith(("c10d::", "nccl:", "_c10d_functional::"))


def mutated(node: Node) -> list[Ref]:
    """Arguments that the operator overwrites: those its schema marks, else by its trailing `_`."""
    if "!" in node.schema:
        text = node.schema[node.schema.find("(") + 1 : node.schema.rfind(") ->")]
        marked = [i for i, part in enumerate(_split(text)) if "!" in part]
        return [ref for i in marked if i < len(node.inputs) for ref in node.inputs[i]]
    name = base_name(node.name)
    if name.endswith("_") and not name.endswith("__") and node.inputs:
        return node.inputs[0]
    return []


def _split(arguments: str) -> list[str]:
    """The arguments of a schema, without the separator `*`."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(arguments):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(arguments[begin:at])
            begin = at + 1
    parts.append(arguments[begin:])
    return [part for part in parts if part.strip() not in ("*", "")]


def reads_shape_only(name: str) -> bool:
    """True if the operator uses its input's shape only, not its values."""
    base = base_name(name)
    return base.endswith("_like") or base.startswith("new_")


def operators(nodes: list[Node], device: str) -> list[Call]:
    """The call tree of nodes in program order, with the ops of `device` marked."""
    calls: dict[int, Call] = {}
    for node in nodes:
        parent = calls.get(node.parent)
        call = calls[node.id] = Call(node, _phase(node, parent), parent=parent)
        if parent is not None:
            parent.children.append(call)
    for node in reversed(nodes):
        _mark_op(calls[node.id], device)
    return list(calls.values())


def _phase(node: Node, parent: Call | None) -> str:
    if node.name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if node.name.startswith("Optimizer.step"):
        return "optimizer"
    return parent.phase if parent is not None else "forward"


def last_step(calls: list[Call]) -> tuple[list[Call], int]:
    """The calls of the last complete step in program order, and the number of steps of the trace.

    A step ends with `Optimizer.step`, or begins at `profiler.step()`. A trace without either is one
    step.
    """
    numbers = [call.node.id for call in calls]
    ends = [
        max(inner.node.id for inner in call.subtree)
        for call in calls
        if call.node.name.startswith("Optimizer.step")
    ]
    if ends:
        begin = bisect_right(numbers, ends[-2]) if len(ends) > 1 else 0
        return calls[begin : bisect_right(numbers, ends[-1])], len(ends)
    begins = [
        at for at, call in enumerate(calls) if call.node.name.startswith("ProfilerStep#")
    ] or [0]
    return calls[begins[-1] :], len(begins)


def set_phases(calls: list[Call]) -> None:
    """Set the phase of all calls from the first backward op to the optimizer, hooks included."""
    in_backward = False
    for call in calls:
        in_backward = in_backward or call.phase == "backward"
        if in_backward and call.phase == "forward":
            call.phase = "backward"


def _mark_op(call: Call, device: str) -> None:
    """Set reads, writes and `is_op` of a call, after those of its children."""
    node = call.node
    child_reads: set[Storage] = set()
    child_writes: set[Storage] = set()
    for child in call.children:
        child_reads |= child.reads
        child_writes |= child.writes
    call.reads, call.writes = child_reads, child_writes
    if node.name.startswith("triton_"):
        message = (
            f"node {node.id} is a compiled kernel ({node.name[:60]}), whose outputs the trace does"
            " not contain: record the step without torch.compile"
        )
        raise InvalidInputError(message, node.place)
    if not is_operator(node.name):
        return
    if base_name(node.name) in ALLOCATIONS or base_name(node.name) == "resize_":
        return
    inputs = {ref.storage for refs in node.inputs for ref in refs if ref.device == device}
    outputs = {ref.storage for ref in node.outputs if ref.device == device}
    changed = {ref.storage for ref in mutated(node) if ref.device == device}
    writes = outputs - inputs | changed
    reads = set() if reads_shape_only(node.name) else inputs
    views = not changed and outputs <= inputs and outputs
    if not (reads or writes) or (views and not child_writes):
        return
    if call.children and writes <= child_writes and reads <= child_reads | child_writes:
        return
    call.is_op = True
    call.reads, call.writes = child_reads | reads, child_writes | writes


def outermost(calls: list[Call]) -> list[Call]:
    """The calls that are not below an op."""
    below = {inner.node.id for call in calls if call.is_op for inner in call.subtree[1:]}
    return [call for call in calls if call.node.id not in below]


def main_device(nodes: list[Node]) -> str:
    """Device of the step: the one of the most output bytes, the host only if there is no other."""
    size: dict[str, int] = defaultdict(int)
    for node in nodes:
        for ref in node.outputs:
            size[ref.device] += ref.bytes
    if not size:
        raise InvalidInputError(
            "no node has an output tensor: start the observer before the step and stop it after",
            "/nodes",
        )
    return max(size, key=lambda device: (device != "cpu", size[device], device))
