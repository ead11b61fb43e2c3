"""Joint plan: the graphs of one iteration, planned together in one arena and one budget.

After an iteration has run, its steps and the order of their forwards and backwards are known. Their
graphs are merged in that order. The user's code between them is known only by the bytes that it
held, and by when it released the tensors that the graphs returned. The joint plan is cut into one
plan a call. These share an arena, whose contents between two calls are as planned while the order
is the same.
"""

import logging
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from coop_plan.planner.core.errors import InfeasibleBudgetError
from coop_plan.runtime.capture.joint_graph import RUNTIME, Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.distributed.collectives import GROUP_THREADS
from coop_plan.runtime.dynamic_shapes.symbolic_trace import reach
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.find_plan import plan_for
from coop_plan.runtime.execute.lower_to_fx import inputs_of, tangents_of
from coop_plan.runtime.execute.plan_index import PlanIndex
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.runtime.options import Options
from coop_plan.runtime.reports import StepReport, add, reports
from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ranks import world_size
from coop_plan.schemas import Compute, Device, Free, Graph, Op, Plan, format_bytes
from coop_plan.schemas.graph_editor import GraphEditor

log = logging.getLogger("coop-plan")

Event = tuple[int, bool]
"""Number of a call in its iteration, and True if its backward began, False for its forward."""

RELEASE = "coop_plan.left"
"""Name of the op whose inputs the user's code releases afterwards."""

Addresses = Sequence[int | None]
"""Storage addresses by position; None for values without memory."""

HalfOutput = tuple[bool, int]
"""True for a gradient of a call, False for an output, and its position."""


@dataclass
class RecordedCall:
    """One call of a step while its iteration was recorded.

    `inputs` and `tangents` are storage addresses by position, `made` those of all outputs and
    gradients; None stands for no tensor. `input_bytes` and `output_bytes` are those of this call.
    `passing` are the positions of inputs that autograd made, whose gradients it passes on; `fresh`
    are those of inputs allocated after the iteration began.
    `leaves` are the inputs whose gradients may be held, those at
    `accumulable` can be added to, and `environment` has the held ones. `released_at` is the first
    event at which an output or gradient was dead outside the graphs. `late` ones were still alive
    at the planned event.
    """

    captured: Captured
    clock: cuda.Clock | None
    passing: Collection[int] = ()
    leaves: Mapping[int, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)
    accumulable: Collection[int] = ()
    environment: MemoryEnvironment = field(default_factory=MemoryEnvironment)
    released_at: dict[HalfOutput, int] = field(default_factory=dict)
    late: set[HalfOutput] = field(default_factory=set)
    inputs: Addresses = ()
    input_bytes: Sequence[int] = ()
    tangents: Addresses = ()
    made: list[int | None] = field(default_factory=list)
    output_bytes: Sequence[int] = ()
    fresh: Collection[int] = ()
    lent: Collection[int] = ()
    """Leaves that are empty when no half of the call runs: FSDP gathers them for each half."""


@dataclass(frozen=True)
class JointPlan:
    """One compiled plan a call, for `between` bytes of the user's code."""

    plans: Sequence[CompiledPlan]
    between: int
    report: StepReport


def plan_jointly(
    calls: Sequence[RecordedCall],
    events: Sequence[Event],
    between: int,
    options: Options,
    instead_of: int,
    otherwise: str,
) -> JointPlan | None:
    """Plan the graphs of an iteration together; returns None, with a warning, if that fails.

    Args:
        calls: in the order of their forwards.
        events: forwards and backwards, one of each for every call.
        between: maximum of the bytes that the user's code held between the graphs.
        options: of all steps.
        instead_of: bytes that the iteration takes without a joint plan. If a budget in bytes cannot
            be met, the plan is that of the least budget, with a warning, if that is below these.
        otherwise: says in the warning what happens without a plan.
    """
    recorded, under = calls, capture_adjust.under
    calls = [replace(call, captured=under(call.captured, call.environment)) for call in calls]
    layout = _Layout(calls, events, between, options)
    for call, alone in zip(calls, recorded, strict=True):
        layout.resident_in_step += call.captured.resident_in_step - alone.captured.resident_in_step
    # Each run stays in its own call: the annealing searches might move it to another one.
    options = replace(options, plan=options.plan.without("reorder", "walk"))
    try:
        raised = f"an iteration of {len(calls)} graphs"
        made, cached = plan_for(
            layout.graph, options, raised=raised, checkpoints=layout.checkpoints()
        )
    except InfeasibleBudgetError as error:
        reason = str(error)  # text: a kept log record must not keep the frames of a forward alive
        if options.plan.outputs == "outside" and any(map(_released_outputs, calls)):
            reason += '; outputs="gradients" needs less: tensors that die between the graphs share'
            reason += " addresses then"
        least: Plan | None = None
        if instead_of > error.budget_bytes and not options.strict:
            least, cached = plan_for(layout.graph, options.within(None))
        if least is None or least.budget_bytes >= instead_of:
            log.warning("%d graphs of one iteration %s: %s", len(calls), otherwise, reason)
            return None
        made = least
        log.warning(
            "%s: %s; until it has that budget, it runs by the plan for %s instead of its %s",
            *(raised, reason, format_bytes(made.budget_bytes), format_bytes(instead_of)),
        )
    parts = layout.cut(made)
    if parts is None and any(op.variants for op in layout.graph.ops):
        # The search over variants may place a run in another call; that over defaults does not.
        return plan_jointly(
            *([_default_variants(call) for call in recorded], events, between, options),
            *(instead_of, otherwise),
        )
    if parts is None:
        log.warning(
            "%d graphs of one iteration %s: method %s recomputes an op within another graph",
            *(len(calls), otherwise, made.method),
        )
        return None
    plans = [
        CompiledPlan(call.captured, part, call.clock)
        for call, part in zip(calls, parts, strict=True)
    ]
    for compiled in plans:
        compiled.measure_outside = False
    name = f"iteration of {len(calls)} graphs {len(reports())}"
    report = StepReport.of(name, layout.graph, made, layout.resident_in_step, plan_cached=cached)
    add(report)
    return JointPlan(plans, between, report)


class _Layout:
    """Merged graph of all calls, with the tensors and ops of each call in it.

    Tangents, and gradients that autograd passes on between the graphs, live outside the arena, and
    only while they are passed: their bytes count for one call at a time.

    Outputs and gradients that the user's code releases within the iteration are planned in the
    arena. A `RELEASE` op reads them at the end of the last half in which they are alive. Their
    producers are not recomputable, since the user's code keeps the same tensor.

    `resident_in_step` are the resident bytes that are allocated after the iteration began.
    """

    def __init__(
        self, calls: Sequence[RecordedCall], events: Sequence[Event], between: int, options: Options
    ) -> None:
        self._calls = calls
        self._events = events
        self._ops: list[tuple[int, int | None]] = []
        self._ends: list[int] = []
        device = calls[0].captured.graph.device
        no_link = Device(kind=device.kind, name=device.name, launch_us=device.launch_us)
        editor = GraphEditor(
            Graph(schema_="coop-plan/graph/1", name="iteration", device=no_link, tensors=[], ops=[])
        )
        known = {
            address
            for call in calls
            for address in call.made
            if address is not None and address not in call.inputs
        }
        self.resident_in_step = 0
        given = passed = 0
        lent: list[int] = []
        ids: list[dict[int, int]] = []
        released: list[dict[int, int]] = []
        for number, call in enumerate(calls):
            graph = call.captured.graph
            released.append(_released_outputs(call) if options.plan.outputs == "gradients" else {})
            shared = _counted_elsewhere(call, known)
            tangents = {t for node in tangents_of(call.captured) for t in stored(call, node)}
            back = _passed_gradients(call)
            empty = {t for p in call.lent for t in stored(call, inputs_of(call.captured)[p])}
            lent.append(sum(graph.tensors[t].bytes for t in empty))
            if not call.fresh:  # they existed when the iteration began
                self.resident_in_step -= lent[-1]
            ids.append(editor.add_tensors(graph.tensors))
            for t in shared | tangents | back | empty:
                editor.change_tensor(ids[number][t], bytes=0)
            for t in released[number]:
                editor.change_tensor(ids[number][t], kind="activation")
            self.resident_in_step += sum(
                graph.tensors[t].bytes
                for t in _residents_made_in_iteration(call) - shared - tangents - back - empty
            )
            given = max(given, sum(graph.tensors[t].bytes for t in tangents - shared))
            passed = max(passed, sum(graph.tensors[t].bytes for t in back))
        # The leaves of the next half may be gathered while one runs. A group's threads may still
        # hold the buffers of earlier collectives: the bytes of one rank and of all.
        largest = max(lent)
        buffers = GROUP_THREADS * (largest + largest // world_size()) if largest else 0
        size = between + given + passed + sum(sorted(lent)[-2:]) + buffers
        self.resident_in_step += size
        editor.add_tensor("between", size, "input")
        self._own = [{new: t for t, new in of.items()} for of in ids]
        for event, (k, backward) in enumerate(events):
            for i in _ops_of_half(calls[k].captured, backward):
                op = calls[k].captured.graph.ops[i]
                if not released[k].keys().isdisjoint(op.outputs):
                    op = op.model_copy(update={"recomputable": False})
                self._ops.append((k, i))
                editor.add_op(op, ids[k])
            last = [
                ids[number][t]
                for number, found in enumerate(released)
                for t, end in found.items()
                if end == event
            ]
            if last:
                self._ops.append((k, None))
                once = {"recomputable": False, "phase": "backward" if backward else "forward"}
                op = Op(id=0, name=RELEASE, inputs=last, outputs=[], cost_us=0.0)
                editor.add_op(op.model_copy(once))
            self._ends.append(len(self._ops))
        self.graph = editor.graph()

    def checkpoints(self) -> list[Hashable | None]:
        """As `Captured.checkpoints`, of all calls."""
        of_calls = [call.captured.checkpoints for call in self._calls]
        found = [(k, None if i is None else of_calls[k][i]) for k, i in self._ops]
        return [None if checkpoint is None else (k, checkpoint) for k, checkpoint in found]

    def cut(self, plan: Plan) -> list[Plan] | None:
        """The plan of each call, in its own ids; None if an op runs within another call's half."""
        index = PlanIndex(self.graph, plan)
        owners = self._owners(index, len(plan.steps))
        parts: list[list[Any]] = [[] for _ in self._calls]
        owner: dict[int, int] = {}
        given: set[int] = set()  # buffers that the user's code releases, not the plan
        for i, step in enumerate(plan.steps):
            if isinstance(step, Compute):
                k, op = self._ops[step.op]
                if k != owners[i]:
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
                return None  # an offload
        return [plan.model_copy(update={"steps": part}) for part in parts]

    def _owners(self, index: PlanIndex, steps: int) -> list[int]:
        """Call of the half that each step is in. A half ends with the last first run of its ops."""
        turns: list[int] = []
        first = 0
        for (k, _), last in zip(self._events, self._ends, strict=True):
            end = max((index.first_run[o] + 1 for o in range(first, last)), default=0)
            turns += [k] * (end - len(turns))
            first = last
        return turns + [self._events[-1][0]] * (steps - len(turns))


def _default_variants(call: RecordedCall) -> RecordedCall:
    """A call whose ops have no variants."""
    graph = call.captured.graph
    ops = [op.model_copy(update={"variants": []}) for op in graph.ops]
    graph = graph.model_copy(update={"ops": ops})
    return replace(call, captured=replace(call.captured, graph=graph))


def _ops_of_half(captured: Captured, backward: bool) -> range:
    if backward:
        return range(captured.forward_ops, len(captured.graph.ops))
    return range(captured.forward_ops)


def stored(call: RecordedCall, node: object) -> list[int]:
    """Tensors that a node of a call's joint graph stands for."""
    if not isinstance(node, fx.Node):
        return []
    return [t for t in call.captured.storages[node] if t is not None]


def input_bytes(captured: Captured, values: Sequence[Any] | None = None) -> list[int]:
    """Bytes of each input of a step as planned, or of the `values` of a call; 0 without memory.

    Values are smaller than planned if the plan is one for any sizes.
    """
    stored = (captured.storages[node] for node in inputs_of(captured))
    planned = [sum(captured.graph.tensors[t].bytes for t in of if t is not None) for of in stored]
    if values is None:
        return planned
    if not captured.any_sizes:
        return planned[: len(values)]
    return [
        min(size, value.element_size() * reach(value.shape, value.stride())) if size else 0
        for size, value in zip(planned, values, strict=False)
    ]


def _passed_gradients(call: RecordedCall) -> set[int]:
    """Gradients that autograd passes on: made in the backward, with memory of their own."""
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


def _released_outputs(call: RecordedCall) -> dict[int, int]:
    """Outputs and gradients that die within the iteration: {tensor: last event it is alive at}."""
    captured = call.captured
    cut = captured.num_fwd_outputs
    found = {
        t: call.released_at[True, p] - 1
        for p, t in capture_adjust.accumulable(captured).items()
        if (True, p) in call.released_at and p not in call.environment.across_steps
    }
    made = {t for op in captured.graph.ops[: captured.forward_ops] for t in op.outputs}
    made -= {t for node in captured.output_args[cut:] for t in stored(call, node)}
    ends: dict[int, list[int | None]] = {}
    for position, node in enumerate(captured.output_args[:cut]):
        for t in stored(call, node):
            ends.setdefault(t, []).append(call.released_at.get((False, position)))
    for t, numbers in ends.items():
        known = [number - 1 for number in numbers if number is not None]
        if t in made and len(known) == len(numbers):
            found[t] = max(known)
    return found


def _residents_made_in_iteration(call: RecordedCall) -> set[int]:
    """Residents of a call that are allocated after the iteration began."""
    captured = call.captured
    if captured.device.type != "cpu":
        return set()  # only the arena's hook counts there
    nodes = inputs_of(captured)
    own = [node for node in nodes if not is_primal(node)]
    own += [nodes[position] for position in call.fresh]
    found = {t for node in own for t in stored(call, node)}
    return found | {t.id for t in captured.graph.tensors if t.name == RUNTIME}


def _counted_elsewhere(call: RecordedCall, known: set[int]) -> set[int]:
    """Residents of a call whose bytes are counted elsewhere, at `known` addresses; adds its own."""
    nodes = (*inputs_of(call.captured), *tangents_of(call.captured))
    shared = set()
    addresses = (*call.inputs, *call.tangents)
    for position, (node, address) in enumerate(zip(nodes, addresses, strict=True)):
        (t,) = call.captured.storages[node]
        if t is None or address is None or position in call.lent:
            continue
        if address in known:
            shared.add(t)
        known.add(address)
    return shared
