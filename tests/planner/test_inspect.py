"""What is told of a plan is what the plan does."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given

from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.inspect.buffers import replay_plan
from coop_plan.planner.inspect.drawing import drawing
from coop_plan.planner.inspect.explain import Price, explain, price_list, slopes
from coop_plan.planner.options import PlanOptions
from coop_plan.schemas import Compute, Free, Prefetch, TensorRead, Write, load_graph, parse_graph
from tests.planner.test_host_updates import iteration
from tests.strategies import graphs
from tests.support import make_graph, make_plan

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "graphs"
EXAMPLE = load_graph(ROOT / "examples" / "graph.json")

SIX = (
    "resnet32",  # convolutions
    "unet",  # convolutions, long skips
    "roofline_gpt2_4",  # attention
    "transformer",
    "chain_vgg_32",  # a chain
    "monet_vgg16_b176",  # with op variants
)


def held_by_hand(graph):
    """By op position what keep-everything holds then, (bytes, tensor id), workspace −1.

    From the graph alone: a tensor lives from its op to its last reader, and an input whose place
    an output of the same size may take is not counted beside it.
    """
    kind = {t.id: t.kind for t in graph.tensors}
    size = {t.id: t.bytes for t in graph.tensors}
    made, last = {}, {}
    for i, op in enumerate(graph.ops):
        for t in op.outputs:
            if kind[t] == "activation":
                made[t] = last[t] = i
        for t in op.inputs:
            if t in made:
                last[t] = i
    rows = []
    for i, op in enumerate(graph.ops):
        live = {t for t in made if made[t] <= i <= last[t]}
        taken = {s for t, s in op.inplace if last.get(s) == i and t in live and t not in op.mutates}
        rows.append([(size[t], t) for t in live - taken] + [(op.workspace_bytes, -1)])
    return rows


@pytest.mark.parametrize("name", ["example", *SIX])
def test_the_top_holders_are_those_of_a_computation_by_hand(name):
    if name != "example" and not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    graph = EXAMPLE if name == "example" else load_graph(DATA / f"{name}.json")
    made = plan(graph, "min", method="keep-all")
    found = explain(graph, made, top=3)
    rows = held_by_hand(graph)
    peak = max(sum(size for size, _ in row) for row in rows)
    top = [row for row in rows if sum(size for size, _ in row) == peak]
    sizes = sorted((size for size, _ in top[0]), reverse=True)[:3]
    assert [holder.bytes for holder in found.holders] == sizes
    names = {t.id: t.name or f"tensor {t.id}" for t in graph.tensors} | {-1: "workspace"}
    there = {names[t] for row in top for _, t in row}
    assert {holder.tensor for holder in found.holders} <= there


def peak_by_hand(graph, made):
    """The peak, its step and its parts, from the plan's steps alone."""
    resident = sum(t.bytes for t in graph.tensors if t.resident)
    outside, best, moment, now = 0, -1, -1, 0
    for step in made.steps:
        if isinstance(step, Free):
            continue
        if isinstance(step, Compute):
            outside += sum(w.bytes for w in step.writes if w.offset is None)
        if outside > best:
            best, moment = outside, now
        now += 1
    return moment, (resident, made.arena_bytes, max(best, 0))


@pytest.mark.parametrize("link", [None, "25GB/s"])
@pytest.mark.parametrize("name", ["example", *SIX])
def test_peak_moment_and_parts_are_equal_in_plan_map_and_explanation(name, link):
    if name != "example" and not DATA.is_dir():
        pytest.skip("needs ../shared/data")
    graph = EXAMPLE if name == "example" else load_graph(DATA / f"{name}.json")
    method = "coop-offline" if "monet" in name else "delta" if link else "dtr"
    made = plan(graph, "70%", method=method, link=link)
    moment, parts = peak_by_hand(graph, made)
    assert sum(parts) == made.peak_bytes
    found = explain(graph, made)
    assert (found.peak_bytes, found.peak_moment) == (made.peak_bytes, moment)
    shown = (sum(found.residents.values()), found.arena_bytes, found.outside_bytes)
    assert shown == parts
    page = drawing(graph, made)
    assert page["figures"]["peak_bytes"] == made.peak_bytes  # also the report's, of `compare`
    drawn = page["map"]
    fixed = sum(size for _, size in drawn["resident"])
    assert drawn["peak"] == moment
    assert (fixed, drawn["arena"], drawn["outside"][moment]) == parts
    assert drawn["budget"] == made.budget_bytes


@pytest.mark.parametrize("method", ["dtr", "coop-offline", "delta"])
@given(graph=graphs())
def test_no_tensor_that_comes_again_counts_as_kept(method, graph):
    try:
        made = plan(graph, "60%", method=method)
    except InfeasibleBudgetError:
        return
    seen = {}
    for held in replay_plan(graph, made).rectangles:
        if held.tensor >= 0:
            seen.setdefault(held.tensor, []).append(held.kind)
    for kinds in seen.values():
        assert not {"kept", "output"} & {*kinds[:-1]}
        assert "evicted" not in kinds[-1:]


def test_a_list_that_is_cut_says_what_it_leaves_out():
    made = plan(EXAMPLE, "50%")
    whole, cut = explain(EXAMPLE, made, top=10**6), explain(EXAMPLE, made, top=2)
    assert whole.omitted == {}
    for name in ("holders", "modules", "reruns"):
        entries = getattr(whole, name)
        assert [*getattr(cut, name)] == entries[:2]
        assert cut.omitted[name] == (len(entries) - 2, sum(e.bytes for e in entries[2:]))


def test_moves_to_the_host_are_explained():
    made = plan(EXAMPLE, "50%", link="25GB/s")
    assert made.swapped_bytes
    moves = explain(EXAMPLE, made, top=10**6).moves
    back = sum(step.bytes for step in made.steps if isinstance(step, Prefetch))
    assert sum(move.times * move.bytes for move in moves) + back == made.swapped_bytes


@given(graphs())
def test_live_bytes_and_times_are_the_plan_s(graph):
    try:
        made = plan(graph, "60%", method="coop")
    except InfeasibleBudgetError:
        made = plan(graph, "min", method="keep-all")
    view = replay_plan(graph, made)
    assert made.arena_bytes * (1 - made.fragmentation) == pytest.approx(max(view.live, default=0))
    assert max((m.end_us for m in view.moments), default=0.0) == pytest.approx(made.cost_us)
    for held in view.rectangles:
        assert held.begin < held.end or held.bytes == 0 or made.arena_bytes
        assert held.offset + held.bytes <= made.arena_bytes
    for moment in range(len(view.moments)):
        there = sorted((h.offset, h.offset + h.bytes) for h in view.at(moment) if h.bytes)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(there))


def test_what_is_overwritten_by_less_is_there_while_it_is():
    tensors = [(0, 8, "input"), (1, 2048, "activation"), (2, 512, "activation"), (3, 4, "output")]
    ops = [
        {"id": 0, "inputs": [0], "outputs": [1]},
        {"id": 1, "inputs": [1], "outputs": [2], "inplace": [[2, 1]]},
        {"id": 2, "inputs": [2], "outputs": [3]},
    ]
    names = ("id", "bytes", "kind")
    graph = parse_graph(
        {
            "schema": "coop-plan/graph/1",
            "tensors": [dict(zip(names, tensor, strict=True)) for tensor in tensors],
            "ops": [{"name": "op", "cost_us": 1, **op} for op in ops],
        }
    )
    made = plan(graph, "min", method="keep-all")
    assert replay_plan(graph, made).live == [2048, 2048, 512]
    assert made.fragmentation == 0


def test_kinds_are_what_the_steps_say():
    made = plan(EXAMPLE, "50%", link="25GB/s")
    view = replay_plan(EXAMPLE, made)
    again = [m for m in view.moments if m.rerun]
    assert len(again) == made.recomputed_ops
    back = sum(isinstance(step, Prefetch) for step in made.steps)
    assert sum(h.kind == "prefetched" for h in view.rectangles) >= back
    runs = sum(isinstance(step, Compute) for step in made.steps)
    assert sum(m.engine == "compute" for m in view.moments) == runs


def test_the_blocker_is_the_largest_working_set_and_the_logits_are_named():
    tensors = {0: ("input", 8), 1: ("activation", 100), 2: ("activation", 5000), 3: ("output", 8)}
    tensors |= {4: ("activation", 5000), 5: ("activation", 100), 6: ("output", 8)}
    ops = [
        {"name": "aten.mm", "inputs": [0], "outputs": [1]},
        {"name": "aten.mm", "inputs": [1], "outputs": [2], "source": "lm_head, model.py:7"},
        {"name": "aten.nll_loss_forward", "inputs": [2], "outputs": [3]},
        {"name": "aten._log_softmax_backward_data", "inputs": [2], "outputs": [4]},
        {"name": "aten.mm", "inputs": [4], "outputs": [5]},
        {"name": "aten.mm", "inputs": [5], "outputs": [6]},
    ]
    graph = make_graph(tensors, ops)
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(graph, 6000, alignment=1)
    made = plan(graph, "min", method="keep-all", alignment=1)
    blocker = explain(graph, made).blocker
    assert blocker.op == refused.value.blocking_op_name == "aten._log_softmax_backward_data"
    assert blocker.bytes == refused.value.working_set_bytes == 10_000
    assert blocker.parts[0].source == "lm_head, model.py:7"
    assert "chunk the loss" in blocker.advice


def test_prices_end_with_the_smallest_budget_and_slopes_are_between_neighbours():
    made = plan(EXAMPLE, "min", method="keep-all")
    prices = price_list(
        EXAMPLE, PlanOptions.of({"budget": "min", "method": "coop"}), made.peak_bytes
    )
    assert prices[0] == Price(made.peak_bytes, 0.0)
    assert all(a.budget_bytes > b.budget_bytes for a, b in itertools.pairwise(prices))
    assert slopes([Price(100, 0.0), Price(50, 0.1), Price(20, None)]) == [0.1 / 50, None]


def test_the_first_price_is_of_the_method():
    """Updates on the host cost less than keep-everything at its own peak."""
    graph = iteration()
    peak = plan(graph, "min", method="keep-all", alignment=1).peak_bytes
    first, *_ = price_list(graph, PlanOptions.of({"budget": "min", "alignment": 1}), peak)
    assert first == Price(peak, plan(graph, peak, alignment=1).overhead)
    assert first.overhead < 0


@pytest.mark.parametrize("budget", ["min", 8000])
@pytest.mark.parametrize("host_us", [300.0, 5000.0])
def test_the_map_ends_with_the_makespan(budget, host_us):
    """Also where the step ends with a run on the host, or with a copy to a home."""
    graph = iteration(host_us=host_us)
    made = plan(graph, budget, alignment=1)
    assert drawing(graph, made)["map"]["end_us"] == pytest.approx(made.cost_us)


def test_a_buffer_without_bytes_is_not_what_an_output_takes_over():
    tensors = {0: ("input", 8), 4: ("output", 8)}
    tensors |= {1: ("activation", 100), 2: ("activation", 0), 3: ("activation", 100)}
    ops = [
        {"inputs": [0], "outputs": [1, 2]},
        {"inputs": [2], "outputs": [3]},
        {"inputs": [1, 3, 2], "outputs": [4]},
    ]
    steps = [
        Compute(op=0, reads=[TensorRead(0)], writes=[Write(0, 1, 0, 100), Write(1, 2, 100, 0)]),
        Compute(op=1, reads=[1], writes=[Write(2, 3, 100, 100)]),
        Compute(op=2, reads=[0, 2, 1], writes=[Write(3, 4, None, 8)]),
        Free([0, 1, 2]),
    ]
    graph = make_graph(tensors, ops)
    view = replay_plan(graph, make_plan(graph, steps))
    assert [(held.begin, held.end) for held in view.rectangles] == [(0, 3), (0, 3), (1, 3)]
