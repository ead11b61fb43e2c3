"""Type and range checks of a plan's values before the replay, also for unparsed plans."""

import math

from coop_plan.planner.verifier.state import Fault
from coop_plan.schemas import Compute, Free, Offload, Plan, Prefetch, Step, TensorRead, Wait


def malformed(plan: Plan) -> list[Fault]:
    """A fault per value that is not an integer of at least 0, not finite, or not a step."""
    check = _Check()
    for name in (
        *("budget_bytes", "resident_bytes", "arena_bytes", "host_arena_bytes"),
        *("peak_bytes", "recomputed_ops", "swapped_bytes"),
    ):
        check.count(getattr(plan, name), f"/{name}")
    check.count(plan.alignment, "/alignment", least=1)
    for name in (
        *("base_cost_us", "cost_us", "overhead", "fragmentation"),
        *("prefetch_stall_us", "offload_stall_us"),
    ):
        check.number(getattr(plan, name), f"/{name}")
    if plan.host_budget_bytes is not None:
        check.count(plan.host_budget_bytes, "/host_budget_bytes")
    if plan.budget_lower_bound_bytes is not None:
        check.count(plan.budget_lower_bound_bytes, "/budget_lower_bound_bytes")
    if plan.link_bytes_per_s is not None:
        check.number(plan.link_bytes_per_s, "/link_bytes_per_s")
    if plan.lower_bound_us is not None:
        check.number(plan.lower_bound_us, "/lower_bound_us")
    for index, home in enumerate(plan.homes):
        check.count(home.tensor, "/homes", index, "tensor")
        check.count(home.host_offset, "/homes", index, "host_offset")
    for number, step in enumerate(plan.steps):
        if not _is_wellformed(step):
            check.step(step, number)
    return check.faults


def _is_wellformed(step: Step) -> bool:
    """Fast path of `_Check.step` for compute and free steps; False if undecided."""
    if type(step) is Compute:
        values: list[object] = [step.op, step.workspace.offset, step.workspace.bytes]
        values += [r.tensor if isinstance(r, TensorRead) else r for r in step.reads]
        for write in step.writes:
            values += (write.buffer, write.tensor, write.bytes, write.offset or 0)
    elif type(step) is Free:
        values = [*step.buffers]
    else:
        return False
    # `bool` is no integer.
    return {*map(type, values)} <= {int} and (not values or min(values) >= 0)  # type: ignore[type-var, operator]


class _Check:
    """Collector of faults; pointers are joined only for a fault."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def count(self, value: object, *place: object, least: int = 0) -> None:
        if type(value) is not int or value < least:
            at = "/".join(map(str, place))
            message = f"{value!r} is not an integer of at least {least}"
            self.faults.append(Fault("malformed", at, message))

    def number(self, value: object, place: str) -> None:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            self.faults.append(Fault("malformed", place, f"{value!r} is not a finite number"))

    def step(self, step: Step, number: int) -> None:
        match step:
            case Compute():
                self.count(step.op, "/steps", number, "op")
                for index, read in enumerate(step.reads):
                    entry = read.tensor if isinstance(read, TensorRead) else read
                    self.count(entry, "/steps", number, "reads", index)
                for index, write in enumerate(step.writes):
                    self.count(write.buffer, "/steps", number, "writes", index, "buffer")
                    self.count(write.tensor, "/steps", number, "writes", index, "tensor")
                    self.count(write.bytes, "/steps", number, "writes", index, "bytes")
                    if write.offset is not None:
                        self.count(write.offset, "/steps", number, "writes", index, "offset")
                self.count(step.workspace.offset, "/steps", number, "workspace/offset")
                self.count(step.workspace.bytes, "/steps", number, "workspace/bytes")
            case Free():
                for index, buffer in enumerate(step.buffers):
                    self.count(buffer, "/steps", number, "buffers", index)
            case Prefetch():
                for name in ("buffer", "tensor", "offset", "bytes"):
                    self.count(getattr(step, name), "/steps", number, name)
                if step.from_ is not None:
                    self.count(step.from_, "/steps", number, "from")
            case Offload() | Wait():
                self.count(step.buffer, "/steps", number, "buffer")
                if isinstance(step, Offload) and step.host_offset is not None:
                    self.count(step.host_offset, "/steps", number, "host_offset")
            case _:
                self.count(step, "/steps", number)
