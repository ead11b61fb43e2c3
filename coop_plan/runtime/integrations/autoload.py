"""Automatic planning of all training of a process within `COOP_BUDGET`.

An outermost module that is called in training mode with gradients is compiled in place before its
first call. A module that the script itself compiles with the default backend is planned, too.
"""

import functools
import logging
import threading
from typing import Any

import torch
from torch import nn

log = logging.getLogger("coop-plan")

VISITED = "_coop_asked"
"""Key in the `__dict__` of a module that was compiled or skipped."""


class _Thread(threading.local):
    inside = False
    """True while a module runs: modules called now are its submodules."""


_thread = _Thread()


def plan_all_training(budget: str) -> None:
    """Plan all training of this process within a budget, from now on.

    Must be called before Dynamo is loaded: it treats the `__call__` of modules at that time as
    PyTorch's own.
    """
    call: Any = nn.Module.__call__
    plain = torch.compile

    @functools.wraps(call)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _thread.inside:
            return call(self, *args, **kwargs)
        if VISITED not in self.__dict__ and self.training and torch.is_grad_enabled():
            _compile(self, budget)
        _thread.inside = True
        try:
            return call(self, *args, **kwargs)
        finally:
            _thread.inside = False

    @functools.wraps(plain)
    def compiled(model: Any = None, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module) and kwargs.get("backend", "inductor") == "inductor":
            model.__dict__[VISITED] = True
            kwargs = {k: v for k, v in kwargs.items() if k in ("fullgraph", "dynamic", "disable")}
            kwargs |= {"backend": "coop", "options": {"budget": budget}}
            log.warning("COOP_BUDGET=%s: %s is planned", budget, type(model).__name__)
        made = plain(model, **kwargs)
        if isinstance(made, nn.Module):
            made.__dict__[VISITED] = True
        return made

    nn.Module.__call__ = watched  # type: ignore[method-assign]
    torch.compile = compiled


def _compile(module: nn.Module, budget: str) -> None:
    from coop_plan.runtime.torch_internals.dynamo import compiled_call  # loads Dynamo

    module.__dict__[VISITED] = True
    if compiled_call(module) is not None:
        return
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    log.warning("COOP_BUDGET=%s: %s is planned", budget, type(inner).__name__)
    inner.compile(backend="coop", options={"budget": budget})
