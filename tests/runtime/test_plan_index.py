"""The index of a plan's buffers, against the plan itself."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.planner import plan
from coop_plan.runtime.execute.plan_index import PlanIndex
from coop_plan.schemas import Compute, Free, Offload, Prefetch, Wait
from tests.planner.test_homes import iteration
from tests.strategies import graphs
from tests.support import random_plan


def by_position(graph, plan):
    """The graph and its plan with positions as op ids, as captured graphs have them."""
    position = {op.id: i for i, op in enumerate(graph.ops)}
    ops = [op.model_copy(update={"id": position[op.id]}) for op in graph.ops]
    steps = [
        step.model_copy(update={"op": position[step.op]}) if isinstance(step, Compute) else step
        for step in plan.steps
    ]
    return graph.model_copy(update={"ops": ops}), plan.model_copy(update={"steps": steps})


@settings(max_examples=100)
@given(graphs(), st.integers(0, 1 << 30), st.sampled_from(["outside", "arena"]))
def test_every_buffer_has_its_maker_its_readers_and_its_end(graph, seed, outputs):
    graph, plan = by_position(graph, random_plan(graph, Random(seed), outputs=outputs))
    index = PlanIndex(graph, plan)
    runs = [at for at, step in enumerate(plan.steps) if isinstance(step, Compute)]
    assert index.runs == runs
    ended = {}
    for at, step in enumerate(plan.steps):
        if isinstance(step, Free):
            ended |= dict.fromkeys(step.buffers, at)
    for buffer in index.buffers.values():
        maker = plan.steps[buffer.made_at]
        written = maker.writes if isinstance(maker, Compute) else [maker]
        (made,) = (write for write in written if write.buffer == buffer.id)
        assert (made.tensor, made.offset, made.bytes) == (
            *(buffer.tensor, buffer.offset, buffer.bytes),
        )
        assert all(buffer.made_at < at for at in buffer.read_at)
        if buffer.ends_at is not None:
            assert all(at <= buffer.ends_at for at in buffer.read_at)
        if buffer.shares is not None:
            old = index.buffers[buffer.shares]
            assert (old.ends_at, old.offset) == (buffer.made_at, buffer.offset)
            ended[old.id] = buffer.made_at
    assert ended == {b.id: b.ends_at for b in index.buffers.values() if b.ends_at is not None}


@settings(max_examples=100)
@given(graphs(variants=False), st.integers(0, 1 << 30))
def test_transfers_are_numbered_and_paired(graph, seed):
    graph, plan = by_position(graph, random_plan(graph, Random(seed)))
    index = PlanIndex(graph, plan)
    started = {}
    for at, step in enumerate(plan.steps):
        if isinstance(step, Offload | Prefetch):
            number = started[step.buffer] = index.transfer_of[at]
            transfer = index.transfers[number]
            assert transfer.buffer.id == step.buffer
            assert transfer.to_host == isinstance(step, Offload)
            if isinstance(step, Prefetch):
                source = index.transfers[transfer.source]
                assert source.buffer.id == step.from_
                assert source.host_offset == transfer.host_offset
        elif isinstance(step, Wait):
            assert index.transfer_of[at] == started[step.buffer]
    assert sorted(set(index.transfer_of.values())) == list(range(len(index.transfers)))


def test_transfers_of_homes_are_marked():
    graph = iteration()
    resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
    graph, made = by_position(graph, plan(graph, resident, alignment=1))
    homes = {home.tensor: home.host_offset for home in made.homes}
    index = PlanIndex(graph, made)
    for at, step in enumerate(made.steps):
        if isinstance(step, Offload | Prefetch):
            transfer = index.transfers[index.transfer_of[at]]
            home = homes.get(transfer.buffer.tensor)
            assert transfer.is_home == (home is not None)
            assert home in (None, transfer.host_offset)
            assert transfer.source is None or not transfer.is_home
            assert transfer.to_host == isinstance(step, Offload)
    assert {moved.to_host for moved in index.transfers if moved.is_home} == {True, False}
