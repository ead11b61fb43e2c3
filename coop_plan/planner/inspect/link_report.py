"""What a link could hide of a step, for people: whether it is too slow to be worth anything."""

from itertools import pairwise

from coop_plan.planner.core.problem import Problem
from coop_plan.schemas import Plan, format_bytes


def unworthy_link(problem: Problem, plan: Plan) -> str | None:
    """
    Why a plan that recomputes moves nothing over the link it has; None where it does, or has none.

    A copy is hidden if the tensor goes and comes back while compute, every op once, does not use
    it.
    """
    if "transfers" not in problem.beyond_recomputation:
        return None
    if plan.swapped_bytes or not plan.recomputed_ops:
        return None
    device, begins, now = problem.device, [], 0.0
    for cost in problem.cost:
        begins.append(now)
        now += cost
    begins.append(now)
    hidden, best, cheapest = 0, float("inf"), (0.0, 0.0, 0)
    for t, size in enumerate(problem.bytes):
        if not problem.movable[t]:
            continue
        speeds = 1e6 / device.d2h_bytes_per_s + 1e6 / device.h2d_bytes_per_s
        takes = 2 * device.copy_latency_us + size * speeds
        uses = [
            problem.producer[t],
            *problem.consumers[t],
            *[problem.op_count] * problem.is_output[t],
        ]
        idle = max(begins[b] - begins[a] - problem.cost[a] for a, b in pairwise(uses))
        hidden += size if takes <= idle else 0
        if idle > 0 and takes / idle < best:
            best, cheapest = takes / idle, (takes, idle, size)
    speed = f"{min(device.d2h_bytes_per_s, device.h2d_bytes_per_s) / 1e9:g} GB/s"
    told = "no tensor of this step is worth the link: at " + speed
    takes, idle, size = cheapest
    if hidden:
        return f"{told} copies of {format_bytes(hidden)} could be hidden, but others cost less"
    return (
        f"{told} the cheapest copy hides 0 bytes "
        f"({format_bytes(size)} take {takes / 1e3:.3g} ms there and back and are unused for "
        f"{idle / 1e3:.3g} ms)"
    )
