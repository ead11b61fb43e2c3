"""`coop-plan fit`: a row for each device, whatever becomes of the others."""

import json
from functools import partial

import msgspec
import pytest

from coop_plan.runtime import CaptureError
from coop_plan.runtime.offline_capture import devices, fake_device
from coop_plan.runtime.offline_capture.eager_parts import EagerMemory, EagerParts
from coop_plan.schemas import InvalidInputError, parse_graph
from tests.planner.test_fit import chain

MEMORY = 512 * 50


class Captures:
    """Stands for the processes that capture: a graph is `graphs(device, batch)`.

    Over fused regions, its sizes and costs are `shrunk` times as large.
    """

    def __init__(self, graphs, eager, shrunk=1.0):
        self.graphs, self.eager, self.shrunk = graphs, eager, shrunk
        self.asked = []

    def __call__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def capture(self, request):
        self.asked.append((request.spec.name, request.batch))
        size = request.batch * (request.length or 1)
        graphs = {"eager": self.graphs(request.spec.name, size)}
        if "fused" in request.kernels:
            graphs["fused"] = scaled(graphs["eager"], self.shrunk)
        return fake_device.Captured(graphs, self.eager)


def scaled(graph, factor):
    """The graph with activations and costs that are `factor` times as large."""
    replace = msgspec.structs.replace
    tensors = [t if t.resident else replace(t, bytes=int(t.bytes * factor)) for t in graph.tensors]
    ops = [replace(op, cost_us=op.cost_us * factor) for op in graph.ops]
    return replace(graph, tensors=tensors, ops=ops)


@pytest.fixture
def ask(run, monkeypatch):
    """Run the command with such captures, on devices of any name."""

    def call(graphs, *arguments, memory=MEMORY, eager=None, shrunk=1.0):
        eager = eager or EagerMemory(step=EagerParts(activations=10 * MEMORY), dtype="float32")
        monkeypatch.setattr(fake_device, "OfflineCapture", Captures(graphs, eager, shrunk))
        monkeypatch.setattr(devices, "device", lambda name: spec(name, memory))
        return run("fit", "a:b", "--batch", 4, "--margin", 0, *arguments)

    return call


def spec(name, memory, **options):
    flops = {"float32": 1e9}
    return devices.DeviceSpec(
        name=name, kind="cpu", memory_bytes=memory, flops=flops, bytes_per_s=1e9, **options
    )


def failing(error, *names, above=0):
    def graphs(device, batch):
        if device in names and batch > above:
            raise error
        return chain(batch)

    return graphs


def test_a_device_that_fails_leaves_the_others_their_figures(ask):
    graphs = failing(CaptureError("it cannot"), "two", "three")
    asked = ("--device", "one,two,three", "--batches")
    code, out, err = ask(graphs, *asked, "--json")
    rows = json.loads(out)
    assert code == 1
    assert err.splitlines()[-1] == "coop-plan: error: two, three: it cannot"
    assert [row["error"] for row in rows] == [None, "it cannot", "it cannot"]
    assert len({tuple(sorted(row)) for row in rows}) == 1
    assert rows[0]["largest"]["one extra forward"]["batch"] > 4
    assert rows[1]["eager"] is None
    code, table, _ = ask(graphs, *asked)
    assert code == 1
    assert [line.split()[0] for line in table.splitlines()][2::2] == ["one", "largest"]


def test_where_no_device_can_be_asked_there_is_one_message(ask):
    graphs = failing(InvalidInputError("no such step"), "one", "two")
    code, out, err = ask(graphs, "--device", "one,two")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "coop-plan: error: one, two: no such step"


@pytest.mark.parametrize(
    ("graphs", "text"),
    [
        (failing(CaptureError("too large"), "one", above=4), "at batch 8, too large"),
        (lambda device, batch: chain(batch) if batch == 4 else other(batch), "one size at a time"),
    ],
)
def test_where_other_batches_cannot_be_captured_the_one_asked_about_is_answered(ask, graphs, text):
    code, out, err = ask(graphs, "--device", "one", "--batches", "--json")
    [row] = json.loads(out)
    assert code == 1
    assert row["keep_all"]["overhead"] == 0
    assert row["within"]["peak_bytes"] <= MEMORY
    assert row["largest"] == {}
    assert text in row["error"]
    assert text in err


def test_one_capture_answers_for_one_batch(ask):
    """The largest batches, which take several captures, are searched when they are asked for."""
    code, out, _ = ask(failing(None), "--device", "one", "--json")
    assert code == 0
    assert fake_device.OfflineCapture.asked == [("one", 4)]
    assert json.loads(out)[0]["largest"] == {}


def test_the_largest_length_at_a_batch(ask):
    """The largest context: a length of 3 and a batch of 4 have as many tokens as a batch of 12."""
    _, out, _ = ask(failing(None), "--device", "one", "--batches", "--json")
    most = json.loads(out)[0]["largest"]["5%"]["batch"]
    asked = ("--device", "one", "--length", 3, "--lengths")
    code, out, _ = ask(failing(None), *asked, "--json")
    [row] = json.loads(out)
    assert code == 0
    assert (row["batch"], row["length"], row["largest"]) == (4, 3, {})
    assert row["longest"]["5%"]["length"] == most // 4
    assert row["longest"]["5%"]["plan"]["overhead"] <= 0.05
    _, table, _ = ask(failing(None), *asked)
    assert "batch 4, length 3" in table
    assert "tokens/s" in table
    assert f"largest length: {most // 4} within 5%" in table
    code, _, err = ask(failing(None), "--device", "one", "--lengths")
    assert code == 2
    assert "--length" in err


def test_a_budget_leaves_states_update_context_and_margin(ask, monkeypatch):
    """The runtime's budget is that of the step: all else on the card is beside it."""
    states, update, context = 4096, 2048, 1024
    step = EagerParts(activations=10 * MEMORY, states=states)
    eager = EagerMemory(step=step, update_bytes=update, dtype="float32")
    memory = round(1.25 * (MEMORY + states + update)) + context
    monkeypatch.setattr("tests.api.test_fit.spec", partial(spec, context_bytes=context))
    asked = ("--device", "one", "--margin", 25)
    _, out, _ = ask(failing(None), *asked, "--json", memory=memory, eager=eager)
    [row] = json.loads(out)
    assert row["within"]["budget_bytes"] == MEMORY
    assert row["smallest"]["peak_bytes"] == row["smallest"]["budget_bytes"] + states + update
    _, table, _ = ask(failing(None), *asked, memory=memory, eager=eager)
    assert f'options={{"budget": {MEMORY}, "outputs": "gradients"}})' in table


def test_as_it_is_means_eager_alone(ask):
    """No plan is better than eager PyTorch where that fits or needs less."""
    eager = EagerMemory(
        step=EagerParts(weights=600), update=EagerParts(weights=600, update=300), dtype="float32"
    )
    _, out, _ = ask(failing(None), "--device", "one", "--json", eager=eager)
    [row] = json.loads(out)
    assert row["eager"]["peak_bytes"] == row["smallest"]["peak_bytes"] == 900
    assert row["within"]["budget_bytes"] is None
    _, table, _ = ask(failing(None), "--device", "one", eager=eager)
    assert "batch 4 fits as it is" in table
    _, table, _ = ask(failing(None), "--device", "one", eager=eager, memory=899)
    assert "batch 4 needs 900 B, and there are 899 B" in table


def test_a_first_call_that_needs_more_than_the_device_has_is_named(ask):
    """It measures each op on copies of its inputs, the parameters included."""
    tensors = [("parameter", 20_000), ("activation", 512), ("output", 8)]
    ops = [
        {
            "id": k,
            "inputs": [k],
            "outputs": [k + 1],
            "cost_us": 1.0,
            "phase": "forward",
            "name": "f",
        }
        for k in range(2)
    ]
    document = {
        "schema": "coop-plan/graph/1",
        "name": "one",
        "device": {"kind": "cpu"},
        "tensors": [{"id": k, "kind": kind, "bytes": n} for k, (kind, n) in enumerate(tensors)],
        "ops": ops,
    }
    graph = parse_graph(document)
    for memory, named in ((40_511, True), (40_512, False)):
        code, table, _ = ask(lambda *_: graph, "--device", "one", memory=memory)
        assert code == 0
        assert ("its first call measures ops on copies of their inputs" in table) == named


def test_shards_have_their_part_of_weights_gradients_and_states(ask):
    step = EagerParts(weights=801, gradients=100, states=1600, activations=500, other=50)
    update = EagerParts(weights=801, gradients=800, states=1600, update=800, other=50)
    eager = EagerMemory(step=step, update=update, dtype="float32")
    for shards, held in ((1, 4051), (8, 550 + 313)):
        _, out, _ = ask(failing(None), "--device", "one", "--shards", shards, "--json", eager=eager)
        [row] = json.loads(out)
        assert (row["shards"], row["shard_bytes"]) == (shards, held)
    _, table, _ = ask(failing(None), "--device", "one", "--shards", 8, eager=eager)
    assert "of 8 shards each takes 863 B in eager PyTorch, without the gathered weights" in table
    assert "shards" not in ask(failing(None), "--device", "one")[1]


def test_a_step_without_a_loss_is_named(ask):
    eager = EagerMemory(step=EagerParts(weights=600), dtype="float32", without_loss=(4, 16))
    _, table, _ = ask(failing(None), "--device", "one,two", eager=eager)
    assert table.count("returns no scalar, but (4, 16): the memory of a loss is not in it") == 1
    assert "no scalar" not in ask(failing(None), "--device", "one")[1]


def test_options_of_an_optimizer_need_one(ask):
    code, _, err = ask(failing(None), "--device", "one", "--update", "fused")
    assert code == 2
    assert "name one" in err


def other(batch):
    return parse_graph(chain(batch).to_json().replace('"name":"f"', '"name":"g"'))


@pytest.mark.parametrize("shrunk", [0.5, 2.0])
def test_the_better_kernels_are_taken_by_plan(ask, shrunk):
    """Fused ones that are half as large and dear, or twice."""

    def row(*arguments):
        asked = ("--device", "one", "--batches", "--json", *arguments)
        code, out, _ = ask(failing(None), *asked, shrunk=shrunk)
        assert code == 0
        (found,) = json.loads(out)
        return found

    eager, fused = row(), row("--kernels", "fused")
    better = shrunk < 1
    for figure in ("keep_all", "smallest"):
        peaks = fused[figure]["peak_bytes"], eager[figure]["peak_bytes"]
        assert peaks[0] < peaks[1] if better else peaks[0] == peaks[1]
    costs = fused["within"]["cost_us"], eager["within"]["cost_us"]
    assert costs[0] < costs[1] if better else costs[0] == costs[1]
    for limit, found in eager["largest"].items():
        batches = fused["largest"][limit]["batch"], found["batch"]
        assert batches[0] > batches[1] if better else batches[0] == batches[1]
    assert fused["within"]["options"]["kernels"] == "fused"
    assert "kernels" not in eager["within"]["options"]
