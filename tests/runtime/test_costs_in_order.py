"""Costs of ops in their order: where an op is the first of its kind for long, it costs more."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import coop_plan
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.capture.graph_builder import UPDATE
from coop_plan.runtime.capture.joint_graph import KEPT_OPS, Captured, with_costs_in_order
from coop_plan.runtime.capture.op_timing import OpTimes
from coop_plan.runtime.capture.op_variants import OpVariant
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.schemas import Graph, Op, Variant
from tests.runtime.starts import start

KINDS = (abs, max, min, sum)
UPDATED = len(KINDS)


def captured(kinds, profiles):
    graph, nodes = fx.Graph(), []
    for kind in kinds:
        nodes.append(graph.call_function(print if kind == UPDATED else KINDS[kind]))
        nodes[-1].meta |= {UPDATE: None} if kind == UPDATED else {}
    variant = {"name": "v", "inputs": [], "outputs": [], "cost_us": 0.0}
    ops = [
        Op(id=i, name="op", inputs=[], outputs=[], cost_us=0.0, variants=[Variant(**variant)])
        for i in range(len(nodes))
    ]
    variants = {
        node: {"v": OpVariant(node, profile)}
        for node, profile in zip(nodes, profiles[::-1], strict=True)
    }
    module = fx.GraphModule({}, fx.Graph())
    made = Graph(schema_="coop-plan/graph/1", tensors=[], ops=ops)
    cpu = torch.device("cpu")
    return Captured(
        *(module, 0, made, nodes, profiles, {}, set(), {}, 0, 0.0, cpu), variants=variants
    )


@given(st.data())
def test_the_first_op_of_its_kind_for_long_costs_more(data):
    kinds = data.draw(st.lists(st.integers(0, UPDATED), min_size=1, max_size=60))
    times = st.tuples(st.floats(0, 100), st.sampled_from([0.0, 50.0, 200.0]))
    profiles = [OpProfile(cost, (), (), 0, 0, False, first) for cost, first in data.draw(
        st.lists(times, min_size=len(kinds), max_size=len(kinds))
    )]  # fmt: skip
    found = with_costs_in_order(captured(kinds, profiles))
    for at, (op, own, other) in enumerate(
        zip(found.graph.ops, profiles, profiles[::-1], strict=True)
    ):
        before = kinds[max(0, at - KEPT_OPS + 1) : at]
        since = before[::-1].index(UPDATED) if UPDATED in before else len(before)
        is_first = kinds[at] not in before[len(before) - since :]
        for form, profile in ((op, own), (op.variants[0], other)):
            costs = [profile.cost_us, profile.first_us] if is_first else [profile.cost_us]
            assert form.cost_us == max(costs)
    assert with_costs_in_order(found).graph == found.graph


@pytest.fixture
def timed(monkeypatch):
    """Every op takes 100 µs as the first of its kind, else 10; nothing is known from before."""
    monkeypatch.setattr(profiler, "_profiles", {})
    monkeypatch.setattr(profiler, "session", lambda: None)
    monkeypatch.setattr(profiler, "time_op", lambda *_: OpTimes(100.0, 10.0))


def test_ops_of_a_step_cost_as_in_its_order(timed):
    report, _ = start()
    ops = report.graph.ops
    costs = {name: [op.cost_us for op in ops if op.name == name] for name in {o.name for o in ops}}
    assert all(of_kind[0] == 100 for of_kind in costs.values())
    assert any(10 in of_kind for of_kind in costs.values())


def test_ops_after_an_update_cost_as_the_first_of_their_kind(timed):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iteration = coop_plan.train_iteration(lambda x: model(x).square().sum(), optimizer, "100%")
    iteration(torch.ones(2, 8))
    ops = coop_plan.reports()[-1].graph.ops
    names = ["" if op.phase == "optimizer" else op.name for op in ops]
    updates = [at for at, name in enumerate(names) if not name]
    after = [ops[at + 1] for at in updates[:-1] if names[at + 1]]
    assert after
    assert all(op.cost_us == 100 for op in after)
    assert any(op.cost_us == 10 for op in ops[: updates[0]])
