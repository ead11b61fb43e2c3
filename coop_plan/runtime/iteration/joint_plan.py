"""The steps of one iteration as one: planned together, within one budget, in one arena.

An iteration of several graphs is known once it has run: which steps were called, and in which order
their forwards and backwards came. The graphs are laid side by side in that order. Between them is
the user's code, of which only the bytes are known that it held, and when it was done with what the
graphs gave it. The plan of the whole is then cut into one for each call, and these share their
arena: what one leaves where another begins is as planned, as long as the order is the same.
"""

import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.runtime.capture.joint_graph import RUNTIME, Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.execute.compiled_plan import Code
from coop_plan.runtime.execute.find_plan import plan_for
from coop_plan.runtime.execute.invocation import room
from coop_plan.runtime.execute.lower_to_fx import inputs_of, tangents_of
from coop_plan.runtime.execute.plan_index import PlanIndex
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import Circumstances
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport, add, reports
from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ranks import group_of_all
from coop_plan.schemas import Compute, Device, Free, Graph, Op, Plan, format_bytes
from coop_plan.schemas.graph_editor import GraphEditor

log = logging.getLogger("coop-plan")

Event = tuple[int, bool]
"""The number of a call in its iteration, and whether its backward began, or its forward."""

LEFT = "coop_plan.left"
"""Name of an op in the place of the user's code, which has no more of what that reads from then."""

Made = tuple[bool, int]
"""Whether the backward of a call made it, or its forward, and its position among what that made."""


@dataclass
class Call:
    """One call of a step while its iteration was recorded.

    Addresses of storages: `inputs` and `tangents` by position, `made` of all that came out of its
    halves; None for what is no tensor. `passing` are positions of inputs that autograd has made,
    which their gradients are passed on to. `leaves` are the inputs whose gradients last, and those
    at `homes` can have a home: which do, and what else it found, is in `circumstances`. `gone` has
    the number of the event before which nobody had what its halves gave away any more: gradients
    were added to others, or used up. What was still there when it was to be gone is `late`.
    """

    captured: Captured
    clock: cuda.Clock | None
    passing: Collection[int] = ()
    leaves: Mapping[int, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)
    homes: Collection[int] = ()
    circumstances: Circumstances = field(default_factory=Circumstances)
    gone: dict[Made, int] = field(default_factory=dict)
    late: set[Made] = field(default_factory=set)
    inputs: Sequence[int | None] = ()
    tangents: Sequence[int | None] = ()
    made: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class Regions:
    """One code for each call of an iteration; `room` as of a flight, `between` as planned for."""

    codes: Sequence[Code]
    room: int
    between: int
    report: StepReport


def plan_regions(
    calls: Sequence[Call], events: Sequence[Event], between: int, options: Options
) -> Regions | None:
    """Plan an iteration as one, or say in the log why not and return None.

    Args:
        calls: in the order of their forwards.
        events: forwards and backwards, one of each for every call.
        between: the most bytes that the user's code held between the graphs.
        options: of all of them.
    """
    if calls[0].captured.device.type == "cuda":
        options = options.on_cuda()
    alone = [call.captured for call in calls]
    calls = [replace(call, captured=_as_found(call)) for call in calls]
    layout = _Layout(calls, events, between, options)
    for call, captured in zip(calls, alone, strict=True):
        layout.within += call.captured.resident_within - captured.resident_within
    # Each run in its own call: a walk might move it to another one's.
    options = replace(options, plan=options.plan.without("reorder", "walk"))
    try:
        made, cached = plan_for(layout.graph, options)
    except InfeasibleBudgetError as error:
        told = str(error)  # who keeps what is logged keeps no frames with it, of a forward
        if options.plan.budget.kind != "share":
            log.warning("%d graphs of one iteration are not planned together: %s", len(calls), told)
            return None
        made, cached = plan_for(layout.graph, options.within(None))
        log.warning(
            "%d graphs of one iteration take %s, the least they can: %s",
            *(len(calls), format_bytes(made.budget_bytes), told),
        )
    parts = layout.cut(made)
    if parts is None:
        log.warning(
            "%d graphs of one iteration are not planned together: method %s recomputes one's ops"
            " within another",
            *(len(calls), made.method),
        )
        return None
    codes = [Code(call.captured, part, call.clock) for call, part in zip(calls, parts, strict=True)]
    for code in codes:
        code.watch = code.watch and not between and group_of_all() is not None
    report = StepReport(
        name=f"iteration of {len(calls)} graphs {len(reports())}",
        budget_bytes=made.budget_bytes,
        peak_bytes=made.peak_bytes,
        planned_arena_bytes=made.arena_bytes,
        resident_bytes=made.resident_bytes - layout.within,
        planned_overhead=made.overhead,
        method=made.method,
        status=made.status,
        graph=layout.graph,
        plan=made,
        plan_cached=cached,
    )
    add(report)
    return Regions(codes, room(made), between, report)


class _Layout:
    """The graph of all calls, and where in it the tensors and ops of each are.

    What is passed back between the graphs, tangents and gradients of what autograd made, is there
    while it is passed on and not longer: it lies outside the arena, and counts for one call at a
    time. Of what is given to the user's code, gradients and outputs of which nothing is left before
    the iteration is over lie in the arena until then: an op reads them at the end of the last half
    that found them, which is in the plan of the whole alone, and nothing makes them again: it is
    the same tensor that the user's code has all the time. `within` are the resident bytes that are
    not there when the iteration begins.
    """

    def __init__(
        self, calls: Sequence[Call], events: Sequence[Event], between: int, options: Options
    ) -> None:
        self._calls = calls
        self._events = events
        self._ops: list[tuple[int, int | None]] = []
        self._ends: list[int] = []
        device = calls[0].captured.graph.device
        no_link = Device(kind=device.kind, name=device.name)  # nothing is moved to the host
        editor = GraphEditor(
            Graph(schema_="coop-plan/graph/1", name="iteration", device=no_link, tensors=[], ops=[])
        )
        there = {
            address
            for call in calls
            for address in call.made
            if address is not None and address not in call.inputs
        }
        self.within = 0
        given = passed = 0
        ids: list[dict[int, int]] = []
        leaving: list[dict[int, int]] = []
        for number, call in enumerate(calls):
            graph = call.captured.graph
            leaving.append(_leaving(call) if options.plan.outputs == "gradients" else {})
            shared = _shared(call, there)
            tangents = {t for node in tangents_of(call.captured) for t in stored(call, node)}
            back = _passed_back(call)
            ids.append(editor.add_tensors(graph.tensors))
            for t in shared | tangents | back:
                editor.change_tensor(ids[number][t], bytes=0)
            for t in leaving[number]:
                editor.change_tensor(ids[number][t], kind="activation")
            self.within += sum(
                graph.tensors[t].bytes
                for t in _made_within(call, first=number == 0) - shared - tangents - back
            )
            given = max(given, sum(graph.tensors[t].bytes for t in tangents - shared))
            passed = max(passed, sum(graph.tensors[t].bytes for t in back))
        size = between + given + passed
        self.within += size
        editor.add_tensor("between", size, "input")
        self._own = [{new: t for t, new in of.items()} for of in ids]
        for event, (k, backward) in enumerate(events):
            for i in _half(calls[k].captured, backward):
                op = calls[k].captured.graph.ops[i]
                if not leaving[k].keys().isdisjoint(op.outputs):
                    op = op.model_copy(update={"recomputable": False})
                self._ops.append((k, i))
                editor.add_op(op, ids[k])
            last = [
                ids[number][t]
                for number, found in enumerate(leaving)
                for t, end in found.items()
                if end == event
            ]
            if last:
                self._ops.append((k, None))
                left = Op(
                    id=0,
                    name=LEFT,
                    phase="backward" if backward else "forward",
                    inputs=last,
                    outputs=[],
                    cost_us=0.0,
                    recomputable=False,
                )
                editor.add_op(left)
            self._ends.append(len(self._ops))
        self.graph = editor.graph()

    def cut(self, whole: Plan) -> list[Plan] | None:
        """The steps of each call, in its own numbers; None if one is within another's half."""
        index = PlanIndex(self.graph, whole)
        turn = self._turns(index, len(whole.steps))
        parts: list[list[Any]] = [[] for _ in self._calls]
        owner: dict[int, int] = {}
        given: set[int] = set()  # buffers that the user's code is to have, and not the plan to free
        for i, step in enumerate(whole.steps):
            if isinstance(step, Compute):
                k, op = self._ops[step.op]
                if k != turn[i]:
                    return None
                if op is None:
                    given.update(read for read in step.reads if isinstance(read, int))
                    continue
                writes = [
                    write.model_copy(update={"tensor": self._own[k][write.tensor]})
                    for write in step.writes
                ]
                owner |= {write.buffer: k for write in writes}
                parts[k].append(step.model_copy(update={"op": op, "writes": writes}))
            elif isinstance(step, Free):
                for k, part in enumerate(parts):
                    own = [b for b in step.buffers if owner[b] == k and b not in given]
                    if own:
                        part.append(step.model_copy(update={"buffers": own}))
            else:
                return None  # a copy to the host
        return [whole.model_copy(update={"steps": part}) for part in parts]

    def _turns(self, index: PlanIndex, steps: int) -> list[int]:
        """Whose half each step falls into: a half ends with the last first run of its ops."""
        turns: list[int] = []
        first = 0
        for (k, _), last in zip(self._events, self._ends, strict=True):
            end = max((index.first_run[o] + 1 for o in range(first, last)), default=0)
            turns += [k] * (end - len(turns))
            first = last
        return turns + [self._events[-1][0]] * (steps - len(turns))


def _as_found(call: Call) -> Captured:
    """The step of a call under its circumstances."""
    if call.circumstances == Circumstances():
        return call.captured
    return capture_adjust.under(call.captured, call.circumstances)


def _half(captured: Captured, backward: bool) -> range:
    """The ops of one half."""
    if backward:
        return range(captured.forward_ops, len(captured.graph.ops))
    return range(captured.forward_ops)


def stored(call: Call, node: object) -> list[int]:
    """The tensors that a node of a call's joint graph stands for."""
    if not isinstance(node, fx.Node):
        return []
    return [t for t in call.captured.storages[node] if t is not None]


def _passed_back(call: Call) -> set[int]:
    """The gradients that are passed on: with memory of their own, made in the backward."""
    captured = call.captured
    gradients = captured.output_args[captured.num_fwd_outputs :]
    found: set[int] = set()
    kept = {
        t for node in captured.output_args[: captured.num_fwd_outputs] for t in stored(call, node)
    }
    for position, gradient in enumerate(gradients):
        (found if position in call.passing else kept).update(stored(call, gradient))
    made = {t for op in captured.graph.ops if op.phase == "backward" for t in op.outputs}
    return (found & made) - kept


def _leaving(call: Call) -> dict[int, int]:
    """What nobody has any more in the end: {tensor: the last event that finds it}."""
    captured = call.captured
    cut = captured.num_fwd_outputs
    found = {
        t: call.gone[True, p] - 1
        for p, t in capture_adjust.movable(captured).items()
        if (True, p) in call.gone and p not in call.circumstances.lasting
    }
    made = {t for op in captured.graph.ops[: captured.forward_ops] for t in op.outputs}
    made -= {t for node in captured.output_args[cut:] for t in stored(call, node)}
    ends: dict[int, list[int | None]] = {}
    for position, node in enumerate(captured.output_args[:cut]):
        for t in stored(call, node):
            ends.setdefault(t, []).append(call.gone.get((False, position)))
    for t, numbers in ends.items():
        known = [number - 1 for number in numbers if number is not None]
        if t in made and len(known) == len(numbers):
            found[t] = max(known)
    return found


def _made_within(call: Call, *, first: bool) -> set[int]:
    """The residents of a call that are made after the iteration began."""
    captured = call.captured
    if captured.device.type != "cpu":
        return set()  # nothing is counted there but what the arena's hook sees
    nodes = inputs_of(captured)
    own = [node for node in nodes if not is_primal(node)]
    own += [] if first else [nodes[position] for position in call.passing]
    found = {t for node in own for t in stored(call, node)}
    return found | {t.id for t in captured.graph.tensors if t.name == RUNTIME}


def _shared(call: Call, there: set[int]) -> set[int]:
    """The residents of a call whose bytes are counted elsewhere; `there` are known addresses."""
    nodes = (*inputs_of(call.captured), *tangents_of(call.captured))
    shared = set()
    for node, address in zip(nodes, (*call.inputs, *call.tangents), strict=True):
        (t,) = call.captured.storages[node]
        if t is None or address is None:
            continue
        if address in there:
            shared.add(t)
        there.add(address)
    return shared
