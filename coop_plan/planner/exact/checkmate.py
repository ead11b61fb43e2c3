"""checkmate: the integer program of Jain et al., Checkmate, MLSys 2020, section 4, in PuLP.

Symbols are the paper's. Stage t ends with the first run of op t (frontier-advancing); within a
stage ops run in program order, each at most once. Stage n, the end of the step, runs none.

    R[t, i]        op i is computed in stage t
    S[t, d]        tensor d is kept from stage t − 1 into stage t
    U[t, i]        share of the arena in use in stage t once op i has its outputs
    FREE[t, i, d]  tensor d is freed in stage t right after op i

Beyond the paper: S and FREE are per tensor and not per op, as ops have several outputs, and per SSA
version of overwritten tensors. Workspace, outputs outside the arena, in-place pairs and ops that
run once are modelled. Only resident tensors are freed; otherwise the model exceeds its own budget.

The stages are a restriction: a schedule that computes an op twice in one stage, or out of program
order, may be cheaper. The optimum is that of the paper's class and no bound for all schedules, so
the plan states none.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from coop_plan.planner.core.errors import DoesNotFitError, TimeLimitError
from coop_plan.planner.core.memory_bounds import largest_working_set
from coop_plan.planner.core.problem import Problem
from coop_plan.planner.core.schedule import Schedule
from coop_plan.planner.exact.model.milp import Outcome
from coop_plan.planner.exact.model.program import Program
from coop_plan.planner.exact.primal.schedule_builder import ScheduleBuilder
from coop_plan.planner.exact.solver.process import SolverProcess, require
from coop_plan.planner.method import Request, Solution
from coop_plan.planner.placement.layout import lay_out
from coop_plan.schemas import InvalidInputError


@dataclass
class CheckmateModel:
    """The integer program of `program` within `capacity` bytes; `pulp` is the package."""

    program: Program
    capacity: int
    pulp: Any
    integral: bool = True
    lp: Any = None
    r: dict[tuple[int, int], Any] = field(default_factory=dict)
    s: dict[tuple[int, int], Any] = field(default_factory=dict)

    @staticmethod
    def variable_count(program: Program) -> int:
        """Upper bound on the number of variables, computed without building the program."""
        per_op = [2 * len(program.makes[i]) + len(program.reads[i]) + 2 for i in range(program.n)]
        return sum((program.n + 1 - i) * count for i, count in enumerate(per_op))

    def __post_init__(self) -> None:
        self.lp = self.pulp.LpProblem("checkmate", self.pulp.LpMinimize)
        n = self.program.n
        for t in range(n + 1):
            self._variables(t)
        cost = self.program.problem.cost
        # [Objective] Σ C_i · R[t, i], in shares of the base cost.
        base = self.program.problem.base_cost_us or 1.0
        self.lp += self.pulp.lpSum(cost[i] / base * r for (t, i), r in self.r.items() if i < t)
        for t in range(n + 1):
            self._correctness(t)
            self._memory(t)

    def _binary(self, name: str) -> Any:
        kind = self.pulp.LpBinary if self.integral else self.pulp.LpContinuous
        return self.lp.add_variable(name, 0, 1, kind)

    def _variables(self, t: int) -> None:
        program = self.program
        producer = program.problem.producer
        for i in range(min(t + 1, program.n)):
            if i == t:
                self.r[t, i] = 1  # frontier-advancing
            elif program.until[i] >= t and not program.runs_once(i):
                self.r[t, i] = self._binary(f"R_{t}_{i}")
        for i in range(t):
            for d in program.makes[i]:
                assert producer[d] == i
                if program.last_useful[d] >= t:
                    self.s[t, d] = self._binary(f"S_{t}_{d}")

    def _correctness(self, t: int) -> None:
        program, r, s = self.program, self.r, self.s
        producer = program.problem.producer
        # [Constraint] inputs are available: R[t, i] ≤ R[t, producer] + S[t, d].
        for i in range(min(t + 1, program.n + 1)):
            if i < program.n and (t, i) not in r:
                continue
            for d in program.reads[i] if i < program.n else program.read_by_all[i]:
                available = r.get((t, producer[d]), 0) + s.get((t, d), 0)
                self._add(r.get((t, i), 1) - available <= 0)
        for i in range(t):
            for d in program.makes[i]:
                if (t, d) not in s:
                    continue
                # [Constraint] kept tensors were available: S[t, d] ≤ R[t−1, i] + S[t−1, d].
                self._add(s[t, d] - r.get((t - 1, i), 0) - s.get((t - 1, d), 0) <= 0)
                # [Constraint] a kept tensor is not recomputed: R[t, i] + S[t, d] ≤ 1.
                if len(program.makes[i]) == 1 and (t, i) in r:
                    self._add(r[t, i] + s[t, d] <= 1)
        # [Constraint] an overwritten version ends: R[t, i] + S[t+1, d] ≤ 1; no later op reads it.
        for i in range(min(t + 1, program.n)):
            for _, d in program.overwrites[i]:
                if (t, i) in r and (t + 1, d) in s:
                    self._add(r[t, i] + s[t + 1, d] <= 1)

    def _add(self, constraint: Any) -> None:
        """Add a constraint; one between constants must hold."""
        if isinstance(constraint, bool):
            holds = constraint
        elif len(constraint):
            self.lp += constraint
            return
        else:
            holds = constraint.valid()
        if not holds:
            raise DoesNotFitError(largest_working_set(self.program.problem).op)

    def _memory(self, t: int) -> None:
        program, r, s = self.program, self.r, self.s
        size = program.problem.size
        users = program.problem.consumers
        # [Variable] U[t, ·], beginning with the tensors kept into stage t.
        used: Any = self.pulp.lpSum(
            s[t, d] * (size[d] / self.capacity)
            for i in range(t)
            for d in program.makes[i]
            if (t, d) in s
        )
        self._add(used <= 1)
        freed: Any = 0
        for i in range(min(t + 1, program.n)):
            if (t, i) not in r:
                continue
            u = self.lp.add_variable(f"U_{t}_{i}", 0)
            made = sum(size[d] for d in program.makes[i]) / self.capacity
            # [Constraint] U[t, i] = U[t, i−1] − mem_freed + R[t, i] · M_i.
            self._add(u - used + freed - r[t, i] * made == 0)
            free = {}
            for d in dict.fromkeys(program.reads[i] + program.makes[i]):
                if not size[d]:
                    continue
                # [Constraint] FREE[t, i, d] = 1 exactly if op i runs, no later op of the stage
                # reads d, and d is not kept: the paper's num_hazards.
                free[d] = self._binary(f"FREE_{t}_{i}_{d}")
                hazards = [s[t + 1, d]] if (t + 1, d) in s else []
                hazards += [r[t, j] for j in users[d] if i < j <= t and (t, j) in r]
                if t == program.n and d in program.read_by_all[t]:
                    hazards.append(1)
                total = 1 - r[t, i] + self.pulp.lpSum(hazards)
                self._add(1 - free[d] <= total)
                self._add((1 + len(hazards)) * (1 - free[d]) >= total)
            # A recomputed output that was also kept, as only its sibling was needed, ends at once.
            duplicates = self._duplicates(t, i)
            shared = self._inplace_bytes(t, i, free)
            problem = program.problem
            again = [d for d in problem.op_outputs[i] if problem.outside[d]] if i < t else []
            need = (problem.workspace[i] + sum(size[d] for d in again)) / self.capacity
            # [Constraint] U ≤ M_budget, including workspace; addresses shared in place count once.
            self._add(u + r[t, i] * need - shared <= 1)
            freed = self.pulp.lpSum(
                [f * (size[d] / self.capacity) for d, f in free.items()] + [duplicates]
            )
            used = u

    def _duplicates(self, t: int, i: int) -> Any:
        """[Variable] B[t, d]: output d of op i is both kept and recomputed, so it exists twice."""
        terms = []
        for d in self.program.makes[i]:
            if len(self.program.makes[i]) > 1 and (t, d) in self.s and i < t:
                both = self._binary(f"B_{t}_{d}")
                self._add(both <= self.r[t, i])
                self._add(both <= self.s[t, d])
                terms.append(both * (self.program.problem.size[d] / self.capacity))
        return self.pulp.lpSum(terms)

    def _inplace_bytes(self, t: int, i: int, free: dict[int, Any]) -> Any:
        """[Variable] P[t, i, p]: the output takes the address of an input freed after op i."""
        allowed = self.program.problem.inplace[i] if i < t else self.program.inplace_pairs(i)
        pairs = [(out, source) for out, source in allowed if source in free]
        share = {pair: self._binary(f"P_{t}_{i}_{pair[0]}_{pair[1]}") for pair in pairs}
        for (out, source), z in share.items():
            self._add(z <= free[source])
            if (t, out) in self.s:
                self._add(z + self.s[t, out] <= 1)
        for side in (0, 1):
            for d in {pair[side] for pair in pairs}:
                self._add(self.pulp.lpSum(share[p] for p in pairs if p[side] == d) <= 1)
        return self.pulp.lpSum(
            z * (self.program.problem.size[out] / self.capacity) for (out, _), z in share.items()
        )


MAX_VARIABLES = 50_000
"""Programs with more variables are rejected; CBC solves about 10 000 in a minute."""


def limited(request: Request, method: str, variables: int, most: int) -> Request:
    """The request with a deadline: in an hour if it has none, as in the paper.

    Raises:
        InvalidInputError: the method's program has more than `most` variables.
    """
    if variables > most:
        raise InvalidInputError(
            f"{method}'s program has about {variables} variables on this graph, above the limit of"
            f" {most}: use optimal",
            "/method",
        )
    if request.deadline is not None:
        return request
    return replace(request, deadline=time.monotonic() + 3600.0)


def solve_checkmate(problem: Problem, request: Request) -> Solution:
    """The cheapest schedule of Checkmate's class that the solver finds by the deadline.

    Args:
        problem: of at most `MAX_VARIABLES` variables.
        request: with the switch `integral` off, the relaxation is rounded; `solver` is a name in
            `pulp.listSolvers()`, for instance `GUROBI_CMD`.

    Raises:
        InvalidInputError: too many variables, or a solver that PuLP does not have.
        DoesNotFitError: no schedule exists, or none that could be placed was found.
        TimeLimitError: none was found in time.
    """
    require("pulp")
    program = Program.of(problem)
    request = limited(request, "checkmate", CheckmateModel.variable_count(program), MAX_VARIABLES)
    assert request.deadline is not None
    integral = "integral" not in request.off
    solver = request.solver or "PULP_CBC_CMD"
    # For rounding, a share of the budget is withheld from the relaxation.
    allowances = (0.0,) if integral else (0.0, 0.1, 0.2, 0.3)
    with SolverProcess() as process:
        for allowance in allowances:
            capacity = int(program.problem.rounded(request.arena_bytes) * (1 - allowance))
            schedule = _solve(process, program, capacity, request, integral, solver)
            placed = lay_out(schedule, request.arena_bytes).placed
            if placed.arena_bytes <= request.arena_bytes:
                return Solution(program.versions.placed_to_original(placed))
    raise DoesNotFitError(largest_working_set(problem).op)


def _solve(
    process: SolverProcess,
    program: Program,
    capacity: int,
    request: Request,
    integral: bool,
    solver: str,
) -> Schedule:
    import pulp

    installed = pulp.listSolvers(onlyAvailable=True)
    if solver not in installed:
        message = f"PuLP solver '{solver}' is not installed, but {', '.join(installed)}"
        raise InvalidInputError(message, "/solver")
    assert request.deadline is not None
    infeasible = DoesNotFitError(largest_working_set(program.problem).op)
    if capacity < largest_working_set(program.problem).bytes:
        raise infeasible
    # Memory rows are divided by the capacity. An arena of 0 bytes holds tensors of 0 bytes only.
    model = CheckmateModel(program, max(capacity, 1), pulp, integral)
    answer = process.solve_pulp(model.lp.toDict(), request.deadline, solver)
    if answer.outcome is Outcome.INFEASIBLE:
        raise infeasible
    values = answer.values
    if values is None:
        raise TimeLimitError("time limit reached before checkmate found any plan")
    chosen = {key for key, s in model.s.items() if _value(s, values) > 0.5}
    if integral:
        computed = {key for key, r in model.r.items() if _value(r, values) > 0.5}
    else:
        computed = _complete_rounding(program, chosen, set(model.r), infeasible)
    built = ScheduleBuilder(program)
    for t in range(program.n + 1):
        for i in range(min(t + 1, program.n)):
            if (t, i) in computed:
                built.run(i, t)
        kept = {d for stage, d in chosen if stage == t + 1}
        built.retain(kept if t < program.n else set(program.read_by_all[t]))
    return built.schedule()


def _value(variable: Any, values: dict[str, float]) -> float:
    """Value of a solved variable; one that no constraint contains is free to be 0."""
    return float(variable if isinstance(variable, int) else values.get(variable.name, 0.0))


def _complete_rounding(
    program: Program,
    kept: set[tuple[int, int]],
    possible: set[tuple[int, int]],
    infeasible: DoesNotFitError,
) -> set[tuple[int, int]]:
    """Phase two of the rounding: the least R for a rounded S; both change where they must."""
    producer = program.problem.producer
    computed = {(i, i) for i in range(program.n)}

    def require(t: int, d: int) -> None:
        if (t, d) in kept or (t, producer[d]) in computed:
            return
        if (t, producer[d]) in possible:
            computed.add((t, producer[d]))
        elif producer[d] < t:
            kept.add((t, d))  # it cannot be recomputed
        else:
            raise infeasible

    for t in range(program.n, -1, -1):
        for d in sorted(d for stage, d in kept if stage == t + 1):
            require(t, d)
        if t == program.n:
            for d in program.read_by_all[t]:
                require(t, d)
        for i in range(min(t, program.n - 1), -1, -1):
            if (t, i) in computed:
                for d in program.reads[i]:
                    require(t, d)
                if any((t + 1, d) in kept for _, d in program.overwrites[i]):
                    raise infeasible
    return computed
