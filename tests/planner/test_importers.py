"""Graphs of recorded steps, and buffers of snapshots: what is there, and where a file is wrong."""

import json
import os
import pickle
from itertools import count as count_from
from random import Random

import pytest

from coop_plan.planner import find_faults, plan
from coop_plan.planner.importers.graph import import_trace
from coop_plan.planner.importers.snapshot import read_snapshot
from coop_plan.planner.inspect.explain import explain
from coop_plan.schemas.errors import InvalidInputError

GPU = "cuda:0"


def t(number, storage, numel=256, device=GPU):
    return [number, storage, 0, numel, 4, device]


class Trace:
    """An execution trace, node by node."""

    def __init__(self):
        self.nodes = []

    def add(self, name, inputs=(), outputs=(), parent=1, schema=""):
        number = len(self.nodes) + 2

        def values(tensors):
            return {
                "values": list(tensors),
                "types": ["Tensor(float)" for _ in tensors],
                "shapes": [[tensor[3]] for tensor in tensors],
            }

        self.nodes.append(
            {
                "id": number,
                "name": name,
                "ctrl_deps": parent,
                "inputs": values(inputs),
                "outputs": values(outputs),
                "attrs": [
                    {"name": "rf_id", "value": number - 1},
                    {"name": "op_schema", "value": schema},
                ],
            }
        )
        return number

    @property
    def document(self):
        return {"schema": "1.1.1-chakra.0.0.4", "nodes": self.nodes}


@pytest.fixture
def step():
    """x @ w, relu in place, a loss; backward to w: address 30 is used twice."""
    trace = Trace()
    linear = trace.add("aten::linear", [t(1, 10), t(2, 20)], [t(3, 30)])
    trace.add("aten::t", [t(2, 20)], [t(4, 20)], linear, "aten::t(Tensor(a) self) -> Tensor(a)")
    addmm = trace.add("aten::mm", [t(1, 10), t(4, 20)], [t(3, 30)], linear)
    trace.add("aten::empty", [], [t(9, 90, 1024)], addmm)
    relu = trace.add("aten::relu_", [t(3, 30)], [t(3, 30)])
    trace.add("aten::clamp_min_", [t(3, 30)], [t(3, 30)], relu)
    trace.add("aten::sum", [t(3, 30)], [t(5, 50, 1)])
    ones = trace.add("aten::ones_like", [t(5, 50, 1)], [t(6, 60, 1)])
    trace.add("aten::empty_like", [t(5, 50, 1)], [t(6, 60, 1)], ones)
    trace.add("aten::fill_", [t(6, 60, 1)], [t(6, 60, 1)], ones)
    back = trace.add("autograd::engine::evaluate_function: ReluBackward0")
    trace.add("aten::threshold_backward", [t(6, 60, 1), t(3, 30)], [t(7, 70)], back)
    back = trace.add("autograd::engine::evaluate_function: MmBackward0")
    trace.add("aten::mm", [t(1, 10), t(7, 70)], [t(8, 30)], back)
    back = trace.add("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
    accumulate = trace.add("torch::autograd::AccumulateGrad", [], [], back)
    trace.add("aten::detach", [t(8, 30)], [t(11, 30)], accumulate)
    optimizer = trace.add("Optimizer.step#SGD.step")
    trace.add("aten::add_", [t(2, 20), t(8, 30)], [t(2, 20)], optimizer)
    return trace


def test_ops_are_what_does_work_and_storages_are_followed(step):
    graph = import_trace(step.document).graph
    assert [(op.name, op.phase) for op in graph.ops] == [
        ("aten::mm", "forward"),
        ("aten::clamp_min_", "forward"),
        ("aten::sum", "forward"),
        ("aten::fill_", "forward"),
        ("aten::threshold_backward", "backward"),
        ("aten::mm", "backward"),
        ("aten::add_", "optimizer"),
    ]
    kinds = {tensor.id: tensor.kind for tensor in graph.tensors}
    mm, relu, loss, fill, _, grad, update = graph.ops
    assert mm.workspace_bytes == 4096
    assert [kinds[i] for i in mm.inputs] == ["parameter", "parameter"]
    assert relu.inplace == [[relu.outputs[0], mm.outputs[0]]]
    assert fill.inputs == []  # it takes the loss's shape alone
    assert kinds[loss.outputs[0]] == kinds[grad.outputs[0]] == "output"
    assert update.mutates == [mm.inputs[1]]
    assert update.inputs == [mm.inputs[1], grad.outputs[0]]
    made = plan(graph, "min")
    assert not find_faults(graph, made)


class Kineto:
    """A Kineto trace of runs of a step: spans nested as its nodes, kernels of 3 µs, 5 µs, ..."""

    def __init__(self, step, runs=1, shift=0, newer=False, thread=7, kernels=("aten::mm",)):
        self.events = []
        children = {}
        for node in step.nodes:
            children.setdefault(node["ctrl_deps"], []).append(node)
        self.clock, self.correlation = 1e15, 5  # in the range of the operators' numbers

        def visit(node, run):
            begin, self.clock = self.clock, self.clock + 2
            number = node["attrs"][0]["value"] + shift + 1000 * run
            if node["name"] in kernels:
                self.launch(3 + 2 * run, number if newer else None, thread)
            for child in children.get(node["id"], ()):
                visit(child, run)
            arguments = {"External id": number}
            self.add("cpu_op", node["name"], begin, self.clock - begin, arguments)
            self.clock += 1

        for run in range(runs):
            for node in children[1]:
                visit(node, run)
        Random(0).shuffle(self.events)

    def add(self, kind, name, begin, duration, arguments, thread=7):
        event = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread}
        self.events.append(event | {"ts": begin, "dur": duration, "args": arguments})

    def launch(self, duration, external, thread=7):
        self.correlation += 1
        numbers = {"correlation": self.correlation, "External id": self.correlation}
        if thread:
            self.add("cuda_runtime", "cudaLaunchKernel", self.clock, 1, numbers, thread)
        if external is not None:
            numbers["External id"] = external
        self.add("kernel", "gemm", self.clock + 500, duration, numbers, 99)
        self.clock += 2

    @property
    def document(self):
        return {"traceEvents": self.events}


def mm_costs(step, kineto):
    found = import_trace(step.document, kineto.document)
    assert found.timed == sum(op.name == "aten::mm" for op in found.graph.ops) == 2
    assert found.times.joined_us == found.times.device_us > 0
    return [op.cost_us for op in found.graph.ops if op.name == "aten::mm"]


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 500])
def test_a_kernel_is_that_of_the_op_around_its_launch(step, newer, shift):
    """The External id is the correlation in older traces, and the operator's in newer ones."""
    assert mm_costs(step, Kineto(step, shift=shift, newer=newer)) == [3, 3]
    assert mm_costs(step, Kineto(step, 3, shift + 500, newer)) == [5, 5]  # median of 3, 5 and 7


@pytest.mark.parametrize("thread", [7, None])
def test_categories_of_older_traces_are_read(step, thread):
    """PyTorch 1.8 to 1.11 wrote capital categories, and `external id` of kernels."""
    old = {"cpu_op": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime"}
    kineto = Kineto(step, newer=True, thread=thread)
    for event in kineto.events:
        event["cat"] = old[event["cat"]]
        if event["cat"] != "Operator":
            number = event["args"]["External id"]
            event["args"] = {"correlation": event["args"]["correlation"], "external id": number}
    assert mm_costs(step, kineto) == [3, 3]


@pytest.mark.parametrize("thread", [None, 8])
def test_without_a_launch_in_an_operator_the_external_id_joins_and_is_named(step, thread):
    kineto = Kineto(step, newer=True, thread=thread)
    assert mm_costs(step, kineto) == [3, 3]
    note = import_trace(step.document, kineto.document).times.note
    assert "2 of 2 kernels joined by External id" in note


def test_steps_of_another_kind_do_not_spoil_the_order_of_names(step):
    """The first step of a trace often differs: its gradients are not zeroed."""
    kineto = Kineto(step, 3, shift=500)
    kineto.events += [
        event | {"ts": event["ts"] - 1e6, "args": {"External id": 0}}
        for event in Kineto(step, 1).events
        if event["cat"] == "cpu_op" and event["name"] not in ("aten::fill_", "aten::ones_like")
    ]
    assert mm_costs(step, kineto) == [5, 5]


def test_a_kernel_of_an_operator_around_an_op_is_the_ops(step):
    [first, second] = mm_costs(step, Kineto(step, kernels=("aten::mm", "aten::linear")))
    assert (first, second) == (6, 3)


def test_an_op_without_a_kernel_is_not_measured(step):
    found = import_trace(step.document, Kineto(step).document)
    known = dict(zip([op.name for op in found.graph.ops], found.times.micros, strict=True))
    assert known["aten::sum"] is None
    assert found.graph.ops[2].cost_us == (1024 + 4) / 1e6  # of its bytes
    on_host = import_trace(step.document, Kineto(step, kernels=()).document)
    assert on_host.timed == len(on_host.graph.ops)
    assert "the trace has no kernels" in on_host.times.note


def test_less_than_half_of_the_device_time_is_an_error(step):
    kineto = Kineto(step)
    kineto.clock = 1e15 + 10
    kineto.launch(5.9, None, thread=8)
    found = import_trace(step.document, kineto.document).times
    assert (found.joined_us, found.device_us) == (6, 11.9)
    assert "launched in no scope" in found.note
    kineto.launch(0.2, None, thread=8)
    with pytest.raises(
        InvalidInputError, match="of the step's 12 µs on the device, 6 are"
    ) as caught:
        import_trace(step.document, kineto.document)
    assert (caught.value.source, caught.value.pointer) == ("kineto", "/traceEvents")


def test_a_trace_of_another_script_is_an_error(step):
    other = Trace()
    for _ in range(3):
        other.add("aten::mm")
        other.add("aten::relu")
        other.add("aten::sum")
    for kineto in (Kineto(other), Kineto(other, kernels=())):
        with pytest.raises(InvalidInputError, match="1 of the execution trace's 7 operators") as e:
            import_trace(step.document, kineto.document)
        assert e.value.source == "kineto"


def layers(count):
    """A step of `count` matrices and relus, a loss, and its backward."""
    trace, number = Trace(), count_from(100)
    values = [t(next(number), next(number))]
    for name in ["aten::mm", "aten::relu"] * count:
        values.append(t(next(number), next(number)))
        weight = [t(next(number), next(number))] if name == "aten::mm" else []
        trace.add(name, [values[-2], *weight], [values[-1]])
    gradient = t(next(number), next(number))
    trace.add("aten::sum", [values[-1]], [gradient])
    for name in ["aten::threshold_backward", "aten::mm"] * count:
        source, gradient = gradient, t(next(number), next(number))
        trace.add(name, [source, values.pop()], [gradient])
    return trace


@pytest.mark.parametrize(("count", "multiple"), [(1, 2), (4, 2), (3, 3)])
def test_a_deeper_network_is_not_several_runs_of_a_step(count, multiple):
    """All but the loss occur `multiple` times as often in both traces."""
    step, deeper = layers(count), layers(multiple * count)
    for kernels in (("aten::mm",), ()):
        import_trace(step.document, Kineto(step, multiple, 500, kernels=kernels).document)
        with pytest.raises(InvalidInputError, match="give the Kineto trace of the same script"):
            import_trace(step.document, Kineto(deeper, 1, 500, kernels=kernels).document)


def test_an_op_is_in_the_scope_of_the_frames_around_it(step):
    scopes = [op.source.split(", ")[0] for op in import_trace(step.document).graph.ops]
    assert scopes == [
        "aten::linear",
        "aten::relu_",
        "aten::sum",
        "aten::ones_like",
        "ReluBackward0",
        "MmBackward0",
        "Optimizer.step#SGD.step",
    ]
    graph = import_trace(step.document).graph
    modules = explain(graph, plan(graph, "min", method="keep-all")).modules
    assert {entry.module for entry in modules} <= set(scopes)


def test_the_last_step_of_several_is_taken(step):
    twice = Trace()
    twice.nodes = [
        node
        | {
            "id": node["id"] + shift,
            "ctrl_deps": node["ctrl_deps"] + (shift if node["ctrl_deps"] > 1 else 0),
        }
        for shift in (0, len(step.nodes))
        for node in step.nodes
    ]
    found = import_trace(twice.document)
    assert found.steps == 2
    assert [op.name for op in found.graph.ops] == [
        op.name for op in import_trace(step.document).graph.ops
    ]


def value_of(nodes, index=0):
    return nodes[2]["inputs"]["values"][index]


def shaped(nodes, shape, strides):
    nodes[2]["inputs"].update(shapes=[shape, []], strides=[strides, []])


def broken(step, change):
    document = json.loads(json.dumps(step.document))
    change(document["nodes"])
    return document


@pytest.mark.parametrize(
    ("pointer", "change"),
    [
        ("/nodes/2/inputs/values/0", lambda n: n[2]["inputs"]["values"].__setitem__(0, [1, 2])),
        ("/nodes/2/inputs/values", lambda n: n[2]["inputs"]["types"].pop()),
        ("/nodes/4/id", lambda n: n[4].update(id=3)),
        ("/nodes/3/id", lambda n: n[3].update(id="x")),
        ("/nodes/3/ctrl_deps", lambda n: n[3].update(ctrl_deps=99)),
        ("/nodes/3/name", lambda n: n[3].pop("name")),
        ("/nodes/3", lambda n: n[3].update(name="triton_poi_fused_0")),
        ("/nodes/3", lambda n: n.__setitem__(3, 7)),
        ("/nodes", lambda n: n.clear()),
        ("/nodes/2/inputs/values/0", lambda n: value_of(n).__setitem__(5, None)),
        ("/nodes/2/inputs/values/0/5", lambda n: value_of(n).__setitem__(5, "\x1b")),
        ("/nodes/2/inputs/values/0", lambda n: value_of(n).__setitem__(3, 10**30)),
        ("/nodes/2/inputs/values/0", lambda n: shaped(n, [-5, 1], [10**6, 1])),
        ("/nodes/2/inputs/values/0", lambda n: shaped(n, [10**30, 1], [10**30, 1])),
        ("/nodes/3/ctrl_deps", lambda n: n[3].update(ctrl_deps=n[3]["id"])),
        ("/nodes/3/name", lambda n: n[3].update(name="aten::\ud800")),
        ("/nodes", lambda n: [value_of(n, i).__setitem__(3, 1 << 57) for i in (0, 1)]),
    ],
)
def test_a_fault_is_named_with_its_place(step, pointer, change):
    with pytest.raises(InvalidInputError) as caught:
        import_trace(broken(step, change))
    assert caught.value.pointer == pointer


DAMAGES = [None, True, -1, 1 << 64, 1.5, float("nan"), "", "x", [], {}, [1, 2, 3], {"a": 1}]


def damaged(document, random):
    """One place of it is something else, is gone, or is there twice."""
    document = json.loads(json.dumps(document))
    places, parents = [], [document]
    for parent in parents:
        items = parent.items() if isinstance(parent, dict) else enumerate(parent)
        for key, value in items:
            places.append((parent, key))
            if isinstance(value, dict | list):
                parents.append(value)
    parent, key = random.choice(places)
    what = random.choice([*DAMAGES, "gone", "twice"])
    if what == "gone":
        del parent[key]
    elif what == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[key] = what
    return document


@pytest.mark.parametrize("seed", range(300))
def test_what_is_damaged_is_a_fault_with_a_place_or_does_not_matter(step, seed):
    random = Random(seed)
    kineto = Kineto(step).document
    document, times = step.document, kineto
    if random.random() < 0.7:
        document = damaged(document, random)
    else:
        times = damaged(times, random)
    try:
        made = import_trace(document, times)
    except InvalidInputError as error:
        assert error.pointer
        assert error.source == ("" if times is kineto else "kineto")
    else:
        assert not find_faults(made.graph, plan(made.graph, "100%", method="keep-all"))


@pytest.mark.parametrize(
    ("pointer", "event"),
    [
        ("/traceEvents", {"cat": "cpu_op", "name": "aten::other"}),
        ("/traceEvents", {"cat": {}, "name": "aten::mm"}),
        ("/traceEvents/0/dur", {"cat": "kernel", "dur": float("nan")}),
    ],
)
def test_a_fault_of_a_kineto_trace_is_named_as_its_own(step, pointer, event):
    event |= {"ph": "X", "ts": 1, "args": {"External id": 3}}
    with pytest.raises(InvalidInputError) as caught:
        import_trace(step.document, {"traceEvents": [event]})
    assert (caught.value.pointer, caught.value.source) == (pointer, "kineto")


def snapshot(events, blocks=()):
    segment = {"device": 0, "address": 4096, "total_size": 8192, "blocks": list(blocks)}
    return pickle.dumps({"segments": [segment], "device_traces": [events]})


def event(action, address, size):
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}


def test_a_snapshot_has_the_lifetimes_of_its_buffers():
    events = [
        event("segment_alloc", 4096, 8192),
        event("alloc", 4096, 100),
        event("free_completed", 6000, 50),  # was there before
        event("alloc", 5000, 200),
        event("free_requested", 4096, 100),
        event("free_completed", 4096, 100),
        event("alloc", 4096, 70),
    ]
    blocks = [
        {"size": 904, "state": "active_allocated"},
        {"size": 1100, "state": "inactive"},
        {"size": 30, "state": "active_allocated"},
    ]
    found = read_snapshot(snapshot(events, blocks))
    rows = list(zip(found.lower, found.upper, found.size, found.address, strict=True))
    assert rows == [
        (0, 2, 50, 6000),
        (0, 7, 30, 6100),
        (1, 5, 100, 4096),
        (3, 7, 200, 5000),
        (6, 7, 70, 4096),
    ]
    assert found.live_bytes == 330
    assert found.reserved_bytes == 8192


def test_a_snapshot_is_never_run():
    class Bad:
        def __reduce__(self):
            return os.system, ("false",)

    with pytest.raises(InvalidInputError, match="system, and only plain data"):
        read_snapshot(pickle.dumps({"segments": [Bad()]}))


def test_a_snapshot_that_asks_for_more_memory_than_there_is_says_so():
    with pytest.raises(InvalidInputError, match="not a memory snapshot: MemoryError"):
        read_snapshot(b"\x80\x04\x8e" + (1 << 55).to_bytes(8, "little") + b".")


@pytest.mark.parametrize(
    ("pointer", "data"),
    [
        ("", b"\x80nothing"),
        ("/device_traces", pickle.dumps({"segments": []})),
        ("/device_traces", pickle.dumps({"segments": [], "device_traces": [[]]})),
        ("/device_traces/0/1", snapshot([event("alloc", 1, 2), 5])),
        ("/device_traces/0/1/addr", snapshot([event("alloc", 1, 2), event("alloc", 1, 2)])),
        ("/device_traces/0/0/size", snapshot([event("alloc", 1, -2)])),
    ],
)
def test_a_fault_of_a_snapshot_is_named_with_its_place(pointer, data):
    with pytest.raises(InvalidInputError) as caught:
        read_snapshot(data)
    assert caught.value.pointer == pointer
