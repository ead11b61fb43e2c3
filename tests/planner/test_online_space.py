"""The online allocator: best fit, from either end, free neighbours merged."""

import pytest

from tests.planner.memories import NO_ROOM, Block, Memory, Step


def separated(*holes):
    """Free blocks of these sizes with a tensor of one byte behind each: a, b, c, …"""
    layout = []
    for number, size in enumerate(holes):
        layout += [size, Block(chr(97 + number), 1)]
    return Memory(*layout)


def test_best_fit_takes_the_smallest_block_that_holds_it():
    memory = separated(8, 3, 5, 9)
    assert memory.allocate(4) == 8 + 1 + 3 + 1
    assert memory.layout() == [
        *(("", 8), ("a", 1), ("", 3), ("b", 1)),
        *(("?", 4), ("", 1), ("c", 1), ("", 9), ("d", 1)),
    ]
    assert memory.allocate(4) == 0
    assert memory.allocate(3) == 9
    assert memory.allocate(10) == NO_ROOM


def test_of_equal_blocks_the_leftmost():
    assert separated(9, 4, 4).allocate(4) == 10


def test_an_exact_fit_leaves_nothing():
    memory = separated(2, 3)
    memory.allocate(3)
    assert memory.layout() == [("", 2), ("a", 1), ("?", 3), ("b", 1)]


def test_from_the_right_end_of_the_same_block():
    memory = separated(9, 6)
    assert memory.allocate(4, right=True) == 9 + 1 + 2
    assert memory.layout() == [("", 9), ("a", 1), ("", 2), ("?", 4), ("b", 1)]
    assert memory.allocate(4) == 0
    assert memory.allocate(4, right=True) == 5


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("a", [("", 1), ("b", 2), ("", 3), ("c", 4), ("d", 5), ("e", 6), ("", 7)]),
        ("b", [("a", 1), ("", 5), ("c", 4), ("d", 5), ("e", 6), ("", 7)]),
        ("c", [("a", 1), ("b", 2), ("", 7), ("d", 5), ("e", 6), ("", 7)]),
        ("d", [("a", 1), ("b", 2), ("", 3), ("c", 4), ("", 5), ("e", 6), ("", 7)]),
        ("e", [("a", 1), ("b", 2), ("", 3), ("c", 4), ("d", 5), ("", 13)]),
    ],
)
def test_a_released_block_is_one_with_its_free_neighbours(name, left):
    memory = Memory(
        *(Block("a", 1), Block("b", 2), 3, Block("c", 4), Block("d", 5)), Block("e", 6), 7
    )
    memory.release(name)
    assert memory.layout() == left


def test_released_between_two_free_blocks_all_three_are_one():
    memory = Memory(2, Block("a", 3), 4, Block("b", 1))
    memory.release("a")
    assert memory.layout() == [("", 9), ("b", 1)]
    assert memory.allocate(9) == 0


def test_all_released_is_one_block():
    memory = separated(2, 3, 4)
    for name in "bac":
        memory.release(name)
    assert memory.layout() == [("", 12)]


@pytest.fixture
def mixed():
    """Mean cost density 1: x and z lie above it, y and w below."""
    step = Step().make("x", size=2, cost=5.0).make("y", size=4, cost=2.0)
    step.make("z", size=2, cost=3.0).make("w", size=4, cost=2.0)
    return step.make("R", "xyzw", size=0, cost=0.0)


def test_expensive_is_what_costs_more_a_byte_than_the_program(mixed):
    """Coop, section 3.3: cost density, not cost: u costs as much as z and is cheap."""
    assert mixed.expensive() == "xz"
    step = Step().make("x", size=1, cost=3.0).make("u", size=9, cost=3.0)
    assert step.make("R", "xu", size=0, cost=0.0).expensive() == "x"


def test_cheap_and_expensive_tensors_grow_from_opposite_ends(mixed):
    run = mixed.run(12, partition=True)
    assert mixed.placed(run) == {"y": 0, "w": 4, "z": 8, "x": 10}
    run = mixed.run(12, partition=False)
    assert mixed.placed(run) == {"x": 0, "y": 2, "z": 6, "w": 8}


def test_what_needed_an_eviction_goes_to_its_end_as_well():
    """y goes for v, which is expensive and takes the right half of y's block."""
    step = Step().make("x", size=2, cost=5.0).make("y", size=4, cost=2.0)
    step.make("z", size=2, cost=3.0).make("w", size=4, cost=2.0).make("v", size=2, cost=6.0)
    step.make("R", "xzwv", size=0, cost=0.0).make("Y", "y", size=0, cost=0.0)
    run = step.run(12, partition=True)
    assert step.told(run).startswith("x y z w -y v R")
    assert step.placed(run)["v"] == 2
