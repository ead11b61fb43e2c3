"""
Which tensors are evicted: Coop's sliding window, DTR's and DTE's single tensors.

Coop: Zhang et al., NeurIPS 2023, Figure 1, section 3.2 and Algorithm 1. DTR: Kirisame et al., ICLR
2021, section 4.1. DTE: Hu et al., MegTaiChi, ICS 2022. A block's cost in a window is e* over
staleness, without its size (OneFlow, oneflow/core/vm/remat).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.memories import (
    NO_ROOM,
    SINGLE,
    SINGLE_WITH_NEIGHBOURS,
    WINDOW,
    Block,
    Memory,
)


def figure_1():
    """Enough cheap bytes for a request of 100, but not side by side."""
    return Memory(
        Block("a", 50, cost=1),
        Block("b", 50, cost=9),
        Block("c", 50, cost=1),
        Block("d", 50, cost=2),
    )


def test_figure_1_the_window_evicts_what_lies_side_by_side():
    """Coop evicts 100 bytes for 100: the cheapest two neighbours."""
    memory = figure_1()
    assert memory.make_room(100, WINDOW) == (100, "cd")
    assert memory.layout() == [("a", 50), ("b", 50), ("?", 100)]


def test_figure_1_single_tensors_free_enough_bytes_in_vain():
    """DTR evicts a and c first, which lie apart, and has to go on; a's bytes are left unused."""
    memory = figure_1()
    assert memory.make_room(100, SINGLE) == (100, "acd")
    assert memory.layout() == [("", 50), ("b", 50), ("?", 100)]


def test_the_cheapest_of_several_windows():
    """Sums are compared, not single tensors: the cheapest block is not in the cheapest window."""
    costs = {"a": 5, "b": 5, "c": 1, "d": 9, "e": 4, "f": 4, "g": 7}
    assert Memory(*(Block(name, 10, cost) for name, cost in costs.items())).window(20) == "bc"
    costs["c"] = 4
    assert Memory(*(Block(name, 10, cost) for name, cost in costs.items())).window(20) == "ef"


def test_of_equal_windows_the_leftmost():
    assert Memory(*(Block(name, 10) for name in "abcd")).window(20) == "ab"


def test_free_blocks_cost_nothing_and_count():
    """Beside free bytes one dear tensor is enough, which is cheaper than two."""
    memory = Memory(Block("a", 10, 3), Block("b", 10, 3), 10, Block("c", 10, 4), Block("d", 10, 1))
    assert memory.window(20) == "b"
    memory = Memory(Block("a", 10, 3), Block("b", 10, 3), 10, Block("c", 10, 2), Block("d", 10, 9))
    assert memory.window(20) == "c"
    memory = Memory(5, Block("a", 10, 9), 5, Block("b", 10, 1), 5, Block("c", 10, 3), 5)
    assert memory.window(20) == "b"
    assert memory.window(30) == "bc"


def test_free_blocks_cost_nothing_at_all():
    memory = Memory(Block("a", 10, 2), 10, Block("x", 1, pinned=True), Block("b", 20, 2.5))
    assert memory.window(20) == "a"


def test_a_window_shrinks_from_the_left():
    """What the bytes on the right have made needless leaves the window."""
    memory = Memory(Block("a", 10, 1), Block("b", 10, 2), Block("c", 30, 4))
    assert memory.window(30) == "c"
    assert memory.window(35) == "bc"
    memory = Memory(Block("a", 30, 9), Block("b", 10, 1), Block("c", 10, 1), Block("d", 10, 1))
    assert memory.window(30) == "bcd"


def test_a_window_shrinks_by_more_than_one_block():
    memory = Memory(*(Block(name, 1, 5) for name in "abcd"), Block("e", 4, 6))
    assert memory.window(4) == "e"


@pytest.mark.parametrize("barrier", [{"pinned": True}, {"evictable": False}])
def test_what_may_not_be_evicted_restarts_the_window(barrier):
    """No window across it, however cheap, and the bytes before it do not count after it."""
    dear = {"c": 50, "d": 50, "e": 50}
    blocks = [Block("a", 10), Block("x", 10, 0.0, **barrier), Block("b", 10)]
    memory = Memory(*blocks, *(Block(name, 10, cost) for name, cost in dear.items()))
    assert memory.window(10) == "a"
    assert memory.window(20) == "bc"
    assert memory.window(40) == "bcde"
    assert memory.window(50) == ""


def test_where_no_window_is_large_enough_nothing_is_evicted():
    memory = Memory(Block("a", 10), Block("x", 10, pinned=True), Block("b", 10))
    assert memory.make_room(20, WINDOW) == (NO_ROOM, "")


def test_a_window_of_free_bytes_only_is_not_asked_for():
    """Room that is there is taken without an eviction, under any rule."""
    for rule in (WINDOW, SINGLE, SINGLE_WITH_NEIGHBOURS):
        memory = Memory(Block("a", 10), 20, Block("b", 10))
        assert memory.make_room(20, rule) == (10, "")


@given(
    layout=st.lists(
        st.one_of(
            st.integers(1, 6),
            st.tuples(st.integers(1, 6), st.integers(0, 9), st.sampled_from([0, 0, 0, 1])),
        ),
        min_size=1,
        max_size=9,
    ),
    size=st.integers(1, 20),
)
def test_the_window_is_the_cheapest_of_all_runs(layout, size):
    """Against all runs of adjacent blocks, one by one."""
    blocks = []
    for item in layout:
        if isinstance(item, tuple):
            block_bytes, cost, pinned = item
            blocks.append(Block(chr(97 + len(blocks)), block_bytes, cost, pinned=bool(pinned)))
        elif not blocks or isinstance(blocks[-1], Block):  # free neighbours are one block
            blocks.append(item)
    runs = [
        blocks[start:end] for start in range(len(blocks)) for end in range(start, len(blocks) + 1)
    ]
    costs = {
        "".join(block.name for block in run if isinstance(block, Block)): sum(
            block.cost for block in run if isinstance(block, Block)
        )
        for run in runs
        if sum(block.size if isinstance(block, Block) else block for block in run) >= size
        and not any(isinstance(block, Block) and block.pinned for block in run)
    }
    victims = Memory(*blocks).window(size)
    if not costs:
        assert victims == ""
    else:
        assert costs[victims] == min(costs.values())


def test_staleness_divides_the_cost():
    """Ten times the cost and a hundred times as long untouched: the better victim."""
    memory = Memory(Block("a", 10, 1, age=1), Block("b", 10, 10, age=100))
    assert memory.window(10) == "b"
    assert memory.single() == "b"


def test_what_was_touched_just_now_is_dear_but_can_go():
    memory = Memory(Block("a", 10, 1, age=0), Block("b", 10, 100, age=1))
    assert memory.window(10) == memory.single() == "b"
    assert memory.window(20) == "ab"


def test_size_counts_for_single_tensors_only():
    """DTR's h divides by bytes; a window already asks for as many as are needed."""
    memory = Memory(Block("a", 10, 10), Block("b", 40, 20))
    assert memory.single() == "b"
    assert memory.window(10) == "a"


@pytest.mark.parametrize(
    ("better", "why"),
    [
        ({"cost": 1.9}, "cost"),
        ({"size": 11}, "bytes"),
        ({"age": 2.1}, "staleness"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dtr_takes_the_least_cost_over_bytes_and_staleness(better, why):
    """Each factor alone decides, wherever the tensor lies."""
    usual = {"size": 10, "cost": 2.0, "age": 2.0}
    for at in range(3):
        blocks = [Block(name, **usual) for name in "abc"]
        blocks[at] = Block("abc"[at], **(usual | better))
        assert Memory(*blocks).single() == "abc"[at], why


def test_dtr_looks_at_e_star():
    """The cheaper one stands between evicted ones, which would have to be computed for it."""
    memory = Memory(
        Block("a", 10, 2),
        Block("b", 10, 3),
        gone=[Block("p", cost=2), Block("q", cost=2)],
        edges="pa aq",
    )
    assert memory.closure_cost("a") == 6
    assert memory.single() == "b"
    assert memory.window(10) == "b"


@pytest.mark.parametrize("neighbours", [False, True])
def test_single_tensors_spare_what_may_not_be_evicted(neighbours):
    blocks = [Block("a", 10, 1, pinned=True), Block("b", 10, 1, evictable=False), Block("c", 1, 99)]
    assert Memory(*blocks).single(neighbours=neighbours) == "c"
    assert Memory(*blocks[:2]).single(neighbours=neighbours) == ""


@pytest.mark.parametrize("free", [(0, 30), (30, 0), (15, 15)], ids=["right", "left", "both"])
def test_dte_counts_the_free_bytes_beside_a_tensor(free):
    """b is the dearer one by itself; with 40 bytes instead of 10 it is the cheaper one."""
    left, right = free
    ends = Block("x", 1, pinned=True), Block("y", 1, pinned=True)
    layout = [Block("a", 10, 1), ends[0], left, Block("b", 10, 3), right, ends[1]]
    memory = Memory(*(block for block in layout if block))
    assert memory.single() == "a"
    assert memory.single(neighbours=True) == "b"


def test_dte_does_not_count_tensors_beside_a_tensor():
    """As DTR where nothing beside is free, though more lies beside b."""
    crowd = [Block("c", 90, 99), Block("b", 10, 2), Block("d", 90, 99)]
    memory = Memory(Block("a", 10, 1), Block("x", 1, pinned=True), *crowd)
    assert memory.single(neighbours=True) == memory.single() == "a"
