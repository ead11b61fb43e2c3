"""`coop_plan.fit`: memory of a training step on absent devices, in eager PyTorch and planned."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from coop_plan.planner import Progress
from coop_plan.planner.fit import Budgeting, largest_batches
from coop_plan.planner.fit import fit as plans_of
from coop_plan.planner.progress import Work
from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.offline_capture import devices as device_files
from coop_plan.runtime.offline_capture import fake_device
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.schemas import Graph, InvalidInputError, Plan

LIMITS = {"5%": 0.05, "10%": 0.10}
"""Limits of overhead for the largest batches, by name."""

UNKNOWN = (
    "memory_bytes",
    "context_bytes",
    "available_bytes",
    "dtype",
    "eager",
    "keep_all",
    "smallest",
    "within",
)
"""Figures that are None if the device has an error."""

Capture = Callable[[int, bool], fake_device.Captured]


def fit(
    target: str,
    devices: Iterable[str],
    batch: int,
    *,
    optimizer: str | None = None,
    masters: bool = False,
    update: str | None = None,
    margin: float = 0.1,
    batches: bool = False,
) -> Iterator[dict[str, Any]]:
    """The figures of a training step on each device, as in `coop-plan fit --json`.

    Args:
        target: `package.module:function`; the function takes `batch` and returns a callable and
            its example arguments.
        devices: names or files of devices.
        batch: argument `batch` of the function.
        optimizer: name of an optimizer, as for `capture`.
        masters: it has float32 copies of parameters of fewer bits.
        update: "foreach", "fused", "plain" or "backward"; None is PyTorch's default.
        margin: bytes that PyTorch's allocator reserves, relative to those that are allocated.
        batches: also search the largest batches.

    Raises:
        InvalidInputError: options of an optimizer without one.
    """
    if optimizer is None and (masters or update):
        raise InvalidInputError("masters and update are those of an optimizer: name one")
    spec = optimizer and OptimizerSpec(name=optimizer, masters=masters, update=update)
    question = {"batch": batch, "optimizer": optimizer, "masters": masters, "update": update}
    with fake_device.OfflineCapture() as captures:

        def capture(
            name: str, there: device_files.DeviceSpec, number: int, eager: bool
        ) -> fake_device.Captured:
            work = Work()
            work.report(Progress(f"{name}: capturing at batch {number}"))
            request = fake_device.CaptureRequest(
                target=target, spec=there, batch=number, optimizer=spec or None, eager=eager
            )
            found = captures.capture(request)
            work.report(Progress(f"{name}: planning at batch {number}"))
            return found

        for name in devices:
            row = {"device": name, **question, "margin": margin, **dict.fromkeys(UNKNOWN)}
            row |= {"largest": {}, "error": None, "invalid": False}
            try:
                there = device_files.device(name)
                row |= _figures_on(there, partial(capture, name, there), batch, margin, batches)
            except (InvalidInputError, RuntimeRefusalError) as error:
                row |= {"error": str(error), "invalid": isinstance(error, InvalidInputError)}
            yield row


def _figures_on(
    there: device_files.DeviceSpec, capture: Capture, batch: int, margin: float, batches: bool
) -> dict[str, Any]:
    graph, eager = capture(batch, True)
    assert eager is not None
    available = int((there.memory_bytes - there.context) / (1 + margin))
    outside = eager.outside_step(sum(tensor.bytes for tensor in graph.tensors if tensor.resident))
    # On CUDA the runtime has no gradients in its arena: each would hold all pages of it.
    budget = Budgeting(available - outside, "gradients" if there.kind == "cpu" else "outside")
    options: dict[str, Any] = {"budget": budget.bytes}
    if budget.outputs != "outside":
        options["outputs"] = budget.outputs

    def of(made: Plan | None, batch: int = batch) -> dict[str, Any]:
        """A plan's figures; `peak_bytes` includes the bytes outside the step."""
        if made is None:
            return {}
        return {
            "peak_bytes": made.peak_bytes + outside,
            "budget_bytes": made.peak_bytes,
            "overhead": made.overhead,
            "cost_us": made.cost_us,
            "samples_per_s": batch / max(made.cost_us * 1e-6, 1e-12),
        }

    found = plans_of(graph, budget)
    as_it_is = of(found.kept) | {"peak_bytes": eager.peak_bytes, "budget_bytes": None}
    smallest, within = of(found.least), of(found.planned)
    if eager.peak_bytes < smallest["peak_bytes"]:
        smallest = as_it_is
    if eager.loading_bytes > available:
        within = {}
    elif eager.peak_bytes <= available:
        within = as_it_is
    elif within:
        within |= {"budget_bytes": budget.bytes, "options": options}
    figures = {
        "memory_bytes": there.memory_bytes,
        "context_bytes": there.context,
        "available_bytes": available,
        "dtype": eager.dtype,
        "eager": eager.figures(),
        "keep_all": of(found.kept),
        "smallest": smallest,
        "within": within or None,
    }
    if not batches:
        return figures

    def graph_at(number: int) -> Graph:
        try:
            return graph if number == batch else capture(number, False).graph
        except (InvalidInputError, RuntimeRefusalError) as error:
            raise InvalidInputError(f"at batch {number}, {error}") from None

    try:
        largest = largest_batches(graph_at, batch, budget, LIMITS)
    except InvalidInputError as error:
        return figures | {"error": f"no largest batch: {error}"}
    return figures | {
        "largest": {
            name: {"limit": best.limit, "batch": best.batch, "plan": of(best.plan, best.batch)}
            for name, best in largest.items()
        }
    }
