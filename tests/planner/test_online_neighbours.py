"""
e*: a tensor's cost and that of the evicted ones beside it.

Kirisame et al., ICLR 2021, section 4.1 and appendix C.2: components of evicted tensors in a
union-find, their sums merged on eviction and reduced, without splitting, on recomputation.
"""

import pytest

from coop_plan.planner.online.state import empty_arena
from tests.planner.memories import Block, Memory, Step


def chain(*gone):
    """From a to e, each made from the one before, costs 1, 2, 4, 8, 16; `gone` in that order."""
    blocks = {name: Block(name, cost=2.0**k) for k, name in enumerate("abcde")}
    there = [block for name, block in blocks.items() if name not in gone]
    return Memory(*there, gone=[blocks[name] for name in gone], edges="ab bc cd de")


def test_a_tensor_with_its_neighbours_there_costs_its_own():
    assert [chain().closure_cost(name) for name in "abcde"] == [1, 2, 4, 8, 16]


def test_evicted_neighbours_count_on_either_side():
    """What it is made from, which it would need, and what is made from it, which would need it."""
    memory = chain("c")
    assert [memory.closure_cost(name) for name in "abde"] == [1, 2 + 4, 8 + 4, 16]


@pytest.mark.parametrize("order", ["bcd", "dcb", "bdc", "cbd"])
def test_a_component_counts_as_a_whole(order):
    """In whatever order it came to be; the last of bdc joins two components."""
    memory = chain(*order)
    assert memory.closure_cost("a") == 1 + 2 + 4 + 8
    assert memory.closure_cost("e") == 16 + 2 + 4 + 8


def test_a_component_touched_twice_counts_once():
    memory = Memory(
        Block("x", cost=1),
        gone=[Block("p", cost=10), Block("q", cost=100)],
        edges="pq px qx",
    )
    assert memory.closure_cost("x") == 111


def test_a_component_met_twice_on_eviction_is_joined_once():
    memory = Memory(
        Block("y", cost=1),
        gone=[Block("p", cost=10), Block("q", cost=100), Block("x", cost=1000)],
        edges="pq px qx xy",
    )
    assert memory.closure_cost("y") == 1111


def test_separate_components_count_each():
    memory = chain("b", "d")
    assert memory.closure_cost("c") == 4 + 2 + 8
    assert memory.closure_cost("a") == 1 + 2


def test_what_is_computed_again_no_longer_counts():
    memory = chain("b", "c", "d")
    memory.compute("d")
    assert memory.closure_cost("a") == 1 + 2 + 4
    assert memory.closure_cost("e") == 16
    memory.compute("b")
    assert memory.closure_cost("a") == 1
    assert memory.closure_cost("b") == 2 + 4
    memory.compute("c")
    assert memory.closure_cost("d") == 8


def test_a_component_is_not_split():
    """Appendix C.2's approximation: b and d stay together after c between them is back."""
    memory = chain("b", "c", "d")
    memory.compute("c")
    assert memory.closure_cost("a") == 1 + 2 + 8
    assert memory.closure_cost("c") == 4 + 2 + 8


@pytest.mark.parametrize("order", ["bcd", "dcb", "cbd", "bdc"])
def test_evicted_again_it_starts_a_component_of_its_own(order):
    """b was with d once, through c; now nothing but its neighbours counts."""
    memory = chain(*order)
    memory.compute("c")
    memory.compute("b")
    memory.evict("b")
    assert memory.closure_cost("a") == 1 + 2
    assert memory.closure_cost("e") == 16 + 8
    assert memory.closure_cost("c") == 4 + 2 + 8


def test_coop_counts_what_a_tensor_is_made_from():
    """OneFlow, eager/tensor_storage.cpp, `approx_neighbor_cost`: not what would need it."""
    blocks = {name: Block(name, cost=2.0**k) for k, name in enumerate("abcde")}
    there = [blocks[name] for name in "ae"]
    gone = [blocks[name] for name in "bcd"]
    memory = Memory(*there, gone=gone, edges="ab bc cd de", dependents=False)
    assert memory.closure_cost("a") == 1
    assert memory.closure_cost("e") == 16 + 2 + 4 + 8


def test_coop_counts_what_is_made_beside_a_tensor():
    step = Step().make("a").make("bc", "a").make("d", "b").make("e", "c")
    arena = empty_arena(step.problem(), 1, 8, partition=False, dependents=False)
    beside = [
        arena.near[arena.near_ptr[step.ids[name]] : arena.near_ptr[step.ids[name] + 1]]
        for name in "bcd"
    ]
    assert ["".join(map(step.name, row)) for row in beside] == ["ac", "ab", "b"]


def test_a_run_keeps_account_of_all_that_comes_and_goes():
    """Dropped, taken over in place or evicted: in a component; there: in none."""
    step = Step(outputs="arena").make("a").make("b", "a").make("c", "b", inplace="cb")
    step.make("d", "c").make("e", "d").make("f", "ed").make("g", "fc").make("H", "ga")
    run = step.run(3, inplace=True)
    assert run.evictions > 0
    assert step.components(run) == ("abcdefg", "")
