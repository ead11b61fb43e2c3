"""Invocation: one call of a step, from its forward to its backward.

Autograd saves a handle and nothing else of a step. All that the backward needs is kept here, by the
number in the handle, until autograd drops the handle: with the loss, or after the backward.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from coop_plan.runtime.capture.sized_numbers import Numbers
from coop_plan.runtime.device.arena import Memory, Run, counted_bytes
from coop_plan.runtime.errors import StepSpentError
from coop_plan.runtime.execute.compiled_plan import CompiledPlan
from coop_plan.runtime.execute.drawing_graph import DrawingGraph
from coop_plan.runtime.execute.host_updates import Copied, HostUpdates
from coop_plan.runtime.execute.rng_state import Generator
from coop_plan.runtime.execute.transfers import Layout
from coop_plan.runtime.torch_internals.autograd import HookUse, accumulate_gradient
from coop_plan.runtime.torch_internals.ops import tensor_versions

_numbers = itertools.count()
_invocations: "dict[int, Invocation]" = {}
"""By number. Accessed by single dict operations: a handle may be dropped on any thread."""


class Invocation:
    """One call of step `name`, which runs `compiled` in a memory from `owner`, its pool.

    `numbers` are those that depend on its sizes, if the step is one for any sizes.

    Between the halves, `saved` tensors wait in `memory`. If another invocation needs that memory,
    the forward runs again, from the inputs and the states of `generators` at the start.

    Inputs and saved outputs are kept as detached aliases, since autograd's tensors would keep the
    handle alive. Their version counters show if one was overwritten.

    `held_bytes` has the sizes of the gradients held when it began, by address. `alone` is True if
    no other invocation of its thread ran meanwhile, `runs_again` after its first forward. By
    position among the primals, `leaves` are the tensors whose gradients are held across steps or
    consumed by hooks, `held` the gradients that the backward adds to, `handed` the leaves whose
    hooks run within the backward, `used` the use by those that ran, and `updates` those of
    parameters within a whole iteration; `updates_on_host` start them on `host`.
    """

    def __init__(
        self,
        name: str,
        compiled: CompiledPlan,
        owner: object,
        generators: Sequence[Generator],
        numbers: Numbers = (),
    ) -> None:
        self.name = name
        self.numbers = numbers
        self.owner = owner
        self.use_own_plan(compiled)
        self.inputs: Sequence[Any] = ()
        self.leaves: Mapping[int, torch.Tensor] = {}
        self.held: Mapping[int, torch.Tensor] = {}
        self.handed: Container[int] = ()
        self.used: dict[int, HookUse | None] = {}
        self.updates: Mapping[int, Callable[..., None]] = {}
        self.updates_on_host: Mapping[int, Callable[[Copied], None]] = {}
        self.host: HostUpdates | None = None
        self.held_bytes: Mapping[int, int] = {}
        self.alone = True
        self.runs_again = False
        self.thread = threading.get_ident()
        self.saved: Sequence[Any] | None = None
        self.memory: Memory | None = None
        self.graphs: Any = None
        """The CUDA graphs whose replay was its forward (`graph_replay`)."""
        self.draws: DrawingGraph | None = None
        """The graph into which a half is being captured."""
        self.states: dict[int, Any] = {}
        """States of the generators at the first runs of random ops that are recomputed, by op."""
        self.rerun_reason = "it ran a backward already (retain_graph=True)"
        self._number = next(_numbers)
        self._handle: object = None
        self._start = [(generator, generator.state()) for generator in generators]
        self._interrupted: tuple[Generator, Any] | None = None
        self._versions: Sequence[int] = ()
        self._saved_versions: Sequence[int] = ()

    def use_plan(self, compiled: CompiledPlan) -> None:
        """Run both halves by this plan."""
        self.compiled, self.run = compiled, Run(compiled.arena)
        self.transfers = compiled.transfer_runner()

    def use_own_plan(self, compiled: CompiledPlan) -> None:
        """Run by this plan of its own, also after a joint plan was abandoned."""
        self._alone = compiled
        self.use_plan(compiled)

    @property
    def in_joint_plan(self) -> bool:
        """True if it runs the joint plan of its iteration."""
        return self.compiled is not self._alone

    def make_handle(self) -> torch.Tensor:
        """A CPU scalar with the invocation's number, which lives until the handle is dropped.

        The handle requires a gradient. PyTorch 2.11 detects a double backward by such a saved
        tensor, and AOTAutograd then refuses it; otherwise the gradients would count as constants.
        """
        number = self._number
        array = np.array(float(number))
        _invocations[number] = self
        self._handle = weakref.ref(array, lambda _: _drop(number))
        return torch.from_numpy(array).requires_grad_()

    def mark_overlap(self) -> None:
        """Tell the other invocations of this thread that hold memory that they are not alone."""
        for other in live_invocations():
            if other is not self and other.memory is not None and other.thread == self.thread:
                other.alone = False

    def keep_inputs(self, inputs: Sequence[Any], leaves: Container[int]) -> None:
        """Keep the inputs of the forward, detached except at `leaves`."""
        self.inputs = [
            value.detach() if isinstance(value, torch.Tensor) and i not in leaves else value
            for i, value in enumerate(inputs)
        ]
        self._versions = tensor_versions(self.inputs)

    def keep_saved(self, saved: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Keep the saved tensors of the forward; some are inputs or outputs."""
        given = {id(value) for value in outputs}
        kept = [
            self.inputs[at] if at is not None else value.detach() if id(value) in given else value
            for value, at in zip(saved, self.compiled.saved_inputs, strict=True)
        ]
        self._saved_versions = [
            version if at is None else self._versions[at]
            for version, at in zip(tensor_versions(kept), self.compiled.saved_inputs, strict=True)
        ]
        self.saved = kept  # from here on the invocation waits

    def release_arena(self, taken_by: str) -> None:
        """Release the memory, for `taken_by`."""
        self.saved, self.memory, self.states = None, None, {}
        self.use_plan(self._alone)
        self.rerun_reason = f"{taken_by} needed its memory"

    def accumulate(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a new gradient to the held one; returns it for autograd if none is held."""
        held = self.held.get(position)
        if held is None:
            if self.compiled.gradient_slots[position] is not None:
                return gradient
            self.compiled.arena.pause()
            return gradient.clone()  # its own memory is the arena's
        held.add_(gradient)
        return None

    def hand_over(self, position: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Pass a new gradient to the hooks of its leaf; returns it for autograd if not handed."""
        if position not in self.handed:
            return gradient
        self.compiled.arena.pause()
        before = self.run.counters()
        leaf = self.leaves[position]
        use = self.used[position] = accumulate_gradient(leaf, gradient, counted_bytes)
        if use is not None and use.kept:  # an optimizer's states, resident for another reason
            self.run.exclude(use.kept, before)
        return None

    def write_input(self, value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Write a buffer's new value, unless the forward runs again; returns the buffer.

        AOTAutograd's own copy of the result to the buffer has no effect then.
        """
        if not self.runs_again:
            self.compiled.arena.pause()
            buffer.copy_(value)
        return buffer

    def check(self, saved: Sequence[Any]) -> None:
        """Check that no saved tensor was overwritten, except by the step itself.

        Raises:
            RuntimeError: one was, with autograd's message.
        """
        versions = zip(tensor_versions(saved), self._saved_versions, strict=True)
        inputs = self.compiled.saved_inputs
        for value, (found, expected), at in zip(saved, versions, inputs, strict=True):
            if found != expected and at not in self.compiled.updated_inputs:
                self.memory = None
                raise RuntimeError(
                    f"one of the variables needed for the backward of '{self.name}' has been"
                    f" modified by an inplace operation: {_described(value)} is at version"
                    f" {found}, expected version {expected}"
                )

    @contextmanager
    def rewound_generators(self) -> Iterator[None]:
        """Context in which the generators have their states of the start of the forward.

        Raises:
            StepSpentError: an input of the forward was overwritten since.
        """
        versions = tensor_versions(self.inputs)
        for at in self.compiled.inputs_read:
            if versions[at] != self._versions[at]:
                raise StepSpentError(
                    f"the forward of '{self.name}' would have to run again before its backward,"
                    f" because {self.rerun_reason}, but an input of it has been modified by an"
                    f" inplace operation since: {_described(self.inputs[at])}"
                )
        present = [generator.state() for generator, _ in self._start]
        try:
            for generator, state in self._start:
                generator.set(state)
            yield
        finally:
            for (generator, _), state in zip(self._start, present, strict=True):
                generator.set(state)

    def restart(self) -> None:
        """Begin a half again whose capture into a CUDA graph failed: nothing of it has run."""
        assert self.memory is not None
        if self.transfers is not None:
            self.transfers.forget()
        self.compiled.arena.leave()
        self.run.begin(self.memory, fresh=True)

    def rest(self) -> None:
        """Let pages of its memory be freed before the process takes more than in its run."""
        if self.memory is not None:
            taken = self.run.counters()
            self.memory.release_above(taken.before_bytes + taken.process_bytes)

    def finish(self) -> None:
        """Release the memory after the backward; the gradients in it keep their part alive."""
        self.held, self.leaves, self.handed, self.used = {}, {}, (), {}
        self.memory, self.states = None, {}

    def save_generator(self, op: int) -> None:
        """Save the generator's state before the first run of a random op."""
        if self.draws is not None:  # a replay computes it
            return
        self.compiled.arena.pause()
        self.states[op] = self.compiled.replayed[op].state()

    def restore_generator(self, op: int) -> None:
        """Restore that state before the op is recomputed."""
        self.compiled.arena.pause()
        if self.draws is not None:
            self.draws.recompute()
            return
        generator = self.compiled.replayed[op]
        self._interrupted = generator, generator.state()
        generator.set(self.states[op])

    def resume_generator(self) -> None:
        """Restore the generator's state after a recomputed op ran or failed."""
        if self.draws is not None:
            self.draws.resume()
        if self._interrupted is not None:
            self.compiled.arena.pause()
            generator, state = self._interrupted
            generator.set(state)
            self._interrupted = None

    def update_on_host(self, position: int, number: int, layout: Layout) -> None:
        """Start an update on the host by the gradient that transfer `number` copies there."""
        assert self.transfers is not None
        self.updates_on_host[position](self.transfers.at_host(number, layout))


def _drop(number: int) -> None:
    """Forget an invocation; one without a backward, as after an exception, has memory still."""
    found = _invocations.pop(number, None)
    if found is not None:
        found.rest()


def invocation_of(handle: torch.Tensor) -> Invocation:
    """Returns the invocation of a handle.

    Raises:
        StepSpentError: its memory was released.
    """
    found = _invocations.get(int(handle.item()))
    if found is None:
        raise StepSpentError(
            "the backward of a step whose memory was released: its saved tensor was copied (by"
            " torch.autograd.graph.saved_tensors_hooks, for example) and then dropped"
        )
    return found


def live_invocations() -> list[Invocation]:
    """Invocations whose handle is alive, oldest first."""
    return list(_invocations.copy().values())


def _described(value: torch.Tensor) -> str:
    return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
