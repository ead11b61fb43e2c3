"""Whatever a process trains, planned within `COOP_BUDGET`; the script knows nothing of it.

A module that is called in training mode with gradients, and that no other calls, is compiled in
place before its first call. So is a module that the script compiles itself, without a backend of
its choice.
"""

import functools
import logging
import threading
from typing import Any

import torch
from torch import nn

log = logging.getLogger("coop-plan")

ASKED = "_coop_asked"
"""In the `__dict__` of a module that was compiled, or need not be."""


class _Here(threading.local):
    inside = False
    """Whether a module runs, and all modules called now are parts of it."""


_here = _Here()


def plan_what_trains(budget: str) -> None:
    """From now on, plan what this process trains into a budget.

    Called before Dynamo is loaded, which takes the `__call__` of modules that it then finds for
    PyTorch's own.
    """
    call: Any = nn.Module.__call__
    plain = torch.compile

    @functools.wraps(call)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _here.inside:
            return call(self, *args, **kwargs)
        if ASKED not in self.__dict__ and self.training and torch.is_grad_enabled():
            _compile(self, budget)
        _here.inside = True
        try:
            return call(self, *args, **kwargs)
        finally:
            _here.inside = False

    @functools.wraps(plain)
    def compiled(model: Any = None, **kwargs: Any) -> Any:
        if isinstance(model, nn.Module) and kwargs.get("backend", "inductor") == "inductor":
            model.__dict__[ASKED] = True
            kwargs = {k: v for k, v in kwargs.items() if k in ("fullgraph", "dynamic", "disable")}
            kwargs |= {"backend": "coop", "options": {"budget": budget}}
            log.warning("COOP_BUDGET=%s: %s is planned", budget, type(model).__name__)
        made = plain(model, **kwargs)
        if isinstance(made, nn.Module):
            made.__dict__[ASKED] = True
        return made

    nn.Module.__call__ = watched  # type: ignore[method-assign]
    torch.compile = compiled


def _compile(module: nn.Module, budget: str) -> None:
    from coop_plan.runtime.torch_internals.dynamo import compiled_call  # loads Dynamo

    module.__dict__[ASKED] = True
    if compiled_call(module) is not None:
        return
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    log.warning("COOP_BUDGET=%s: %s is planned", budget, type(inner).__name__)
    inner.compile(backend="coop", options={"budget": budget})
