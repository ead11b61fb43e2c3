"""Plans whose ops run in any order that they may, for what runs them."""

import itertools
import time

import numpy as np

from coop_plan.planner.core.arrays import to_arrays, to_program
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.method import Solution
from coop_plan.planner.placement.layout import lay_out
from coop_plan.planner.planning import verified_plan
from coop_plan.planner.search.compute.metropolis import metropolis
from coop_plan.planner.search.compute.params import MoveParams
from coop_plan.planner.search.compute.sequence import current_sequence, new_state, set_sequence

ANYWHERE = MoveParams(first_run_chance=0.7, drift_chance=1.0)

STEPS = 3000


def shuffled_plan(graph, options, *, seed=0):
    """The ops of a step, and some of them again, in an order that a Metropolis search ends at.

    The search weighs measured costs. Of few ops it may end at the program's order: then it has
    another seed.
    """
    plans = (plan_at_seed(graph, options, 1000 * attempt + seed) for attempt in itertools.count())
    return next(plan for plan in plans if is_shuffled(graph, plan))


def plan_at_seed(graph, options, seed):
    problem = Problem.from_graph(graph, options.alignment, options.outputs)
    program = np.arange(problem.op_count)
    state = new_state(problem, 3 * program.size + 100, ANYWHERE)
    set_sequence(state, program)
    temperature = problem.base_cost_us / problem.op_count
    metropolis(to_program(to_arrays(problem)), state, STEPS, 1 << 60, temperature, 1.0, seed)
    placed, _ = lay_out(Schedule.of(problem, current_sequence(state)), work=0)
    budget = problem.fixed_bytes + placed.arena_bytes
    return verified_plan(graph, Solution(placed), options, budget, time.monotonic())


def is_shuffled(graph, plan):
    """Whether ops run for the first time in another order than the program's."""
    first = list(dict.fromkeys(step.op for step in plan.steps if hasattr(step, "op")))
    return first != [op.id for op in graph.ops]
