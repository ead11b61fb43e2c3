"""Compiling what a framework calls, where it is."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.dynamo import compiled_call, set_compiled_call


def coop(budget: int | str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `torch.compile`: this backend, with a budget and other options of it.

    Raises:
        OptionsError: they cannot be used.
    """
    given = dict(options) if budget is None else {"budget": budget, **options}
    Options.parse(given)  # here, and not after the first batch was loaded
    return {"backend": "coop", "options": given}


def compile_module(module: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Let each call of a module be compiled; what is returned undoes it.

    The module stays what it is: its class, its parameters and their names.
    """
    kept = compiled_call(module)
    module.compile(**arguments)

    def undo() -> None:
        set_compiled_call(module, kept)

    return undo


def compile_method(owner: object, name: str, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Let a method of one object be compiled; what is returned undoes it."""
    method = getattr(owner, name)
    setattr(owner, name, torch.compile(method, **arguments))
    there = weakref.ref(owner)

    def undo() -> None:
        found = there()
        if found is not None:
            delattr(found, name)

    return undo
