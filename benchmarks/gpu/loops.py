"""Training loops beyond one step after another; their numbers must be eager's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.tasks import gpt2
from benchmarks.gpu.training import (
    TOLERANCE,
    Result,
    Row,
    bytes_and_peak,
    difference,
    fresh,
    now,
    reported,
)


def scaled(device: str, small: bool) -> Result:
    """Autocast to float16 with a GradScaler whose first scales overflow."""
    found: dict[str, list[torch.Tensor]] = {}
    for mode, given in _three():
        fresh(device)
        torch.manual_seed(0)
        model, loss_of, batch = gpt2(small, torch.float16)
        model, batch = model.to(device), batch.to(device)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**40, enabled=True)

        run: Any = torch.compile(loss_of, dynamic=False, **given) if given else loss_of
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        torch.manual_seed(1)
        losses, scales = [], []
        for _ in range(8):
            loss = run(model, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            scales.append(torch.tensor(scaler.get_scale()))
            del loss
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        found[mode] = [*losses, *scales, state, *(p.detach().cpu() for p in model.parameters())]
    return _compared(found)


def _three() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields eager, the joint graph, and ours under half of the peak."""
    yield "eager", {}
    yield "joint", {"backend": "aot_eager"}
    yield "coop 50%", {"backend": "coop", "options": {"budget": "50%"}}


def _compared(found: dict[str, list[torch.Tensor]]) -> Result:
    ours = found["coop 50%"]
    least = min(difference(ours, found[mode]) for mode in ("eager", "joint"))
    note = f"numbers, states and scales differ from eager's or the joint graph's by {least:.1e}"
    return [{"mode": "coop 50%", "note": note}], [] if least <= TOLERANCE else ["numbers"]


def loops(device: str, small: bool) -> Result:
    """Two models trained alternately; batches copied on a side stream, gradients kept."""
    found: dict[str, list[torch.Tensor]] = {}
    for mode, given in _three():
        fresh(device)
        torch.manual_seed(0)
        torch.set_default_device(device)
        kept: list[Any] = []
        numbers: list[torch.Tensor] = []
        models = [gpt2(True)[0].to(device) for _ in range(2)]
        batches = [torch.randint(0, 100, (4, 64), device="cpu") for _ in range(6)]
        batches = batches if small else [batch.pin_memory() for batch in batches]

        loss_of = gpt2(True)[1]
        run: Any = torch.compile(loss_of, dynamic=False, **given) if given else loss_of
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.manual_seed(1)
        for batch in batches:
            with torch.cuda.stream(side):
                there = batch.to(device, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            there.record_stream(torch.cuda.current_stream())
            for model in models:
                loss = run(model, there)
                loss.backward()
                numbers.append(loss.detach().cpu())
                kept.append([(p.grad, p.grad.clone()) for p in model.parameters()])
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-2 * parameter.grad
                        parameter.grad = None
        numbers += [p.detach().cpu() for model in models for p in model.parameters()]
        found[mode] = [*numbers, torch.cuda.get_rng_state()]
        torch.set_default_device("cpu")
        if not all(torch.equal(a, b) for pairs in kept for a, b in pairs):
            return [], [f"{mode}: a gradient that was kept has changed"]
    return _compared(found)


def update(device: str, small: bool) -> Result:
    """AdamW's foreach update in the idle arena: peaks of whole iterations, and numbers."""
    modes: dict[str, dict[str, Any]] = {"eager": {}, "joint": {"backend": "aot_eager"}}
    for budget in ("100%", "min"):
        options = {"budget": budget, "outputs": "gradients"}
        modes[f"coop {budget}"] = {"backend": "coop", "options": options}
    rows: list[Row] = []
    faults: list[str] = []
    found: dict[str, list[torch.Tensor]] = {}
    for mode, given in modes.items():
        row, found[mode] = _updated(device, small, given)
        rows.append({"mode": mode} | row)
        if mode == "coop 100%" and row["peak"] > row["budget"] + row["states"]:
            faults.append(f"{row['peak']} bytes, of which {row['states']} are states")
        if mode.startswith("coop"):
            least = min(difference(found[mode], found[other]) for other in ("eager", "joint"))
            faults += [f"{mode}: numbers differ by {least:.1e}"] if least > TOLERANCE else []
    return rows, faults


def _updated(device: str, small: bool, given: dict[str, Any]) -> tuple[Row, list[torch.Tensor]]:
    """Six iterations; peaks are above the bytes before the model was built."""
    fresh(device)
    before = bytes_and_peak(device)[0]
    torch.manual_seed(0)
    model, loss_of, batch = gpt2(small)
    model, batch = model.to(device), batch.to(device)
    run: Any = torch.compile(loss_of, dynamic=False, **given) if given else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    torch.manual_seed(1)
    losses, seconds, peaks = [], [], []
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        loss = run(model, batch)
        loss.backward()
        began = now(device)
        optimizer.step()
        seconds.append(now(device) - began)
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        del loss
        peaks.append(bytes_and_peak(device)[1] - before)
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(value.nbytes for value in states if value.device.type == device)
    row: Row = {"peak": peaks[-1], "first_peak": peaks[0], "seconds": seconds[-1], "states": kept}
    numbers = [value.detach().cpu() for value in (*losses, *model.parameters(), *states)]
    return row | reported(), numbers


LOOPS: dict[str, Callable[[str, bool], Result]] = {
    "scaled": scaled,
    "loops": loops,
    "update": update,
}
