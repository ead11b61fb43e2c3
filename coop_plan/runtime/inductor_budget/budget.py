"""Memory budget in bytes for graphs that Inductor compiles as a whole."""

import ast
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.capture.profiler import workspace_of
from coop_plan.runtime.errors import BudgetExceededError, CaptureError, OptionsError
from coop_plan.runtime.fused.ops import tensors_of
from coop_plan.runtime.inductor_budget.first_step import measure_next_step
from coop_plan.runtime.inductor_budget.joint_model import JointModel
from coop_plan.runtime.inductor_budget.saved_sets import Level, levels
from coop_plan.runtime.inductor_budget.wrapper_code import Storage, Usage, memory_usage
from coop_plan.runtime.torch_internals import FUSED_SINCE, version
from coop_plan.runtime.torch_internals.ops import storage_key
from coop_plan.runtime.torch_internals.partitioner import (
    CustomPartitionerFn,
    Lowered,
    Modules,
    donated_inputs,
    is_static_input,
    library_call,
    lowered,
    partition,
    refuse_caches,
    traced_tensors,
)
from coop_plan.schemas.units import format_bytes, parse_budget

log = logging.getLogger("coop-plan")

TOLERANCE = 4096
"""Bytes of scalars and random states by which a measured step may exceed its budget."""

TAIL = 3
"""Last candidates of which the one with the smallest peak is taken for the least budget."""


class InductorBudget(CustomPartitionerFn):
    """Partitioner for Inductor that keeps the peak of a training step within a budget.

        torch._inductor.config.custom_partitioner_fn = coop_plan.InductorBudget("8GiB")

    or, for one function, `torch.compile(model, options={"custom_partitioner_fn": ...})`. The budget
    counts bytes of the step as everywhere in coop-plan: parameters, buffers, inputs, activations,
    gradients, scratch; not optimizer states, nor other graphs. It needs `dynamic=False`.

    The saved tensors are those of a row of candidates, ordered by peak (`saved_sets`), of which the
    loosest found within the budget is taken. Its peak is Inductor's estimate for the kernels in
    their final order, plus the measured workspace of ops that libraries run. The first whole step
    between two steps of an optimizer of the graph's parameters is measured.

    Attributes:
        budget_bytes: the budget.
        planned_bytes: planned peak of the graph that was compiled last; 0 before.

    Raises:
        OptionsError: the budget is a share or "min", or PyTorch is older than 2.13.
        CaptureError: a size is a symbol.
        BudgetExceededError: at compilation, no candidate fits; in the second step, the measured
            peak exceeds the budget. Both name the least budget.
    """

    def __init__(self, budget: int | str) -> None:
        parsed = parse_budget(budget)
        if parsed.kind != "bytes":
            raise OptionsError(f"InductorBudget takes bytes, such as '8GiB', not {budget!r}")
        if version() < FUSED_SINCE:
            oldest = ".".join(map(str, FUSED_SINCE))
            raise OptionsError(f"InductorBudget needs PyTorch {oldest} or newer")
        self.budget_bytes = int(parsed.value)
        self.planned_bytes = 0

    def uuid(self) -> Any:
        """No cache: every process plans and verifies."""
        refuse_caches()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **rest: Any) -> Modules:
        """The forward and backward of a joint graph."""
        candidates = Candidates(gm, joint_inputs, rest)
        if not candidates.count:
            return candidates.modules(None)
        found = candidates.loosest_within(self.budget_bytes)
        if found is None:
            raise BudgetExceededError(
                f"no saved set of this graph keeps a step within {format_bytes(self.budget_bytes)}"
                f" ({self.budget_bytes} bytes); the least budget is {candidates.least} bytes,"
                f" {format_bytes(candidates.resident)} of them parameters and inputs: give"
                f" InductorBudget that, or compile with backend='coop'"
            )
        self.planned_bytes = planned = candidates.peak(found)
        log.info(
            "InductorBudget: %s planned within %s, saved set %d of %d",
            *(format_bytes(planned), format_bytes(self.budget_bytes), found, candidates.count),
        )
        asked, least, resident = self.budget_bytes, candidates.least, candidates.resident

        def check(taken: int) -> None:
            measured = taken + resident
            if measured > asked + TOLERANCE:
                raise BudgetExceededError(
                    f"a step took {measured} bytes, above its budget of {asked} bytes and"
                    f" {measured - planned} more than planned; the least budget is about"
                    f" {least + measured - planned} bytes. Bytes outside this graph count, too:"
                    " other graphs of the step, and tensors that the loop keeps"
                )

        measure_next_step(candidates.device, traced_tensors(gm.graph), check)
        return candidates.modules(found)


def loosest_within(peak: Callable[[int], int], count: int, budget: int) -> int | None:
    """Index of a candidate whose peak is within a budget; None if the last one's is not.

    Candidates 0 to `count - 1` are in order of falling peak; if an estimate is out of order, the
    result is still within the budget, and a larger budget never has a later candidate. About
    log2(count) peaks are computed.
    """
    if peak(0) <= budget:
        return 0
    if peak(count - 1) > budget:
        return None
    beyond, within = 0, count - 1
    while within - beyond > 1:
        middle = (beyond + within) // 2
        if peak(middle) <= budget:
            within = middle
        else:
            beyond = middle
    return within


def up_to_least(peak: Callable[[int], int], count: int) -> int:
    """Number of candidates up to the one with the smallest peak of the last `TAIL`.

    Candidates are in the order of modelled peaks, and those of the code may rise again at the end.
    """
    return 1 + min(range(max(count - TAIL, 0), count), key=peak)


class Candidates:
    """Partitions of a joint graph in order of falling peak, lowered when they are asked for.

    Attributes:
        count: number of candidates; 0 for a graph without a backward.
        resident: bytes of parameters, buffers and inputs.
        device: device of most of these bytes.
    """

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[object], rest: dict[str, Any]
    ) -> None:
        _refuse_changing_sizes(module.graph)
        self._module, self._inputs, self._rest = module, inputs, rest
        self._results: int = rest["num_fwd_outputs"]
        self._levels: list[Level] = []
        self._names: list[str] = []
        self._peaks: dict[int, int] = {}
        storages = {
            storage_key(value): (value.device, value.untyped_storage().nbytes())
            for node in module.graph.nodes
            if node.op == "placeholder" and is_static_input(node)
            for value in tensors_of(node)
        }
        by_device: dict[torch.device, int] = {}
        for device, size in storages.values():
            by_device[device] = by_device.get(device, 0) + size
        self.device = max(by_device, key=by_device.__getitem__, default=torch.device("cpu"))
        self.resident = by_device.get(self.device, 0)
        partition(module, inputs, self._plan, **rest)

    @property
    def count(self) -> int:
        return len(self._levels)

    @property
    def useful(self) -> int:
        """Number of candidates up to the one with the smallest peak of the last few."""
        return up_to_least(self.peak, self.count)

    def loosest_within(self, budget: int) -> int | None:
        """Index of the candidate for a budget; None if it is below the least."""
        if self.peak(0) <= budget:  # the others need not be lowered
            return 0
        return loosest_within(self.peak, self.useful, budget)

    @property
    def least(self) -> int:
        """Smallest of the peaks that were computed."""
        return min(self._peaks.values())

    def modules(self, index: int | None) -> Modules:
        """The graphs of a candidate; of Inductor's own choice if None."""
        if index is None:
            return partition(self._module, self._inputs, lambda _, own: own(), **self._rest)
        saved = {self._names[i] for i in self._levels[index].saved}

        def choose(graph: fx.Graph, _: Callable[[], list[fx.Node]]) -> list[fx.Node]:
            return [n for n in graph.nodes if is_static_input(n) or n.name in saved]

        return partition(self._module, self._inputs, choose, **self._rest)

    def peak(self, index: int) -> int:
        """Bytes of the step with a candidate, parameters and inputs included."""
        if index not in self._peaks:
            forward, backward = self.modules(index)
            ahead = lowered(forward, self._results)
            donated = donated_inputs((forward, backward), self._results)
            behind = lowered(backward, 0, donated, ahead.strides[self._results :])
            first = _run(ahead)
            results = set(first.returned[: self._results])
            saved = [None if s in results else s for s in first.returned[self._results :]]
            held = self._model.tangent_bytes + sum(storage.size for storage in results if storage)
            most = max(first.peak, held + _run(behind, saved).peak)
            self._peaks[index] = self.resident + most
        return self._peaks[index]

    def _plan(self, graph: fx.Graph, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        chosen = own()
        self._model = JointModel(graph, self._results)
        self._names = [node.name for node in self._model.nodes]
        self._levels = levels(self._model, self._model.positions(chosen))
        return chosen


def _refuse_changing_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        sizes = [size for value in tensors_of(node) for size in value.shape]
        if not all(isinstance(size, int) for size in sizes):
            raise CaptureError(
                f"{node.name} has a size that changes, {sizes}: InductorBudget needs fixed ones;"
                " compile with dynamic=False"
            )


def _run(graph: Lowered, inputs: Sequence[Storage | None] = ()) -> Usage:
    """A run of a graph; `inputs` are storages of tensors that it frees, the others stay."""
    sizes = {name: value.untyped_storage().nbytes() for name, value in graph.values.items()}

    def workspace(call: ast.Call) -> int:
        """Bytes of scratch on this machine; 0 if it cannot be measured alone."""
        found = library_call(call, graph.values)
        try:
            return 0 if found is None else workspace_of(*found)
        except CaptureError as error:
            log.info("InductorBudget: %s", error)
            return 0

    return memory_usage(graph.code, sizes, workspace, inputs)
