"""Plans with transfers by the plainest rule, for what runs them."""

from coop_plan.planner import verify
from coop_plan.planner.core.build_plan import assemble
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Solution
from coop_plan.planner.placement.layout import lay_out, lay_out_host
from tests.schedules import schedule_of


def swap_plan(graph, options, *, ahead=2, share=1.0, gradients=False, added=False):
    """
    Every tensor of the forward that the backward reads goes to the host and comes back.

    Copied away once the forward is through with it, waited for an op later, and back `ahead` ops
    before it is read. With a `share` the largest ones alone, so much of their bytes. With
    `gradients` these go as well, and come back when the step ends. If they are `added` to what is
    there, they go and come back in between.
    """
    graph = options.apply_link(graph)
    problem = Problem.from_graph(graph, options.alignment, options.outputs, options.host_budget)
    phases = [op.phase == "forward" for op in graph.ops]
    moved = {}
    for t, tensor in enumerate(graph.tensors):
        uses = problem.consumers[t]
        made = problem.producer[t]
        early = [op for op in uses if phases[op]]
        late = [op for op in uses if not phases[op]]
        if tensor.kind != "activation" or not tensor.bytes or not graph.device.linked:
            continue
        if made < 0 or not phases[made]:
            continue
        last = max([made, *early])
        if late and late[0] >= last + 2 + ahead and not problem.overwritten[t]:
            moved[t] = (last, late[0])
    wanted = share * sum(graph.tensors[t].bytes for t in moved)
    for t in sorted(moved, key=lambda t: graph.tensors[t].bytes):
        if sum(graph.tensors[u].bytes for u in moved) - graph.tensors[t].bytes >= wanted:
            del moved[t]
    orders = []
    away = {t: problem.producer[t] for t in (gradients_away(problem) if gradients else ())}
    for op in range(problem.op_count):
        orders += [("prefetch", t) for t, (_, late) in moved.items() if late == op + ahead]
        orders += [("wait", t) for t, (_, late) in moved.items() if late == op]
        if added and graph.ops[op].name == "coop_plan.accumulate":
            new = graph.ops[op].inputs[0]
            orders += [(do, new) for do in ("offload", "wait", "prefetch", "wait")]
        orders.append(("run", op))
        orders += [("wait", t) for t, (last, _) in moved.items() if last == op - 1]
        orders += [("offload", t) for t, (last, _) in moved.items() if last == op]
        orders += [("offload", t) for t, made in away.items() if made == op]
        orders += [("wait", t) for t, made in away.items() if made == op - 1]
    orders += [(do, t) for do in ("prefetch", "wait") for t in away]
    schedule = schedule_of(problem, orders)
    placed, _ = lay_out(schedule, work=0)
    host = lay_out_host(schedule)
    made = assemble(
        Solution(placed),
        host_offsets=host.offsets,
        host_arena_bytes=host.peak,
        link_bytes_per_s=options.link,
        method=options.method,
        budget_bytes=problem.fixed_bytes + placed.arena_bytes,
        solve_seconds=0.0,
    )
    verify(graph, made)
    return made


def gradients_away(problem):
    """Gradients in the arena that are made early enough for that."""
    return [
        t
        for t in range(problem.tensor_count)
        if problem.is_output[t]
        and problem.movable[t]
        and max([problem.producer[t], *problem.consumers[t]]) == problem.producer[t]
        and problem.producer[t] < problem.op_count - 2
    ]
