"""CUDA graphs of a planned step: each half is captured once, and replayed from then on.

A graph holds addresses, so all that a replay touches stays at its place:

- the arena, where the tensors between the halves lie, is that of the capture;
- parameters and buffers are read where they are; if one moves, the halves are captured again;
- other inputs, and the gradients of the outputs, are copied into places of the graphs' own;
- results stay in the graph's memory. Before a replay overwrites one that is still held, it moves to
  memory of PyTorch's allocator, as its holders see by the address alone;
- random ops draw by offsets that a replay is given: recomputed ones by those of their first runs.

The plan has the bytes of the places and of the results (`joint_graph`). One call at a time uses the
graphs: others run the plan's ops, as do calls that no graph can run. A line says why, once.
"""

import functools
import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from coop_plan.runtime.capture.graph_builder import device_of
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device import cuda
from coop_plan.runtime.distributed.collectives import collective_of
from coop_plan.runtime.errors import CudaGraphError
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.drawing_graph import DrawingGraph
from coop_plan.runtime.execute.graph_places import copy_to_place, has_layout, is_on_device, place_of
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.execute.rng_state import default_generator
from coop_plan.runtime.execute.straight_line import op_at
from coop_plan.runtime.torch_internals.cuda import HostWaits
from coop_plan.runtime.torch_internals.joint_graphs import is_primal
from coop_plan.runtime.torch_internals.ops import is_shared, storage_object

log = logging.getLogger("coop-plan")

MAX_CAPTURES = 8
"""Captures of one plan, after which it runs without graphs: its addresses do not stay."""


class GraphReplay:
    """Captures the halves of the plans of a step `name`, and replays them.

    `where` is the user's line, for messages. Replays are not timed by the `clock`.
    """

    def __init__(self, captured: Captured, name: str, where: str, clock: cuda.Clock) -> None:
        self._name, self._where, self._clock = name, where, clock
        self._outputs = captured.num_fwd_outputs
        self._static = _static_inputs(captured)
        self._collectives = [
            op.name
            for op, node in zip(captured.graph.ops, captured.ops, strict=True)
            if collective_of(node.target) is not None
        ]
        self._on_host = [
            op.name
            for op, node in zip(captured.graph.ops, captured.ops, strict=True)
            if op.rng and device_of(node).type == "cpu"
        ]
        self._generator = default_generator(captured.device)
        self._offsets: tuple[dict[int, int], dict[int, int]] = {}, {}
        """By half, of the first runs of random ops that are recomputed, from its begin."""
        self._warm: CompiledPlan | None = None
        self._is_backward_warm = False
        self._graphs: _Graphs | None = None
        self._captures = 0
        self._obstacle: str | None = None
        self._logged: set[str] = set()

    def forward(self, invocation: Invocation, inputs: list[Any]) -> Any:
        """Outputs and saved tensors, as of `CompiledPlan.forward`; `inputs` are emptied."""
        compiled = invocation.compiled
        if (reason := self._why_plain(invocation)) is not None:
            self._log_once(reason)
            return compiled.forward(invocation, inputs)
        if compiled is not self._warm:
            self._warm = self._graphs = self._obstacle = None
            self._captures, self._is_backward_warm = 0, False
            self._offsets = {}, {}
            made = self._watched(compiled.forward, invocation, inputs, self._offsets[0])
            self._warm = compiled
            return made
        graphs = self._graphs
        if graphs is not None and graphs.is_in_use(invocation):
            self._log_once("another call of it waits for its backward")
            return compiled.forward(invocation, inputs)
        if self._obstacle is not None:
            return compiled.forward(invocation, inputs)
        if graphs is None or not graphs.fit(invocation, inputs):
            self._graphs = graphs = None  # with its memory
            if self._captures == MAX_CAPTURES:
                self._refuse(f"its parameters, arena or numbers changed {MAX_CAPTURES} times")
                return compiled.forward(invocation, inputs)
            self._captures += 1
            try:
                self._graphs = graphs = _Graphs(
                    invocation, self._static, self._outputs, self._offsets
                )
            except RuntimeError as error:
                self._refuse(_description(error, compiled.forward))
            if graphs is None:  # after the frames of the error, which hold tensors
                invocation.restart()
                return compiled.forward(invocation, inputs)
        self._clock.skip()
        made = graphs.replay_forward(invocation, inputs)
        inputs.clear()
        return made

    def backward(self, invocation: Invocation, given: list[Any]) -> Any:
        """Gradients, as of `CompiledPlan.backward`; `given` is emptied."""
        graphs, compiled = invocation.graphs, invocation.compiled
        is_first = compiled is self._warm and not self._is_backward_warm
        if graphs is not None:
            tangents = given[len(compiled.saved_inputs) :]
            given.clear()
            half = None
            try:
                if not is_first and graphs.fit(invocation, invocation.inputs):
                    half = graphs.backward(invocation, tangents)
            except RuntimeError as error:
                self._refuse(_description(error, compiled.backward))
            if half is not None:
                return graphs.replay_backward(half, invocation, tangents)
            invocation.restart()
            given += [*graphs.saved(invocation), *tangents]
            del tangents
        if not is_first or self._obstacle is not None:
            return compiled.backward(invocation, given)
        made = self._watched(compiled.backward, invocation, given, self._offsets[1])
        self._is_backward_warm = True
        return made

    def _watched(
        self,
        half: Callable[..., Any],
        invocation: Invocation,
        given: list[Any],
        offsets: dict[int, int],
    ) -> Any:
        """Run the ops of a half, and refuse one that makes the host wait: no graph has it.

        `offsets` gets those of its random ops that are recomputed.
        """
        before, begin = {*invocation.states}, self._generator.state()
        with HostWaits() as waits:
            made = half(invocation, given)
        offsets |= {op: s[1] - begin[1] for op, s in invocation.states.items() if op not in before}
        if waits.found is not None:
            file, line = waits.found
            op = op_at(half, file, line) or f"{file}:{line}"
            self._refuse(f"{op} makes the host wait for the device")
        return made

    def _why_plain(self, invocation: Invocation) -> str | None:
        """The reason why this call runs the plan's ops, if it does."""
        compiled, memory = invocation.compiled, invocation.memory
        if self._collectives:
            return f"{self._collectives[0]} was not seen to work in one"
        if self._on_host:
            return f"{self._on_host[0]} draws its random numbers on the CPU"
        if compiled.outputs == "gradients":
            return 'outputs="gradients" has them in the arena'
        if compiled.consumed:
            return "hooks consume gradients in its backward"
        if invocation.in_joint_plan:
            return "it is one of several graphs of an iteration"
        if invocation.numbers:
            return "its plan is one for several input sizes"
        if memory is not None and memory.live_offsets:
            return "a tensor that outlived a step or an update lies in its arena"
        return "the user captures one" if cuda.capturing() else None

    def _refuse(self, reason: str) -> None:
        """Run this plan without graphs from now on."""
        self._graphs, self._obstacle = None, reason
        self._log_once(reason)

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("%s: '%s' runs without a CUDA graph: %s", self._where, self._name, reason)


def _description(error: RuntimeError, half: Callable[..., Any]) -> str:
    """The op at which the capture of a half failed, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    ops = [op for f in frames if (op := op_at(half, f.filename, f.lineno or 0))]
    return ": ".join([*ops, str(error).partition("\n")[0]])


class _Graphs:
    """The captured halves of one plan, in the arena of the invocation given.

    A backward is captured for each set of held gradients, whose addresses it has.
    """

    def __init__(
        self,
        invocation: Invocation,
        static: Sequence[int],
        outputs: int,
        offsets: Sequence[Mapping[int, int]],
    ) -> None:
        self._compiled, self._outputs, self._offsets = invocation.compiled, outputs, offsets
        self._block = weakref.ref(_block_of(invocation))
        self._user = weakref.ref(invocation)
        on_device = [i for i, value in enumerate(invocation.inputs) if is_on_device(value)]
        self._static = [i for i in static if i in on_device]
        self._addresses = self._addresses_of(invocation.inputs)
        self._places = {i: place_of(invocation.inputs[i]) for i in on_device if i not in static}
        if written := self._places.keys() & self._compiled.updated_inputs:
            raise CudaGraphError(f"it overwrites its input {min(written)}")
        self._baked = {
            i: value.clone() if isinstance(value, torch.Tensor) else value
            for i, value in enumerate(invocation.inputs)
            if i not in on_device
        }
        self._in_arena = torch.empty(0, device="cpu")
        given = self._given(invocation)
        graph, made = self._capture_forward(invocation, given)
        values = list(made[:outputs])
        positions = {id(value): i for i, value in enumerate(values)}
        self._outside: dict[int, int] = {}
        """Positions of saved tensors outside the arena among the results of the forward."""
        for i, value in enumerate(made[outputs:]):
            if self._compiled.saved_inputs[i] is None and not _is_in(value, invocation):
                if id(value) not in positions:
                    values.append(value)
                self._outside[i] = positions.get(id(value), len(values) - 1)
        self._forward = _Half(graph, values, given)
        self._tangents: list[Any] | None = None
        self._backwards: dict[tuple[object, ...], _Half] = {}

    def _addresses_of(self, inputs: Sequence[Any]) -> list[int]:
        return [inputs[i].data_ptr() for i in self._static]

    def is_in_use(self, invocation: Invocation) -> bool:
        """True if another call is between its halves."""
        user = self._user()
        return (
            user is not None
            and user is not invocation
            and user.graphs is self
            and (user.memory is not None)
        )

    def fit(self, invocation: Invocation, inputs: Sequence[Any]) -> bool:
        """True if the graphs have the addresses and the numbers of a call."""
        return (
            self._block() is _block_of(invocation)
            and self._addresses == self._addresses_of(inputs)
            and all(_equal(inputs[i], value) for i, value in self._baked.items())
        )

    def _given(self, invocation: Invocation) -> list[Any]:
        """Inputs of a capture."""
        return [self._places.get(i, value) for i, value in enumerate(invocation.inputs)]

    def _capture_forward(
        self, invocation: Invocation, given: list[Any]
    ) -> tuple[DrawingGraph, Sequence[Any]]:
        redraws = self._compiled.forward_redraws
        graph = DrawingGraph(_block_of(invocation).device, redraws, self._offsets[0])
        return graph, _capture(
            graph, invocation, lambda: self._compiled.forward(invocation, [*given])
        )

    def replay_forward(self, invocation: Invocation, inputs: Sequence[Any]) -> Sequence[Any]:
        """Outputs of a forward, and saved tensors: stand-ins for those that only graphs read."""
        self._user, invocation.graphs = weakref.ref(invocation), self
        for i, place in self._places.items():
            copy_to_place(inputs[i], place)
        values = self._forward.replay(inputs, invocation)
        for i in self._compiled.updated_inputs:
            increment_version(inputs[i])
        saved = [self._in_arena] * len(self._compiled.saved_inputs)
        for i, position in self._outside.items():
            saved[i] = values[position]
        return [*values[: self._outputs], *saved]

    def saved(self, invocation: Invocation) -> Sequence[Any]:
        """The tensors that the forward saved, which its replay does not make.

        They are made in a capture of the forward that is dropped: it runs nothing, so their memory
        in the arena is as the replay left it.
        """
        given = self._given(invocation)
        _, made = self._capture_forward(invocation, given)
        saved, values = [*made[self._outputs :]], self._forward.tensors(given)
        for i, position in self._outside.items():
            saved[i] = values[position]
        return saved

    def backward(self, invocation: Invocation, tangents: Sequence[Any]) -> "_Half":
        """The backward that adds to the gradients held now, captured if there is none."""
        if self._tangents is None:
            self._tangents = [place_of(t) if is_on_device(t) else t for t in tangents]
        if any(not has_layout(place, t) for place, t in zip(self._tangents, tangents, strict=True)):
            raise CudaGraphError("gradients of its outputs have another layout than before")
        key = tuple((p, g.data_ptr(), g.stride()) for p, g in invocation.held.items())
        found = self._backwards.get(key)
        if found is None:
            if len(self._backwards) == MAX_CAPTURES:
                raise CudaGraphError(f"gradients that it adds to moved {MAX_CAPTURES} times")
            given = [*self.saved(invocation), *self._tangents]
            theirs = _addresses([*given, *invocation.held.values()])  # no reference: they die
            redraws = self._compiled.backward_redraws
            graph = DrawingGraph(_block_of(invocation).device, redraws, self._offsets[1])
            made = _capture(
                *(graph, invocation),
                lambda: _copied_out(self._compiled.backward(invocation, given), theirs),
            )
            found = self._backwards[key] = _Half(graph, made, ())
        return found

    def replay_backward(
        self, half: "_Half", invocation: Invocation, tangents: Sequence[Any]
    ) -> Sequence[Any]:
        """Gradients of a backward."""
        assert self._tangents is not None
        for place, tangent in zip(self._tangents, tangents, strict=True):
            if is_on_device(place):
                copy_to_place(tangent, place)
        made = half.replay((), invocation)
        increment_version(invocation.held.values())
        return made


class _Half:
    """A graph, and the tensors that its capture returned, in the graph's memory.

    `values` may be `inputs` of the capture: a replay returns those of its call instead.
    """

    def __init__(self, graph: DrawingGraph, values: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._graph = graph
        self._storages: list[torch.UntypedStorage] = []
        self._makers: list[Callable[[Sequence[Any]], Any]] = []
        given = {id(value): i for i, value in enumerate(inputs) if is_on_device(value)}
        theirs = {inputs[i].untyped_storage().data_ptr() for i in given.values()}
        numbers: dict[int, int] = {}
        for value in values:
            if not is_on_device(value):
                self._makers.append(partial(_constant, value))
            elif id(value) in given:
                self._makers.append(itemgetter(given[id(value)]))
            else:
                storage = value.untyped_storage()
                if storage.data_ptr() in theirs and storage.nbytes():
                    raise CudaGraphError("it returns a view of an input")
                number = numbers.setdefault(storage_object(storage), len(numbers))
                if number == len(self._storages):
                    self._storages.append(storage)
                layout = value.dtype, value.storage_offset(), value.size(), value.stride()
                self._makers.append(partial(_tensor, self._storages, number, layout))

    def replay(self, inputs: Sequence[Any], invocation: Invocation) -> list[Any]:
        """Run the graph, after results of earlier replays that are still held have moved."""
        for i in range(len(self._storages)):
            if is_shared(self._storages, i):
                self._storages[i] = cuda.copy_out(self._storages[i])
        self._graph.replay(invocation.states)
        return self.tensors(inputs)

    def tensors(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of the latest replay."""
        return [make(inputs) for make in self._makers]


def _capture(
    graph: DrawingGraph, invocation: Invocation, half: Callable[[], Sequence[Any]]
) -> Sequence[Any]:
    """Capture what a half asks of the device, and return its results; nothing runs."""
    device = _block_of(invocation).device
    torch.cuda.synchronize(device)
    gc.collect()  # a collection in the capture might ask the device what a capture forbids
    torch.cuda.empty_cache()
    side = _side_stream(device)
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side), graph.capturing():
        invocation.draws = graph
        try:
            made = half()
            if invocation.transfers is not None:
                invocation.transfers.join()
        finally:
            invocation.draws = None
        invocation.compiled.arena.pause()
    current.wait_stream(side)
    return made


@functools.cache
def _side_stream(device: int | None) -> torch.cuda.Stream:
    """The stream of captures: the default stream cannot be captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _addresses(values: Sequence[Any]) -> set[int]:
    """Addresses of the storages of tensors."""
    return {value.untyped_storage().data_ptr() for value in values if is_on_device(value)}


def _copied_out(values: Sequence[Any], theirs: set[int]) -> Sequence[Any]:
    """The results of a backward, with copies of those in storages at addresses of its inputs."""
    return [value.clone() if _addresses([value]) & theirs else value for value in values]


def _static_inputs(captured: Captured) -> list[int]:
    """Positions of the primals that are parameters or buffers."""
    found = []
    for i, node in enumerate(filter(is_primal, captured.module.graph.nodes)):
        (t,) = captured.storages[node]
        if t is not None and captured.graph.tensors[t].kind in ("parameter", "buffer"):
            found.append(i)
    return found


def _block_of(invocation: Invocation) -> cuda.Block:
    assert invocation.memory is not None and invocation.memory.block is not None
    return invocation.memory.block


def _is_in(value: torch.Tensor, invocation: Invocation) -> bool:
    """True if a tensor lies in the arena."""
    block = _block_of(invocation)
    return block.address <= value.data_ptr() < block.address + block.size


def _equal(value: Any, baked: Any) -> bool:
    """True if an input without a place is as it was at the capture."""
    if isinstance(value, torch.Tensor):
        return isinstance(baked, torch.Tensor) and torch.equal(value, baked)
    return bool(value == baked)


def _tensor(
    storages: Sequence[torch.UntypedStorage], number: int, layout: tuple[Any, ...], _: object
) -> torch.Tensor:
    """A new tensor over a storage; no method, so that a half that is dropped is freed at once."""
    dtype, *where = layout
    storage = storages[number]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)


def _constant(value: Any, _: Sequence[Any]) -> Any:
    return value
