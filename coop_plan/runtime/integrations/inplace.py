"""In-place compilation and replacement of the modules and methods that a framework calls."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coop_plan.runtime.errors import OptionsError
from coop_plan.runtime.options import Options
from coop_plan.runtime.torch_internals.dynamo import compiled_call, set_compiled_call


def coop(budget: int | str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `torch.compile` for this backend, with a budget and other options.

    Raises:
        OptionsError: an option is invalid.
    """
    given = dict(options) if budget is None else {"budget": budget, **options}
    Options.parse(given)  # raises here, before the first batch is loaded
    return {"backend": "coop", "options": given}


def compile_module(module: nn.Module, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Compile the calls of a module in place; returns a function that undoes it.

    The module keeps its class, its parameters and their names.
    """
    kept = compiled_call(module)
    module.compile(**arguments)

    def undo() -> None:
        set_compiled_call(module, kept)

    return undo


def compile_method(owner: object, name: str, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """Compile a method of one object; returns a function that undoes it."""
    method = getattr(owner, name)
    setattr(owner, name, torch.compile(method, **arguments))
    reference = weakref.ref(owner)

    def undo() -> None:
        found = reference()
        if found is not None:
            delattr(found, name)

    return undo


class Replacements:
    """Functions that are attributes of objects in place of their methods, until `undo`."""

    def __init__(self) -> None:
        self._made: list[tuple[object, str]] = []

    def set(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Have `owner.name` be the function."""
        setattr(owner, name, function)
        self._made.append((owner, name))

    def undo(self) -> None:
        """Have all methods be those of the classes again."""
        while self._made:
            delattr(*self._made.pop())


def refuse(reasons: Mapping[str, object]) -> None:
    """Raise an OptionsError with the first reason that applies: whose value is true."""
    for reason, applies in reasons.items():
        if applies:
            raise OptionsError(reason)
