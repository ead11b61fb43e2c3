"""An in-place pair is a choice: with it no peak and no cost is above that of the graph without."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hard_graphs import FAMILIES, hard_graph
from coop_plan.planner import METHODS, InfeasibleBudgetError, Problem, find_faults, plan
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.keep_all import keep_all_schedule, lay_out_everything
from tests.strategies import graphs
from tests.support import make_graph

MIB = 1 << 20
DETERMINISTIC = [name for name, info in METHODS.items() if not info.anytime]


def narrowing(pairs):
    """An op narrows 8 MiB to 1, then 8 others are live next to the result."""
    sizes = (64, 8 * MIB, MIB, 8 * MIB, MIB)
    kinds = ("input", *["activation"] * 3, "output")
    ops = [
        {"inputs": [0], "outputs": [1]},
        {"inputs": [1], "outputs": [2], "inplace": [[2, 1]] if pairs else []},
        {"inputs": [0], "outputs": [3]},
        {"inputs": [3, 2], "outputs": [4]},
    ]
    return make_graph(dict(enumerate(zip(kinds, sizes, strict=True))), ops)


def without_pairs(graph):
    bare = {"inplace": []}
    ops = [
        op.model_copy(bare | {"variants": [v.model_copy(bare) for v in op.variants]})
        for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


@pytest.mark.parametrize("method", ["keep-all", "coop", "dtr", "coop-offline", "auto"])
def test_a_smaller_output_leaves_the_larger_block(method):
    """The block that it would hold until its end raises the peak by 7 MiB."""
    for budget in ("100%", 10 * MIB + 64, "min"):
        made = plan(narrowing(pairs=True), budget, method=method, time_limit=20)
        assert (made.peak_bytes, made.overhead) == (10 * MIB + 64, 0.0)


def test_a_smaller_output_stays_in_the_larger_block_where_both_do_not_fit():
    """Nothing is live next to it later, so the pair saves its bytes."""
    tensors = {0: ("input", 1), 1: ("activation", 8), 2: ("activation", 4), 3: ("output", 1)}
    ops = [
        {"inputs": [0], "outputs": [1]},
        {"inputs": [1], "outputs": [2], "inplace": [[2, 1]]},
        {"inputs": [2], "outputs": [3]},
    ]
    graph = make_graph(tensors, ops)
    made = plan(graph, "min", method="keep-all", alignment=1)
    assert made.arena_bytes == 8
    assert find_faults(graph, made) == []


def peak_of_blocks(schedule, merged):
    """The largest sum of live blocks if these buffers share the addresses of their inputs."""
    t, problem = schedule.trace, schedule.problem
    load = np.zeros(len(schedule) + 1, dtype=np.int64)
    for event, variant in enumerate(schedule.variants):
        load[event] += problem.rounded(problem.variants[variant].workspace_bytes)
    end = t.last.copy()
    for b in reversed(range(t.tensor.size)):
        if b in merged:
            end[t.shares[b]] = max(end[t.shares[b]], end[b])
    for b in range(t.tensor.size):
        if b not in merged:
            load[t.first[b] : end[b] + 1] += problem.size[t.tensor[b]]
    return int(load.max())


@settings(max_examples=100, deadline=None)
@given(graph=graphs(max_ops=9, variants=False), unit=st.sampled_from([1, 4]))
def test_blocks_are_merged_where_that_lowers_the_peak(graph, unit):
    """Against every choice of the pairs with a smaller output."""
    schedule = keep_all_schedule(Problem.from_graph(graph, unit, "arena"))
    size, tensor = schedule.problem.size, schedule.tensor
    shared = {b for b, source in enumerate(schedule.trace.shares.tolist()) if source >= 0}
    equal = {b for b in shared if size[tensor[b]] == size[tensor[schedule.trace.shares[b]]]}
    blocks = schedule.blocks()
    chosen = {b for b, source in enumerate(blocks.shares.tolist()) if source >= 0}
    assert equal <= chosen <= shared
    assert blocks.live == peak_of_blocks(schedule, chosen) <= peak_of_blocks(schedule, equal)
    some = itertools.islice(
        itertools.chain.from_iterable(
            itertools.combinations(sorted(shared - equal), k) for k in range(len(shared) + 1)
        ),
        64,
    )
    assert blocks.live == min(peak_of_blocks(schedule, equal | set(more)) for more in some)


@settings(max_examples=100, deadline=None)
@given(
    graph=graphs(max_ops=10),
    outputs=st.sampled_from(["outside", "arena", "gradients"]),
    unit=st.sampled_from([1, 4, 8]),
)
def test_keep_everything_needs_no_more_than_without_pairs(graph, outputs, unit):
    mine, theirs = (
        lay_out_everything(Problem.from_graph(g, unit, outputs)).placed
        for g in (graph, without_pairs(graph))
    )
    assert mine.arena_bytes <= theirs.arena_bytes
    assert Schedule.of(mine.problem, mine.schedule.variants).cost_us == mine.cost_us


def test_keep_everything_without_pairs_takes_no_problem_of_its_own(monkeypatch):
    """A second problem of 1 000 ops takes as long as the first."""
    problem = Problem.from_graph(narrowing(pairs=True))
    made = []
    monkeypatch.setattr(Problem, "with_places", lambda *rest: made.append(rest))
    layout = lay_out_everything(problem)
    assert layout.placed.problem is problem
    assert (made, layout.placed.arena_bytes) == ([], 9 * MIB)


def least(graph, budget, method, unit):
    try:
        made = plan(graph, budget, method=method, alignment=unit, outputs="arena")
    except InfeasibleBudgetError as error:
        return error.min_feasible_bytes, None
    assert find_faults(graph, made) == []
    return made.peak_bytes, made.cost_us


@settings(max_examples=25, deadline=None)
@given(
    graph=graphs(max_ops=8),
    unit=st.sampled_from([1, 4]),
    method=st.sampled_from(DETERMINISTIC),
    share=st.sampled_from([0.5, 0.7, 0.9]),
)
def test_no_method_does_worse_with_pairs(graph, unit, method, share):
    """At one budget in bytes, and at the smallest that the method finds."""
    bare = without_pairs(graph)
    assert least(graph, "min", method, unit)[0] <= least(bare, "min", method, unit)[0]
    budget = int(share * plan(bare, "100%", alignment=unit, outputs="arena").peak_bytes)
    if budget > 0:
        (_, mine), (_, theirs) = (least(g, budget, method, unit) for g in (graph, bare))
        assert theirs is None or (mine is not None and mine <= theirs + 1e-6)


def with_smaller_outputs(graph, random):
    """The graph with more in-place pairs of a smaller output, and the graph without any of them."""
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    made = {t for op in graph.ops for t in op.outputs}

    def smaller(op):
        return [
            [out, t]
            for out in op.outputs
            for t in dict.fromkeys(op.inputs)
            if 0 < size[out] < size[t] and t in made and t not in op.mutates
        ]

    ops, equal = [], []
    for op in graph.ops:
        kept = [pair for pair in op.inplace if size[pair[0]] == size[pair[1]]]
        more = [pair for pair in smaller(op) if random.random() < 0.7]
        ops.append(op.model_copy({"inplace": kept + more}))
        equal.append(op.model_copy({"inplace": kept}))
    return graph.model_copy({"ops": ops}), graph.model_copy({"ops": equal})


@settings(max_examples=8, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 99),
    ops=st.integers(20, 400),
    method=st.sampled_from(["coop", "dtr", "coop-offline"]),
    share=st.sampled_from([0.5, 0.7]),
    random=st.randoms(use_true_random=False),
)
def test_smaller_outputs_make_no_plan_worse_at_any_size(family, seed, ops, method, share, random):
    graph, bare = with_smaller_outputs(hard_graph(family, seed, ops), random)
    everything = [
        lay_out_everything(Problem.from_graph(g)).placed.arena_bytes for g in (graph, bare)
    ]
    assert everything[0] <= everything[1]
    budget = int(share * plan(bare, "100%").peak_bytes)
    costs = []
    for g in (graph, bare):
        try:
            costs.append(plan(g, budget, method=method).cost_us)
        except InfeasibleBudgetError:
            costs.append(np.inf)
    assert costs[0] <= costs[1] * (1 + 1e-9)
