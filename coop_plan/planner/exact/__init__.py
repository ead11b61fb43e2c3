"""
Exact planners: mixed-integer and constraint models with proved bounds.

`optimal` is the engine, in `optimal.py`; `auto` (`auto.py`) tries keep-all before it; `checkmate`
(`checkmate.py`) is the integer program of the paper, a method of its own for comparison. What
`optimal` does for one request, in the order in which the files act:

1. **Start.** `coop-offline` (`planner.heuristic`) makes a plan. `incumbent.py` holds the best plan
   and the best bound from here on and tells the caller when they move. `model/program.py` is the
   problem as the models see it, with a tensor for each version of what ops overwrite.
2. **First model.** `model/points.py` chooses a few time points, `model/timepoint.py` builds the
   MILP that checks memory there only (`model/milp.py` holds it; with a link, `model/transfers.py`
   adds what is on the host and what the copy engines have time for; `model/overwriting.py`, that
   each run which overwrites a tensor takes a buffer), and `solver/process.py` has it solved in a
   child process, which it kills at the deadline. Its optimum is a lower bound for good.
3. **Readout.** `primal/readout.py` makes a schedule of the solution, through
   `primal/schedule_builder.py`. If it fits everywhere, `primal/packing.py` looks for a layout, and
   a schedule with a layout is a plan: within the tolerance of the bound it is proved optimal.
4. **Overflow → refine.** Where the readout needs more than there is, `primal/follow.py` makes a
   plan of it with coop-offline's kernel, which evicts what the readout evicts until all fits.
   `refine.py` adds the time points, or the cuts of single recomputes, at which it overflows most:
   back to 2.
5. **Hard models**, which are not solved within a small share of the time:
   a. with a wide gap, `dual/background.py` starts a process beside the search, in which
      `dual/bounding.py` solves relaxations at more and more time points for better bounds, while
      coop-offline looks for better plans;
   b. `model/paths.py` adds path cuts, found by `model/separation.py`, to the relaxation, and then
      the model is solved again; if time runs out, `primal/lns.py` improves its solution by large
      neighbourhood search;
   c. `primal/fix_and_refine.py` leads from that solution to a plan: it fixes what is resident, has
      `primal/repair.py` mend segments that overflow, and solves windows anew where that fails.
6. **Layouts.** Where a schedule fits but has no layout, the rounds are repeated within slightly
   smaller arenas, which prove nothing.
7. **Joint model.** On tiny graphs `primal/intervals.py` at last decides eviction and layout as one,
   in CP-SAT.

A solver's process (`solver/worker.py`) takes the typed jobs of `solver/jobs.py` to OR-Tools'
MathOpt or PuLP (`solver/milp_solvers.py`), PDLP (`solver/pdlp.py`) or CP-SAT (`solver/cp_sat.py`).
How long each step may take, how many of what there are at once: `params.py`.
"""
