"""Planning options: validation and cache key."""

import pytest

from coop_plan.planner import PlanOptions, plan
from coop_plan.schemas import Device, InvalidInputError
from tests.support import make_graph

GRAPH = make_graph({0: ("input", 8), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])


def options(**fields):
    return PlanOptions.of({"budget": "50%"} | fields)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"budget": True}, "/budget"),
        ({"budget": 1.5}, "/budget"),
        ({"budget": "12 apples"}, "/budget"),
        ({"method": "coop_offline"}, "/method"),
        ({"time_limit": -1}, "/time_limit"),
        ({"time_limit": float("inf")}, "/time_limit"),
        ({"time_limit": float("nan")}, "/time_limit"),
        ({"seed": -1}, "/seed"),
        ({"seed": 1 << 63}, "/seed"),
        ({"alignment": 3}, "/alignment"),
        ({"alignment": True}, "/alignment"),
        ({"outputs": "inside"}, "/outputs"),
        ({"host_budget": "much"}, "/host_budget"),
        ({"host_budget": -1}, "/host_budget"),
        ({"link": "25 horses"}, "/link"),
        ({"link": 2.5}, "/link"),
        ({"link": -1}, "/link"),
        ({"solver": "GUROBI_CMD"}, "/solver"),
        ({"switches": {"sliding-window": False}}, "/switches/sliding-window"),
        ({"method": "coop", "switches": {"sliding-window": 0}}, "/switches"),
        ({"pool": 3}, "/pool"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(fields, pointer):
    with pytest.raises(InvalidInputError) as caught:
        options(**fields)
    assert caught.value.pointer == pointer


def test_every_field_is_part_of_the_key():
    """But what asks for the same: a switch that is on, a budget in other words."""
    asked = [
        *({}, {"budget": "51%"}, {"budget": 50}, {"budget": "min"}, {"method": "coop"}),
        *({"time_limit": 1}, {"seed": 1}, {"method": "checkmate"}, {"outputs": "arena"}),
        *({"method": "checkmate", "solver": "X"}, {"alignment": 1}, {"host_budget": 0}),
        {"link": "25GB/s"},
        {"method": "coop", "switches": {"partitioning": False}},
    ]
    keys = [options(**fields).key("sha256:1", "planner") for fields in asked]
    assert len(set(keys)) == len(asked)
    same = options(method="coop", switches={"partitioning": True}, budget="50.0 %")
    assert same.key("sha256:1", "planner") == keys[4]
    assert options().key("sha256:1", "planner", links=True) != keys[0]
    others = {same.key(*rest) for rest in [("sha256:2", "planner"), ("sha256:1", "newer")]}
    assert keys[4] not in others
    assert same.key("sha256:1", "planner", costs="sha256:3") != keys[4]


def test_a_link_replaces_the_bandwidths_of_the_graph():
    device = {"d2h_bytes_per_s": 4.0, "h2d_bytes_per_s": 2.0, "copy_latency_us": 3.0}
    graph = make_graph({0: ("input", 8), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])
    assert options().apply_link(graph) is graph
    graph = graph.model_copy(update={"device": Device(**device)})
    asked = options(link="25GB/s").apply_link(graph).device
    assert (asked.d2h_bytes_per_s, asked.h2d_bytes_per_s, asked.copy_latency_us) == (25e9, 25e9, 3)
    assert graph.device.linked
    assert not options(link=0).apply_link(graph).device.linked
    assert plan(graph, "100%", link="25GB/s").link_bytes_per_s == 25e9


def test_plan_takes_options_or_their_fields():
    for budget in ("100%", PlanOptions.of({"budget": "100%"})):
        assert plan(GRAPH, budget).overhead == 0
    with pytest.raises(InvalidInputError, match="unknown field"):
        plan(GRAPH, "100%", speed=3)
