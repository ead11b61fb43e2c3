"""
Mutation check: for each idea of the core one way to break it, and the tests that must see it.

    python -m tests.mutations [NAME...]

Each mutation is made in a copy of the repository, where its tests are then run. Exit status 1 if
one survives, if its text is not found exactly once, or if its tests fail without it as well.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]

LIMIT_S = 3600
"""A run of tests that takes longer hangs; generous, because the machine may be busy."""

ALL_PASSED, SOME_FAILED, ERROR = 0, 1, 3
"""Exit statuses of pytest; all others mean that it could not run the tests. A fixture that fails,
for which pytest has `SOME_FAILED` too, is an `ERROR` here."""


@dataclass(frozen=True)
class Mutation:
    """
    `old` becomes `new`; at least one of `tests` (files or pytest ids) must fail.

    `where` is a file or a folder: `old` may move within it, but must occur in it exactly once.
    Without `compiled` the kernels are run as Python, which is faster for a few small tests.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    compiled: bool = False


PLANS = "tests/planner/test_online_plans.py"
RUN = "tests/planner/test_online_run.py"
SCHEDULE = "tests/planner/core/test_schedule.py"

MUTATIONS = (
    Mutation(  # Coop evicts as DTR does
        "window",
        "planner/online",
        "cheapest_window(s, size) if rule.window else cheapest_tensor(",
        "cheapest_tensor(",
        (PLANS,),
    ),
    Mutation(  # a component that another one joins does not grow
        "e-star",
        "planner/online",
        "s.part[root].cost_us += s.part[joined].cost_us",
        "s.part[root].cost_us += 0.0",
        ("tests/planner/test_online_neighbours.py", PLANS),
    ),
    Mutation(  # what the op at hand reads may be evicted
        "pins",
        "planner/online",
        "s.tensor[t].pins > 0 or not s.tensor[t].is_evictable",
        "not s.tensor[t].is_evictable",
        (RUN, PLANS),
    ),
    Mutation(  # a buffer reaches one unit into the one above
        "placement-overlap",
        "planner/placement",
        "at = offsets[j] + height[j]",
        "at = offsets[j] + height[j] - 1",
        ("tests/planner/test_placement.py::test_every_constraint_is_kept",),
    ),
    Mutation(  # after its first restart an annealing restarts at every check
        "restart-streak",
        "planner/search",
        "self.load(best[1])\n                    streak = 0",
        "self.load(best[1])",
        ("tests/planner/test_annealing.py",),
    ),
    Mutation(  # an output takes over an input that another op of the closure still reads
        "in-place-guard",
        "planner/online",
        "and s.tensor[source].pins == 1",
        "and s.tensor[source].pins >= 1",
        (RUN,),
    ),
    Mutation(  # the verifier forgets the outputs outside the arena
        "verifier-peak",
        "planner/verifier",
        "peak = resident + arena + outside",
        "peak = resident + arena",
        ("tests/planner/test_verifier.py",),
    ),
    Mutation(  # two copies on the host lie on one another
        "host-overlap",
        "planner/verifier",
        "if start < end and offset < stop:",
        "if start < end and offset < stop - 1:",
        ("tests/planner/test_verifier.py",),
    ),
    Mutation(  # a copy on the host ends when it was made
        "host-lifetime",
        "planner/core",
        "upper[pending[t.moved[e]]] = e + 1",
        "upper[pending[t.moved[e]]] = upper[pending[t.moved[e]]]",
        (f"{SCHEDULE}::test_copies_on_the_host_share_addresses_once_they_are_read",),
    ),
    Mutation(  # a copy does not wait for the one before it
        "engine-order",
        "planner/core",
        "self.free_us = max(now_us, self.free_us) + self.duration_us(size)",
        "self.free_us = now_us + self.duration_us(size)",
        (f"{SCHEDULE}::test_an_engine_takes_its_copies_in_order",),
    ),
    Mutation(  # nobody waits for copies
        "wait-for-copies",
        "runtime",
        "timing = self._engines.wait(handle)",
        "timing = None",
        ("tests/runtime/test_swap.py::test_losses_and_parameters_equal_eager",),
        compiled=True,
    ),
    Mutation(  # a random op that runs again draws other numbers
        "rng-replay",
        "runtime",
        "generator.set(self.states[op])",
        "generator.state()",
        ("tests/runtime/test_training.py::test_losses_and_parameters_equal_eager",),
        compiled=True,
    ),
    Mutation(  # whether an op may run again does not enter
        "fingerprint",
        "schemas/fingerprint.py",
        "op.recomputable,",
        "",
        ("tests/schemas/test_fingerprint.py::test_structure_enters",),
    ),
    Mutation(  # every request is solved, whoever else asks the same
        "single-flight",
        "api",
        "job = self._running.get(job_id)",
        "job = None",
        ("tests/api/test_jobs.py::test_identical_questions_are_one_solve",),
    ),
    Mutation(  # GiB are GB
        "budget-parsing",
        "schemas/units.py",
        "= 1024**_power",
        "= 1000**_power",
        ("tests/schemas/test_units.py",),
    ),
    Mutation(  # the bound writes back what the host has updated at home
        "home-updated-on-host",
        "planner/exact/model/homes.py",
        '*self._sum("O", t, first, self.last), *on_host, home]',
        '*self._sum("O", t, first, self.last), home]',
        ("tests/planner/test_homes_bound.py",),
    ),
    Mutation(  # the bound fetches residents that have no home
        "home-of-none",
        "planner/exact/model/homes.py",
        'self._row([*self._sum("P", t, 0, k), *not_read, *absent], 0.0)',
        'self._row([*self._sum("P", t, 0, k), *not_read], 1.0)',
        ("tests/planner/test_homes_bound.py",),
    ),
)


def copy_repository(target: Path) -> None:
    """What git knows or would add, links as links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def sources(place: Path) -> Iterator[Path]:
    """The file, or the modules in the folder."""
    yield from sorted(place.rglob("*.py")) if place.is_dir() else (place,)


def mutate(mutation: Mutation, root: Path) -> str | None:
    """Make the mutation under `root`; what is wrong with it, if it cannot be made."""
    place = root / mutation.where
    if not place.exists():
        return f"there is no {mutation.where}"
    texts = {path: path.read_text() for path in sources(place)}
    found = sum(text.count(mutation.old) for text in texts.values())
    if found != 1:
        return f"{found} times in {mutation.where}: {mutation.old}"
    for path, text in texts.items():
        if mutation.old in text:
            path.write_text(text.replace(mutation.old, mutation.new))
    return None


def run_tests(mutation: Mutation, root: Path) -> tuple[int, str]:
    """pytest's exit status on the mutation's tests, and the test that failed or the last words."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["NUMBA_DISABLE_JIT"] = "0" if mutation.compiled else "1"
    plain = ("-x", "-q", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *mutation.tests],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == SOME_FAILED and failed:
        return SOME_FAILED, failed[1]
    status = ERROR if done.returncode == SOME_FAILED else done.returncode
    return status, (done.stdout + done.stderr)[-2000:]


def check(mutation: Mutation, *, sound: dict[tuple[str, ...], bool]) -> bool:
    """Whether the mutation is killed; `sound` remembers which tests pass without any."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_repository(root)
        if mutation.tests not in sound:
            status, said = run_tests(mutation, root)
            sound[mutation.tests] = status == ALL_PASSED
            if status != ALL_PASSED:
                click.echo(said)
        if not sound[mutation.tests]:
            click.echo(f"BROKEN    {mutation.name}: its tests fail without it")
            return False
        wrong = mutate(mutation, root)
        if wrong is not None:
            click.echo(f"NOT MADE  {mutation.name}: {wrong}")
            return False
        status, said = run_tests(mutation, root)
    word = {ALL_PASSED: "SURVIVED", SOME_FAILED: "killed"}.get(status, "BROKEN")
    click.echo(f"{word:<9} {mutation.name}: {said if word != 'SURVIVED' else mutation.tests}")
    return word == "killed"


@click.command()
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Check the named mutations, all of them by default."""
    unknown = set(names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        raise click.UsageError(f"unknown: {', '.join(sorted(unknown))}")
    sound: dict[tuple[str, ...], bool] = {}
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    killed = [check(mutation, sound=sound) for mutation in chosen]
    click.echo(f"{sum(killed)} of {len(killed)} killed")
    sys.exit(not all(killed))


if __name__ == "__main__":
    main()
