"""What a plan's values must be before anything is replayed, whoever made or parsed it."""

import math
from collections.abc import Iterable

from coop_plan.planner.verifier.replay import Fault
from coop_plan.schemas import Compute, Free, Offload, Plan, Prefetch, Step, TensorRead, Wait

COUNTS = (
    *("budget_bytes", "resident_bytes", "arena_bytes", "peak_bytes"),
    *("recomputed_ops", "swapped_bytes"),
)
NUMBERS = ("base_cost_us", "cost_us", "overhead", "fragmentation")


def malformed(plan: Plan) -> list[Fault]:
    """The values that are no whole numbers from 0 up, no finite numbers, or no known step."""
    entries: list[tuple[str, object, int]] = [
        (f"/{name}", getattr(plan, name), 0) for name in COUNTS
    ]
    entries.append(("/alignment", plan.alignment, 1))
    for number, step in enumerate(plan.steps):
        entries += ((f"/steps/{number}{place}", value, 0) for place, value in _counts(step))
    faults = [
        Fault("malformed", place, f"{value!r} is no whole number of at least {least}")
        for place, value, least in entries
        if type(value) is not int or value < least
    ]
    numbers = [(f"/{name}", getattr(plan, name)) for name in NUMBERS]
    if plan.lower_bound_us is not None:
        numbers.append(("/lower_bound_us", plan.lower_bound_us))
    faults += [
        Fault("malformed", place, f"{value!r} is no finite number")
        for place, value in numbers
        if type(value) not in (int, float) or not math.isfinite(value)
    ]
    return faults


def _counts(step: Step) -> Iterable[tuple[str, object]]:
    """Where a step has a count, and its value; an unknown step is none itself."""
    match step:
        case Compute():
            yield "/op", step.op
            for index, read in enumerate(step.reads):
                yield f"/reads/{index}", read.tensor if isinstance(read, TensorRead) else read
            for index, write in enumerate(step.writes):
                at = f"/writes/{index}"
                yield f"{at}/buffer", write.buffer
                yield f"{at}/tensor", write.tensor
                yield f"{at}/bytes", write.bytes
                if write.offset is not None:
                    yield f"{at}/offset", write.offset
            yield "/workspace/offset", step.workspace.offset
            yield "/workspace/bytes", step.workspace.bytes
        case Free():
            for index, buffer in enumerate(step.buffers):
                yield f"/buffers/{index}", buffer
        case Prefetch():
            for name in ("buffer", "tensor", "offset", "bytes"):
                yield f"/{name}", getattr(step, name)
            yield "/from", step.from_
        case Offload() | Wait():
            yield "/buffer", step.buffer
        case _:
            yield "", step
