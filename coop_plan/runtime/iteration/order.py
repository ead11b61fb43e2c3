"""An order of forwards and backwards: what earlier iterations of it showed, and its joint plan."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment, accumulable
from coop_plan.runtime.gradients.held_gradients import MAX_GRADIENT_PLANS, can_be_added_to
from coop_plan.runtime.iteration.joint_plan import Event, JointPlan, RecordedCall, stored


@dataclass(eq=False)
class Order:
    """Steps of an iteration by call, its events, and its joint plan.

    `calls` is empty until an iteration is recorded, which took `peak_bytes` by the plans of its
    calls. `is_planned` is also True if that failed. `replans` counts re-plans for excess bytes,
    `observations` those for held or late tensors.
    """

    steps: tuple[weakref.ref[Any], ...]
    events: tuple[Event, ...]
    calls: list[RecordedCall] = field(default_factory=list)
    peak_bytes: int = 0
    is_planned: bool = False
    joint_plan: JointPlan | None = None
    replans: int = 0
    observations: int = 0


def set_accumulable(calls: Sequence[RecordedCall]) -> None:
    """Set the accumulable gradients of recorded calls.

    The gradient of a leaf that several calls share counts for the first of them, and is not
    accumulable: autograd sums the gradients of all calls before it adds the sum to `.grad`.
    """
    by_use: dict[int, list[RecordedCall]] = {}
    for call in calls:
        for leaf in call.leaves.values():
            by_use.setdefault(id(leaf()), []).append(call)
    for call in calls:
        own = {p: by_use[id(leaf())] for p, leaf in call.leaves.items()}
        call.accumulable = [p for p in accumulable(call.captured) if len(own.get(p, ())) == 1]
        call.leaves = {p: leaf for p, leaf in call.leaves.items() if own[p][0] is call}


def extend_saved_outputs(calls: Sequence[RecordedCall], events: Sequence[Event]) -> None:
    """Keep outputs that a recorded call's backward reads alive until its end.

    A call that released its memory while it was recorded did not hold them.
    """
    for number, call in enumerate(calls):
        over = events.index((number, True)) + 1
        captured = call.captured
        read = {t for op in captured.graph.ops[captured.forward_ops :] for t in op.inputs}
        for which, at in call.released_at.items():
            backward, position = which
            if not backward and not read.isdisjoint(stored(call, captured.output_args[position])):
                call.released_at[which] = max(at, over)


def update_held_gradients(order: Order) -> bool:
    """Observe the gradients that are held when an iteration begins.

    Returns:
        True if it was not planned for one of them.
    """
    found = False
    for call in order.calls:
        now = call.environment
        planned = now.across_steps | now.duplicated
        across_steps: set[int] = set()
        duplicated: set[int] = set()
        for position, reference in call.leaves.items():
            leaf = reference()
            if leaf is None or leaf.grad is None or position in planned:
                continue
            owner = can_be_added_to(call.accumulable, position, leaf)
            (across_steps if owner else duplicated).add(position)
        if across_steps or duplicated:
            found = True
            call.environment = MemoryEnvironment(
                now.across_steps | across_steps, now.duplicated | duplicated
            )
    return found and _count_observation(order)


def learn(order: Order, calls: Sequence[RecordedCall]) -> bool:
    """Adopt the observations of the calls of an iteration that ran the joint plan.

    Returns:
        True if gradients or outputs were alive that it was not planned for.
    """
    found = False
    for call, other in zip(order.calls, calls, strict=True):
        call.leaves = {p: other.leaves[p] for p in call.leaves}
        now, twice = call.environment, other.environment.duplicated
        late = call.released_at.keys() & other.late
        if twice <= now.duplicated and not late:
            continue
        found = True
        call.environment = MemoryEnvironment(now.across_steps - twice, now.duplicated | twice)
        on_time = {which: at for which, at in call.released_at.items() if which not in late}
        call.released_at = on_time | {
            which: other.released_at[which] for which in late & other.released_at.keys()
        }
    return found and _count_observation(order)


def _count_observation(order: Order) -> bool:
    """Count an observation; after `MAX_GRADIENT_PLANS`, assume the worst of all tensors."""
    order.observations += 1
    if order.observations == MAX_GRADIENT_PLANS:
        for call in order.calls:
            now = call.environment
            across_steps = (
                now.across_steps | set(call.accumulable) & call.leaves.keys()
            ) - now.duplicated
            call.environment = replace(now, across_steps=across_steps)
            call.released_at = {}
    return True
