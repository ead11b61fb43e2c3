"""The verifier against the byte-by-byte reference: on valid plans, and on tampered ones."""

from random import Random

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from coop_plan.planner import InfeasibleBudgetError, plan
from coop_plan.planner.verifier import find_faults
from coop_plan.schemas import InvalidInputError, parse_plan
from tests.planner.reference import Machine
from tests.planner.test_host_updates import UPDATED
from tests.strategies import graphs
from tests.support import make_graph, make_plan, naive_plan, random_plan

OUTPUTS = st.sampled_from(["outside", "arena", "gradients"])
SEEDS = st.integers(0, 2**32)


@settings(max_examples=150, deadline=None)
@given(graphs(), OUTPUTS, st.sampled_from([1, 4, 512]))
def test_naive_plans_are_accepted(graph, outputs, alignment):
    """Keep-everything at fresh addresses is valid for every graph."""
    plan = naive_plan(graph, outputs=outputs, alignment=alignment)
    assert find_faults(graph, plan) == []


@settings(max_examples=250, deadline=None)
@given(graphs(), SEEDS, OUTPUTS, st.sampled_from([1, 4]))
def test_random_valid_plans_are_accepted_and_right(graph, seed, outputs, alignment):
    """Reordered, evicting, recomputing, swapping, in-place plans: both say they are good."""
    plan = random_plan(graph, Random(seed), outputs=outputs, alignment=alignment)
    event(f"recomputes: {plan.recomputed_ops > 0}, swaps: {plan.swapped_bytes > 0}")
    machine = Machine(graph, plan)
    assert machine.right
    assert machine.clean
    assert find_faults(graph, plan) == []


@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(graphs(max_ops=6), SEEDS, OUTPUTS, st.integers(1, 3))
def test_tampered_plans_are_accepted_only_if_good(graph, seed, outputs, changes):
    """After random changes, figures measured anew, the verifier agrees with the reference."""
    random = Random(seed)
    plan = random_plan(graph, random, outputs=outputs)
    document = plan.to_dict()
    for _ in range(changes):
        tamper(document["steps"], random)
    try:
        steps = parse_plan(document).steps
    except InvalidInputError:
        assume(False)
    tampered = make_plan(graph, steps, outputs=outputs)
    machine = Machine(graph, tampered)
    faults = find_faults(graph, tampered)
    event(f"accepted: {not faults}")
    assert (faults == []) == machine.good, faults


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(UPDATED, OUTPUTS, SEEDS, st.sampled_from(["min", "60%", "80%"]))
def test_tampered_plans_with_homes_are_accepted_only_if_good(graph, outputs, seed, budget):
    """The planner's plans with movable residents and updates on the host, changed at random."""
    random = Random(seed)
    try:
        made = plan(graph, budget, outputs=outputs, alignment=1, smallest=True)
    except InfeasibleBudgetError as error:
        made = plan(graph, error.min_feasible_bytes, outputs=outputs, alignment=1)
    assume(made.homes)
    machine = Machine(graph, made)
    assert machine.right
    assert machine.clean
    assert find_faults(graph, made) == []
    for _ in range(60):
        document = made.to_dict()
        for _ in range(random.choice([1, 1, 2])):
            random.choice(HOMES)(document["steps"], random)
        try:
            steps = parse_plan(document).steps
        except InvalidInputError:
            continue
        tampered = make_plan(graph, steps, outputs=outputs, homes=made.homes)
        machine = Machine(graph, tampered)
        faults = find_faults(graph, tampered)
        kind = "on the host" if any(s.get("variant") == "host" for s in document["steps"]) else ""
        event(f"accepted: {not faults} {kind}")
        assert (faults == []) == machine.good, faults


def tamper(steps, random):
    """One random change of a plan's steps; often, but not always, it breaks the plan."""
    if steps:
        random.choice(TAMPERS)(steps, random)


def _pick(steps, random, do):
    found = [step for step in steps if step["do"] == do]
    return random.choice(found) if found else None


def _buffers(steps):
    made = [w["buffer"] for s in steps if s["do"] == "compute" for w in s["writes"]]
    return made + [s["buffer"] for s in steps if s["do"] == "prefetch"] or [0]


def _drop(steps, random):
    del steps[random.randrange(len(steps))]


def _repeat(steps, random):
    """A step again; a compute with fresh buffers, so that it is a recompute, freed at once."""
    at = random.randrange(len(steps))
    step = dict(steps[at])
    if step["do"] == "compute":
        fresh = max(_buffers(steps)) + 1
        step["writes"] = [w | {"buffer": fresh + n} for n, w in enumerate(step["writes"])]
        if random.random() < 0.5:
            top = 64 * len(steps)
            step["writes"] = [w | {"offset": top + 32 * n} for n, w in enumerate(step["writes"])]
    where = random.randrange(at, len(steps)) + 1
    steps.insert(where, step)
    if step["do"] == "compute" and random.random() < 0.7:
        steps.insert(where + 1, {"do": "free", "buffers": [w["buffer"] for w in step["writes"]]})


def _move(steps, random):
    step = steps.pop(random.randrange(len(steps)))
    steps.insert(random.randrange(len(steps) + 1), step)


def _swap(steps, random):
    at = random.randrange(len(steps))
    if at:
        steps[at - 1], steps[at] = steps[at], steps[at - 1]


def _offset(steps, random):
    places = [w for s in steps if s["do"] == "compute" for w in s["writes"]]
    places += [s for s in steps if s["do"] == "prefetch"]
    if places:
        place = random.choice(places)
        others = [p["offset"] for p in places if p["offset"] is not None]
        place["offset"] = random.choice([*others, 0, 1, 8, 40, None])


def _read(steps, random):
    step = _pick(steps, random, "compute")
    if step and step["reads"]:
        at = random.randrange(len(step["reads"]))
        tensors = [{"tensor": w["tensor"]} for s in steps for w in s.get("writes", ())]
        step["reads"][at] = random.choice(_buffers(steps) + tensors)


def _number(steps, random):
    step = _pick(steps, random, "compute")
    if step and step["writes"]:
        random.choice(step["writes"])["buffer"] = random.choice([*_buffers(steps), 10**6])


def _unfree(steps, random):
    step = _pick(steps, random, "free")
    if step and step["buffers"]:
        del step["buffers"][random.randrange(len(step["buffers"]))]


def _add_free(steps, random):
    step = {"do": "free", "buffers": [random.choice(_buffers(steps))]}
    steps.insert(random.randrange(len(steps) + 1), step)


def _write(steps, random):
    step = _pick(steps, random, "compute")
    if step and step["writes"]:
        write = random.choice(step["writes"])
        write[random.choice(["bytes", "tensor"])] = random.choice([0, 1, 4, 8, 9])
        if random.random() < 0.3:
            step["writes"].pop()


def _workspace(steps, random):
    step = _pick(steps, random, "compute")
    if step:
        step["workspace"][random.choice(["bytes", "offset"])] = random.randrange(40)


def _variant(steps, random):
    step = _pick(steps, random, "compute")
    if step:
        step["variant"] = random.choice([None, "v0", "v1", "none such"])


def _op(steps, random):
    step = _pick(steps, random, "compute")
    if step:
        step["op"] = random.choice([s["op"] for s in steps if s["do"] == "compute"] + [99])


def _transfer(steps, random):
    buffer = random.choice(_buffers(steps))
    at = random.randrange(len(steps) + 1)
    fresh = max(_buffers(steps)) + 1
    away = {"do": "offload", "buffer": buffer, "host_offset": random.choice([None, 0, 1, 4, 64])}
    back = {"do": "prefetch", "buffer": fresh, "offset": random.choice([0, 8, 64 * len(steps)])}
    made = [w for s in steps for w in s.get("writes", ()) if w["buffer"] == buffer]
    if made:
        back |= {"tensor": made[0]["tensor"], "bytes": made[0]["bytes"], "from": buffer}
    added = [away, {"do": "wait", "buffer": buffer}]
    if made and random.random() < 0.6:
        added += [back, {"do": "wait", "buffer": fresh}, {"do": "free", "buffers": [fresh]}]
    if random.random() < 0.4:
        del added[random.randrange(len(added))]
    steps[at:at] = added


def _home(steps, random):
    """A copy to or from another place of the host, or a read there of something else."""
    step = _pick(steps, random, random.choice(["offload", "prefetch", "compute"]))
    places = [s["host_offset"] for s in steps if s["do"] == "offload"]
    buffers = [s["buffer"] for s in steps if s["do"] == "offload"]
    if step and step["do"] == "offload":
        step["host_offset"] = random.choice([*places, 0, 4, 8])
    elif step and step["do"] == "prefetch":
        step["from"] = random.choice([*buffers, None])
    elif step and step["reads"]:
        reads = [read for s in steps for read in s.get("reads", ())]
        step["reads"][random.randrange(len(step["reads"]))] = random.choice([*reads, *buffers])


def _engine(steps, random):
    """A run on the host moves: the rules of its copies and homes are at stake."""
    found = [k for k, step in enumerate(steps) if step.get("variant") == "host"]
    if found:
        step = steps.pop(random.choice(found))
        steps.insert(random.randrange(len(steps) + 1), step)


HOMES = [_drop, _repeat, _move, _swap, _read, _transfer, _home, _home, _engine, _engine]

TAMPERS = [_drop, _repeat, _move, _swap, _offset, _offset, _read, _read, _number, _unfree]
TAMPERS += [_write, _workspace, _variant, _op, _add_free, _transfer]


@pytest.mark.parametrize("outputs", ["outside", "arena", "gradients"])
def test_an_empty_step_is_a_plan(outputs):
    """No ops at all: nothing to do, nothing to hold."""
    graph = make_graph({}, [])
    assert find_faults(graph, naive_plan(graph, outputs=outputs)) == []
