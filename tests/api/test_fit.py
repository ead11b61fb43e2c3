"""`coop-plan fit`: a row for each device, whatever becomes of the others."""

import json

import msgspec
import pytest

from coop_plan.api.cli import fit
from coop_plan.runtime import CaptureError
from coop_plan.schemas import Device, InvalidInputError, parse_graph
from tests.planner.test_fit import chain


@pytest.fixture
def ask(run, monkeypatch):
    """Run the command where a capture is `graphs(device, batch)`."""

    def call(graphs, *arguments):
        def captured(target, progress, *, device, batch, optimizer, masters):
            there = Device(kind="cpu", memory_bytes=512 * 50)
            return msgspec.structs.replace(graphs(device, batch), device=there)

        monkeypatch.setattr(fit, "captured", captured)
        return run("fit", "a:b", "--batch", 4, *arguments)

    return call


def failing(error, *devices, above=0):
    def graphs(device, batch):
        if device in devices and batch > above:
            raise error
        return chain(batch)

    return graphs


def test_a_device_that_fails_leaves_the_others_their_figures(ask):
    graphs = failing(CaptureError("it cannot"), "two", "three")
    code, out, err = ask(graphs, "--device", "one,two,three", "--json")
    rows = json.loads(out)
    assert code == 1
    assert err == "coop-plan: error: two, three: it cannot\n"
    assert [row["error"] for row in rows] == [None, "it cannot", "it cannot"]
    assert len({tuple(sorted(row)) for row in rows}) == 1
    assert rows[0]["largest"]["one extra forward"]["batch"] > 4
    assert rows[1]["keep_all"] is None
    code, table, again = ask(graphs, "--device", "one,two,three")
    assert (code, again) == (1, err)
    assert [line.split()[0] for line in table.splitlines()] == ["device", "one", "one:"]


def test_where_no_device_can_be_asked_there_is_one_message(ask):
    graphs = failing(InvalidInputError("no such step"), "one", "two")
    code, out, err = ask(graphs, "--device", "one,two")
    assert (code, out, err) == (2, "", "coop-plan: error: one, two: no such step\n")


@pytest.mark.parametrize(
    ("graphs", "text"),
    [
        (failing(CaptureError("too large"), "one", above=4), "at batch 8, too large"),
        (lambda device, batch: chain(batch) if batch == 4 else other(batch), "one batch at a time"),
    ],
)
def test_where_other_batches_cannot_be_captured_the_one_asked_about_is_answered(ask, graphs, text):
    code, out, err = ask(graphs, "--device", "one", "--json")
    [row] = json.loads(out)
    assert code == 1
    assert row["keep_all"]["overhead"] == 0
    assert row["within"]["peak_bytes"] <= 512 * 50
    assert row["largest"] == {}
    assert text in row["error"]
    assert text in err
    code, table, _ = ask(graphs, "--device", "one")
    assert table.splitlines()[1].split()[-3:] == ["unknown"] * 3


def other(batch):
    return parse_graph(chain(batch).to_json().replace('"name":"f"', '"name":"g"'))
