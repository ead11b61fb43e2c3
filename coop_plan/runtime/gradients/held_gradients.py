"""What a step finds in the process beside its own tensors, and the plan that leaves room for it.

A graph does not say which gradients are there when its forward begins, nor what runs outside of it.
The runtime sees both, and plans the step anew for them: gradients that live across a forward get a
home outside the arena (`capture.lasting`), other bytes a reserve. What was seen once is planned for
from then on.
"""

import logging
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device.arena import node_owners
from coop_plan.runtime.distributed.collectives import group_of
from coop_plan.runtime.dynamic_shapes.history import Others
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.find_plan import plan_for
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import Circumstances
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.autograd import (
    accumulate_node,
    gradient_hooks,
    hooks_use_gradient,
    makes_a_graph,
    runs_in_this_backward,
)
from coop_plan.schemas import Plan, format_bytes

log = logging.getLogger("coop-plan")

MANY_PLANS = 4
"""Sets of lasting gradients met one after the other, from which on all are taken to last."""


class Residents:
    """Of one compiled step: what it found so far, and plans under these circumstances.

    `budget_bytes` is what the budget came to in the first plan. Where the options name it in bytes
    it is kept or an error; a share of what the step takes, or `min`, grows to the least that is
    feasible.
    """

    def __init__(
        self,
        captured: Captured,
        now: Circumstances,
        options: Options,
        budget_bytes: int,
        name: str,
        others: Others,
    ) -> None:
        self.circumstances = now
        self.budget_bytes = budget_bytes
        self._captured = captured
        self._options = options
        self._others = others
        self._name = name
        self._movable = capture_adjust.movable(captured)
        self._bytes = capture_adjust.sizes(captured)
        self._usable = capture_adjust.usable(captured)
        self._kept: set[int] = set()  # by hooks
        self._plans = 0
        self._planned = self.circumstances

    def expect(self) -> bool:
        """Take the circumstances to be those of the function's other steps; whether it has some."""
        expected = self._others.expected(self._captured)
        if expected == Circumstances():
            return False
        self.circumstances = replace(expected, used=expected.used | self._planned.used)
        return self.circumstances != self._planned

    def held(self, inputs: Sequence[Any]) -> dict[int, int]:
        """Bytes of the gradients that are there when a forward begins, by where they begin."""
        return {
            gradient.data_ptr(): gradient.nbytes
            for _, _, gradient in self._gradients(inputs)
            if gradient.layout is torch.strided
        }

    def _gradients(self, inputs: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for position in self._bytes:
            leaf = inputs[position]
            if leaf.is_leaf and leaf.grad is not None:
                yield position, leaf, leaf.grad

    def leaves(self, inputs: Sequence[Any]) -> dict[int, "weakref.ref[torch.Tensor]"]:
        """Those of a forward's inputs whose gradients last, by position."""
        return {p: weakref.ref(inputs[p]) for p in self._bytes if inputs[p].is_leaf}

    def observe(self, inputs: Sequence[Any], left: Iterable[int]) -> bool:
        """Look at the gradients that are there when a forward begins.

        Args:
            inputs: of the forward, parameters among them as the user has them.
            left: positions of gradients of an earlier call that still lie in the arena.

        Returns:
            Whether the circumstances are others than before.
        """
        held: set[int] = set()
        beside: set[int] = set()
        for position, parameter, _ in self._gradients(inputs):
            moves = can_be_added_to(self._movable, position, parameter)
            (held if moves else beside).add(position)
        now = self.circumstances
        beside |= now.beside
        found = (held.union(left) | now.lasting) - beside
        if found <= now.lasting and beside == now.beside:
            return False
        if self._plans >= MANY_PLANS:
            found = set(self._movable) - beside
        self.circumstances = replace(now, lasting=frozenset(found), beside=frozenset(beside))
        return True

    def used_up(self, inputs: Sequence[Any]) -> Mapping[int, "weakref.ref[torch.Tensor]"]:
        """Leaves among a forward's inputs whose hooks may use their gradients up, by position.

        Those of which it is not known.
        """
        asked = self._usable.keys() - self.circumstances.used - self._kept
        return {
            p: weakref.ref(inputs[p])
            for p in asked
            if inputs[p].is_leaf and hooks_use_gradient(inputs[p])
        }

    def learn(
        self, *, outside: int = 0, beside: Collection[int] = (), used: Iterable[int] = ()
    ) -> bool:
        """Take into account that so many bytes lay outside the plan, or gradients were kept twice.

        Or used up by hooks; of one that is kept after that, no hook is taken to use it up again.

        Returns:
            Whether the circumstances are others than before.
        """
        now = self.circumstances
        self._kept |= now.used.intersection(beside)
        self.circumstances = Circumstances(
            now.lasting.difference(beside),
            now.beside.union(beside),
            now.used.union(used).difference(beside),
            now.reserve + outside,
        )
        return self.circumstances != now

    def plan(self) -> tuple[Captured, Plan, bool]:
        """The step under the present circumstances, its plan, and whether that was in the cache.

        Raises:
            BudgetExceededError: the budget was named in bytes and is too small.
        """
        captured = capture_adjust.under(self._captured, self.circumstances)
        least = self._options.plan.budget.kind == "min"
        try:
            within = self._options.within(None if least else self.budget_bytes)
            made, cached = plan_for(captured.graph, within, others=self._others)
        except InfeasibleBudgetError as error:
            if self._options.plan.budget.kind == "bytes":
                told = self._told(error)
                self.circumstances = self._planned
                raise told from None
            made, cached = plan_for(captured.graph, self._options.within(None))
        if not self._plans and any(group_of(node) for node in captured.ops):
            log.warning(
                "'%s' is planned anew by this rank alone, as another rank need not have found what"
                " it did: %s; its collectives keep their order",
                *(self._name, self._why()),
            )
        self._plans += 1
        self._planned = self.circumstances
        self._others.found(self._captured, self.circumstances)
        if made.budget_bytes > self.budget_bytes and self._options.plan.budget.kind == "share":
            log.log(
                self._others.level(self._cause()),
                "'%s' takes %s, and not %s as planned first: %s",
                *(self._name, format_bytes(made.budget_bytes), format_bytes(self.budget_bytes)),
                self._why(),
            )
        self.budget_bytes = max(self.budget_bytes, made.budget_bytes)
        return captured, made, cached

    def _told(self, error: InfeasibleBudgetError) -> BudgetExceededError:
        return BudgetExceededError(
            f"'{self._name}' cannot keep to its budget of {format_bytes(self.budget_bytes)}:"
            f" {self._why()}, with which it takes at least"
            f" {format_bytes(error.min_feasible_bytes)}; free them before the forward (gradients by"
            " zero_grad), or give it that budget"
        )

    def _cause(self) -> str:
        """The kind of `_why`, whatever its figures."""
        now = self.circumstances
        return f"gradients {bool(now.lasting | now.beside)}, outside {bool(now.reserve)}"

    def _why(self) -> str:
        now = self.circumstances
        held = sum(self._bytes[p] for p in now.lasting | now.beside if p in self._bytes)
        parts = []
        if held:
            parts.append(f"gradients of {format_bytes(held)} live across its forward")
        if now.reserve:
            parts.append(f"{format_bytes(now.reserve)} are taken outside the plan")
        return " and ".join(parts)


def can_be_added_to(movable: Container[int], position: int, leaf: torch.Tensor) -> bool:
    """Whether a gradient that is there when a forward begins can have a home."""
    return position in movable and not gradient_hooks(leaf)


def handed_over(leaves: Mapping[int, torch.Tensor], used: Iterable[int]) -> set[int]:
    """Of the gradients that are `used` up those whose hooks this backward can call itself."""
    found = {p for p in used if p in leaves and _hooks_alone(leaves[p])}
    return set() if found and makes_a_graph() else found


def _hooks_alone(leaf: torch.Tensor) -> bool:
    """Whether all that autograd does with our gradient of a leaf is to set it, and call hooks."""
    return leaf.grad is None and hooks_use_gradient(leaf) and _is_only_ours(leaf)


def held_in_place(leaves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The gradients of these leaves that a backward can add to, as autograd would at its end."""
    if makes_a_graph():  # autograd makes new sums, and leaves the old ones as they are
        return {}
    return {
        position: leaf.grad
        for position, leaf in leaves.items()
        if leaf.grad is not None and _is_added_to(leaf, leaf.grad)
    }


def _is_added_to(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the backward that runs now adds our gradient to that of a leaf, in place.

    And nothing else: no hook is called with it, and no other function of autograd's graph has a
    gradient for the leaf, which would be added to ours first. Whoever waits for the leaf's node, by
    an edge or in C++ as DDP does, is one of its owners; our function is one, `node` another.
    (torch/csrc/autograd/functions/accumulate_grad.h, case 2.3)
    """
    if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
        return False
    of_gradient = gradient.dtype, gradient.device, gradient.shape
    if of_gradient != (leaf.dtype, leaf.device, leaf.shape) or gradient_hooks(leaf):
        return False
    return _is_only_ours(leaf)


def _is_only_ours(leaf: torch.Tensor) -> bool:
    node = accumulate_node(leaf)
    return runs_in_this_backward(node) and node_owners(node) == 2
