"""Loans of arenas on CUDA to an optimizer's step.

Between a backward and the next forward an arena holds gradients at most. On the CPU its other pages
are freed. On CUDA it is one block of PyTorch's allocator, which cannot be freed in part, so its
free bytes serve the temporaries of `optimizer.step()`: a foreach update makes one copy of all
parameters. The bytes of a step are then those of the forward and backward or of the update, the
larger of the two, as in eager PyTorch.

- An arena is allocated with room for the temporaries of AdamW, as far as the step's budget goes
  (`gap.arena_for_loans`): otherwise a gap that lacks a few bytes would serve none.
- If no gap between the gradients is large, they first move to the arena's start, which costs one
  copy of them on the device. A temporary for which there is no gap lies outside, as without a loan.
- States, which a first step makes, move to PyTorch's allocator when the step ends. So no tensor of
  the user's is in the arena when the next forward begins.
- Only optimizers of `torch.optim` borrow, from their thread's arenas: their updates run on the
  current stream, and gradients of other threads stay where they are. Those with hooks of the
  user's around their step do not borrow, as a hook may keep what it allocates.
- A step that raises an error leaves its loan until the thread's next run or optimizer step; a
  closure's run ends it.
- Nothing is lent while a CUDA graph is captured, nor an arena whose addresses a CUDA graph holds.
"""

import functools
import threading
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from coop_plan.runtime.device import cuda
from coop_plan.runtime.device.arena import Memory
from coop_plan.runtime.execute.arena_pool import idle_arenas
from coop_plan.runtime.torch_internals.autograd import has_step_hooks, is_own_optimizer
from coop_plan.runtime.torch_internals.ops import tree_flatten


class _Borrowed(threading.local):
    """The arenas that this thread has borrowed."""

    def __init__(self) -> None:
        self.arenas: list[Memory] = []


_borrowed = _Borrowed()


@functools.cache
def lend_to_optimizers() -> None:
    """Lend idle arenas on CUDA to all optimizers' steps from now on."""
    register_optimizer_step_pre_hook(_lend)
    register_optimizer_step_post_hook(_recall)


def _lend(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _recall(optimizer)  # of a step that raised an error
    lends = is_own_optimizer(optimizer) and not has_step_hooks(optimizer)
    if lends and not cuda.capturing():
        _borrowed.arenas = [arena for arena in idle_arenas() if arena.lend()]


def _recall(optimizer: Any, *_: object) -> None:
    arenas, _borrowed.arenas = _borrowed.arenas, []
    for arena in arenas:
        kept = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        arena.recall(tree_flatten([*map(dict, optimizer.state.values()), kept])[0])
