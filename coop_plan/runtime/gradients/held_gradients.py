"""Observes the memory environment of a step, and plans the step again for it.

A graph does not say which gradients are held when its forward begins, nor what else is allocated
while it runs. The runtime observes both: gradients held across steps get an accumulating op
(`gradients.capture_adjust`), other bytes a reserve. An observation counts for all later plans.
"""

import logging
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coop_plan.planner import InfeasibleBudgetError
from coop_plan.planner.planning import keep_all_peak
from coop_plan.runtime.capture.joint_graph import Captured
from coop_plan.runtime.device.arena import counted_bytes, node_owners
from coop_plan.runtime.dynamic_shapes.history import ShapeHistory
from coop_plan.runtime.errors import BudgetExceededError
from coop_plan.runtime.execute.find_plan import peak_in_eager, plan_for
from coop_plan.runtime.gradients import capture_adjust
from coop_plan.runtime.gradients.capture_adjust import MemoryEnvironment
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.autograd import (
    HookUse,
    WatchedHook,
    accumulate_node,
    creates_graph,
    has_gradient_hooks,
    has_only_post_hooks,
    runs_in_this_backward,
    watch_hooks,
)
from coop_plan.schemas import Plan, format_bytes

log = logging.getLogger("coop-plan")

MAX_GRADIENT_PLANS = 4
"""Plans for different sets of held gradients, after which all gradients count as held."""


@dataclass(eq=False)
class HeldGradients:
    """Memory environment of one compiled step, as observed so far, and plans for it.

    `budget_bytes` is the budget of the latest plan. A budget in bytes is kept, or an error. A share
    is of keep-everything with the held gradients; it or `min` grows to the least feasible budget.
    """

    _captured: Captured
    environment: MemoryEnvironment
    _options: Options
    budget_bytes: int
    _name: str
    _history: ShapeHistory
    _kept: set[int] = field(default_factory=set)
    """Positions of gradients that hooks keep."""
    _plans: int = 0

    def __post_init__(self) -> None:
        self._accumulable = capture_adjust.accumulable(self._captured)
        self._bytes = capture_adjust.sizes(self._captured)
        self._consumable = capture_adjust.consumable(self._captured)
        self._planned = self.environment

    def expect(self) -> bool:
        """Assume the environment of the function's other steps; returns whether that changes it."""
        expected = self._history.expected(self._captured)
        if expected == MemoryEnvironment():
            return False
        self.environment = replace(expected, consumed=expected.consumed | self._planned.consumed)
        return self.environment != self._planned

    def held(self, inputs: Sequence[Any]) -> dict[int, int]:
        """Bytes of the gradients that are held when a forward begins, by address."""
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
        """Leaves among a forward's inputs that get a gradient, by position."""
        return {p: weakref.ref(inputs[p]) for p in self._bytes if inputs[p].is_leaf}

    def observe(self, inputs: Sequence[Any], left: Iterable[int]) -> bool:
        """Observe the gradients that are held when a forward begins.

        Args:
            inputs: of the forward; parameters are the user's own tensors.
            left: positions of gradients of an earlier call that are still in the arena.

        Returns:
            True if the environment changed.
        """
        held: set[int] = set()
        duplicated: set[int] = set()
        for position, parameter, _ in self._gradients(inputs):
            moves = can_be_added_to(self._accumulable, position, parameter)
            (held if moves else duplicated).add(position)
        now = self.environment
        duplicated |= now.duplicated
        found = (held.union(left) | now.across_steps) - duplicated
        if found <= now.across_steps and duplicated == now.duplicated:
            return False
        if self._plans >= MAX_GRADIENT_PLANS:
            found = set(self._accumulable) - duplicated
        self.environment = replace(
            now, across_steps=frozenset(found), duplicated=frozenset(duplicated)
        )
        return True

    def watch_unobserved_hooks(
        self, inputs: Sequence[Any], gradients: Sequence[Any]
    ) -> dict[int, list[WatchedHook]]:
        """Hooks that were not yet observed to consume or keep these gradients, by position."""
        asked = self._consumable.keys() - self.environment.consumed - self._kept
        return {
            p: watch_hooks(inputs[p], gradients[p], counted_bytes)
            for p in asked
            if inputs[p].is_leaf and has_only_post_hooks(inputs[p]) and gradients[p] is not None
        }

    def learn(
        self,
        used: Mapping[int, HookUse | None],
        *,
        outside: int = 0,
        duplicated: Collection[int] = (),
    ) -> bool:
        """Add bytes outside the plan, duplicated gradients, and what hooks did with `used` ones.

        A gradient that was planned as consumed never is again if its hooks did not consume it or
        did not run early (None), or if it is duplicated. Such gradients, and larger temporaries of
        hooks, may explain the bytes outside, which do not count then.

        Returns:
            True if the environment changed.
        """
        now = self.environment
        consumed = {p: use.temporaries for p, use in used.items() if use and use.consumed}
        self._kept |= now.consumed & (used.keys() - consumed.keys() | set(duplicated))
        twice = now.duplicated.union(duplicated)
        dead = now.consumed.union(consumed) - twice - self._kept
        hook_bytes = now.hook_bytes
        if (outside or dead != now.consumed) and self._captured.device.type == "cpu":
            hook_bytes = max([hook_bytes, *(consumed[p] for p in consumed.keys() & dead)])
        explained = twice != now.duplicated or now.consumed - dead or hook_bytes > now.hook_bytes
        self.environment = MemoryEnvironment(
            now.across_steps.difference(duplicated),
            twice,
            dead,
            now.reserve + (0 if explained else outside),
            hook_bytes,
        )
        return self.environment != now

    def plan(self, instead_of: int = 0) -> tuple[Captured, Plan, bool]:
        """The step in its present environment, its plan, and True if the plan was cached.

        If a budget in bytes is too small, the plan is that of the least budget, with a warning, if
        that is below the `instead_of` bytes that the present plan takes.

        Raises:
            BudgetExceededError: the budget is in bytes and too small.
        """
        captured = capture_adjust.under(self._captured, self.environment)
        least = self._options.plan.budget.kind == "min"
        first = self.budget_bytes
        self._raise_share()
        try:
            within = self._options.within(None if least else self.budget_bytes)
            made, cached = plan_for(captured.graph, within, history=self._history)
        except InfeasibleBudgetError:
            made, cached = plan_for(captured.graph, self._options.within(None))
            if self._options.plan.budget.kind == "bytes":
                exceeded = self._budget_exceeded(made.budget_bytes)
                if made.budget_bytes >= instead_of:
                    self.environment = self._planned
                    raise exceeded from None
                log.warning("%s; until then it runs by the plan for that", str(exceeded))
        self._plans += 1
        self._planned = self.environment
        self._history.found(self._captured, self.environment)
        if made.budget_bytes > first and self._options.plan.budget.kind == "share":
            log.log(
                self._history.level(self._cause()),
                "'%s' takes %s instead of %s as first planned: %s",
                *(self._name, format_bytes(made.budget_bytes), format_bytes(first)),
                self._why(),
            )
        self.budget_bytes = max(self.budget_bytes, made.budget_bytes)
        return captured, made, cached

    def _raise_share(self) -> None:
        """Let a share be of keep-everything with the held gradients, as it runs in this loop."""
        plan = self._options.plan
        if plan.budget.kind == "share":
            held = replace(self.environment, reserve=0)
            captured = capture_adjust.under(self._captured, held)
            budget = plan.budget.resolve(keep_all_peak(captured.graph, plan)) or 0
            eager = peak_in_eager(captured.graph, captured.checkpoints)
            budget = budget if eager is None else min(budget, eager)
            self.budget_bytes = max(self.budget_bytes, budget)

    def _budget_exceeded(self, smallest_bytes: int) -> BudgetExceededError:
        return BudgetExceededError(
            f"'{self._name}' cannot keep to its budget of {format_bytes(self.budget_bytes)}:"
            f" {self._why()}, and it needs at least"
            f" {format_bytes(smallest_bytes)}; free them before the forward (gradients by"
            " zero_grad), or give it that budget"
        )

    def _cause(self) -> str:
        """Kind of reason, as in `_why` but without figures."""
        now = self.environment
        return f"gradients {bool(now.across_steps | now.duplicated)}, outside {bool(now.reserve)}"

    def _why(self) -> str:
        now = self.environment
        held = sum(self._bytes[p] for p in now.across_steps | now.duplicated if p in self._bytes)
        parts = []
        if held:
            parts.append(f"gradients of {format_bytes(held)} live across its forward")
        if now.reserve:
            parts.append(f"{format_bytes(now.reserve)} are allocated outside the plan")
        if now.hook_bytes:
            parts.append(f"{format_bytes(now.hook_bytes)} are temporaries of a gradient's hook")
        if kept := sum(self._bytes[p] for p in self._kept):
            parts.append(f"gradients of {format_bytes(kept)} outlive their hooks")
        return " and ".join(parts)


def can_be_added_to(accumulable: Container[int], position: int, leaf: torch.Tensor) -> bool:
    """True if a gradient that is held when a forward begins can be added to."""
    return position in accumulable and not has_gradient_hooks(leaf)


def handed_over(leaves: Mapping[int, torch.Tensor], consumed: Iterable[int]) -> set[int]:
    """Positions in `consumed` whose hooks this backward can call itself."""
    found = {p for p in consumed if p in leaves and _hooks_alone(leaves[p])}
    return set() if found and creates_graph() else found


def _hooks_alone(leaf: torch.Tensor) -> bool:
    """True if autograd would only set the leaf's gradient to ours and call its hooks."""
    return leaf.grad is None and has_only_post_hooks(leaf) and _is_only_ours(leaf)


def held_in_place(leaves: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Gradients of these leaves that a backward can add to, as autograd would at its end."""
    if creates_graph():  # autograd makes new sums, and leaves the old ones as they are
        return {}
    return {
        position: leaf.grad
        for position, leaf in leaves.items()
        if leaf.grad is not None and _is_added_to(leaf, leaf.grad)
    }


def _is_added_to(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    """True if the running backward would add our gradient to that of a leaf in place.

    No hook may be called with it, and no other autograd function may have a gradient for the leaf,
    which autograd would add to ours first. All that wait for the leaf's node, by an edge or in C++
    as DDP does, own it; our function and `node` are the only owners.
    (torch/csrc/autograd/functions/accumulate_grad.h, case 2.3)
    """
    if type(gradient) is not torch.Tensor or gradient.layout != torch.strided:
        return False
    of_gradient = gradient.dtype, gradient.device, gradient.shape
    if of_gradient != (leaf.dtype, leaf.device, leaf.shape) or has_gradient_hooks(leaf):
        return False
    return _is_only_ours(leaf)


def _is_only_ours(leaf: torch.Tensor) -> bool:
    node = accumulate_node(leaf)
    return runs_in_this_backward(node) and node_owners(node) == 2
