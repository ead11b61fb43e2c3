"""Report to the user on a host link that a plan leaves unused."""

from itertools import pairwise

from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.timeline import Timeline
from coop_plan.schemas import Plan, format_bytes


def unused_link_reason(problem: Problem, plan: Plan) -> str | None:
    """The reason why a plan recomputes and transfers nothing; None if it transfers or has no link.

    A copy is hidden if offload and prefetch fit between two uses of the tensor, with every op run
    once.
    """
    if "transfers" not in problem.beyond_recomputation:
        return None
    if plan.swapped_bytes or not plan.recomputed_ops:
        return None
    device, timeline = problem.device, Timeline(problem.device)
    begins = [*map(timeline.compute, problem.cost), timeline.now_us]
    hidden, best, cheapest = 0, float("inf"), (0.0, 0.0, 0)
    for t, size in enumerate(problem.bytes):
        if not problem.movable[t]:
            continue
        speeds = 1e6 / device.d2h_bytes_per_s + 1e6 / device.h2d_bytes_per_s
        round_trip = 2 * (device.copy_launch_us + device.copy_latency_us) + size * speeds
        uses = [
            problem.producer[t],
            *problem.consumers[t],
            *[problem.op_count] * problem.is_output[t],
        ]
        idle = max(begins[b] - begins[a] - problem.cost[a] for a, b in pairwise(uses))
        hidden += size if round_trip <= idle else 0
        if idle > 0 and round_trip / idle < best:
            best, cheapest = round_trip / idle, (round_trip, idle, size)
    speed = f"{min(device.d2h_bytes_per_s, device.h2d_bytes_per_s) / 1e9:g} GB/s"
    prefix = f"the plan moves no tensor: at {speed}"
    round_trip, idle, size = cheapest
    if hidden:
        return (
            f"{prefix} copies of {format_bytes(hidden)} could be hidden, but recomputing costs less"
        )
    return (
        f"{prefix} no copy can be hidden: the best one, of {format_bytes(size)}, takes"
        f" {round_trip / 1e3:.3g} ms there and back; its tensor is unused for {idle / 1e3:.3g} ms"
    )
