"""`coop_plan.fit`: memory of a training step on absent devices, in eager PyTorch and planned."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from coop_plan.planner import Progress, plan
from coop_plan.planner.fit import Budgeting, Largest, largest_sizes
from coop_plan.planner.fit import fit as plans_of
from coop_plan.planner.progress import Work
from coop_plan.runtime.errors import RuntimeRefusalError
from coop_plan.runtime.kernels import GraphKind, Kernels
from coop_plan.runtime.offline_capture import devices as device_files
from coop_plan.runtime.offline_capture import fake_device
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.schemas import Graph, InvalidInputError, Outputs, Plan, parse_rate

LIMITS = {"5%": 0.05, "10%": 0.10}
"""Limits of overhead for the largest batches, by name."""

BUDGETED: Outputs = "gradients"
"""Outputs in the arena of the plans of a step."""

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
    "iteration",
)
"""Figures that are None if the device has an error."""

Sizes = Mapping[str, int | None]
"""Arguments `batch` and `length` of the user's function."""

Capture = Callable[..., fake_device.Captured]
"""Captures the step at some sizes; the second argument asks for eager PyTorch's memory.

With `whole` it captures the whole iteration instead.
"""


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
    clip_norm: bool = False,
    shards: int | None = None,
    kernels: Kernels = "eager",
    accumulate: bool = False,
    iteration: bool = False,
    link: str | None = None,
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
        clip_norm: gradients are clipped to a norm before the optimizer's step.
        shards: also count a rank of so many that share weights, gradients and states.
        accumulate: gradients of several micro-batches add up before the optimizer's step.
        kernels: "fused" plans the step over fused regions, too, and takes the better plan.
        iteration: also plan the iteration as `train_iteration` does, with updates in the plan.
        link: bandwidth in each direction of a link over which parameters and states of this plan
            may move between device and host, such as "25GB/s".

    With the largest product of classes and its loss in chunks, plans are those of chunks whose bits
    only the device can check (`head_in_chunks`).

    Raises:
        InvalidInputError: options of an optimizer without one, `lengths` without a length,
            gradients that add up or are clipped, and are freed in the backward, `link` without
            `iteration`, or that with fused kernels, gradients that add up or an average.
    """
    if lengths and length is None:
        raise InvalidInputError("the largest lengths are searched from a first one: give --length")
    if optimizer is None and (masters or update or ema or clip_norm):
        raise InvalidInputError(
            "masters, update, ema and clip-norm are those of an optimizer: name one"
        )
    if accumulate and update == "backward":
        raise InvalidInputError("an update in the backward frees the gradients: they cannot add up")
    if iteration and (optimizer is None or kernels == "fused" or accumulate or ema):
        raise InvalidInputError(
            "a whole iteration has an optimizer, one micro-batch and eager kernels, and no average"
        )
    if link is not None:
        if not iteration:
            raise InvalidInputError("a link is that of a whole iteration: ask for one")
        parse_rate(link)
    if clip_norm and update == "backward":
        raise InvalidInputError("an update in the backward precedes the norm of all gradients")
    spec = optimizer and OptimizerSpec(
        name=optimizer, masters=masters, update=update, ema=ema, clip_norm=clip_norm
    )
    sizes: Sizes = {"batch": batch, "length": length}
    searched = [size for size, asked in (("batch", batches), ("length", lengths)) if asked]
    question = {
        **sizes,
        "kernels": kernels,
        "optimizer": optimizer,
        "masters": masters,
        "update": update,
        "ema": ema,
        "clip_norm": clip_norm,
        "accumulate": accumulate,
        "link": link,
    }
    kinds: tuple[Kernels, ...] = ("eager", "fused") if kernels == "fused" else ("eager",)
    with fake_device.OfflineCapture() as captures:

        def capture(
            name: str,
            there: device_files.DeviceSpec,
            sizes: Sizes,
            eager: bool,
            *,
            whole: bool = False,
        ) -> fake_device.Captured:
            work = Work()
            at = ", ".join(f"{size} {number}" for size, number in sizes.items() if number)
            work.report(Progress(f"{name}: capturing at {at}"))
            request = fake_device.CaptureRequest(
                target=target,
                spec=there,
                optimizer=spec or None,
                states=False,
                eager=eager,
                kernels=kinds,
                split=BUDGETED if kernels == "fused" else None,
                accumulates=accumulate,
                chunks=True,
                iteration=whole,
                **sizes,
            )
            found = captures.capture(request)
            work.report(Progress(f"{name}: planning at {at}"))
            return found

        for name in devices:
            row: dict[str, Any] = {
                "device": name,
                **question,
                "margin": margin,
                **dict.fromkeys(UNKNOWN),
            }
            row |= {"shards": shards, "largest": {}, "longest": {}, "error": None, "invalid": False}
            try:
                there = device_files.device(name)
                there_at = partial(capture, name, there)
                row |= _figures_on(there, there_at, sizes, searched, margin, shards)
                if iteration:
                    graphs = there_at(sizes, False, whole=True).graphs
                    available = row["available_bytes"]
                    row["iteration"] = _iteration_figures(graphs, available, batch, link)
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
    found = capture(sizes, True)
    graph, eager, graphs = found.graph, found.eager, found.graphs
    assert eager is not None
    available = int((there.memory_bytes - there.context) / (1 + margin))
    rests = there.kind == "cpu"
    room = eager.step_budget(graph, available, rests=rests)
    budget = Budgeting(room - eager.updating_bytes(rests=rests), BUDGETED)
    options: dict[str, Any] = {"budget": room, "outputs": budget.outputs}
    if "fused" in graphs:
        options["kernels"] = "fused"

    def of(
        kind: GraphKind,
        made: Plan | None,
        batch: int | None = None,
        *,
        scattered: bool = True,
    ) -> dict[str, Any]:
        """A plan's figures; `peak_bytes` includes the bytes outside the step.

        The runtime finds a plan at its own costs, which may leave gradients elsewhere.
        """
        if made is None:
            return {}
        batch = batch or sizes["batch"] or 1
        return {
            "peak_bytes": eager.with_plan(graphs[kind], made, rests=rests, scattered=scattered),
            "budget_bytes": eager.step_bytes(graphs[kind], made, rests=rests),
            "overhead": made.overhead,
            "cost_us": made.cost_us,
            "samples_per_s": batch / max(made.cost_us * 1e-6, 1e-12),
            "head_in_chunks": kind == "chunked",
        }

    fits = {kind: plans_of(over, budget) for kind, over in graphs.items()}
    kept = {
        kind: of(kind, found.kept, scattered=False)
        for kind, found in fits.items()
        if kind in ("eager", "fused")
    }
    as_it_is = kept["eager"] | {"peak_bytes": eager.peak_bytes, "budget_bytes": None}
    smallest = min(
        (of(kind, _whole_budget(found.least)) for kind, found in fits.items()),
        key=itemgetter("budget_bytes", "cost_us"),
    )
    planned = [of(kind, found.planned) for kind, found in fits.items() if found.planned]
    within = min(planned, key=itemgetter("cost_us", "peak_bytes"), default=dict(smallest))
    if eager.peak_bytes < smallest["peak_bytes"]:
        smallest = as_it_is
    if max(eager.loading_bytes, within["peak_bytes"]) > available:
        within = {}
    if eager.peak_bytes <= available:
        within = as_it_is
    elif within:
        options["budget"] = max(room, within["budget_bytes"])
        within |= {"budget_bytes": options["budget"], "options": options}
    figures = {
        "memory_bytes": there.memory_bytes,
        "context_bytes": there.context,
        "available_bytes": available,
        "dtype": eager.dtype,
        "without_loss": eager.without_loss or None,
        "eager": eager.figures(),
        "keep_all": min(kept.values(), key=itemgetter("peak_bytes", "cost_us")),
        "smallest": smallest,
        "within": within or None,
        "first_call_bytes": max(map(_first_call_bytes, graphs.values())),
        "shard_bytes": shards and eager.shard_bytes(shards),
    }
    for size in searched:
        try:
            figures |= _largest(graphs, capture, sizes, size, budget, of)
        except InvalidInputError as error:
            return figures | {"error": f"no largest {size}: {error}"}
    return figures


def _iteration_figures(
    graphs: Mapping[GraphKind, Graph], available: int, batch: int, link: str | None
) -> dict[str, Any]:
    """Plans of a whole iteration: of the smallest budget, and within the available bytes or None.

    `host_bytes` hold parameters and states between their uses, and copies.
    """
    budget = Budgeting(available, link=0 if link is None else parse_rate(link))

    def of(kind: GraphKind, made: Plan) -> dict[str, Any]:
        return {
            "peak_bytes": made.peak_bytes,
            "overhead": made.overhead,
            "cost_us": made.cost_us,
            "samples_per_s": batch / max(made.cost_us * 1e-6, 1e-12),
            "host_bytes": made.host_arena_bytes,
            "head_in_chunks": kind == "chunked",
        }

    found = [(kind, plan(graph, "min", link=budget.link)) for kind, graph in graphs.items()]
    least = min((of(*each) for each in found), key=itemgetter("peak_bytes", "cost_us"))
    within = [(kind, budget.plan(graph)) for kind, graph in graphs.items()]
    planned = [of(kind, made) for kind, made in within if made is not None]
    best = min(planned, key=itemgetter("cost_us", "peak_bytes"), default=None)
    if best is None and least["peak_bytes"] <= available:
        best = least
    return {"smallest": least, "within": best}


def _whole_budget(made: Plan) -> Plan:
    """A plan with all bytes of its budget, which one at other costs may take."""
    arena = made.arena_bytes + made.budget_bytes - made.peak_bytes
    return made.model_copy({"peak_bytes": made.budget_bytes, "arena_bytes": arena})


def _first_call_bytes(graph: Graph) -> int:
    """Bytes of a step's first call, which measures each op on copies of its inputs."""
    size = {tensor.id: tensor.bytes for tensor in graph.tensors}
    resident = sum(tensor.bytes for tensor in graph.tensors if tensor.resident)
    largest = max(
        sum(size[t] for t in {*op.inputs, *op.outputs}) + op.workspace_bytes for op in graph.ops
    )
    return resident + largest


def _largest(
    graphs: Mapping[GraphKind, Graph],
    capture: Capture,
    sizes: Sizes,
    size: str,
    budget: Budgeting,
    of: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """The largest batches or lengths by limit of overhead; `graphs` are those of `sizes`.

    Split regions may be others at another size, so their graph is not searched.
    """
    graphs = {kind: graph for kind, graph in graphs.items() if kind != "split"}
    first = sizes[size]
    assert first is not None
    captured = {first: graphs}

    def graph_at(kind: GraphKind, number: int) -> Graph:
        try:
            if number not in captured:
                captured[number] = capture({**sizes, size: number}, False).graphs
        except (InvalidInputError, RuntimeRefusalError) as error:
            raise InvalidInputError(f"at {size} {number}, {error}") from None
        return captured[number][kind]

    found: dict[str, tuple[GraphKind, Largest]] = {}
    for kind in graphs:
        over = largest_sizes(partial(graph_at, kind), first, budget, LIMITS)
        for name, best in over.items():
            if name not in found or best.size > found[name][1].size:
                found[name] = kind, best
    figures = {
        name: {
            "limit": best.limit,
            size: best.size,
            "plan": of(kind, best.plan, best.size if size == "batch" else None),
        }
        for name, (kind, best) in found.items()
    }
    return {"largest" if size == "batch" else "longest": figures}
