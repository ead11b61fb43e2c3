"""Checks of each op of a planned step on the pretended device, as it runs.

Before an op, only tensors of the plan may be live in the arena, and only those that it has live
then: none outlives its plan. After it, each result lies where the plan has it, whatever the order
of its allocations; gradients for which the plan expected held ones, and there are none, lie
elsewhere. Both run on the stream of the arena's memory. Memory that a failed update had borrowed
takes that of results: then the places are not checked.
"""

import torch
from torch.utils._pytree import tree_flatten

from coop_plan.runtime.capture.graph_builder import UPDATE
from coop_plan.runtime.execute.compiled_plan import CompiledPlan, _copied_slots, _state_parts
from coop_plan.runtime.execute.lower_to_fx import OCCURRENCE
from coop_plan.runtime.execute.plan_index import PlanIndex
from coop_plan.runtime.gradients.capture_adjust import accumulate
from coop_plan.schemas import Compute

BORROWED = -1
"""In `live_offsets`."""


def check_plans(monkeypatch):
    """Check the ops of all plans that are compiled from now on."""
    begin, lower = CompiledPlan.__init__, CompiledPlan._lower

    def init(self, captured, plan, clock):
        self.checked = captured, plan, PlanIndex(captured.graph, plan)
        adds = (s for s in plan.steps if isinstance(s, Compute))
        adds = (s for s in adds if captured.ops[s.op].target is accumulate)
        self.added = {s.reads[0]: captured.ops[s.op].args[1] for s in adds}
        begin(self, captured, plan, clock)

    def lower_checked(self, module, graph):
        (invocation, *_), (captured, _, _) = graph.find_nodes(op="placeholder"), self.checked
        for node in list(graph.nodes):
            number = node.meta.get(OCCURRENCE)
            if number is None or UPDATE in node.meta or captured.any_sizes:
                continue
            with graph.inserting_before(node):
                graph.call_function(_check_live, (invocation, number))
            with graph.inserting_after(node):
                graph.call_function(_check_results, (invocation, number, node))
        return lower(self, module, graph)

    monkeypatch.setattr(CompiledPlan, "__init__", init)
    monkeypatch.setattr(CompiledPlan, "_lower", lower_checked)


def _step(invocation, number):
    captured, plan, index = invocation.compiled.checked
    block = invocation.memory.block
    current = torch.cuda.current_stream()
    used_on = current if invocation.draws is not None else block._stream
    assert current is used_on, f"run {number} is on another stream than its memory"
    return captured, plan.steps[index.runs[number]], index


def _check_live(invocation, number):
    captured, step, index = _step(invocation, number)
    if invocation.in_joint_plan:  # its arena has other graphs' tensors
        return
    at = index.runs[number]
    parts = _state_parts(captured)
    planned = {
        offset
        for buffer in index.buffers.values()
        if buffer.offset is not None
        and buffer.made_at < at
        and (buffer.ends_at is None or buffer.ends_at >= at)
        for _, offset in _copied_slots(buffer, parts)
    }
    live = set(invocation.memory.live_offsets) - {BORROWED}
    assert live <= planned, (
        f"before run {number} ({captured.graph.ops[step.op].name}) tensors at {live - planned}"
        " outlive their plan"
    )


def _check_results(invocation, number, made):
    captured, step, _ = _step(invocation, number)
    results, base = tree_flatten(made)[0], invocation.memory.block.address
    for write in step.writes:
        position = invocation.compiled.added.get(write.buffer)
        is_elsewhere = position is not None and position not in invocation.held
        is_elsewhere = is_elsewhere or BORROWED in invocation.memory.live_offsets
        if write.offset is not None and write.bytes and not is_elsewhere:
            found = results[captured.producer[write.tensor][1]].untyped_storage().data_ptr()
            assert found == base + write.offset, (
                f"result {write.tensor} of run {number} ({captured.graph.ops[step.op].name})"
                f" lies at {found - base}, not at {write.offset}"
            )
