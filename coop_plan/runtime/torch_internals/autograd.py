"""The backward that runs now, and what autograd does with a gradient when it is over.

`AccumulateGrad` adds it to `.grad`, and hooks are called.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from coop_plan.runtime.torch_internals.dynamo_graphs import leaves_of


def inside_backward() -> bool:
    """Whether this thread runs within a call of the autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def makes_a_graph() -> bool:
    """Whether the compiled backward that runs in this thread is asked for `create_graph=True`.

    Gradients are off while it runs, as within any `autograd.Function`. Assumed: AOTAutograd runs it
    from `_double_backward` then (_functorch/_aot_autograd/runtime_wrappers.py:3484).
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_double_backward":
            return True
        frame = frame.f_back
    return False


def hooks_use_gradient(leaf: torch.Tensor) -> bool:
    """Whether hooks are called when a gradient was added, and none with it before that."""
    return bool(leaf._post_accumulate_grad_hooks) and not leaf._backward_hooks


def all_use_gradients(gm: fx.GraphModule) -> bool:
    """Whether hooks are called after the gradient of every leaf among a graph's inputs."""
    leaves = leaves_of(gm)
    return bool(leaves) and all(map(hooks_use_gradient, leaves))


def gradient_hooks(leaf: torch.Tensor) -> bool:
    """Whether Python functions are called with a gradient before it is added, or after."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def accumulate_node(leaf: torch.Tensor) -> Any:
    """The node of autograd that adds to `leaf.grad`."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class _Called:
    """A hook of a leaf that was called in a backward already, in which autograd calls it again.

    Autograd calls them for a gradient of nothing, too. It stays in the hook's place.
    """

    def __init__(self, hook: Callable[[torch.Tensor], None]) -> None:
        self.hook = hook
        self.backward = -1  # the number that autograd has for it

    def __call__(self, leaf: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() != self.backward:
            return self.hook(leaf)
        return None


def give_gradient(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    """Do what autograd does with the gradient of a leaf that has none, and with its hooks.

    It does not call them again in the backward that runs now. (torch/csrc/autograd/functions/
    accumulate_grad.h, cases 1.1 and 1.4, and utils/grad_layout_contract.h)
    """
    strides = zip(leaf.shape, leaf.stride(), gradient.stride(), strict=True)
    if any(size > 1 and wanted != stride for size, wanted, stride in strides):
        gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    leaf.grad = gradient.detach()
    hooks: Any = leaf._post_accumulate_grad_hooks
    for key, hook in tuple(hooks.items()):
        called = hooks[key] = hook if isinstance(hook, _Called) else _Called(hook)
        called.backward = torch._C._current_graph_task_id()
        if called.hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")


def after_this_backward(run: Callable[[], None]) -> None:
    """Call a function when the backward that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def runs_in_this_backward(node: Any) -> bool:
    """Whether autograd runs a leaf's node in the backward that runs now.

    `torch.autograd.grad` returns the gradient instead.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False
