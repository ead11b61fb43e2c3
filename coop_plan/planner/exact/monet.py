"""monet: the integer program of Shah et al., Memory Optimization for Deep Networks, ICLR 2021.

Stage t ends with the first run of op t. The forward pass runs once (section 3). In a stage of the
backward pass, ops of the forward pass may be recomputed before op t, in program order, each at most
once and each run in a variant of its own (section 4.2).

    δ[t, v]     variant v runs in stage t: the paper's r and δ as one, Σ δ ≤ 1 by op
    s[t, d]     tensor d is kept from stage t − 1 into stage t
    N[t, i, d]  tensor d is needed in stage t by op i or later, or kept beyond the stage
    m[t, i, d]  tensor d is resident in stage t while op i runs, and no output of it
    z[t, v, p]  variant v writes its output over an input in stage t, as pair p allows

Minimise Σ cost[v] · δ[t, v]. Beyond the paper: any graph, tensors that only some variants make, and
ops that run once. The class is a restriction, so the optimum is no bound for all schedules, and the
plan states none.
"""

from dataclasses import dataclass, field
from math import inf

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import working_set_bound, working_sets
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.core.ssa import SsaForm
from coop_plan.planner.exact.checkmate import limited
from coop_plan.planner.exact.model.milp import Milp, Outcome, Terms
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.solver.process import SolverProcess
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out


@dataclass
class MonetModel:
    """The integer program within `capacity` bytes, rounded up."""

    program: Program
    capacity: int
    milp: Milp = field(default_factory=Milp)
    delta: dict[tuple[int, int], int] = field(default_factory=dict)
    s: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def variable_count(program: Program) -> int:
        """Estimate of the number of variables, computed without building the program."""
        tensors = len(program.last_useful)
        return sum((1 + len(_rerunnable(program, t))) * 2 * tensors for t in range(program.n))

    def __post_init__(self) -> None:
        problem, program = self.program.problem, self.program
        unit = problem.base_cost_us or 1.0
        for t in range(program.n):
            for op in (*_rerunnable(program, t), t):
                for v in program.choices[op]:
                    self.delta[t, v] = self.milp.binary(problem.variants[v].cost_us / unit)
            for d, last in enumerate(program.last_useful):
                if 0 <= problem.producer[d] < t <= last:
                    self.s[t, d] = self.milp.binary()
        for d in program.read_by_all[program.n]:  # the end of the step reads them
            self.s[program.n, d] = self.milp.column(1.0, 1.0, 0.0, integer=True)
        for t in range(program.n):
            self._correctness(t)
            self._memory(t)
        for d in program.read_by_all[program.n]:
            self._kept(program.n, d)

    def made(self, t: int, d: int) -> Terms:
        """Terms of: stage t makes tensor d."""
        variants = self.program.problem.variants
        makers = self.program.choices[self.program.problem.producer[d]]
        return [
            (self.delta[t, v], 1.0)
            for v in makers
            if (t, v) in self.delta and d in variants[v].outputs
        ]

    def available(self, t: int, d: int) -> Terms:
        """Terms of: stage t has tensor d, kept or made in it."""
        return [*self._column(t, d), *self.made(t, d)]

    def _column(self, t: int, d: int) -> Terms:
        return [(self.s[t, d], 1.0)] if (t, d) in self.s else []

    def _correctness(self, t: int) -> None:
        program = self.program
        # [Constraint] Σ δ = 1 for the op whose stage it is, ≤ 1 for recomputes.
        for op in (*_rerunnable(program, t), t):
            columns = [(self.delta[t, v], 1.0) for v in program.choices[op]]
            self.milp.row(columns, float(op == t), 1.0)
            # [Constraint] inputs are available: δ[t, v] ≤ s[t, d] + Σ δ[t, producers of d].
            for v in program.choices[op]:
                for d in program.reads[v]:
                    available = self.available(t, d)
                    self.milp.row([*available, (self.delta[t, v], -1.0)], 0.0, inf)
        for stage, d in [key for key in self.s if key[0] == t]:
            self._kept(stage, d)

    def _kept(self, t: int, d: int) -> None:
        # [Constraint] kept tensors were available: s[t, d] ≤ s[t−1, d] + Σ δ[t−1, producers of d].
        self.milp.row([*self.available(t - 1, d), (self.s[t, d], -1.0)], 0.0, inf)
        if self.program.problem.overwritten[d]:  # never recomputed
            self.milp.row([(self.s[t, d], 1.0)], 1.0, 1.0)

    def _memory(self, t: int) -> None:
        program, milp = self.program, self.milp
        problem, need = program.problem, working_sets(program.problem)
        unit = max(self.capacity, 1)
        ops = (*_rerunnable(program, t), t)
        # [Variable] N, from the end of the stage back.
        needed: dict[int, int] = {}
        for d, last in enumerate(program.last_useful):
            if problem.producer[d] <= t < last and (t + 1, d) in self.s:
                needed[d] = self.s[t + 1, d]
        for op in reversed(ops):
            after, readers = dict(needed), dict[int, list[int]]()
            for v in program.choices[op]:
                for d in program.reads[v]:
                    readers.setdefault(d, []).append(self.delta[t, v])
            for d, columns in readers.items():
                if program.unconstrained[d]:
                    continue
                needed[d] = milp.column(0.0, 1.0, 0.0, integer=False)
                for column in [*columns, *([after[d]] if d in after else [])]:
                    milp.row([(needed[d], 1.0), (column, -1.0)], 0.0, inf)
            # [Constraint] m ≥ s + N − 1 and m ≥ Σ δ + N − 1, for tensors made before the op.
            weights: dict[int, float] = {}
            for d, column in needed.items():
                if program.unconstrained[d]:
                    continue
                made_before = self.made(t, d) if problem.producer[d] < op else []
                for terms in filter(None, (self._column(t, d), made_before)):
                    m = milp.column(0.0, 1.0, 0.0, integer=False)
                    row = [(m, 1.0), (column, -1.0), *((c, -a) for c, a in terms)]
                    milp.row(row, -1.0, inf)
                    weights[m] = problem.size[d]
            # [Constraint] Σ bytes of residents + outputs + workspace of the op ≤ capacity.
            for v in program.choices[op]:
                variant = problem.variants[v]
                taken = problem.rounded(variant.workspace_bytes)
                taken += sum(problem.size[d] for d in variant.makes)
                if op < t:
                    taken += need.rerun[v] - need.first[v]
                weights[self.delta[t, v]] = taken
                self._inplace(t, v, after, weights)
            terms = [(c, w / unit) for c, w in weights.items()]
            milp.row(terms, -inf, self.capacity / unit)

    def _inplace(self, t: int, v: int, after: dict[int, int], weights: dict[int, float]) -> None:
        """[Variable] z[t, v, p]: the output takes the address of an input that the run ends."""
        milp, problem = self.milp, self.program.problem
        pairs = [p for p in problem.variants[v].inplace if p[1] in self.program.reads[v]]
        z = {pair: milp.binary() for pair in pairs if not problem.outside[pair[0]]}
        for (out, source), column in z.items():
            weights[column] = -problem.size[out]
            milp.row([(self.delta[t, v], 1.0), (column, -1.0)], 0.0, inf)
            if source in after:
                milp.row([(column, 1.0), (after[source], 1.0)], -inf, 1.0)
        milp.match(z.items())


def _rerunnable(program: Program, t: int) -> list[int]:
    """Forward ops that may be recomputed in stage t of the backward pass, in program order."""
    problem = program.problem
    phases = [op.phase for op in problem.graph.ops]
    begin = next((i for i, phase in enumerate(phases) if phase != "forward"), 0)
    if t < begin:
        return []
    return [
        op
        for op in range(min(t, begin) if begin else t)
        if all(program.until[v] >= t for v in program.choices[op])
        and not any(
            problem.overwritten[d]
            for v in program.choices[op]
            for d in (*problem.variants[v].inputs, *problem.variants[v].outputs)
        )
        and problem.graph.ops[op].recomputable
    ]


def solve_monet(problem: Problem, request: Request) -> Solution:
    """The cheapest schedule of MONeT's class that the solver finds by the deadline.

    Raises:
        InvalidInputError: the program has more than 100 000 variables.
        DoesNotFitError: no schedule exists, or its layout exceeds the arena.
        TimeLimitError: no schedule was found in time.
    """
    program = Program.of_versions(SsaForm.unchanged(problem), variants=True)
    request = limited(request, "monet", MonetModel.variable_count(program), 100_000)
    assert request.deadline is not None
    infeasible = DoesNotFitError(working_set_bound(problem).op)
    capacity = problem.rounded(request.arena_bytes)
    if working_set_bound(problem).bytes > capacity:
        raise infeasible
    model = MonetModel(program, capacity)
    with SolverProcess() as process:
        answer = process.solve(model.milp, request.deadline)
    if answer.outcome is Outcome.INFEASIBLE:
        raise infeasible
    values = answer.values
    if values is None:
        raise TimeLimitError("time limit reached before monet found any plan")
    runs = [
        v
        for t in range(program.n)
        for op in (*_rerunnable(program, t), t)
        for v in program.choices[op]
        if values[model.delta[t, v]] > 0.5
    ]
    placed = lay_out(Schedule.of(problem, runs), request.arena_bytes).placed
    if placed.arena_bytes > request.arena_bytes:
        raise infeasible
    return Solution(placed)
