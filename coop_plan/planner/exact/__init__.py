"""Exact planners: mixed-integer and constraint models with proved bounds.

`optimal` (`optimal.py`) is the engine. `auto` (`auto.py`) tries keep-all before it. `checkmate`
(`checkmate.py`) and `monet` (`monet.py`) are the integer programs of their papers, for comparison.
One request of `optimal`, in the order in which the files act:

1. **Start.** `coop-offline` (`planner.heuristic`) makes a plan. `incumbent.py` holds the best plan
   and the best bound and reports changes. `model/program.py` is the problem as the models see it,
   with a tensor per SSA version.
2. **First model.** `model/point_selection.py` selects a few time points. `model/timepoint.py`
   builds the MILP that constrains memory there only (`model/milp.py` holds it).
   `model/transfers.py` adds host copies and copy engines, `model/overwriting.py` the buffers of
   overwritten tensors. `solver/process.py` solves it in a child process, killed at the deadline.
   Its optimum is a valid lower bound.
3. **Readout.** `primal/readout.py` makes a schedule of the solution, through
   `primal/schedule_builder.py`. If it fits everywhere and has a layout, it is a plan, which is
   proved optimal if it is within the tolerance of the bound.
4. **Overflow → refine.** If the readout overflows, `primal/guided_replan.py` makes a plan of nearly
   the same evictions with coop-offline's kernel. `refine.py` adds time points, or cuts of
   recomputes, at the largest overflows: back to 2.
5. **Hard models** are not solved within a small share of the time. `model/paths.py` adds path cuts,
   found by `model/separation.py`, before the model is solved again; on a timeout `primal/lns.py`
   improves its solution by large neighbourhood search. With transfers `dual/background.py` starts a
   process instead, in which `dual/bounding.py` solves relaxations at more and more time points,
   while coop-offline improves the plan.
6. **Layout conflicts.** If a schedule fits but has no layout, the rounds are repeated within
   slightly smaller arenas, which prove nothing.

With variants, the model has columns for the choice of each run. `variants.py` runs the search of
`primal/variant_search.py` on it. With transfers, coop-offline plans the variants found there.

A solver process (`solver/worker.py`) passes the typed jobs of `solver/jobs.py` to OR-Tools' MathOpt
or PuLP (`solver/milp_solvers.py`), PDLP (`solver/pdlp.py`) or HiGHS's simplex
(`solver/simplex.py`).
"""
