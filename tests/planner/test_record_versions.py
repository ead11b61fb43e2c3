"""Records of a later version: fields that this one does not know are left out."""

import msgspec

from coop_plan.planner import plan
from coop_plan.planner.plan_cache.record import StoredPlan, as_bytes, as_record
from tests.planner.test_plan_cache import graph  # noqa: F401 - a fixture


def with_fields(value):
    """With one more field in every object."""
    if isinstance(value, list):
        return [with_fields(item) for item in value]
    if isinstance(value, dict):
        kept = {
            name: item if name == "versions" else with_fields(item) for name, item in value.items()
        }
        return kept | {"of_tomorrow": [1]}
    return value


def test_a_reader_leaves_out_what_it_does_not_know(graph):  # noqa: F811
    record = StoredPlan.of(plan(graph, "100%"), graph)
    later = msgspec.msgpack.encode(with_fields(msgspec.msgpack.decode(as_bytes(record))))
    assert as_record(later) == record
    assert as_record(later).for_graph(graph) == record.plan
