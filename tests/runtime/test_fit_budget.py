"""A budget that `coop-plan fit` prints keeps a process within the card that was asked about."""

import contextlib
import json
import os
import subprocess
import sys

import msgspec
import pytest

from coop_plan.api.cli.main import main
from coop_plan.runtime.offline_capture.devices import DeviceSpec

SOURCE = """
import torch
from torch import nn

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

def convolution(batch=8):
    # 16 channels fill a block of oneDNN's layouts; fewer are padded in scratch that fit leaves out.
    layers = [m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())]
    model = nn.Sequential(*layers)
    return (lambda x: model(x).square().mean()), (torch.randn(batch, 16, 24, 24),)
"""

TRAIN = """
import functools
import json
import sys
import torch
from coop_plan.runtime.device import arena, build

from coop_plan.runtime.offline_capture.optimizers import AdamW8bit

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
}[optimizer]
if update == "backward":
    def complete(parameter, own):
        own.step()
        own.zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(complete, own=make([p])))
optimizer = make([torch.nn.Parameter(torch.empty(0))] if update else list(model.parameters()))
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
    optimizer.step()
    optimizer.zero_grad()
print(arena.process_bytes()[1] - before)
"""

CASES = [
    ("deep", 512, "adamw", 1, ""),
    ("wide", 1024, "momentum", 1, ""),
    ("wide", 256, "adafactor", 2, ""),
    ("convolution", 32, "adamw", 1, ""),
    ("recurrent", 8, "adamw8bit", 1, ""),
    ("recurrent", 33, "adamw", 1, ""),
    ("deep", 512, "adamw", 1, "backward"),
    ("wide", 1024, "momentum", 1, "backward"),
]


@pytest.mark.parametrize(("name", "batch", "optimizer", "micro", "update"), CASES)
def test_the_printed_budget_keeps_the_process_within_the_card(
    name, batch, optimizer, micro, update, importable, tmp_path, capsys
):
    """States, gradients and temporaries of the update included, counted from outside."""
    importable("fit_steps", SOURCE)

    def ask(memory):
        spec = DeviceSpec(
            kind="cpu", memory_bytes=memory, flops={"float32": 1e11}, bytes_per_s=1e10
        )
        path = tmp_path / "card.json"
        path.write_bytes(msgspec.json.encode(spec))
        arguments = ["--device", str(path), "--batch", str(batch), "--optimizer", optimizer]
        arguments += ["--update", update] if update else []
        with contextlib.suppress(SystemExit):
            main(["fit", "fit_steps:" + name, *arguments, "--margin", "0", "--json"])
        return json.loads(capsys.readouterr().out)[0]

    row = ask(2**34)
    eager, least = row["eager"]["peak_bytes"], row["smallest"]["peak_bytes"]
    assert least < eager
    card = (eager + 2 * least) // 3
    options = json.dumps(ask(card)["within"]["options"])
    ended = subprocess.run(
        [sys.executable, "-c", TRAIN, name, str(batch), optimizer, options, str(micro), update],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert ("refused" in ended.stderr) <= (micro > 1)
    assert int(ended.stdout) <= card
