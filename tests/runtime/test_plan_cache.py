"""A plan is made once on a machine, and made again when what was kept does not hold."""

import contextlib
import json
import sqlite3

import pytest

from coop_plan.planner import find_faults
from coop_plan.runtime.capture import profile
from coop_plan.runtime.capture.profile import OpProfile
from tests.runtime.starts import start


@contextlib.contextmanager
def store(cache):
    connection = sqlite3.connect(cache / "step_plans.sqlite3")
    with contextlib.closing(connection), connection:
        yield connection


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
        {"outputs": "outside"},
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

    measure = profile._parse
    monkeypatch.setattr(profile, "_parse", lambda text: slower(*vars(measure(text)).values()))
    report, _ = start()
    assert not report.plan_cached
    assert report.profiled_ops == 0


@pytest.mark.parametrize("damage", ["not json", "no plan", "wrong plan", "wrong ids"])
def test_a_plan_that_does_not_hold_is_made_again(cache, damage):
    good, _ = start()
    with store(cache) as connection:
        ((text,),) = connection.execute("select record from plan")
        record = json.loads(text)
        if damage == "no plan":
            del record["plan"]
        elif damage == "wrong plan":  # it would read what is gone
            record["plan"]["steps"] = record["plan"]["steps"][1:]
        elif damage == "wrong ids":
            record["tensors"] = record["tensors"][1:]
        text = damage if damage == "not json" else json.dumps(record)
        connection.execute("update plan set record = ?", (text,))
    report, _ = start()
    assert not report.plan_cached
    assert report.plan.steps == good.plan.steps
    assert start()[0].plan_cached


def test_a_plan_within_more_than_was_asked_is_made_again(cache):
    start(10_000_000)
    with store(cache) as connection:
        connection.execute("update plan set record = replace(record, '10000000', '10000001')")
    assert not start(10_000_000)[0].plan_cached


def test_a_bad_entry_is_deleted_even_if_no_other_plan_can_be_made(cache, monkeypatch):
    start()
    with store(cache) as connection:
        connection.execute("update plan set record = replace(record, '\"op\":1,', '\"op\":2,')")
    monkeypatch.setattr("coop_plan.runtime.cache.plans.keep", lambda *_: None)
    assert not start()[0].plan_cached
    with store(cache) as connection:
        assert connection.execute("select count(*) from plan").fetchone() == (0,)


def test_a_damaged_file_costs_a_line_and_is_replaced(cache, caplog):
    start()
    path = cache / "step_plans.sqlite3"
    path.write_bytes(b"this is no database\n" * 300)
    assert not start()[0].plan_cached
    assert caplog.text.count("without the cache") == 1
    assert path.with_name("step_plans.sqlite3.damaged").exists()
    assert start()[0].plan_cached
