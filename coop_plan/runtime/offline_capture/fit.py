"""`coop_plan.fit`: memory of a training step on absent devices, in eager PyTorch and planned."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from coop_plan.planner import Progress
from coop_plan.planner.fit import Budgeting, largest_sizes
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
    "without_loss",
    "eager",
    "keep_all",
    "smallest",
    "within",
    "first_call_bytes",
    "shard_bytes",
)
"""Figures that are None if the device has an error."""

Sizes = Mapping[str, int | None]
"""Arguments `batch` and `length` of the user's function."""

Capture = Callable[[Sizes, bool], fake_device.Captured]
"""Captures the step at some sizes; the second argument asks for eager PyTorch's memory."""


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
    length: int | None = None,
    lengths: bool = False,
    ema: bool = False,
    shards: int | None = None,
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
        length: argument `length` of the function.
        lengths: also search the largest lengths.
        ema: an exponential moving average of the trained parameters is kept.
        shards: also count a rank of so many that share weights, gradients and states.

    Raises:
        InvalidInputError: options of an optimizer without one, or `lengths` without a length.
    """
    if lengths and length is None:
        raise InvalidInputError("the largest lengths are searched from a first one: give --length")
    if optimizer is None and (masters or update or ema):
        raise InvalidInputError("masters, update and ema are those of an optimizer: name one")
    spec = optimizer and OptimizerSpec(name=optimizer, masters=masters, update=update, ema=ema)
    sizes: Sizes = {"batch": batch, "length": length}
    searched = [size for size, asked in (("batch", batches), ("length", lengths)) if asked]
    question = {**sizes, "optimizer": optimizer, "masters": masters, "update": update, "ema": ema}
    with fake_device.OfflineCapture() as captures:

        def capture(
            name: str, there: device_files.DeviceSpec, sizes: Sizes, eager: bool
        ) -> fake_device.Captured:
            work = Work()
            at = ", ".join(f"{size} {number}" for size, number in sizes.items() if number)
            work.report(Progress(f"{name}: capturing at {at}"))
            request = fake_device.CaptureRequest(
                target=target, spec=there, optimizer=spec or None, eager=eager, **sizes
            )
            found = captures.capture(request)
            work.report(Progress(f"{name}: planning at {at}"))
            return found

        for name in devices:
            row = {"device": name, **question, "margin": margin, **dict.fromkeys(UNKNOWN)}
            row |= {"shards": shards, "largest": {}, "longest": {}, "error": None, "invalid": False}
            try:
                there = device_files.device(name)
                there_at = partial(capture, name, there)
                row |= _figures_on(there, there_at, sizes, searched, margin, shards)
            except (InvalidInputError, RuntimeRefusalError) as error:
                row |= {"error": str(error), "invalid": isinstance(error, InvalidInputError)}
            yield row


def _figures_on(
    there: device_files.DeviceSpec,
    capture: Capture,
    sizes: Sizes,
    searched: Sequence[str],
    margin: float,
    shards: int | None,
) -> dict[str, Any]:
    graph, eager = capture(sizes, True)
    assert eager is not None
    available = int((there.memory_bytes - there.context) / (1 + margin))
    rests = there.kind == "cpu"
    outside = eager.outside_step(rests=rests)
    updating = eager.resting_bytes(_gradients(graph)) if rests else 0
    budget = Budgeting(available - outside, "gradients")
    options = {"budget": budget.bytes, "outputs": budget.outputs}

    def of(made: Plan | None, batch: int | None = None) -> dict[str, Any]:
        """A plan's figures; `peak_bytes` includes the bytes outside the step."""
        if made is None:
            return {}
        batch = batch or sizes["batch"] or 1
        return {
            "peak_bytes": max(made.peak_bytes + outside, updating),
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
    if max(eager.loading_bytes, updating) > available:
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
        "without_loss": eager.without_loss or None,
        "eager": eager.figures(),
        "keep_all": of(found.kept),
        "smallest": smallest,
        "within": within or None,
        "first_call_bytes": _first_call_bytes(graph),
        "shard_bytes": shards and eager.shard_bytes(shards),
    }
    for size in searched:
        try:
            figures |= _largest(graph, capture, sizes, size, budget, of)
        except InvalidInputError as error:
            return figures | {"error": f"no largest {size}: {error}"}
    return figures


def _gradients(graph: Graph) -> int:
    """Number of gradients that a step returns."""
    late = {t for op in graph.ops if op.phase == "backward" for t in op.outputs}
    return sum(tensor.kind == "output" and tensor.id in late for tensor in graph.tensors)


def _first_call_bytes(graph: Graph) -> int:
    """Bytes of a step's first call, which measures each op on copies of its inputs."""
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
    largest = max(
        sum(size[t] for t in {*op.inputs, *op.outputs}) + op.workspace_bytes for op in graph.ops
    )
    return resident + largest


def _largest(
    graph: Graph,
    capture: Capture,
    sizes: Sizes,
    size: str,
    budget: Budgeting,
    of: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """The largest batches or lengths by limit of overhead; `graph` is that of `sizes`."""
    first = sizes[size]
    assert first is not None

    def graph_at(number: int) -> Graph:
        try:
            return graph if number == first else capture({**sizes, size: number}, False).graph
        except (InvalidInputError, RuntimeRefusalError) as error:
            raise InvalidInputError(f"at {size} {number}, {error}") from None

    found = {
        name: {
            "limit": best.limit,
            size: best.size,
            "plan": of(best.plan, best.size if size == "batch" else None),
        }
        for name, best in largest_sizes(graph_at, first, budget, LIMITS).items()
    }
    return {"largest" if size == "batch" else "longest": found}
