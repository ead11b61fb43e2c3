"""Movable residents on the host: plans with homes, and the verifier's rules of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpt, with_adamw
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.lower import lowered
from coop_plan.planner.homes.search import HomeSearch
from coop_plan.planner.inspect.explain import explain
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.planning import keep_all_peak
from coop_plan.planner.registry import METHODS
from coop_plan.planner.search.makespan.annealing import MOVES
from coop_plan.planner.search.makespan.metropolis import evaluate_sequence
from coop_plan.planner.search.makespan.sequence import (
    new_state,
    set_sequence,
    to_closed_program,
)
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Device, Graph, Offload, Op, Tensor
from tests.strategies import graphs
from tests.support import edit

FAST = Device(kind="cuda", h2d_bytes_per_s=4e6, d2h_bytes_per_s=2e6, copy_latency_us=0.25)


def movable(graph, yes=True):
    """The graph on a linked device with its launches, with all residents movable or none."""
    tensors = [t.model_copy({"movable": yes and t.resident}) for t in graph.tensors]
    own = {name: getattr(graph.device, name) for name in ("kind", "launch_us", "copy_launch_us")}
    return graph.model_copy({"tensors": tensors, "device": FAST.model_copy(own)})


def iteration(layers=4, weight=1000, activation=300, cost=400.0):
    """Forward, backward and update of a chain: a parameter and a moment a layer, both movable."""
    tensors, ops = [], []

    def tensor(size, kind, **fields):
        tensors.append(Tensor(id=len(tensors), bytes=size, kind=kind, **fields))
        return tensors[-1].id

    def op(inputs, outputs, phase, mutates=()):
        ops.append(
            Op(
                id=len(ops),
                name="op",
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                cost_us=cost,
                mutates=list(mutates),
                recomputable=not mutates,
            )
        )

    weights = [tensor(weight, "parameter", movable=True) for _ in range(layers)]
    moments = [tensor(weight, "buffer", movable=True) for _ in range(layers)]
    kept = [tensor(activation, "input")]
    for w in weights:
        kept.append(tensor(activation, "activation"))
        op([kept[-2], w], [kept[-1]], "forward")
    gradient = tensor(activation, "activation")
    op([kept[-1]], [gradient], "backward")
    updates = []
    for w, m, x in reversed(list(zip(weights, moments, kept, strict=False))):
        of_weight = tensor(weight, "activation")
        op([gradient, x], [of_weight], "backward")
        before, gradient = gradient, tensor(activation, "activation")
        op([before, w], [gradient], "backward")
        updates.append((of_weight, m, w))
    for of_weight, m, w in updates:
        op([of_weight, m], [], "optimizer", [m])
        op([m, w], [], "optimizer", [w])
    return Graph(schema_="coop-plan/graph/1", device=FAST, tensors=tensors, ops=ops)


@given(
    graphs(launches=True),
    st.sampled_from(["outside", "arena"]),
    st.sampled_from([1, 4]),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_homes_never_cost_more_and_never_need_more_memory(graph, outputs, alignment, share):
    """`min` and the cost at a budget are at most those with all residents on the device.

    `plan` verifies each plan; the bound on the peak holds for both.
    """
    fields = {"method": "coop-offline", "outputs": outputs, "alignment": alignment}
    fixed, free = movable(graph, yes=False), movable(graph)
    least, less = (plan(g, "min", **fields) for g in (fixed, free))
    assert less.peak_bytes <= least.peak_bytes
    bound = budget_lower_bound(Problem.from_graph(free, alignment, outputs))
    assert bound <= less.peak_bytes
    high = keep_all_peak(free, PlanOptions.given("min", fields))
    budget = max(1, least.peak_bytes + (high - least.peak_bytes) * share // 10)
    assert plan(free, budget, **fields).cost_us <= plan(fixed, budget, **fields).cost_us


@pytest.mark.parametrize("later", [False, True])
def test_the_end_of_the_step_reads_a_copy_from_the_host(later):
    """Also where an op reads the last version after it: else the home keeps an old version."""
    tensors = [Tensor(id=0, bytes=8, kind="parameter", movable=True)]
    tensors.append(Tensor(id=1, bytes=8, kind="output"))
    common = {"phase": "optimizer", "inputs": [0], "cost_us": 1.0}
    ops = [Op(id=0, name="update", outputs=[], mutates=[0], recomputable=False, **common)]
    ops.append(Op(id=1, name="read", outputs=[1], **common))
    graph = Graph(schema_="coop-plan/graph/1", device=FAST, tensors=tensors, ops=ops)
    problem = lowered(Problem.from_graph(graph, 1), [0]).form.problem
    program = to_closed_program(problem)
    state = new_state(problem, program, 400, MOVES)

    def cost_of(codes):
        set_sequence(state, np.array(codes))
        return evaluate_sequence(program, state, 1_000)[0]

    begin, update, read, end = range(4)
    last, first = (problem.op_count + 1 + t for t, _ in (*problem.homes.returned, (0, 0)))
    ends = [end, read] if later else [read, end]
    assert cost_of([begin, first, update, *ends]) == np.inf
    ends.insert(ends.index(end), last)
    assert cost_of([begin, first, update, *ends]) < np.inf


def test_residents_may_exceed_the_budget():
    """A budget below the residents is met, with each mutated one written back."""
    graph = iteration()
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    with pytest.raises(InfeasibleBudgetError):
        plan(movable(graph, yes=False), resident, alignment=1)
    made = plan(graph, resident, alignment=1)
    assert made.peak_bytes <= resident
    assert made.resident_bytes < resident
    mutated = {t for op in graph.ops for t in op.mutates}
    written = [s for s in made.steps if isinstance(s, Offload)]
    homes = {home.tensor: home.host_offset for home in made.homes}
    assert len([s for s in written if s.host_offset in homes.values()]) >= len(
        mutated.intersection(homes)
    )
    assert made.cost_us < 2 * made.base_cost_us


@pytest.mark.parametrize("method", [name for name, info in METHODS.items() if not info.homes])
def test_a_method_without_homes_says_which_method_has_them(method):
    """It plans with all residents on the device, and names the remedy below their bytes."""
    graph = iteration(layers=2)
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    assert plan(graph, "100%", method=method, alignment=1).homes == []
    told = f"{method} does not use the graph's .*movable residents, coop-offline does"
    with pytest.raises(InfeasibleBudgetError, match=told):
        plan(graph, resident, method=method, alignment=1)


def test_an_explanation_has_the_bound_with_the_plans_link():
    """A captured graph may have none: the option `link` set that of its plan."""
    graph = iteration()
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    alone = graph.model_copy({"device": Device()})
    made = plan(alone, resident, alignment=1, link=4_000_000)
    assert made.homes
    assert explain(alone, made).budget_lower_bound_bytes <= made.peak_bytes


def test_a_host_budget_below_the_homes_is_kept():
    graph = iteration()
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    made = plan(graph, resident, alignment=1)
    allowed = made.host_arena_bytes
    assert plan(graph, resident, alignment=1, host_budget=allowed).host_arena_bytes <= allowed
    with pytest.raises(InfeasibleBudgetError):
        plan(graph, resident, alignment=1, host_budget=1000)


def test_a_refusal_names_a_bound_that_homes_respect():
    graph = iteration()
    least = plan(graph, "min", alignment=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(graph, 1, alignment=1, smallest=True)
    assert caught.value.min_feasible_bytes == least.peak_bytes
    assert caught.value.budget_lower_bound_bytes <= least.peak_bytes


def test_the_search_for_the_smallest_budget_ends_without_a_plan(monkeypatch):
    """Also below 64 bytes, where a 64th of the budget is none."""
    graph = iteration(layers=1, weight=4, activation=4)
    monkeypatch.setattr(HomeSearch, "_search", lambda *_: None)
    assert plan(graph, "min", alignment=1).homes == []


@pytest.mark.parametrize("on_host", [False, True])
def test_the_smallest_budget_is_searched_between_its_bound_and_one_that_is_met(
    monkeypatch, on_host
):
    """Activations leave the device, too: the peak is a 64th above its bound at most.

    One whole search lowers the cost, and few probes come before it.
    """
    graph = with_adamw(gpt(2, tokens=1024, width=256), 25.0)
    if not on_host:
        ops = [op.model_copy({"variants": []}) for op in graph.ops]
        graph = graph.model_copy({"ops": ops})
    searched = []
    search = HomeSearch._search

    def counted(self, low, known, budget, limit_us, request):
        searched.append(request.any_schedule)
        return search(self, low, known, budget, limit_us, request)

    monkeypatch.setattr(HomeSearch, "_search", counted)
    least = plan(graph, "min")
    assert least.peak_bytes <= least.budget_lower_bound_bytes * (1 + 1 / 64) + 512
    assert searched.count(False) == 1
    assert len(searched) <= 10


def without_write_back(document):
    """The document without the last copy to a home, and the wait for it."""
    homes = {home["host_offset"] for home in document["homes"]}
    steps = document["steps"]
    last = max(k for k, s in enumerate(steps) if s["do"] == "offload" and s["host_offset"] in homes)
    buffer = steps[last]["buffer"]
    wait = next(k for k in range(last, len(steps)) if steps[k] == {"do": "wait", "buffer": buffer})
    del steps[wait], steps[last]


def overlapping(document):
    document["homes"][1]["host_offset"] = document["homes"][0]["host_offset"]


def of_an_input(document):
    document["homes"][0]["tensor"] = 8


def twice(document):
    document["homes"].append(document["homes"][0])


def without_home(document):
    del document["homes"][0]


def read_during_write_back(document):
    """A prefetch from a home begins before the wait for the copy that overwrites it."""
    steps, homes = document["steps"], {h["host_offset"]: h["tensor"] for h in document["homes"]}
    at = next(k for k, s in enumerate(steps) if s["do"] == "offload" and s["host_offset"] in homes)
    tensor = homes[steps[at]["host_offset"]]
    size = next(s["bytes"] for s in steps if s["do"] == "prefetch" and s["tensor"] == tensor)
    fields = {"buffer": 10**6, "tensor": tensor, "offset": 0, "bytes": size, "from": None}
    steps.insert(at + 1, {"do": "prefetch"} | fields)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_write_back, "stale-home"),
        (overlapping, "overlap"),
        (of_an_input, "wrong-home"),
        (twice, "wrong-home"),
        (without_home, "not-offloaded"),
        (read_during_write_back, "not-ready"),
    ],
)
def test_the_verifier_refuses(change, code):
    """Each rule of homes, broken alone, is a fault of its own code."""
    graph = iteration()
    made = plan(graph, "min", alignment=1)
    assert made.homes
    assert not find_faults(graph, made)
    assert code in {fault.code for fault in find_faults(graph, edit(made, change))}
