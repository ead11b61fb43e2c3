"""Random loops, eager and planned, in a process with `outside_counter.cpp` in front of libc.

    ITERATIONS=300 pytest tests/runtime/test_iterations.py -k random_loops

runs 300 loops of a new seed; else the same 20 run each time. A failure prints the seed, and
`start(folder, "300", "SEED")` runs the same loops.
"""

import contextlib
import copy
import ctypes
import gc
import logging
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.device.arena import Memory, process_bytes
from coop_plan.runtime.execute.arena_pool import release
from coop_plan.runtime.iteration.recorder import TOLERANCE, IterationRecorder

ROOT = Path(__file__).parents[2]
PAGE = 4096
WIDTHS = (16, 24, 32)
ROWS = (48, 40)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


def start(folder, examples, *seeds):
    """Run the loops in a process that the counter is loaded into."""
    run_counted(folder, f"from {__name__} import main; main{(examples, *seeds)}")


def run_counted(folder, code):
    """Run code in a process that the counter is loaded into."""
    library = folder / "outside_counter.so"
    source = Path(__file__).with_name("outside_counter.cpp")
    build = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(build, check=True)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr  # of what Dynamo's caches hold until the end


def net(width, depth=3):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = net(width, 2), net(width, 2)

    def forward(self, x):
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(h)


EXCESS = re.compile(
    r"'([^']*)'(?:, it|, the graphs of one iteration)?"
    r" used ([\d.]+) (\w+) of (?:its|their) budget of ([\d.]+) (\w+)"
)


def lines_told(messages):
    """(step, bytes used, budget) of each line that told an excess."""
    return [
        (step, float(used) * UNITS[unit], float(budget) * UNITS[other])
        for step, used, unit, budget, other in EXCESS.findall("\n".join(messages))
    ]


def told_excess(messages):
    """Largest excess in bytes that a line told of each step."""
    found = {}
    for step, used, budget in lines_told(messages):
        found[step] = max(used - budget, found.get(step, 0.0))
    return found


def told_bytes(messages, names, budget):
    """Most bytes that a line told for steps with these names, and at most this budget."""
    lines = (line for line in lines_told(messages) if line[0] in names and line[2] <= budget)
    return max((used for _, used, _ in lines), default=0.0)


def check_idle_memories(number):
    """Allocate beside random idle memories: their pages go before what takes their bytes comes."""
    draw, library = random.Random(number), Peak.library
    for _ in range(100):
        size, slack = draw.randint(1, 20) * PAGE, draw.randint(0, 4 * PAGE)
        memory = Memory()
        memory.reserve(size)
        start = library.outside_bytes()
        memory.release_above(process_bytes()[0] + slack)
        library.outside_reset()
        made = torch.empty(draw.randint(1, 24 * PAGE), dtype=torch.uint8)
        beyond = library.outside_peak(ctypes.byref(ctypes.c_long())) - start
        assert beyond <= max(slack, made.nbytes - size) + PAGE, (size, slack, made.nbytes, beyond)


class Told(logging.Handler):
    """Messages of the project. Most are told once."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logging.getLogger("coop-plan").addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


class Peak:
    """Bytes of PyTorch's allocator and of arenas, above those at the start."""

    library = ctypes.CDLL(None)

    def __init__(self, parameters):
        gc.collect()
        release()
        self.start = self.library.outside_bytes() - sum(p.nbytes for p in parameters)

    def during(self, run):
        """Peak; of each mapping that counts, less than a page was requested by nobody."""
        self.library.outside_reset()
        run()
        mappings = ctypes.c_long()
        peak = self.library.outside_peak(ctypes.byref(mappings))
        return peak - self.start, mappings.value


for name in ("outside_bytes", "outside_peak"):
    with contextlib.suppress(AttributeError):  # the module is imported without the library
        getattr(Peak.library, name).restype = ctypes.c_long


@st.composite
def orders(draw):
    """Halves of one iteration: ("F", loss, width, number of graphs, rows) and ("B", loss, retains).

    A backward that retains the graph is followed by another one of its loss, at once or later.
    """
    losses = draw(st.integers(1, 3))
    halves, begun, waiting = [], 0, []
    while begun < losses or waiting:
        last = begun == losses
        if not last and (len(waiting) < 2 or draw(st.booleans())):
            width = draw(st.sampled_from(WIDTHS))
            halves.append(("F", begun, width, draw(st.integers(1, 2)), draw(st.sampled_from(ROWS))))
            waiting.append(begun)
            begun += 1
        else:
            loss = draw(st.sampled_from(waiting))
            waiting.remove(loss)
            halves.append(("B", loss, draw(st.integers(0, 7)) == 7))
    for half in [half for half in halves if half[0] == "B" and half[2]]:
        at = draw(st.integers(halves.index(half) + 1, len(halves)))
        halves.insert(at, ("B", half[1], False))
    return tuple(halves)


@dataclass(frozen=True)
class Iteration:
    """One iteration: its halves, what is around it, and the half at which an exception ends it.

    `evaluates` is "" for no evaluation before, "no_grad", or "kept" for one whose result is kept,
    with its graph, until the next. The exception comes before half `stop`, or within it.
    """

    halves: tuple
    holds: bool
    evaluates: str
    stop: int | None
    within: bool

    @property
    def regular(self):
        """True if its forwards run once as soon as it is planned."""
        retains = any(half[0] == "B" and half[2] for half in self.halves)
        return self.stop is None and self.evaluates != "kept" and not retains


@st.composite
def loops(draw):
    phases = draw(st.lists(orders(), min_size=1, max_size=2, unique=True))
    iteration = st.builds(
        Iteration,
        st.sampled_from(phases),
        st.booleans(),
        st.sampled_from(["", "", "no_grad", "kept"]),
        st.one_of(st.none(), st.none(), st.none(), st.integers(1, 4)),
        st.booleans(),
    )
    return draw(st.lists(iteration, min_size=2, max_size=8))


class WithinBackwardError(Exception):
    """Raised by a hook."""


def fail(_):
    raise WithinBackwardError


class Runner:
    """The nets, eager or compiled."""

    def __init__(self, nets, steps):
        self.nets, self.steps = nets, steps
        self.kept = None

    def run(self, iteration):
        losses, first, found = {}, {}, []
        for i, half in enumerate(iteration.halves):
            stops = i == iteration.stop
            if stops and not (iteration.within and half[0] == "B"):
                break  # an exception, after which all is dropped
            if half[0] == "B":
                loss = losses[half[1]] if half[2] else losses.pop(half[1])
                if stops:
                    first[half[1]].register_hook(fail)
                    with contextlib.suppress(WithinBackwardError):
                        loss.backward()
                    break
                loss.backward(retain_graph=half[2])
                continue
            _, loss, width, length, rows = half
            h = torch.linspace(-1, 1, rows * width).reshape(rows, width) + loss
            for _ in range(length):
                h = torch.relu(self.steps[width](h))
                first.setdefault(loss, h)
            losses[loss] = h.square().mean()
            found.append(losses[loss].detach())
        return found

    def evaluate(self, iteration):
        _, _, width, _, rows = iteration.halves[0]
        with torch.set_grad_enabled(iteration.evaluates == "kept"):
            self.kept = self.steps[width](torch.ones(rows, width))

    def gradients(self):
        return [p.grad for part in self.nets.values() for p in part.parameters()]


_compiled = {}


def runners(budget, dynamic):
    """One eager and one compiled runner of equal nets, compiled once for all examples."""
    if budget not in _compiled:
        torch.manual_seed(0)
        nets = {width: net(width) for width in WIDTHS[1:]} | {WIDTHS[0]: Broken(WIDTHS[0])}
        planned = copy.deepcopy(nets)
        options = {"budget": budget}
        steps = {
            width: torch.compile(part, backend="coop", dynamic=dynamic, options=options)
            for width, part in planned.items()
        }
        for width, step in steps.items():  # compiling takes more
            for rows in ROWS:
                step(torch.ones(rows, width)).sum().backward()
                step(torch.ones(rows, width, requires_grad=True)).sum().backward()
        _compiled[budget] = Runner(nets, nets), Runner(planned, steps)
    return _compiled[budget]


def widths_of(halves):
    return {half[2] for half in halves if half[0] == "F"}


class Halves:
    """Budgets of the plans by which halves ran since the last look, and names of their steps."""

    def __init__(self):
        self._found = set()
        measure = IterationRecorder.measure

        def noted(recorder, invocation):
            self._found.add((invocation.compiled.budget_bytes, invocation.name))
            return measure(recorder, invocation)

        IterationRecorder.measure = noted

    def look(self):
        found, self._found = self._found, set()
        budgets, names = zip(*found, strict=True)
        return max(budgets), names


def forwards_again():
    return sum(report.forwards_again for report in runtime.reports())


def run_loop(of, loop, told, halves_run):
    """Run a loop both ways and check each iteration."""
    eager, planned = runners(*of)
    for runner in (eager, planned):
        runner.kept = None
        for part in runner.nets.values():
            part.zero_grad()
    peak = Peak([p for part in planned.nets.values() for p in part.parameters()])
    times, first_nets = {}, {}
    for iteration in loop:
        first_nets.setdefault(iteration.halves[0][2], set()).add(iteration.halves)
    for number, iteration in enumerate(loop):
        halves = iteration.halves
        ran = halves[: iteration.stop]  # but perhaps the backward that an exception ended
        if not iteration.holds:
            for runner in (eager, planned):
                for part in runner.nets.values():
                    part.zero_grad()
        before, found = forwards_again(), []
        unused = [p for w in set(WIDTHS) - widths_of(ran) for p in planned.nets[w].parameters()]
        others = [*unused, *(p.grad for p in unused), *eager.gradients()]
        other_bytes = sum(value.nbytes for value in others if value is not None)

        def run(iteration=iteration, found=found):
            if iteration.evaluates:
                planned.evaluate(iteration)
            found.extend(planned.run(iteration))

        used, mappings = peak.during(run)
        wanted = eager.run(iteration)
        assert all(map(torch.equal, found, wanted)), f"iteration {number}: other losses"
        for ours, theirs in zip(planned.gradients(), eager.gradients(), strict=True):
            assert (ours is None) == (theirs is None), f"iteration {number}: a gradient is missing"
            assert ours is None or torch.equal(ours, theirs), f"iteration {number}: other gradients"
        allowed, names = halves_run.look()
        excess = 1.02 * max(0.0, told_bytes(told.messages, names, 1.01 * allowed) - allowed)
        if planned.kept is not None:  # by an earlier iteration: its input, results of two graphs
            allowed += planned.kept.nbytes * 3
        if iteration.stop is not None:  # no half follows that would tell of the loss's tensors:
            # two outputs, and three temporaries of the backward of `square`.
            allowed += max(5 * 4 * half[2] * half[4] for half in ran if half[0] == "F")
        beyond = used - other_bytes - allowed - TOLERANCE - PAGE * mappings
        assert beyond <= excess, (
            f"iteration {number}: {beyond} beyond its budget of {allowed}, {excess} told of {names}"
        )
        if iteration.regular:
            times[halves] = times.get(halves, 0) + 1
            regular = all(other.regular for other in loop[: number + 1])
            alone = len(first_nets[halves[0][2]]) == 1
            if times[halves] >= 3 and regular and alone:
                assert forwards_again() == before, f"iteration {number}: a forward ran again"


def main(examples, number=None):
    number = random.randrange(2**32) if number is None else int(number)
    print("seed", number)  # noqa: T201
    torch.set_num_threads(1)
    told, halves_run = Told(), Halves()
    config = settings(
        max_examples=int(examples),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a shrunk loop finds other plans, since these are kept
        suppress_health_check=[HealthCheck.too_slow],
    )
    kinds = st.sampled_from([("min", False), ("80%", True)])

    @seed(number)
    @config
    @given(of=kinds, loop=loops())
    def check(of, loop):
        run_loop(of, loop, told, halves_run)

    check()
