"""A plan is made once on a machine, and made again when what was kept does not hold."""

import contextlib
import sqlite3

import pytest

from coop_plan.planner import InfeasibleBudgetError, find_faults
from coop_plan.planner.plan_cache.record import StoredRefusal, read_signed, sign
from coop_plan.runtime.cache import plans
from coop_plan.runtime.capture import profiler
from coop_plan.runtime.execute import find_plan
from coop_plan.runtime.op_profile import OpProfile
from coop_plan.runtime.options import Options
from coop_plan.schemas import Device
from tests.runtime.starts import start
from tests.support import make_graph


@contextlib.contextmanager
def store(cache):
    connection = sqlite3.connect(cache / "step_plans.sqlite3")
    with contextlib.closing(connection), connection:
        yield connection


def changed(cache, change):
    """What is kept, changed by whoever can seal it; with None by somebody who cannot."""
    with store(cache) as connection:
        ((key, data),) = connection.execute("select key, record from answer")
        made = data[:-1] if change is None else sign(change(read_signed(data, key, b"")), key, b"")
        connection.execute("update answer set record = ?", (made,))


def test_the_second_start_reads_the_plan_that_the_first_made():
    made, loss = start("min")
    read, again = start("min")
    assert (made.plan_cached, read.plan_cached) == (False, True)
    assert read.plan == made.plan
    assert loss == again
    assert not find_faults(read.graph, read.plan)
    assert read.measured_arena_bytes == read.planned_arena_bytes
    assert read.outside_bytes == 0


@pytest.mark.parametrize(
    "other",
    [
        {"budget": "90%"},
        {"budget": "80.1%"},
        {"budget": "min"},
        {"method": "dtr"},
        {"alignment": 64},
        {"outputs": "gradients"},
        {"time_limit": 0.5},
        {"method": "coop", "switches": {"sliding-window": False}},
    ],
)
def test_another_question_is_another_plan(other):
    start()
    if "switches" in other:
        start(method=other["method"])
    assert not start(**other)[0].plan_cached
    assert start(**other)[0].plan_cached


def test_other_costs_are_another_plan(monkeypatch):
    start()

    def slower(cost_us, *rest):
        return OpProfile(cost_us * 4, *rest)

    measure = profiler._parse
    monkeypatch.setattr(profiler, "_parse", lambda text: slower(*vars(measure(text)).values()))
    report, _ = start()
    assert not report.plan_cached
    assert report.profiled_ops == 0


@pytest.mark.parametrize("damage", ["not sealed", "no plan", "wrong plan", "wrong ids"])
def test_a_plan_that_does_not_hold_is_made_again(cache, damage):
    good, _ = start()

    def spoil(record):
        plan = record.plan
        if damage == "no plan":
            return StoredRefusal(
                method=plan.method,
                budget_bytes=1,
                min_feasible_bytes=2,
                op=None,
                working_set_bytes=0,
                unused=[],
            )
        if damage == "wrong plan":  # it would read what is gone
            return record.model_copy({"plan": plan.model_copy({"steps": plan.steps[1:]})})
        return record.model_copy({"tensors": record.tensors[1:]})

    changed(cache, None if damage == "not sealed" else spoil)
    report, _ = start()
    assert not report.plan_cached
    assert report.plan.steps == good.plan.steps
    assert start()[0].plan_cached


def test_a_plan_within_more_than_was_asked_is_made_again(cache):
    start(10_000_000)
    changed(
        cache,
        lambda record: record.model_copy(
            {"plan": record.plan.model_copy({"budget_bytes": 10_000_001})}
        ),
    )
    assert not start(10_000_000)[0].plan_cached


def test_a_bad_entry_is_deleted_even_if_no_other_plan_can_be_made(cache, monkeypatch):
    start()
    changed(cache, lambda record: record.model_copy({"ops": record.ops[::-1]}))
    monkeypatch.setattr("coop_plan.runtime.cache.plans.store", lambda *_: None)
    assert not start()[0].plan_cached
    with store(cache) as connection:
        assert connection.execute("select count(*) from answer").fetchone() == (0,)


@pytest.mark.parametrize("own", [0.0, 25e9])
def test_keys_differ_by_all_launches_that_count_for_the_link(own):
    """Also for the option's link, on a device without one of its own, as on the CPU."""
    options = Options.parse({"budget": "50%", "link": "25GB/s"})
    graph = make_graph({0: ("output", 8)}, [{"outputs": [0]}])
    times = [("cpu", 0.0, 0.0), ("cpu", 5.0, 0.0), ("cpu", 0.0, 5.0), ("cuda", 5.0, 0.0)]
    devices = [
        Device(kind=kind, launch_us=op, copy_launch_us=copy).with_link(own)
        for kind, op, copy in [*times, ("cuda", 0.0, 5.0)]
    ]
    keys = {plans.key_of(graph.model_copy({"device": d}), options) for d in devices}
    assert len(keys) == len(devices)


def test_a_damaged_file_costs_a_line_and_is_replaced(cache, caplog):
    start()
    path = cache / "step_plans.sqlite3"
    path.write_bytes(b"this is no database\n" * 300)
    assert not start()[0].plan_cached
    assert caplog.text.count("without the cache") == 1
    assert path.with_name("step_plans.sqlite3.damaged").exists()
    assert start()[0].plan_cached


@pytest.mark.parametrize(("bound", "searches"), [(50, [False, True]), (101, [False])])
def test_a_budget_that_the_method_misses_is_searched_from_above(bound, searches):
    """Unless no schedule of any method meets it."""
    seen = []

    def make(graph, options):
        seen.append(options.smallest)
        if options.smallest:
            return graph
        raise InfeasibleBudgetError("m", 100, None, None, "", 0, budget_lower_bound_bytes=bound)

    options = Options.parse({"budget": 100})
    with pytest.raises(InfeasibleBudgetError) if bound > 100 else contextlib.nullcontext():
        assert find_plan._or_smallest(make, "graph", options, "", None) == "graph"
    assert seen == searches
