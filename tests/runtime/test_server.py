"""Training with a planning service: one question a job, one plan, eager's numbers."""

import hashlib
import os
import re
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from coop_plan import runtime
from coop_plan.planner import plan
from coop_plan.runtime.errors import OptionsError, PlanServerError
from coop_plan.runtime.execute import find_plan
from coop_plan.runtime.options import Options
from tests.runtime.ranks import cache_with_extension, together
from tests.runtime.test_distributed import Block
from tests.support import make_graph

pytest.importorskip("uvicorn")
from coop_plan.client import client
from tests.api.server import serving

HERE = "tests.runtime.test_server"


@pytest.fixture
def nobody():
    """The address of no server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def train(rank, **options):
    """Three steps of data-parallel training on this rank: losses and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])

    def step(x):
        return model(x).square().mean()

    if options:
        step = torch.compile(step, backend="coop", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(10 + rank)
    kept = []
    for x in [torch.randn(64, 32) for _ in range(3)]:
        optimizer.zero_grad()
        loss = step(x)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        kept.append(loss.detach().clone())
    return kept + [p.detach().clone() for p in model.parameters()]


def lose_patience():
    """Let this process's clients wait for a server that is away for a second only."""
    client.PATIENCE_SECONDS = 1.0


def compare(rank, count):
    """On one rank: train eagerly and with a server, and say which plan was run."""
    expected = train(rank)
    given = {"budget": "min", "server": os.environ["SERVER"]}
    if "FALLBACK" in os.environ:
        lose_patience()
        given["server_fallback"] = os.environ["FALLBACK"]
    found = train(rank, **given)
    assert len(found) == len(expected) > 3
    assert all(map(torch.equal, found, expected))
    [report] = runtime.reports()
    assert report.plan.recomputed_ops > 0
    assert report.steps_run == 3
    costs = [op.cost_us for op in report.graph.ops]
    plan = hashlib.sha256(report.plan.to_json().encode()).hexdigest()
    sys.stdout.write(f"PLAN {plan} {sum(costs)}\n")


def refused(rank, count):
    """On one rank: the server is away, and that is an error on every rank."""
    lose_patience()
    with pytest.raises(Exception, match="cannot be reached") as error:
        train(rank, budget="min", server=os.environ["SERVER"])
    assert PlanServerError.__name__ in str(error.value)  # it is inside Dynamo's own
    assert not runtime.reports()
    other = f"rank {1 - rank}:" in str(error.value)
    sys.stdout.write(f"REFUSED {other}\n")


def apart(folder, function, count=2):
    """Caches of their own for the ranks: nothing is taken from a neighbour's."""
    caches = [cache_with_extension(folder / f"cache {rank}") for rank in range(count)]
    return together(f"{HERE}:{function}", folder / "ranks", count, caches=caches)


def test_two_ranks_ask_once_and_run_one_plan_with_eagers_numbers(tmp_path, monkeypatch):
    with serving(tmp_path, "--store", str(tmp_path / "plans")) as server:
        monkeypatch.setenv("SERVER", str(server.base_url))
        outputs = apart(tmp_path, "compare")
        metrics = server.get("/metrics").text
    plans = {re.search(r"PLAN (\S+ \S+)", output)[1] for output in outputs}
    assert len(plans) == 1  # the plan and the costs it was made with
    asked = re.findall(r'requests_total{method="POST",route="/plan",status="200"} (\S+)', metrics)
    assert asked == ["1.0"]
    assert 'coop_plan_plans_total{cache="miss"} 1.0' in metrics


def test_without_its_server_training_ends_or_plans_here(tmp_path, monkeypatch, nobody):
    monkeypatch.setenv("SERVER", nobody)
    outputs = apart(tmp_path / "error", "refused")
    said = [re.search(r"REFUSED (\w+)", output)[1] for output in outputs]
    assert sorted(said) == ["False", "True"]  # one decision, told by the other rank, too
    monkeypatch.setenv("FALLBACK", "local")
    outputs = apart(tmp_path / "local", "compare")
    assert len({re.search(r"PLAN (\S+)", output)[1] for output in outputs}) == 1
    assert sum("planned here" in output for output in outputs) == 1


@pytest.fixture
def silent():
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("server", ["nobody", "silent"])
def test_a_server_that_is_away_is_waited_for_once(server, request, monkeypatch, caplog):
    """Until it answers, each further shape waits for a second at most, and tells nothing."""
    waits, patience = [], 2.0

    class Client(client.Client):
        def __init__(self, server, *, patience_seconds):
            waits.append(patience_seconds)
            super().__init__(server, patience_seconds=patience_seconds)

        def check_alive(self, seconds):
            waits.append(seconds)
            super().check_alive(seconds)

    monkeypatch.setattr(client.protocol, "WAIT_SECONDS", 1)
    monkeypatch.setattr(client, "PATIENCE_SECONDS", patience)
    monkeypatch.setattr(client, "Client", Client)
    address = request.getfixturevalue(server)
    options = Options.parse({"budget": "min", "server": address, "server_fallback": "local"})
    graphs = [make_graph({0: ("input", size), 1: ("output", 8)}, [{"inputs": [0], "outputs": [1]}])
              for size in range(8, 14)]  # fmt: skip
    find_plan.plan_for(graphs[0], options)
    for graph in graphs[1:]:
        assert find_plan.plan_for(graph, options)[0].steps
    assert waits == [patience] + 5 * 2 * [find_plan.AWAY_SECONDS]
    assert caplog.text.count("planned here") == 1
    monkeypatch.setattr(Client, "check_alive", lambda *_: None)
    monkeypatch.setattr(Client, "plan", lambda *_: plan(graphs[0], "min"))
    find_plan.plan_for(graphs[0], options)
    assert address not in find_plan._away


@pytest.mark.parametrize("wrong", [{"server": 1}, {"server": "", "server_fallback": "maybe"}])
def test_options_that_cannot_be_used_are_refused(wrong):
    with pytest.raises(OptionsError, match="server"):
        Options.parse({"budget": "min"} | wrong)
