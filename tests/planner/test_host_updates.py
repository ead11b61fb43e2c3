"""Updates on the host: plans that run them there, and the verifier's rules of such runs."""

import json

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from benchmarks.homes import rule
from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.core.memory_bounds import budget_lower_bound
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.homes.updates import host_updates
from coop_plan.planner.inspect.exports import trace
from coop_plan.planner.options import PlanOptions
from coop_plan.planner.plan_cache.cost_rule import all_costs
from coop_plan.planner.plan_cache.remap_ids import remap_ids
from coop_plan.planner.planning import keep_all_peak
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import Compute, Device, Graph, Op, Tensor, Variant, fingerprint
from coop_plan.schemas.fingerprint import tensor_order
from tests.planner.reference import Machine
from tests.planner.test_homes import FAST, movable
from tests.strategies import COSTS, graphs
from tests.support import edit


def on_host(op, cost_us):
    """The op with a variant on the host, of the same inputs."""
    fields = {"name": "host", "cost_us": cost_us, "inputs": op.inputs, "outputs": []}
    return op.model_copy({"variants": [Variant(**fields, engine="host")]})


def runs_on_host(made):
    return [step for step in made.steps if isinstance(step, Compute) and step.variant == "host"]


def iteration(layers=4, weight=1000, host_us=300.0):
    """Forward, and backward with the update of each parameter and its moments, all movable."""
    tensors, ops = [], []

    def tensor(size, kind, **fields):
        tensors.append(Tensor(id=len(tensors), bytes=size, kind=kind, **fields))
        return tensors[-1].id

    def op(inputs, outputs, phase, mutates=()):
        fields = {"name": "op", "phase": phase, "inputs": inputs, "outputs": outputs}
        fields |= {"mutates": list(mutates), "recomputable": not mutates, "cost_us": 400.0}
        made = Op(id=len(ops), **fields)
        ops.append(on_host(made, host_us) if mutates else made)

    weights = [tensor(weight, "parameter", movable=True) for _ in range(layers)]
    moments = [tensor(2 * weight, "buffer", movable=True) for _ in range(layers)]
    kept = [tensor(300, "input")]
    for w in weights:
        kept.append(tensor(300, "activation"))
        op([kept[-2], w], [kept[-1]], "forward")
    gradient = tensor(300, "activation")
    op([kept[-1]], [gradient], "backward")
    for w, m, x in reversed(list(zip(weights, moments, kept, strict=False))):
        of_weight = tensor(weight, "activation")
        op([gradient, x], [of_weight], "backward")
        before, gradient = gradient, tensor(300, "activation")
        op([before, w], [gradient], "backward")
        op([of_weight, m, w], [], "backward", [m, w])
    return Graph(schema_="coop-plan/graph/1", device=FAST, tensors=tensors, ops=ops)


@st.composite
def graphs_with_updates(draw):
    """Random graphs of movable residents, whose ops without outputs may run on the host."""
    graph = movable(draw(graphs(launches=True)))
    resident = {tensor.id for tensor in graph.tensors if tensor.resident}
    ops = [
        on_host(op, draw(COSTS)) if not op.outputs and {*op.mutates} <= resident else op
        for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


@st.composite
def iterations(draw):
    """Random iterations: sizes, costs, links, launches; updates at once or at the end, some on one
    engine.
    """
    graph = iteration(draw(st.integers(1, 4)))
    size = st.sampled_from([100, 300, 1000, 2000])
    cost = st.sampled_from([0.0, 20.0, 100.0, 400.0, 1600.0])
    rate = st.sampled_from([1e6, 2e6, 5e6, 2e7])
    tensors = [tensor.model_copy({"bytes": draw(size)}) for tensor in graph.tensors]
    ops = []
    for op in graph.ops:
        made = op.model_copy({"cost_us": draw(cost), "variants": []})
        ops.append(on_host(made, draw(cost)) if op.mutates and draw(st.integers(0, 4)) else made)
    if draw(st.booleans()):
        ops.sort(key=lambda op: bool(op.mutates))
    link = {"h2d_bytes_per_s": draw(rate), "d2h_bytes_per_s": draw(rate)}
    link["kind"] = draw(st.sampled_from(["cpu", "cuda"]))
    link |= {name: draw(st.sampled_from([0.0, 150.0])) for name in ("launch_us", "copy_launch_us")}
    made = {"tensors": tensors, "ops": ops, "device": FAST.model_copy(link)}
    return graph.model_copy(made)


@st.composite
def entangled(draw):
    """Iterations whose ops use residents of others, too; some are random."""
    graph = iteration(draw(st.integers(2, 3)), host_us=draw(st.sampled_from([0.0, 300.0])))
    other = st.sampled_from([tensor.id for tensor in graph.tensors if tensor.movable])
    ops = []
    for op in graph.ops:
        more = draw(st.lists(other, max_size=1))
        overwritten = [*op.mutates, *(more if op.mutates and draw(st.integers(0, 3)) == 0 else ())]
        fields = {"inputs": op.inputs + more, "mutates": list(dict.fromkeys(overwritten))}
        made = op.model_copy(fields | {"rng": draw(st.integers(0, 3)) == 0})
        ops.append(on_host(made, op.variants[0].cost_us) if op.variants else made)
    return graph.model_copy({"ops": ops})


UPDATED = st.one_of(graphs_with_updates(), iterations())


def without_updates(graph):
    """The graph whose updates run on the device alone."""
    ops = [
        op.model_copy({"variants": [v for v in op.variants if v.engine == "device"]})
        for op in graph.ops
    ]
    return graph.model_copy({"ops": ops})


@given(UPDATED, st.sampled_from(["outside", "arena"]), st.integers(0, 9))
@settings(max_examples=40)
def test_updates_on_the_host_never_cost_more_and_never_need_more_memory(graph, outputs, share):
    """`min` and the cost at a budget are at most those without; `plan` verifies each plan."""
    assume(host_updates(Problem.from_graph(graph, 1, outputs)))
    fields = {"method": "coop-offline", "outputs": outputs, "alignment": 1}
    fixed = without_updates(graph)
    least, less = (plan(g, "min", **fields) for g in (fixed, graph))
    assert less.peak_bytes <= least.peak_bytes
    assert less.budget_bytes == less.peak_bytes
    assert budget_lower_bound(Problem.from_graph(graph, 1, outputs)) <= less.peak_bytes
    high = keep_all_peak(graph, PlanOptions.given("min", fields))
    budget = max(1, least.peak_bytes + (high - least.peak_bytes) * share // 10)
    try:
        limit_us = plan(fixed, budget, **fields).cost_us
    except InfeasibleBudgetError:  # the option `smallest` searches on
        return
    free = plan(graph, budget, **fields)
    event(f"on the host at min: {bool(runs_on_host(less))}, else {bool(runs_on_host(free))}")
    assert free.cost_us <= limit_us


@given(UPDATED, st.integers(0, 9))
@settings(max_examples=30)
def test_no_rule_costs_less(graph, share):
    """Residents fetched at each use, states fetched, all updates on the host: at each budget."""
    assume(host_updates(Problem.from_graph(graph, 1)))
    buffers = {t.id for t in graph.tensors if t.kind == "buffer"}
    options = PlanOptions.given("min", {"alignment": 1})
    least, high = plan(graph, options).peak_bytes, keep_all_peak(graph, options)
    budget = max(1, least + (high - least) * share // 10)
    made = plan(graph, budget, alignment=1, smallest=True)
    rules = {
        "states": rule(graph, budget, buffers.__contains__, alignment=1),
        "streaming": rule(graph, budget, lambda _: True, alignment=1),
        "host": rule(graph, budget, lambda _: False, on_host=True, alignment=1),
    }
    best = min((cost for cost in rules.values() if cost is not None), default=float("inf"))
    event(f"best: {[name for name, cost in rules.items() if cost == best]}")
    assert made.overhead <= best + 1e-9, rules


@given(entangled(), st.sampled_from(["min", "80%"]))
@settings(max_examples=30)
def test_updates_may_share_residents_with_other_ops(graph, budget):
    """Each plan is good: an update is on the host only where the others do not depend on it."""
    try:
        made = plan(graph, budget, alignment=1)
    except InfeasibleBudgetError:
        return
    event(f"on the host: {bool(runs_on_host(made))}")
    machine = Machine(graph, made)
    assert machine.right
    assert machine.clean


def test_updates_on_the_host_need_no_memory_of_the_device():
    """The working set of an update falls away: `min` sinks below it."""
    graph = iteration()
    fixed, free = (plan(g, "min", alignment=1) for g in (without_updates(graph), graph))
    assert len(runs_on_host(free)) == 4
    update = next(op for op in graph.ops if op.mutates)
    used = sum(t.bytes for t in graph.tensors if t.id in update.inputs)
    assert free.peak_bytes < used <= fixed.peak_bytes


@pytest.mark.parametrize(("host_us", "count"), [(300.0, 4), (1e6, 0)])
def test_the_plan_weighs_both(host_us, count):
    """A slow host computes nothing, a fast one all, beside the device: less than each op once."""
    graph = iteration(host_us=host_us)
    made = plan(graph, 8000, alignment=1)
    assert len(runs_on_host(made)) <= count
    if count:
        assert runs_on_host(made)
        assert made.overhead < 0
        assert made.status == "feasible"
        assert made.lower_bound_us is None


def test_without_a_link_nothing_runs_on_the_host():
    graph = iteration()
    alone = graph.model_copy({"device": Device()})
    assert not runs_on_host(plan(alone, "100%", alignment=1))
    with pytest.raises(InfeasibleBudgetError):
        plan(alone, 8000, alignment=1)


def test_the_engine_enters_the_fingerprint():
    graph = iteration()
    ops = [
        op.model_copy({"variants": [v.model_copy({"engine": "device"}) for v in op.variants]})
        for op in graph.ops
    ]
    assert fingerprint(graph.model_copy({"ops": ops})) != fingerprint(graph)


def test_a_cached_plan_is_carried_to_other_ids_and_costs():
    """Its figures are those of the other graph, with no bound that the host disproves."""
    graph = iteration()
    made = plan(graph, 8000, alignment=1)
    ops = [
        op.model_copy({"variants": [v.model_copy({"cost_us": 5000.0}) for v in op.variants]})
        for op in graph.ops
    ]
    ids = [op.id for op in graph.ops], tensor_order(graph)
    slower = graph.model_copy({"ops": ops})
    carried = remap_ids(made, *ids, slower, all_costs(graph))
    assert find_faults(slower, carried) == []
    assert carried.cost_us > made.cost_us
    assert carried.lower_bound_us < made.cost_us


def test_views_have_a_track_of_the_host():
    """Runs on the host follow one another beside compute, and end with the step at the latest."""
    graph = iteration()
    made = plan(graph, 8000, alignment=1)
    events = json.loads(trace(graph, made))["traceEvents"]
    runs = [event for event in events if event.get("cat") == "host"]
    assert len(runs) == len(runs_on_host(made))
    ends = [run["ts"] + run["dur"] for run in runs]
    assert all(end <= run["ts"] for end, run in zip(ends, runs[1:], strict=False))
    assert max(ends) <= made.cost_us
    last = max(event["ts"] + event["dur"] for event in events if event.get("ph") == "X")
    assert last == pytest.approx(made.cost_us)


# Changes of a plan's document. The first run on the host reads a copy and two homes.


def first_run(document):
    steps = document["steps"]
    return next(k for k, s in enumerate(steps) if s.get("variant") == "host")


def gradient_of(document):
    reads = document["steps"][first_run(document)]["reads"]
    return next(read for read in reads if isinstance(read, int))


def homes_of(document):
    reads = document["steps"][first_run(document)]["reads"]
    return [read["tensor"] for read in reads if not isinstance(read, int)]


def before_the_offload(document):
    steps, buffer = document["steps"], gradient_of(document)
    run = steps.pop(first_run(document))
    at = next(k for k, s in enumerate(steps) if s["do"] == "offload" and s["buffer"] == buffer)
    steps.insert(at, run)


def without_a_run(document):
    del document["steps"][first_run(document)]


def again(document):
    at = first_run(document)
    document["steps"].insert(at, document["steps"][at])


def without_home(document):
    (tensor, _) = homes_of(document)
    document["homes"] = [home for home in document["homes"] if home["tensor"] != tensor]


def of_another_tensor(document):
    reads = document["steps"][first_run(document)]["reads"]
    reads[1], reads[2] = reads[2], reads[1]


def of_a_buffer(document):
    """The run overwrites a copy in place of the home."""
    step = document["steps"][first_run(document)]
    step["reads"] = [gradient_of(document)] * len(step["reads"])


def too_few_reads(document):
    del document["steps"][first_run(document)]["reads"][-1]


def with_a_write(document):
    write = {"buffer": 10**6, "tensor": 0, "offset": 0, "bytes": 0}
    document["steps"][first_run(document)]["writes"] = [write]


def with_workspace(document):
    document["steps"][first_run(document)]["workspace"] = {"offset": 0, "bytes": 8}


def prefetch(document, tensor, at):
    """Insert a copy from a home, and the wait for it two steps later."""
    steps = document["steps"]
    size = next(s["bytes"] for s in steps if s["do"] == "prefetch" and s["tensor"] == tensor)
    fields = {"buffer": 10**6, "tensor": tensor, "offset": 10**5, "bytes": size, "from": None}
    steps.insert(at, {"do": "prefetch"} | fields)
    steps.insert(at + 2, {"do": "wait", "buffer": 10**6})
    steps.insert(at + 3, {"do": "free", "buffers": [10**6]})


def of_parameter(document):
    fetched = {s["tensor"] for s in document["steps"] if s["do"] == "prefetch"}
    return next(t for t in homes_of(document) if t in fetched)


def during_a_prefetch(document):
    prefetch(document, of_parameter(document), first_run(document))


def prefetched_afterwards(document):
    prefetch(document, of_parameter(document), first_run(document) + 1)


def over_the_copy(document):
    """A later copy takes the address of the gradient's."""
    steps, buffer = document["steps"], gradient_of(document)
    sent = [s for s in steps if s["do"] == "offload"]
    own = next(s for s in sent if s["buffer"] == buffer)
    sent[sent.index(own) + 1]["host_offset"] = own["host_offset"]


def cheaper(document):
    document["cost_us"] -= 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (before_the_offload, "not-offloaded"),
        (without_a_run, "missing-op"),
        (without_a_run, "stale-home"),
        (again, "repeated-op"),
        (again, "stale-version"),
        (without_home, "not-offloaded"),
        (of_another_tensor, "wrong-tensor"),
        (of_a_buffer, "split-mutation"),
        (too_few_reads, "wrong-reads"),
        (with_a_write, "wrong-writes"),
        (with_workspace, "wrong-workspace"),
        (during_a_prefetch, "not-ready"),
        (prefetched_afterwards, "not-ready"),
        (over_the_copy, "overlap"),
        (cheaper, "wrong-figure"),
    ],
)
def test_the_verifier_refuses(change, code):
    """Each rule of runs on the host, broken alone, is a fault of its own code."""
    graph = iteration()
    made = plan(graph, "min", alignment=1)
    assert runs_on_host(made)
    assert not find_faults(graph, made)
    assert code in {fault.code for fault in find_faults(graph, edit(made, change))}
