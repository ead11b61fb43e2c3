"""The current backward, and the accumulation of gradients.

`AccumulateGrad` adds a gradient to `.grad` and calls hooks.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
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


class _CallOnce:
    """Wrapper of a leaf's hook that skips autograd's second call in the same backward.

    Autograd calls hooks for an undefined gradient, too. The wrapper replaces the hook for good.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self.hook = hook
        self.backward = -1  # autograd's graph task id

    def __call__(self, leaf: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != self.backward:
            return self.hook(leaf)
        return None


def accumulate_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set the gradient of a leaf that has none and call its hooks, as autograd does.

    Autograd does not call them again in the current backward. (torch/csrc/autograd/functions/
    accumulate_grad.h, cases 1.1 and 1.4, and utils/grad_layout_contract.h)
    """
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    if any(size > 1 and wanted != stride for size, wanted, stride in strides):
        gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    leaf.grad = gradient.detach()
    hooks: Any = leaf._post_accumulate_grad_hooks
    for key, hook in tuple(hooks.items()):
        called = hooks[key] = hook if isinstance(hook, _CallOnce) else _CallOnce(hook)
        called.backward = torch._C._current_graph_task_id()
        if called.hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


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
