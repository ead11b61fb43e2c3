"""The current backward, and the accumulation of gradients.

`AccumulateGrad` adds a gradient to `.grad` and calls hooks.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from coop_plan.runtime.torch_internals.dynamo_graphs import leaves_of


def inside_backward() -> bool:
    """True if this thread runs inside a call of the autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def has_saved_tensors_hooks() -> bool:
    """True within `torch.autograd.graph.saved_tensors_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def creates_graph() -> bool:
    """True if the compiled backward that this thread runs has `create_graph=True`.

    The grad mode does not tell: it is off, as in any `autograd.Function`.
    """
    return _second_node() is not None


def refuse_second_backward(refused: Exception) -> None:
    """Let autograd raise `refused` when it differentiates what this backward returns.

    Otherwise it raises AOTAutograd's error, which has no line.
    """
    node = _second_node()
    if node is not None:

        def refuse(_: Any) -> None:
            raise refused

        node.register_prehook(refuse)


def _second_node() -> Any:
    """Autograd's node of the gradients of this thread's compiled backward; None without a graph.

    Assumed: with `create_graph=True` AOTAutograd calls the backward from the forward of an
    `autograd.Function`, whose context is `double_ctx` and the node
    (_functorch/_aot_autograd/runtime_wrappers.py:3484).
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and "double_ctx" in frame.f_code.co_varnames:
            return frame.f_locals["double_ctx"]
        frame = frame.f_back
    return None


def has_only_post_hooks(leaf: torch.Tensor) -> bool:
    """True if a leaf has post-accumulate hooks, and no hooks that run before accumulation."""
    return bool(leaf._post_accumulate_grad_hooks) and not leaf._backward_hooks


def all_leaves_have_only_post_hooks(gm: fx.GraphModule) -> bool:
    """True if all leaves among a graph's inputs have post-accumulate hooks only."""
    leaves = leaves_of(gm)
    return bool(leaves) and all(map(has_only_post_hooks, leaves))


def has_gradient_hooks(leaf: torch.Tensor) -> bool:
    """True if a leaf has Python hooks, before or after accumulation."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def is_own_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True for a class of `torch.optim`, whose update runs on the current stream."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if functions run before an optimizer's step, its own or those of all optimizers.

    Functions of this package do not count.
    """
    return _are_users(optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """The same, before or after its step."""
    after = optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks
    return has_step_pre_hooks(optimizer) or _are_users(*after)


def _are_users(*hooks: Mapping[int, Any]) -> bool:
    every = itertools.chain(*(some.values() for some in hooks))
    return any(not str(hook.__module__).startswith("coop_plan.") for hook in every)


def accumulate_node(leaf: torch.Tensor) -> Any:
    """The node of autograd that adds to `leaf.grad`."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


CountBytes = Callable[[], AbstractContextManager[Sequence[int]]]
"""Makes a context whose sequence has the peak and the change of its bytes at its end."""


@dataclass(frozen=True)
class HookUse:
    """Use of a gradient by the hooks of its leaf in a backward.

    Attributes:
        consumed: they left the leaf without its gradient.
        temporaries: most bytes that one of them took beyond those that stay, with a copy of the
            gradient in the leaf's layout.
        kept: bytes that stay, as an optimizer's states, the first time that they keep any.
    """

    consumed: bool
    temporaries: int
    kept: int


class WatchedHook:
    """Wrapper of a leaf's hook, for good, which measures it and can be called for autograd.

    Autograd's call in the same backward is skipped then: it calls hooks for an undefined gradient,
    too. `copied` are the bytes of the gradient's copy in the leaf's layout, if it needs one.
    """

    def __init__(self, hook: Callable[[torch.Tensor], object], count: CountBytes) -> None:
        self.hook = hook
        self.count = count
        self.copied = 0
        self.use: HookUse | None = None
        self._has_kept = False
        self.skipped = -1  # autograd's graph task id

    def __call__(self, leaf: torch.Tensor) -> object:
        skipped = torch._C._current_graph_task_id() == self.skipped
        return None if skipped else self._run(leaf)

    def run_early(self, leaf: torch.Tensor) -> object:
        """Call the hook in place of autograd's next call in this backward."""
        self.skipped = torch._C._current_graph_task_id()
        return self._run(leaf)

    def _run(self, leaf: torch.Tensor) -> object:
        gradient = leaf.grad  # alive until the bytes are counted, with autograd as with ours
        with self.count() as counted:
            result = self.hook(leaf)
        del gradient
        peak, change = counted  # pages that an idle arena freed for them are in neither
        kept = 0 if self._has_kept else max(0, change)
        self._has_kept |= change > 0
        self.use = HookUse(leaf.grad is None, self.copied + peak - change, kept)
        return result


class _LaterHook:
    """Wrapper of a leaf's hook, for good, which autograd does not call in the present backward."""

    def __init__(self, hook: Callable[[torch.Tensor], object]) -> None:
        self.hook = hook
        self.skipped = torch._C._current_graph_task_id()

    def __call__(self, value: torch.Tensor) -> object:
        skipped = torch._C._current_graph_task_id() == self.skipped
        return None if skipped else self.hook(value)


def watch_hooks(leaf: torch.Tensor, gradient: torch.Tensor, count: CountBytes) -> list[WatchedHook]:
    """Watch the post-accumulate hooks of a leaf that gets this gradient."""
    hooks: Any = leaf._post_accumulate_grad_hooks
    for key, hook in tuple(hooks.items()):
        if not isinstance(hook, WatchedHook):
            hooks[key] = WatchedHook(hook, count)
        hooks[key].use = None
        hooks[key].copied = 0 if _has_strides_of(leaf, gradient) else leaf.nbytes
    return list(hooks.values())


def use_of(hooks: Sequence[WatchedHook]) -> HookUse | None:
    """Use of a gradient by all hooks of its leaf; None if one was not called since the watch."""
    uses = [hook.use for hook in hooks if hook.use is not None]
    if not uses or len(uses) < len(hooks):
        return None
    most = max(use.temporaries for use in uses)
    return HookUse(uses[-1].consumed, most, sum(use.kept for use in uses))


def _has_strides_of(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    if gradient.layout is not torch.strided:
        return True
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    return all(size <= 1 or wanted == stride for size, wanted, stride in strides)


def accumulate_gradient(
    leaf: torch.Tensor, gradient: torch.Tensor, count: CountBytes
) -> HookUse | None:
    """Set the gradient of a leaf that has none and call its hooks, as autograd does.

    Autograd does not call them again in the current backward. (torch/csrc/autograd/functions/
    accumulate_grad.h, cases 1.1 and 1.4, and utils/grad_layout_contract.h)
    """
    hooks = watch_hooks(leaf, gradient, count)
    if _has_strides_of(leaf, gradient):
        leaf.grad = gradient.detach()
    else:
        leaf.grad = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    for hook in hooks:
        if hook.run_early(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
    return use_of(hooks)


def skip_added_hooks(leaf: torch.Tensor) -> None:
    """Skip, in this backward, hooks that were added to a leaf whose hooks were called early."""
    present = torch._C._current_graph_task_id()
    hooks: Any
    for hooks in (leaf._post_accumulate_grad_hooks, leaf._backward_hooks or {}):
        for key, hook in tuple(hooks.items()):
            if getattr(hook, "skipped", -1) != present:
                hooks[key] = _LaterHook(hook)


def after_this_backward(run: Callable[[], None]) -> None:
    """Call a function at the end of the current backward."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def runs_in_this_backward(node: Any) -> bool:
    """True if autograd runs a leaf's node in the current backward.

    `torch.autograd.grad` returns the gradient instead of running the node.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False
