"""A budget that `coop-plan fit` prints keeps a process within the card that was asked about."""

import contextlib
import json
import os
import random
import tempfile

import msgspec
import pytest

from coop_plan.api.cli.main import main
from coop_plan.runtime.offline_capture.devices import DeviceSpec
from coop_plan.runtime.offline_capture.optimizer_spec import OPTIMIZERS
from tests.params import slow_after
from tests.runtime.forked import Forked

SOURCE = """
import random
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

def blocks(width, depth):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())])

def deep(batch=8):
    model = blocks(128, 12)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 128),)

def wide(batch=8):
    model = blocks(512, 3)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 512),)

def recurrent(batch=8):
    model = nn.ModuleList([nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 4)])
    step = lambda x: model[1](model[0](x)[0]).square().mean()
    return step, (torch.randn(batch, 16, 32),)

class Residual(nn.Module):
    def __init__(self, width, inner, checkpointed):
        super().__init__()
        layers = nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        self.layers, self.checkpointed = nn.Sequential(*layers), checkpointed

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.inward(x).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.outward(y.transpose(1, 2).flatten(2))

class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]

def drawn(seed):
    # A network of a seed, and a function that returns an input of a batch.
    draw = random.Random(seed)
    kind, width = draw.choice(["rows", "tokens", "words", "images"]), draw.choice([32, 64, 128])
    length, side = draw.choice([4, 16]), draw.choice([8, 12])
    layers = [nn.Embedding(500, width)] if kind == "words" else []
    for _ in range(draw.randint(2, 7)):
        inner = draw.choice([32, 256, 512])
        if kind == "images":
            norm = [nn.BatchNorm2d(16)] if draw.random() < 0.4 else []
            layers += [nn.Conv2d(16, 16, 3, padding=1), *norm, nn.ReLU()]
            continue
        choices = [lambda: Residual(width, inner, draw.random() < 0.3)]
        choices.append(lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()))
        choices.append(lambda: nn.Dropout(0.2))
        if kind != "rows":
            choices += [lambda: Attention(width), lambda: Recurrent(width)]
        layers.append(draw.choice(choices)())
    model = nn.Sequential(*layers, *[nn.Linear(width, 8)] * (kind != "images"))
    def argument(batch):
        if kind == "words":
            return torch.randint(0, 500, (batch, length))
        shapes = {"rows": (width,), "tokens": (length, width), "images": (16, side, side)}
        return torch.randn(batch, *shapes[kind])
    return model, argument

def __getattr__(name):
    if not name.startswith("seed_"):
        raise AttributeError(name)
    def step_of_seed(batch=8):
        model, argument = drawn(int(name[5:]))
        return (lambda x: model(x).square().mean()), (argument(batch),)
    return step_of_seed

def classes(batch=8):
    # The logits are larger than all else.
    layers = nn.Embedding(3000, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3000)
    model = nn.Sequential(*layers)
    step = lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    return step, (torch.randint(0, 3000, (batch, 64)),)

def convolution(batch=8):
    # 12 channels are padded to a block of oneDNN's layouts in scratch.
    layers = [m for _ in range(4) for m in (nn.Conv2d(12, 12, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 12, 24, 24),)
"""

TRAIN = """
import functools
import json
import sys
import torch
from coop_plan.runtime.device import arena, build

from coop_plan.runtime.offline_capture.optimizers import AdamW8bit, Lion

class Pair:
    def __init__(self, matrices, others):
        self.all = [torch.optim.Muon(matrices)] if matrices else []
        self.all += [torch.optim.AdamW(others, foreach=False)] if others else []

    def step(self):
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.all:
            optimizer.zero_grad()

build.arena()
before = arena.process_bytes()[0]
import fit_steps
name, batch, optimizer, options, micro, update = sys.argv[1:]
step, args = getattr(fit_steps, name)(int(batch))
model = step.__closure__[0].cell_contents
make = {
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamw8bit": AdamW8bit,
    "lion": Lion,
    "sgd": lambda p: torch.optim.SGD(p),
    "muon": lambda p: Pair([q for q in p if q.ndim == 2], [q for q in p if q.ndim != 2]),
}[optimizer]
if update == "backward":
    def complete(parameter, own):
        own.step()
        own.zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(complete, own=make([p])))
others = [torch.nn.Parameter(torch.empty(0))]
optimizer = make(others if update == "backward" else list(model.parameters()))
step = torch.compile(step, backend="coop", options=json.loads(options))
for _ in range(3):
    try:
        for _ in range(int(micro)):
            step(*args).backward()
    except Exception as error:
        if "BudgetExceededError" not in repr(error) + str(error):
            raise
        print("refused", file=sys.stderr)
        break
    if update == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(arena.process_bytes()[1] - before)
"""

STEPS = ("deep", 512), ("wide", 1024), ("convolution", 32)
UPDATES = "adamw", "momentum", "adafactor"
BOTH = "COOP_FIT_SEEDS" in os.environ
"""True if each step and optimizer runs with one micro-batch and with three, else with either."""

CASES = [
    ("recurrent", 8, "adamw8bit", 1, ""),
    ("deep", 512, "adamw", 1, "backward"),
    ("wide", 1024, "adamw", 3, "clip"),
    ("classes", 16, "adamw", 1, ""),
    *(
        (name, batch, optimizer, micro, "")
        for i, (name, batch) in enumerate(STEPS)
        for j, optimizer in enumerate(UPDATES)
        for micro in ((1, 3) if BOTH else (1 if (i + j) % 2 else 3,))
    ),
    ("recurrent", 33, "adamw", 1, ""),
    ("wide", 1024, "momentum", 1, "backward"),
]


@pytest.fixture
def ask(importable, tmp_path, capsys):
    """`coop-plan fit` of a step of `SOURCE` on a CPU with so many bytes: the printed row."""
    importable("fit_steps", SOURCE)

    def asked(name, batch, optimizer, update, memory, micro=1):
        spec = DeviceSpec(
            kind="cpu", memory_bytes=memory, flops={"float32": 1e11}, bytes_per_s=1e10
        )
        path = tmp_path / "card.json"
        path.write_bytes(msgspec.json.encode(spec))
        arguments = ["--device", str(path), "--batch", str(batch), "--optimizer", optimizer]
        arguments += {"": [], "clip": ["--clip-norm"]}.get(update, ["--update", update])
        arguments += ["--accumulate"] if micro > 1 else []
        with contextlib.suppress(SystemExit):
            main(["fit", "fit_steps:" + name, *arguments, "--margin", "0", "--json"])
        return json.loads(capsys.readouterr().out)[0]

    return asked


def trained(name, batch, optimizer, micro, update, options):
    """Peak of a process that trains by the printed options, and whether that was refused."""
    arguments = name, str(batch), optimizer, json.dumps(options), str(micro), update
    with tempfile.TemporaryFile() as errors:
        process = Forked(TRAIN, *arguments, stderr=errors.fileno())
        said, code = process.communicate()
        errors.seek(0)
        text = errors.read().decode()
    assert code == 0, text
    return int(said), "refused" in text


@pytest.mark.parametrize(("name", "batch", "optimizer", "micro", "update"), slow_after(4, CASES))
def test_the_printed_budget_keeps_the_process_within_the_card(
    name, batch, optimizer, micro, update, ask
):
    """States, gradients and temporaries of the update included, counted from outside."""
    row = ask(name, batch, optimizer, update, 2**34, micro)
    eager, least = row["eager"]["peak_bytes"], row["smallest"]["peak_bytes"]
    assert least < eager
    assert row["smallest"]["head_in_chunks"] == (name == "classes")
    card = (eager + 2 * least) // 3
    options = ask(name, batch, optimizer, update, card, micro)["within"]["options"]
    peak, refused = trained(name, batch, optimizer, micro, update, options)
    assert not refused
    assert peak <= card


SEEDS = [int(seed) for seed in os.environ.get("COOP_FIT_SEEDS", "0-1").split("-")]
"""First and last seed of random steps; `COOP_FIT_SEEDS=0-30` tries 31, and more of `CASES`."""


@pytest.mark.parametrize("seed", slow_after(1, range(SEEDS[0], SEEDS[-1] + 1)))
def test_printed_budgets_of_random_steps(seed, ask):
    """Networks, batches, optimizers and cards from the smallest one to eager's."""
    draw = random.Random(seed)
    optimizer = draw.choice(list(OPTIMIZERS))
    update = draw.choice(["", "", "", "backward"])
    name, batch = f"seed_{seed}", draw.choice([1, 8, 33, 128])
    micro = 1 if update else draw.choice([1, 1, 2])
    row = ask(name, batch, optimizer, update, 2**34, micro)
    eager, least = row["eager"]["peak_bytes"], row["smallest"]["peak_bytes"]
    assert least <= eager
    card = least + int(draw.choice([0, 0.3, 0.9]) * (eager - least))
    if card == eager:
        return  # nothing is printed where nothing is better than eager
    within = ask(name, batch, optimizer, update, card, micro)["within"]
    if row["eager"]["loading_bytes"] > card:
        assert within is None
        return
    peak, refused = trained(name, batch, optimizer, micro, update, within["options"])
    assert not refused, (name, batch, optimizer, update, card, within)
    assert peak <= card, (name, batch, optimizer, micro, update, card, within)
