"""A small training step, started in this process as if it were a new one, and in new ones.

    python -m tests.runtime.starts BUDGET...

prints the figures of a start for each budget as JSON.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.capture import profiler, tracing_rules


@contextlib.contextmanager
def traced_ops():
    """A list that grows by each op that AOTAutograd traces."""
    found, see = [], tracing_rules._restride_as_eager
    tracing_rules._restride_as_eager = lambda op, args: (found.append(op), see(op, args))
    try:
        yield found
    finally:
        tracing_rules._restride_as_eager = see


def start(budget="80%", **options):
    """Compile and run the step with nothing in memory: its report and its loss."""
    profiler._profiles.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())])
    step = torch.compile(
        lambda x: model(x).square().mean(),
        backend="coop",
        fullgraph=True,
        dynamic=False,
        options={"budget": budget, **options},
    )
    loss = step(torch.randn(256, 64))
    loss.backward()
    return runtime.reports()[-1], loss.item()


def in_a_new_process(*budgets, prefix=()):
    """A running `python -m tests.runtime.starts`."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.runtime.starts", *budgets],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def figures(process):
    """What a process printed, once it is done, and what it said on stderr."""
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return json.loads(out), err


if __name__ == "__main__":
    torch.set_num_threads(1)
    facts = []
    for budget in sys.argv[1:]:
        with traced_ops() as traced:
            report, loss = start(budget)
        facts.append([report.profiled_ops, report.plan_cached, loss, len(traced)])
    print(json.dumps(facts))  # noqa: T201
