"""Plans that ranks share by content: no rank waits for one that plans nothing."""

import os
import random
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from coop_plan import runtime
from coop_plan.runtime.distributed import sharing
from tests.runtime.ranks import together

HERE = "tests.runtime.test_sharing"
LENGTHS = (8, 12, 16, 24)


class Padded(nn.Module):
    """Layers over a padded batch; the ranks add up their losses in the graph."""

    def __init__(self, exchanging):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(16, 16), nn.Tanh())])
        self.exchanging = exchanging

    def forward(self, x):
        loss = self.layers(x).square().mean()
        return functional.all_reduce(loss, "sum", dist.group.WORLD) if self.exchanging else loss


def train(called, model, rank, steps=6):
    """Losses and gradients, with lengths drawn by rank."""
    drawn, found = random.Random(rank), []
    torch.manual_seed(10 + rank)
    for _ in range(steps):
        model.zero_grad()
        loss = called(torch.randn(4, drawn.choice(LENGTHS), 16))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        dist.barrier()
    return found


def own_lengths(rank, count):
    """Bitwise eager, whatever shapes the other ranks meet, and nobody waits in vain."""
    warnings.simplefilter("ignore", FutureWarning)
    server = os.environ.get("SERVER")
    exchanging = server is None
    options = {"budget": "min"} | ({} if exchanging else {"server": server})
    eager = Padded(exchanging)
    expected = train(eager, eager, rank)
    model = Padded(exchanging)
    step = torch.compile(model, backend="coop", fullgraph=True, options=options)
    assert all(map(torch.equal, train(step, model, rank), expected))
    reports = runtime.reports()
    assert sum(report.steps_run for report in reports) == 6
    assert any(report.plan.recomputed_ops for report in reports)
    assert not sharing._given_up


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_pads_its_own_batch(tmp_path, count):
    together(f"{HERE}:own_lengths", tmp_path / "run", count)


def test_each_rank_pads_its_own_batch_and_asks_a_server(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    from tests.api.server import serving

    with serving(tmp_path, "--store", str(tmp_path / "plans")) as server:
        monkeypatch.setenv("SERVER", str(server.base_url))
        together(f"{HERE}:own_lengths", tmp_path / "run", 2)


class Ranks:
    """Two ranks of one process, which take turns."""

    def __init__(self, monkeypatch):
        self.store, self.rank = dist.HashStore(), 0
        monkeypatch.setattr(sharing, "world_size", lambda: 2)
        monkeypatch.setattr(sharing, "default_store", lambda: self.store)
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(sharing, "_given_up", set())
        monkeypatch.setattr(sharing, "_failures", set())

    def ask(self, rank, make, name="x", seconds=0.1):
        self.rank = rank
        return sharing.made_once(name, make, pack=str.encode, unpack=bytes.decode, seconds=seconds)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def failing(error):
    def make():
        raise error

    return make


def test_the_first_rank_makes_a_result_and_others_take_it(ranks):
    assert ranks.ask(1, lambda: "by 1") == "by 1"
    assert ranks.ask(0, lambda: "by 0") == "by 1"
    assert ranks.ask(0, lambda: "another", "y") == "another"


def test_a_rank_is_waited_for_once(ranks, caplog, monkeypatch):
    for name in "ab":
        ranks.store.set(f"coop-plan/{name}", b"claimed by 1 0")
    assert ranks.ask(0, lambda: "by 0", "a") == "by 0"
    with monkeypatch.context() as patch:
        patch.setattr(sharing, "time", None)  # whoever waits reads it
        assert ranks.ask(0, lambda: "by 0", "b", seconds=60.0) == "by 0"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert ranks.ask(1, lambda: "by 1", "a") == "by 0"


def test_a_failure_of_the_server_is_raised_on_all_ranks_and_then_tried_again(ranks):
    away = runtime.PlanServerError("away")
    for rank in (1, 0):
        with pytest.raises(runtime.PlanServerError, match="away"):
            ranks.ask(rank, failing(away))
    assert ranks.ask(0, lambda: "by 0") == "by 0"
    assert ranks.ask(1, failing(away)) == "by 0"


def test_another_failure_is_not_the_other_ranks(ranks):
    with pytest.raises(ZeroDivisionError):
        ranks.ask(1, failing(ZeroDivisionError()))
    assert ranks.ask(0, lambda: "by 0") == "by 0"


def test_without_a_store_each_rank_makes_its_own(ranks, caplog, monkeypatch):
    def closed():
        raise dist.DistNetworkError("closed")

    monkeypatch.setattr(sharing, "default_store", closed)
    assert ranks.ask(0, lambda: "by 0") == "by 0"
    assert "the store of the process group fails" in caplog.text
