"""
The simulated step: what is pinned, taken over in place, dropped, and kept to the last.

Coop: Zhang et al., NeurIPS 2023, section 3.4 (recomputable in-place). DTR: Kirisame et al., ICLR
2021, appendix C.3 (banishing). Closure pinning and eager eviction of what was recomputed: OneFlow,
oneflow/core/vm/remat; without them: simrd, simrd/runtime/v2.py. The stories are `Step.told`'s.
"""

import pytest

from coop_plan.planner.core.errors import DoesNotFitError
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.method import Request
from coop_plan.planner.online import run
from coop_plan.planner.online.methods import solve_coop
from tests.planner.memories import SINGLE, SINGLE_WITH_NEIGHBOURS, WINDOW, Step
from tests.support import make_graph

RULES = pytest.mark.parametrize("rule", [WINDOW, SINGLE, SINGLE_WITH_NEIGHBOURS])


def test_the_closure_of_an_op_is_pinned():
    """Its inputs, and those of each op that runs again for it, but not of what is there."""
    step = Step().make("a").make("b", "a").make("c", "b").make("d", "c").make("e")
    step.make("G", "de")
    assert step.closure_pins(5, live="abe") == {"b": 1, "c": 1, "d": 1, "e": 1}
    assert step.closure_pins(5, live="abcde") == {"d": 1, "e": 1}


def test_an_op_that_runs_again_for_two_readers_pins_once():
    """b is pinned by both of its readers, a by the one run of b."""
    step = Step().make("a").make("b", "a").make("c", "b").make("d", "b").make("G", "cd")
    assert step.closure_pins(4, live="a") == {"a": 1, "b": 2, "c": 1, "d": 1}


@RULES
def test_what_the_op_at_hand_reads_is_not_evicted_for_what_it_lacks(rule):
    """c is computed again for G; p, which G reads too, is by far the cheapest, but q goes."""
    step = Step().make("a").make("c", "a", cost=0.5).make("p").make("q", cost=50)
    step.make("w", cost=100).make("G", "cp", size=0).make("R", "apqw")
    told = "a c p q -c w -q c G -c q R -a -p -q -w"
    assert step.told(step.run(4, rule)) == told


@RULES
def test_what_was_made_by_the_op_at_hand_is_not_evicted_for_its_workspace(rule):
    """b itself is the cheapest when its own workspace finds no room."""
    step = Step().make("a", size=2, cost=9).make("b", cost=0.001, workspace_bytes=2)
    step.make("R", "ab")
    assert step.told(step.run(3, rule)) == "a -a b a R -a -b"


@RULES
def test_where_all_is_pinned_nothing_fits(rule):
    """a and b are read, c is made, and nothing else could go."""
    step = Step().make("a").make("b").make("c", "ab").make("R", "c")
    assert step.told(step.run(3, rule)) == "a b c -a -b R -c"
    with pytest.raises(DoesNotFitError) as caught:
        step.run(2, rule)
    assert caught.value.op == 2


def test_an_op_that_is_wanted_twice_runs_once():
    """G lacks x and y, which one op makes: it is asked for once each."""
    step = Step().make("a").make("xy", "a").make("w", size=3, cost=9).make("V", "w")
    run = step.make("G", "xy").make("A", "a").run(4)
    assert step.told(run) == "a x y -x -y w V -w x y G -x -y A -a"


def test_what_was_recomputed_for_others_goes_at_once():
    """a and b serve c alone the second time, and leave when they have."""
    step = Step().make("a").make("b", "a").make("c", "b").make("w", size=3).make("V", "w")
    run = step.make("G", "c").run(3)
    assert step.told(run) == "a b -a c -b -c w V -w a b -a c -b G -c"


def test_what_dtr_recomputed_for_others_stays_until_the_rule_evicts_it():
    """As above; a and b wait for u, which needs their room."""
    step = Step().make("a").make("b", "a").make("c", "b").make("w", size=3).make("V", "w")
    run = step.make("G", "c").make("u", size=2).make("U", "u").run(3, SINGLE, whole_closure=False)
    assert step.told(run) == "a b -a c -b -c w V -w a b c G -c -a -b u U -u"


def test_dtr_locks_what_an_op_reads_when_its_turn_comes():
    """For G x is made before y: p, which only y is made from, may go for x and come back."""
    step = Step().make("p").make("y", "p").make("a").make("x", "a", workspace_bytes=1)
    step.make("w", size=3).make("V", "w").make("P", "p").make("G", "xy", size=0).make("R", "p")
    told = step.told(step.run(3, SINGLE, whole_closure=False))
    assert told == "p y a -p -y x -a -x w V -w p P a -p x p -a y G -x -y R -p"
    with pytest.raises(DoesNotFitError):
        step.run(3, SINGLE)


def test_what_is_the_only_source_stays_though_it_was_recomputed_for_others():
    """s goes for good while b, made again for c, is there; b when c is the last to be read."""
    step = Step().make("s", recomputable=False).make("b", "s").make("c", "b").make("w", size=2)
    step.make("V", "ws").make("C", "c").make("x", size=2).make("X", "x").make("D", "c")
    step.make("y", size=3).make("Y", "y").make("E", "c")
    told = step.told(step.run(4, SINGLE, whole_closure=False))
    assert told == "s b c -b -c w V -w b c C -s -c x X -x c D -b y Y -y E -c"


def test_what_was_recomputed_for_others_stays_if_the_program_reads_it():
    """As above, but a has a reader to come: it is neither dropped nor made a third time."""
    step = Step().make("a").make("b", "a").make("c", "b").make("w", size=3).make("V", "w")
    run = step.make("G", "c").make("A", "a").run(3)
    assert step.told(run) == "a b c -b -a -c w V -w a b c -b G -c A -a"


def test_what_an_op_made_before_is_no_younger_when_the_op_runs_again():
    """For X the op of x and b runs again; b, untouched the longest, goes for u, and not q."""
    step = Step().make("q").make("a", cost=50).make("xb", "a").make("h").make("Q", "q")
    step.make("w").make("W", "wh").make("X", "x").make("u", size=2).make("U", "u")
    told = step.told(step.make("R", "qab").run(5, SINGLE))
    assert told == "q a x b h Q -x w W -w -h x b X -x -b u U -u x b -x R -q -a -b"


def test_in_place_the_output_takes_the_address_of_a_dying_input():
    """A chain fits where one of its tensors does; without, two must."""
    step = Step().make("a").make("b", "a", inplace="ba").make("c", "b", inplace="cb").make("D", "c")
    assert step.told(step.run(1, inplace=True)) == "a b=a c=b D -c"
    with pytest.raises(DoesNotFitError):
        step.run(1, inplace=False)
    assert step.told(step.run(2, inplace=False)) == "a b -a c -b D -c"


def test_in_place_it_is_the_very_address():
    """Though a smaller hole would hold the output and best fit would take that."""
    step = Step().make("h", size=2).make("k").make("a", size=3).make("H", "h")
    run = step.make("b", "a", size=3, inplace="ba").make("R", "bk").run(9, inplace=True)
    assert step.placed(run) == {"h": 0, "k": 2, "a": 3, "b": 3}


def test_an_input_with_readers_left_keeps_its_address():
    step = Step().make("a").make("b", "a", inplace="ba").make("C", "b").make("D", "a")
    assert step.told(step.run(2, inplace=True)) == "a b C -b D -a"


def test_an_input_that_cannot_be_computed_again_keeps_its_address():
    """It might be needed: only banishing decides when it goes."""
    step = Step().make("a", recomputable=False).make("b", "a", inplace="ba").make("C", "b")
    assert step.told(step.run(2, inplace=True)) == "a b -a C -b"


def test_an_input_pinned_for_another_op_keeps_its_address():
    """
    For G both b and c are made again from a, whose readers in the program are all done.

    b, made first, must leave a to c, which may have its address.
    """
    step = Step().make("a").make("b", "a", inplace="ba").make("c", "a", inplace="ca")
    run = step.make("w", size=3, cost=9).make("V", "w").make("G", "bc").run(3, inplace=True)
    assert step.told(run) == "a b c=a -c -b w V -w a b c=a G -b -c"


def test_one_input_gives_its_address_to_one_output():
    step = Step().make("a").make("bx", "a", inplace="ba xa").make("C", "bx")
    assert step.told(step.run(2, inplace=True)) == "a b=a x C -b -x"


def test_an_output_that_is_there_takes_no_address():
    """For X the op that makes b and x runs again; b has stayed and is made aside this time."""
    step = Step().make("a").make("bx", "a", inplace="ba").make("w", size=3, cost=9).make("V", "w")
    run = step.make("X", "x").make("B", "b").run(4, inplace=True)
    assert step.told(run) == "a b=a x -x w V -w a b x -a X -x B -b"


@RULES
def test_what_cannot_be_computed_again_stays(rule):
    """t is by far the cheapest; v goes."""
    step = Step().make("t", cost=0.001, recomputable=False).make("v", cost=50).make("w", cost=9)
    run = step.make("X", "w").make("R", "tv").run(2, rule)
    assert step.told(run) == "t v -v w X -w v R -t -v"


@RULES
def test_what_is_made_from_a_banished_tensor_stays(rule):
    """t is gone for good, so that u, cheap as it is, cannot be made again; v goes."""
    step = Step().make("t", recomputable=False).make("u", "t").make("v", cost=50)
    run = step.make("w", cost=100).make("X", "w").make("R", "uv").run(2, rule)
    assert step.told(run) == "t u -t v -v w X -w v R -u -v"
    assert step.evictable(run) == "vw"


def test_a_dead_tensor_waits_for_what_is_evicted_and_made_from_it():
    """T is the last to read t, but u has been evicted and is still to be read: t goes after u."""
    step = Step().make("t", recomputable=False).make("u", "t").make("w", size=2, cost=9)
    step.make("X", "w").make("T", "t").make("v").make("U", "u").make("V", "v").make("Z", "uv")
    run = step.run(3)
    assert step.told(run) == "t u -u w X -w T v u -t U V Z -u -v"
    assert step.evictable(run) == "wv"


def test_a_dead_tensor_waits_for_what_is_evicted_further_on():
    """Between t and u lies m, dead and gone itself."""
    step = Step().make("t", recomputable=False).make("m", "t").make("u", "m")
    step.make("w", size=2, cost=9).make("X", "w").make("T", "t").make("Y").make("U", "u")
    assert step.told(step.run(3)) == "t m u -m -u w X -w T Y m -t u -m U -u"


def test_an_online_run_that_may_not_recompute_does_not_fit(monkeypatch):
    tensors = {0: ("input", 8), 1: ("activation", 9), 2: ("activation", 9), 3: ("output", 8)}
    ops = [{"inputs": [0], "outputs": [1]}, {"inputs": [0], "outputs": [2], "workspace_bytes": 9}]
    ops.append({"inputs": [1, 2], "outputs": [3]})
    problem = Problem.from_graph(make_graph(tensors, ops), 1)
    assert solve_coop(problem, Request(18)).placed.cost_us == 4
    monkeypatch.setattr(run, "MAX_RECOMPUTES_PER_OP", 0)
    with pytest.raises(DoesNotFitError):
        solve_coop(problem, Request(18))
