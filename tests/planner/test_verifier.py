"""Each thing the verifier must catch: a valid plan, one change, and the fault it must name."""

import time

import pytest

from coop_plan.planner.verifier import InvalidPlanError, find_faults, verify
from coop_plan.schemas import fingerprint, parse_graph, parse_plan
from tests.support import edit, make_graph, make_plan

TENSORS = {
    0: ("parameter", 4),
    1: ("input", 8),
    2: ("activation", 8),
    3: ("activation", 8),
    4: ("activation", 4),
    5: ("output", 4),
    6: ("activation", 0),
}
OPS = [
    {"inputs": [1, 0], "outputs": [2]},
    {"inputs": [2], "outputs": [3], "workspace_bytes": 4, "inplace": [[3, 2]], "cost_us": 2.0},
    {"inputs": [3], "outputs": [5]},
    {"inputs": [3, 2], "outputs": [4]},
    {"inputs": [0, 4], "mutates": [0], "phase": "optimizer", "recomputable": False},
]
OPS[0]["variants"] = [
    {"name": "lean", "cost_us": 4.0, "workspace_bytes": 8, "inputs": [0, 1], "outputs": [2]}
]
GRAPH = make_graph(TENSORS, OPS)


def compute(op, reads, writes, workspace=(0, 0), variant=None):
    return {
        "do": "compute",
        "op": op,
        "variant": variant,
        "reads": [{"tensor": int(r[1:])} if isinstance(r, str) else r for r in reads],
        "writes": [
            dict(zip(("buffer", "tensor", "offset", "bytes"), w, strict=True)) for w in writes
        ],
        "workspace": {"offset": workspace[0], "bytes": workspace[1]},
    }


def free(*buffers):
    return {"do": "free", "buffers": list(buffers)}


STEPS = [
    compute(0, ["t1", "t0"], [(10, 2, 0, 8)]),
    compute(1, [10], [(11, 3, 8, 8)], (16, 4)),
    compute(2, [11], [(12, 5, None, 4)]),
    free(10),
    compute(0, ["t1", "t0"], [(13, 2, 0, 8)]),
    compute(3, [11, 13], [(14, 4, 16, 4)]),
    free(11, 13),
    compute(4, ["t0", 14], []),
    free(14),
]

SWAP_GRAPH = make_graph(
    {1: ("input", 8), 2: ("activation", 8), 3: ("activation", 4), 5: ("output", 4)},
    [
        {"inputs": [1], "outputs": [2]},
        {"outputs": [3], "cost_us": 3.0},
        {"inputs": [2, 3], "outputs": [5]},
    ],
    device={"h2d_bytes_per_s": 1e6, "d2h_bytes_per_s": 1e6},
)


def offload(buffer, host_offset=0):
    return {"do": "offload", "buffer": buffer, "host_offset": host_offset}


def wait(buffer):
    return {"do": "wait", "buffer": buffer}


def prefetch(buffer, tensor, offset, size, source):
    fields = {"buffer": buffer, "tensor": tensor, "offset": offset, "bytes": size}
    return {"do": "prefetch", **fields, "from": source}


SWAP_STEPS = [
    compute(0, ["t1"], [(10, 2, 0, 8)]),
    offload(10),
    compute(1, [], [(11, 3, 8, 4)]),
    wait(10),
    free(10),
    prefetch(12, 2, 0, 8, 10),
    wait(12),
    compute(2, [12, 11], [(13, 5, None, 4)]),
    free(12, 11),
]


def plan_of(graph, steps, **fields):
    """A plan of raw steps, its figures measured by the test support."""
    blank = dict.fromkeys(["budget_bytes", "resident_bytes", "arena_bytes", "peak_bytes"], 0)
    blank |= dict.fromkeys(["base_cost_us", "cost_us", "overhead", "fragmentation"], 0.0)
    blank |= {"schema": "coop-plan/plan/1", "graph": fingerprint(graph), "method": "test"}
    blank |= {"status": "feasible", "recomputed_ops": 0, "swapped_bytes": 0, "solve_seconds": 0.0}
    return make_plan(graph, parse_plan(blank | {"steps": steps}).steps, **fields)


def copy(steps):
    return plan_of(GRAPH, steps).to_dict()["steps"]


def faults_after(change, graph=GRAPH, steps=STEPS, **fields):
    """The faults of a valid plan after `change` of its steps, the figures measured anew."""
    changed = copy(steps)
    change(changed)
    return find_faults(graph, plan_of(graph, changed, **fields))


def assign(value, *path):
    def change(node):
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value

    return change


def insert(at, *steps):
    return lambda list_: list_.__setitem__(slice(at, at), list(steps))


def delete(at):
    return lambda list_: list_.__delitem__(at)


def test_the_examples_are_valid_and_measured_right():
    """The plans that the other tests break; and the timeline's arithmetic by hand."""
    plan = plan_of(GRAPH, STEPS)
    assert find_faults(GRAPH, plan) == []
    assert (plan.resident_bytes, plan.arena_bytes, plan.peak_bytes) == (12, 20, 36)
    assert (plan.base_cost_us, plan.cost_us, plan.recomputed_ops) == (6.0, 7.0, 1)
    swap = plan_of(SWAP_GRAPH, SWAP_STEPS)
    assert find_faults(SWAP_GRAPH, swap) == []
    # 1 compute; copy out 1..9; compute until 4; wait until 9; copy in until 17; compute.
    assert (swap.cost_us, swap.swapped_bytes) == (18.0, 16)
    verify(GRAPH, plan)


STEP_FAULTS = {
    "overlap of two buffers": (assign(4, 1, "writes", 0, "offset"), "overlap", "1/writes/0/offset"),
    "overlap with a buffer the step does not touch": (
        assign(8, 4, "writes", 0, "offset"),
        "overlap",
        "4/writes/0/offset",
    ),
    "too many writes": (
        insert(0, compute(0, ["t1", "t0"], [(20, 2, 0, 8), (21, 3, 4, 8)])),
        "wrong-writes",
        "0/writes",
    ),
    "missing input: not outside": (
        assign({"tensor": 2}, 1, "reads", 0),
        "missing-input",
        "1/reads/0",
    ),
    "output read outside before it is there": (
        assign({"tensor": 5}, 1, "reads", 0),
        "missing-input",
        "1/reads/0",
    ),
    "input never written": (assign(99, 1, "reads", 0), "not-live", "1/reads/0"),
    "input freed": (assign(10, 5, "reads", 1), "not-live", "5/reads/1"),
    "output outside read by its buffer": (assign(12, 5, "reads", 0), "not-live", "5/reads/0"),
    "wrong tensor in the buffer": (assign(11, 5, "reads", 1), "wrong-tensor", "5/reads/1"),
    "wrong resident tensor": (assign({"tensor": 1}, 0, "reads", 1), "wrong-tensor", "0/reads/1"),
    "too few reads": (assign([10, 10], 1, "reads"), "wrong-reads", "1/reads"),
    "too few writes": (assign([], 5, "writes"), "wrong-writes", "5/writes"),
    "wrong tensor written": (
        assign(3, 0, "writes", 0, "tensor"),
        "wrong-tensor",
        "0/writes/0/tensor",
    ),
    "unknown tensor written": (
        assign(77, 5, "writes", 0, "tensor"),
        "wrong-tensor",
        "5/writes/0/tensor",
    ),
    "wrong bytes": (assign(7, 0, "writes", 0, "bytes"), "wrong-bytes", "0/writes/0/bytes"),
    "buffer id again": (assign(10, 4, "writes", 0, "buffer"), "reused-buffer", "4/writes/0/buffer"),
    "stale: recompute after the update": (
        insert(9, compute(0, ["t1", "t0"], [(20, 2, 0, 8)]), free(20)),
        "stale-version",
        "9/reads/1",
    ),
    "early free": (insert(1, free(10)), "not-live", "2/reads/0"),
    "double free": (insert(4, free(10)), "double-free", "4/buffers/0"),
    "free twice in one step": (assign([11, 13, 11], 6, "buffers"), "double-free", "6/buffers/2"),
    "free of an unknown buffer": (assign([99], 3, "buffers"), "not-live", "3/buffers/0"),
    "free of an output outside": (assign([14, 12], 8, "buffers"), "early-free", "8/buffers/1"),
    "output in the arena": (
        assign(20, 2, "writes", 0, "offset"),
        "output-in-arena",
        "2/writes/0/offset",
    ),
    "activation outside": (
        assign(None, 0, "writes", 0, "offset"),
        "output-outside",
        "0/writes/0/offset",
    ),
    "output twice": (
        insert(3, compute(2, [11], [(15, 5, None, 4)])),
        "output-twice",
        "3/writes/0/offset",
    ),
    "workspace on an input": (
        assign(4, 1, "workspace", "offset"),
        "overlap",
        "1/workspace/offset",
    ),
    "workspace on an output": (
        assign(12, 1, "workspace", "offset"),
        "overlap",
        "1/workspace/offset",
    ),
    "workspace too small": (
        assign(3, 1, "workspace", "bytes"),
        "wrong-workspace",
        "1/workspace/bytes",
    ),
    "workspace not needed": (
        assign({"offset": 16, "bytes": 1}, 0, "workspace"),
        "wrong-workspace",
        "0/workspace/bytes",
    ),
    "once only": (insert(8, compute(4, ["t0", 14], [])), "repeated-op", "8/op"),
    "update applied twice": (insert(8, compute(4, ["t0", 14], [])), "stale-version", "8/reads/0"),
    "unknown op": (assign(9, 0, "op"), "unknown-op", "0/op"),
    "unknown variant": (assign("fat", 0, "variant"), "unknown-variant", "0/variant"),
    "variant's inputs": (assign("lean", 0, "variant"), "wrong-tensor", "0/reads/0"),
    "leak": (assign([11], 6, "buffers"), "leak", ""),
    "output never written": (delete(2), "missing-output", ""),
    "op never run": (delete(2), "missing-op", ""),
    "wait for nothing": (insert(1, wait(10)), "no-transfer", "1/buffer"),
    "transfers without bandwidth": (insert(1, offload(10), wait(10)), "no-bandwidth", "1"),
}


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_fault_in_a_step(name):
    """The fault is named with its place; every plan with it is refused."""
    change, code, place = STEP_FAULTS[name]
    faults = faults_after(change)
    pointer = f"/steps/{place}" if place else "/steps"
    assert (code, pointer) in [(fault.code, fault.pointer) for fault in faults]
    assert all(fault.message for fault in faults)


SWAP_FAULTS = {
    "source dropped before the wait": (insert(2, free(10)), "early-free", "2/buffers/0"),
    "use before the wait": (delete(6), "not-ready", "6/reads/0"),
    "free before the wait": (assign(free(12, 11), 6), "early-free", "6/buffers/0"),
    "prefetch of what was never offloaded": (assign(11, 5, "from"), "not-offloaded", "5/from"),
    "prefetch before the copy is complete": (delete(3), "not-offloaded", "4/from"),
    "prefetch of another tensor": (assign(3, 5, "tensor"), "wrong-tensor", "5/tensor"),
    "prefetch of another size": (assign(4, 5, "bytes"), "wrong-bytes", "5/bytes"),
    "prefetch onto a live buffer": (assign(8, 5, "offset"), "overlap", "5/offset"),
    "prefetch into a used id": (assign(10, 5, "buffer"), "reused-buffer", "5/buffer"),
    "offload twice at once": (insert(2, offload(10)), "not-ready", "2/buffer"),
    "offload while it arrives": (insert(6, offload(12)), "not-ready", "6/buffer"),
    "offload of a freed buffer": (insert(5, offload(10)), "not-live", "5/buffer"),
    "no place on the host": (assign(None, 1, "host_offset"), "no-host-offset", "1/host_offset"),
    "waited for twice": (insert(4, wait(10)), "no-transfer", "4/buffer"),
    "unfinished at the end": (insert(9, prefetch(30, 2, 0, 8, 10)), "unfinished-transfer", "9"),
}


@pytest.mark.parametrize("name", SWAP_FAULTS)
def test_fault_in_a_transfer(name):
    """The source is kept until the copy is done, and nothing is used before it is there."""
    change, code, place = SWAP_FAULTS[name]
    faults = faults_after(change, SWAP_GRAPH, SWAP_STEPS)
    assert (code, f"/steps/{place}") in [(fault.code, fault.pointer) for fault in faults]


def two_copies(second, forget=False):
    """Buffer 11 is copied to the host while that of buffer 10 is there, or no longer wanted."""
    copies = [compute(1, [], [(11, 3, 8, 4)]), wait(10), offload(11, second), wait(11)]
    back = [prefetch(12, 2, 16, 8, 10), wait(12)]
    last = [free(10), compute(2, [12, 11], [(13, 5, None, 4)]), free(12, 11)]
    head = [compute(0, ["t1"], [(10, 2, 0, 8)]), offload(10)]
    if forget:
        return [*head, copies[0], wait(10), *back, *copies[2:], *last]
    return [*head, *copies, *back, *last]


@pytest.mark.parametrize("second", [0, 4, 7])
def test_copies_on_the_host_overlap(second):
    """The first one is still to be read: the second one would overwrite it."""
    found = find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, two_copies(second)))
    assert [(f.code, f.pointer) for f in found] == [("overlap", "/steps/4/host_offset")]
    assert "step 1" in found[0].message
    assert not find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, two_copies(second, forget=True)))


def test_the_slab_on_the_host():
    """Its bytes are a figure, copies lie within it at aligned offsets, its budget is a limit."""
    steps = two_copies(8)

    def faults(**fields):
        found = find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, steps, **fields))
        return [(fault.code, fault.pointer) for fault in found]

    assert plan_of(SWAP_GRAPH, steps).host_arena_bytes == 12
    assert faults(host_budget_bytes=12) == []
    assert faults(host_budget_bytes=11) == [("over-budget", "/host_budget_bytes")]
    assert faults(host_arena_bytes=11) == [("outside-arena", "/steps/4/host_offset")]
    assert faults(host_arena_bytes=13) == [("wrong-figure", "/host_arena_bytes")]
    assert faults(alignment=16)[0] == ("misaligned", "/steps/2/writes/0/offset")
    changed = faults_after(assign(13, 4, "host_offset"), SWAP_GRAPH, steps, alignment=4)
    assert ("misaligned", "/steps/4/host_offset") in [(f.code, f.pointer) for f in changed]


def test_the_link_of_a_plan_is_what_its_cost_is_for():
    """Instead of the device's bandwidth: at 2 MB/s a copy takes 4 µs and not 8; 0 is none."""
    made = plan_of(SWAP_GRAPH, SWAP_STEPS)
    slow = make_plan(SWAP_GRAPH, made.steps, link_bytes_per_s=2e6)
    assert [f.pointer for f in find_faults(SWAP_GRAPH, slow)][:1] == ["/cost_us"]
    fast = SWAP_GRAPH.model_copy(update={"device": SWAP_GRAPH.device.with_link(2e6)})
    right = plan_of(fast, SWAP_STEPS, link_bytes_per_s=2e6)
    assert right.cost_us < made.cost_us
    assert find_faults(SWAP_GRAPH, right) == []
    none = plan_of(SWAP_GRAPH, SWAP_STEPS, link_bytes_per_s=0.0)
    assert [f.code for f in find_faults(SWAP_GRAPH, none)] == ["no-bandwidth"] * 2


def test_stalls_are_figures():
    """8 bytes take 8 µs each way; op 1 runs for 3 µs of the first copy."""
    assert find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, SWAP_STEPS)) == []
    made = plan_of(SWAP_GRAPH, SWAP_STEPS)
    assert (made.offload_stall_us, made.prefetch_stall_us) == (5.0, 8.0)
    for field in ("offload_stall_us", "prefetch_stall_us"):
        (fault,) = find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, SWAP_STEPS, **{field: 1.0}))
        assert (fault.code, fault.pointer) == ("wrong-figure", f"/{field}")


def test_offload_again_while_the_host_copy_is_read():
    """The second copy would overwrite what the prefetch reads."""
    steps = [*SWAP_STEPS[:4], prefetch(12, 2, 16, 8, 10), offload(10), wait(10), wait(12), free(10)]
    steps += SWAP_STEPS[7:]
    assert [f.code for f in find_faults(SWAP_GRAPH, plan_of(SWAP_GRAPH, steps))] == [
        *("not-ready", "overlap")
    ]


FIGURES = {
    "resident_bytes": 13,
    "arena_bytes": 21,
    "peak_bytes": 35,
    "base_cost_us": 6.001,
    "cost_us": 7.001,
    "overhead": 0.1667,
    "fragmentation": 0.01,
    "recomputed_ops": 0,
    "swapped_bytes": 1,
}


@pytest.mark.parametrize("field", FIGURES)
def test_wrong_figure(field):
    """Each figure is recomputed; a wrong one is named, alone."""
    plan = plan_of(GRAPH, STEPS, **{field: FIGURES[field], "budget_bytes": 100})
    assert [(f.code, f.pointer) for f in find_faults(GRAPH, plan)] == [
        ("wrong-figure", f"/{field}")
    ]


def test_figures_within_the_tolerance():
    """Sums of measured costs may differ in the last digits."""
    plan = plan_of(GRAPH, STEPS, cost_us=7.000001, overhead=1 / 6 + 1e-7)
    assert find_faults(GRAPH, plan) == []


def test_over_budget():
    """The budget is a limit in bytes: one less than the peak is refused."""
    assert find_faults(GRAPH, plan_of(GRAPH, STEPS, budget_bytes=36)) == []
    (fault,) = find_faults(GRAPH, plan_of(GRAPH, STEPS, budget_bytes=35))
    assert fault.code == "over-budget"


def test_outside_the_arena():
    """An end beyond `arena_bytes` would be memory of someone else."""
    faults = find_faults(GRAPH, plan_of(GRAPH, STEPS, arena_bytes=19))
    assert [(f.code, f.pointer) for f in faults if f.code == "outside-arena"] == [
        ("outside-arena", "/steps/1/workspace/offset"),
        ("outside-arena", "/steps/5/writes/0/offset"),
    ]


def test_misaligned():
    """Buffers, workspaces and prefetched buffers lie on multiples of the alignment."""
    faults = find_faults(GRAPH, plan_of(GRAPH, STEPS, alignment=16))
    assert [(f.code, f.pointer) for f in faults] == [("misaligned", "/steps/1/writes/0/offset")]
    faults = faults_after(assign(19, 1, "workspace", "offset"), alignment=2)
    assert faults[0].pointer == "/steps/1/workspace/offset"
    faults = faults_after(assign(13, 5, "offset"), SWAP_GRAPH, SWAP_STEPS, alignment=4)
    assert ("misaligned", "/steps/5/offset") in [(f.code, f.pointer) for f in faults]


@pytest.mark.parametrize(
    ("status", "bound", "codes"),
    [
        ("optimal", None, ["no-proof"]),
        ("optimal", 6.5, ["no-proof"]),
        ("optimal", 7.0, []),
        ("feasible", 6.5, []),
        ("feasible", 7.1, ["wrong-bound"]),
    ],
)
def test_bounds(status, bound, codes):
    """Optimal needs a bound equal to the cost; no bound is above it."""
    plan = plan_of(GRAPH, STEPS, status=status, lower_bound_us=bound)
    assert [fault.code for fault in find_faults(GRAPH, plan)] == codes


def test_plan_for_another_graph():
    """Returned first and alone, whatever else is wrong."""
    ops = [dict(op) for op in OPS]
    ops[0]["workspace_bytes"] = 8
    other = make_graph(TENSORS, ops)
    (fault,) = find_faults(other, plan_of(GRAPH, STEPS, budget_bytes=1))
    assert (fault.code, fault.pointer) == ("wrong-graph", "/graph")


def test_variant():
    """A chosen variant brings its own inputs, workspace and cost."""
    steps = copy(STEPS)
    steps[4] = compute(0, ["t0", "t1"], [(13, 2, 0, 8)], (16, 8), variant="lean")
    plan = plan_of(GRAPH, steps)
    assert plan.cost_us == 10.0
    assert find_faults(GRAPH, plan) == []
    steps[4]["workspace"]["bytes"] = 0
    assert find_faults(GRAPH, plan_of(GRAPH, steps))[0].code == "wrong-workspace"


def test_approximate_variant():
    """No option allows results that differ in a bit."""
    (lean,) = OPS[0]["variants"]
    ops = [OPS[0] | {"variants": [lean | {"approximate": True}]}, *OPS[1:]]
    graph, steps = make_graph(TENSORS, ops), copy(STEPS)
    steps[4] = compute(0, ["t0", "t1"], [(13, 2, 0, 8)], (16, 8), variant="lean")
    (fault,) = find_faults(graph, plan_of(graph, steps))
    assert (fault.code, fault.pointer) == ("approximate-variant", "/steps/4/variant")


def test_variant_that_does_not_read_what_its_op_overwrites():
    """It could not overwrite it."""
    lazy = {"name": "lazy", "cost_us": 1.0, "inputs": [], "outputs": []}
    graph = make_graph({0: ("buffer", 4)}, [{"inputs": [0], "mutates": [0], "variants": [lazy]}])
    assert find_faults(graph, plan_of(graph, [compute(0, ["t0"], [])])) == []
    (fault,) = find_faults(graph, plan_of(graph, [compute(0, [], [], variant="lazy")]))
    assert (fault.code, fault.pointer) == ("unknown-variant", "/steps/0/variant")


# -- in place ---------------------------------------------------------------------------------

INPLACE_GRAPH = make_graph(
    {1: ("input", 8), 2: ("activation", 8), 3: ("activation", 4), 4: ("activation", 8)}
    | {5: ("output", 4)},
    [
        {"inputs": [1], "outputs": [2]},
        {"inputs": [2], "outputs": [3, 4], "inplace": [[3, 2]]},
        {"inputs": [3, 4], "outputs": [5]},
    ],
)
INPLACE_STEPS = [
    compute(0, ["t1"], [(10, 2, 0, 8)]),
    compute(1, [10], [(11, 3, 0, 4), (12, 4, 8, 8)]),
    compute(2, [11, 12], [(13, 5, None, 4)]),
    free(11, 12),
]


def test_in_place():
    """The overwritten buffer ends: its address is counted once, and it may not be freed or read."""
    plan = plan_of(INPLACE_GRAPH, INPLACE_STEPS)
    assert find_faults(INPLACE_GRAPH, plan) == []
    assert plan.fragmentation == 0.0
    faults = faults_after(insert(2, free(10)), INPLACE_GRAPH, INPLACE_STEPS)
    assert [(f.code, f.pointer) for f in faults] == [("double-free", "/steps/2/buffers/0")]
    again = compute(1, [10], [(21, 3, 16, 4), (22, 4, 20, 8)])
    faults = faults_after(insert(2, again, free(21, 22)), INPLACE_GRAPH, INPLACE_STEPS)
    assert ("not-live", "/steps/2/reads/0") in [(f.code, f.pointer) for f in faults]


def test_in_place_frees_the_rest_of_a_larger_buffer_only_after_the_step():
    """Another write into the tail of the overwritten input would destroy it while it is read."""
    change = assign(4, 1, "writes", 1, "offset")
    faults = faults_after(change, INPLACE_GRAPH, INPLACE_STEPS)
    assert [(f.code, f.pointer) for f in faults] == [("overlap", "/steps/1/writes/1/offset")]
    later = copy(INPLACE_STEPS)
    later[3:] = [compute(0, ["t1"], [(14, 2, 16, 8)]), free(14), free(11, 12)]
    later[3]["writes"][0] |= {"offset": 16}
    assert find_faults(INPLACE_GRAPH, plan_of(INPLACE_GRAPH, later)) == []


@pytest.mark.parametrize(
    ("change", "code", "pointer"),
    [
        (lambda g: g["ops"][1].update(inplace=[]), "inplace", "/steps/1/writes/0/offset"),
        (lambda g: g["ops"][1].update(mutates=[2]), "inplace", "/steps/1/writes/0/offset"),
        (lambda g: g["tensors"][2].update(bytes=12), "wrong-bytes", "/steps/1/writes/0/bytes"),
    ],
)
def test_in_place_not_allowed(change, code, pointer):
    """Only declared pairs share an address, and not those whose input the op also overwrites."""
    document = INPLACE_GRAPH.to_dict()
    change(document)
    graph = parse_graph(document)
    faults = find_faults(graph, plan_of(graph, INPLACE_STEPS))
    assert (faults[0].code, faults[0].pointer) == (code, pointer)


def test_two_writes_on_one_address():
    """The outputs of one step live together."""
    steps = copy(INPLACE_STEPS)
    steps[1]["writes"] = [w | {"offset": 8} for w in steps[1]["writes"]]
    steps[3] = free(10, 11, 12)
    faults = find_faults(INPLACE_GRAPH, plan_of(INPLACE_GRAPH, steps))
    assert [(f.code, f.pointer) for f in faults] == [("overlap", "/steps/1/writes/1/offset")]


def test_in_place_larger_than_its_input():
    """An output that does not fit into the input's bytes cannot take them over."""
    graph = make_graph(
        {2: ("activation", 4), 3: ("activation", 8)},
        [{"outputs": [2]}, {"inputs": [2], "outputs": [3], "inplace": [[3, 2]]}],
    )
    steps = [compute(0, [], [(1, 2, 0, 4)]), compute(1, [1], [(2, 3, 0, 8)]), free(2)]
    assert [f.code for f in find_faults(graph, plan_of(graph, steps))] == ["inplace"]


def test_one_buffer_is_taken_over_once():
    """Two outputs on one address destroy each other, even if each pair is allowed."""
    graph = make_graph(
        {2: ("activation", 4), 3: ("activation", 4), 4: ("activation", 4)},
        [{"outputs": [2]}, {"inputs": [2], "outputs": [3, 4], "inplace": [[3, 2], [4, 2]]}],
    )
    steps = [compute(0, [], [(1, 2, 0, 4)]), compute(1, [1], [(2, 3, 0, 4), (3, 4, 0, 4)])]
    faults = find_faults(graph, plan_of(graph, [*steps, free(2, 3)]))
    assert [(f.code, f.pointer) for f in faults] == [("overlap", "/steps/1/writes/1/offset")]


def test_in_place_during_a_copy():
    """The copy to the host would read what overwrites it."""
    document = INPLACE_GRAPH.to_dict()
    document["device"] |= {"d2h_bytes_per_s": 1e6, "h2d_bytes_per_s": 1e6}
    graph = parse_graph(document)
    faults = faults_after(insert(1, offload(10)), graph, INPLACE_STEPS)
    assert [(f.code, f.pointer) for f in faults] == [("early-free", "/steps/2/writes/0/offset")]


# -- versions, order, outputs ------------------------------------------------------------------

MUTATION_GRAPH = make_graph(
    {1: ("activation", 4), 2: ("activation", 4), 3: ("output", 4)},
    [
        {"outputs": [1]},
        {"inputs": [1], "outputs": [2]},
        {"inputs": [1, 1], "mutates": [1]},
        {"inputs": [1, 2], "outputs": [3]},
    ],
    device={"h2d_bytes_per_s": 1e6, "d2h_bytes_per_s": 1e6},
)
MUTATION_STEPS = [
    compute(0, [], [(10, 1, 0, 4)]),
    compute(1, [10], [(11, 2, 4, 4)]),
    compute(2, [10, 10], []),
    compute(3, [10, 11], [(12, 3, None, 4)]),
    free(10, 11),
]


def test_overwritten_activation():
    """Versions belong to buffers: a recomputed one starts over, and the mutator may run again."""
    assert find_faults(MUTATION_GRAPH, plan_of(MUTATION_GRAPH, MUTATION_STEPS)) == []
    again = [free(10), compute(0, [], [(20, 1, 8, 4)]), compute(2, [20, 20], [])]
    steps = [*MUTATION_STEPS[:3], *again, compute(3, [20, 11], [(12, 3, None, 4)]), free(20, 11)]
    assert find_faults(MUTATION_GRAPH, plan_of(MUTATION_GRAPH, steps)) == []


@pytest.mark.parametrize(
    ("change", "code", "place"),
    [
        (insert(3, compute(2, [10, 10], [])), "stale-version", "3/reads/0"),
        (insert(3, compute(1, [10], [(20, 2, 8, 4)]), free(20)), "stale-version", "3/reads/0"),
        (delete(2), "stale-version", "2/reads/0"),
        (
            lambda steps: steps.__setitem__(
                slice(2, 3), [compute(0, [], [(20, 1, 8, 4)]), compute(2, [10, 20], []), free(20)]
            ),
            "split-mutation",
            "3/reads/1",
        ),
        (insert(2, offload(10)), "early-free", "3/reads"),
        (
            lambda steps: steps.__setitem__(
                slice(2, 5),
                [
                    *[offload(10), wait(10), compute(2, [10, 10], []), free(10)],
                    *[prefetch(20, 1, 0, 4, 10), wait(20)],
                    *[compute(3, [20, 11], [(12, 3, None, 4)]), free(20, 11)],
                ],
            ),
            "stale-version",
            "8/reads/0",
        ),
    ],
)
def test_stale_versions(change, code, place):
    """Twice applied, read too late, read too early, split over copies, an older host copy."""
    faults = faults_after(change, MUTATION_GRAPH, MUTATION_STEPS)
    assert (code, f"/steps/{place}") in [(f.code, f.pointer) for f in faults]


def test_an_output_outside_that_is_overwritten_is_read_there_only():
    """Else an old version could be made again in the arena, which no bound knows of."""
    graph = make_graph(
        {1: ("output", 4), 2: ("activation", 4), 3: ("output", 4)},
        [
            {"outputs": [1]},
            {"inputs": [1], "outputs": [2]},
            {"inputs": [1], "mutates": [1]},
            {"inputs": [2], "outputs": [3]},
        ],
    )
    before = [
        compute(0, [], [(1, 1, None, 4)]),
        compute(1, [{"tensor": 1}], [(2, 2, 0, 4)]),
        compute(2, [{"tensor": 1}], []),
    ]
    after = [compute(3, [2], [(3, 3, None, 4)]), free(2)]
    assert find_faults(graph, plan_of(graph, [*before, *after])) == []
    made_again = [free(2), compute(0, [], [(4, 1, 4, 4)]), compute(1, [4], [(5, 2, 0, 4)])]
    steps = [*before, *made_again, compute(3, [5], [(3, 3, None, 4)]), free(4, 5)]
    (fault,) = find_faults(graph, plan_of(graph, steps))
    assert (fault.code, fault.pointer) == ("stale-version", "/steps/5/reads/0")


def test_random_ops_keep_their_order():
    """First runs follow the generator's stream; recomputing one replays its state."""
    graph = make_graph(
        {1: ("activation", 4), 2: ("activation", 4)},
        [{"outputs": [1], "rng": True}, {"outputs": [2], "rng": True}],
    )
    first, second = compute(0, [], [(1, 1, 0, 4)]), compute(1, [], [(2, 2, 4, 4)])
    replayed = [first, second, free(1), compute(0, [], [(3, 1, 0, 4)]), free(2, 3)]
    assert find_faults(graph, plan_of(graph, replayed)) == []
    (fault,) = find_faults(graph, plan_of(graph, [second, first, free(1, 2)]))
    assert (fault.code, fault.pointer) == ("rng-order", "/steps/1/op")


def test_what_runs_once_runs_in_program_order():
    """Two ranks that issue their collectives in different orders exchange the wrong data."""
    graph = make_graph(
        {1: ("activation", 4), 2: ("activation", 4), 3: ("activation", 4)},
        [
            {"outputs": [1], "recomputable": False},
            {"outputs": [2]},
            {"outputs": [3], "recomputable": False},
        ],
    )
    first, free_to_move = compute(0, [], [(1, 1, 0, 4)]), compute(1, [], [(2, 2, 4, 4)])
    second = compute(2, [], [(3, 3, 8, 4)])
    assert find_faults(graph, plan_of(graph, [first, second, free_to_move, free(1, 2, 3)])) == []
    (fault,) = find_faults(graph, plan_of(graph, [second, free_to_move, first, free(1, 2, 3)]))
    assert (fault.code, fault.pointer) == ("once-order", "/steps/2/op")


def test_any_other_order_that_respects_data():
    """Independent ops may change places."""
    graph = make_graph(
        {1: ("activation", 4), 2: ("activation", 4)}, [{"outputs": [1]}, {"outputs": [2]}]
    )
    steps = [compute(1, [], [(2, 2, 4, 4)]), compute(0, [], [(1, 1, 0, 4)]), free(1, 2)]
    assert find_faults(graph, plan_of(graph, steps)) == []


def test_output_recomputed_as_a_temporary():
    """After its production outside the arena, an output may be computed again into the arena."""
    extra = compute(2, [11], [(20, 5, 16, 4)])
    assert faults_after(insert(3, extra, free(20))) == []
    assert [f.code for f in faults_after(insert(3, extra))] == ["overlap", "leak"]


ARENA_STEPS = [
    *STEPS[:2],
    compute(2, [11], [(12, 5, 20, 4)]),
    *STEPS[3:],
]


def test_outputs_in_the_arena():
    """They stay to the end, once; null offsets do not occur."""
    plan = plan_of(GRAPH, ARENA_STEPS, outputs="arena")
    assert find_faults(GRAPH, plan) == []
    assert plan.peak_bytes == 12 + 24
    (fault,) = faults_after(assign([14, 12], 8, "buffers"), steps=ARENA_STEPS, outputs="arena")
    assert (fault.code, fault.pointer) == ("missing-output", "/steps")
    faults = faults_after(
        assign(None, 2, "writes", 0, "offset"), steps=ARENA_STEPS, outputs="arena"
    )
    assert [f.code for f in faults] == ["output-outside", "missing-output"]
    again = compute(2, [11], [(20, 5, 24, 4)])
    assert [f.code for f in faults_after(insert(3, again), steps=ARENA_STEPS, outputs="arena")] == [
        "leak"
    ]


def test_output_overwritten_after_its_production():
    """What counts at the end is the final version."""
    graph = make_graph(
        {1: ("output", 4)}, [{"outputs": [1]}, {"inputs": [1], "mutates": [1], "outputs": []}]
    )
    outside = [compute(0, [], [(1, 1, None, 4)]), compute(1, ["t1"], [])]
    assert find_faults(graph, plan_of(graph, outside)) == []
    copy_only = [*outside[:1], compute(0, [], [(2, 1, 0, 4)]), compute(1, [2], []), free(2)]
    codes = [f.code for f in find_faults(graph, plan_of(graph, copy_only))]
    assert codes == ["stale-version", "missing-output"]
    arena = [compute(0, [], [(1, 1, 0, 4)]), compute(1, [1], [])]
    assert find_faults(graph, plan_of(graph, arena, outputs="arena")) == []
    swapped = [*arena, compute(0, [], [(2, 1, 4, 4)]), free(1)]
    codes = [f.code for f in find_faults(graph, plan_of(graph, swapped, outputs="arena"))]
    assert codes == ["leak", "missing-output"]


def test_no_bytes_overlap_nothing():
    """A buffer without bytes may lie anywhere in the arena, on the alignment, also at its end."""
    graph = make_graph(
        {1: ("activation", 8), 2: ("activation", 0)},
        [
            {"outputs": [1]},
            {"inputs": [1], "outputs": [2], "inplace": [[2, 1]]},
            {"inputs": [1, 2]},
        ],
    )

    def steps(offset):
        empty = compute(1, [1], [(2, 2, offset, 0)])
        return [compute(0, [], [(1, 1, 0, 8)]), empty, compute(2, [1, 2], []), free(1, 2)]

    for offset in (0, 4, 8):
        assert find_faults(graph, plan_of(graph, steps(offset), alignment=4)) == []
    assert [f.code for f in find_faults(graph, plan_of(graph, steps(12), alignment=4))] == [
        "outside-arena"
    ]


def test_the_error_is_one_line_and_carries_all_faults():
    """What a user reads: the first fault, and how many more."""
    plan = plan_of(GRAPH, STEPS, budget_bytes=1, recomputed_ops=0)
    with pytest.raises(InvalidPlanError) as caught:
        verify(GRAPH, plan)
    assert str(caught.value) == (
        "/recomputed_ops: recomputed_ops is 1, not 0 [wrong-figure] (and 1 more)"
    )
    assert [fault.code for fault in caught.value.faults] == ["wrong-figure", "over-budget"]
    assert len(find_faults(GRAPH, plan, limit=1)) == 1
    worst = edit(plan, lambda document: document.update(steps=[free(1)] * 100))
    assert len(find_faults(GRAPH, worst)) == 20


def test_ten_thousand_ops_with_many_live_buffers():
    """30 000 buffers, 10 000 of them live at once, within seconds."""
    n = 10_000
    tensors = dict.fromkeys(range(3 * n), ("activation", 64))
    ops = [{"outputs": [3 * i, 3 * i + 1, 3 * i + 2]} for i in range(n)]
    graph = make_graph(tensors, ops)
    steps, kept = [], []
    for i in range(n):
        spot = 64 * ((i * 7919) % n)
        writes = [(3 * i, 3 * i, spot, 64)]
        writes += [(3 * i + k, 3 * i + k, 64 * (n + k), 64) for k in (1, 2)]
        steps += [compute(i, [], writes), free(3 * i + 1, 3 * i + 2)]
        kept.append(3 * i)
    steps.append(free(*kept))
    figures = {"arena_bytes": 64 * (n + 3), "peak_bytes": 64 * (n + 3), "resident_bytes": 0}
    figures |= {"base_cost_us": float(n), "cost_us": float(n), "overhead": 0.0}
    figures |= {"fragmentation": 1 - (n + 2) / (n + 3), "recomputed_ops": 0, "swapped_bytes": 0}
    figures |= {"schema": "coop-plan/plan/1", "graph": fingerprint(graph), "method": "test"}
    figures |= {"budget_bytes": 64 * (n + 3), "status": "feasible", "solve_seconds": 0.0}
    plan = parse_plan(figures | {"alignment": 64, "steps": steps})
    started = time.process_time()
    assert find_faults(graph, plan) == []
    assert time.process_time() - started < 3


def unparsed(change, place, value):
    """The valid plan with one value set past all parsing."""
    plan = plan_of(GRAPH, STEPS)
    steps = list(plan.steps)
    if place == "plan":
        return plan.model_copy(update={change: value})
    number, *path = place
    step = steps[number]
    if path:
        parts = list(step.writes)
        parts[path[0]] = parts[path[0]].model_copy(update={change: value})
        step = step.model_copy(update={"writes": parts})
    else:
        step = step.model_copy(update={change: value})
    steps[number] = step
    return plan.model_copy(update={"steps": steps})


@pytest.mark.parametrize(
    ("change", "place", "value", "pointer"),
    [
        ("offset", (0, 0), -8, "/steps/0/writes/0/offset"),
        ("offset", (0, 0), 8.0, "/steps/0/writes/0/offset"),
        ("bytes", (0, 0), -8, "/steps/0/writes/0/bytes"),
        ("buffer", (1, 0), "11", "/steps/1/writes/0/buffer"),
        ("op", (2,), True, "/steps/2/op"),
        ("buffers", (3,), [-1], "/steps/3/buffers/0"),
        ("alignment", "plan", 0, "/alignment"),
        ("arena_bytes", "plan", -20, "/arena_bytes"),
        ("budget_bytes", "plan", 1e9, "/budget_bytes"),
        ("cost_us", "plan", float("nan"), "/cost_us"),
        ("lower_bound_us", "plan", float("inf"), "/lower_bound_us"),
        ("steps", "plan", [None], "/steps/0"),
    ],
)
def test_what_nobody_has_parsed_is_checked_as_well(change, place, value, pointer):
    """A plan built in memory, or by a parser of somebody's own, gets no further than one read."""
    faults = find_faults(GRAPH, unparsed(change, place, value))
    assert [(fault.code, fault.pointer) for fault in faults] == [("malformed", pointer)]
