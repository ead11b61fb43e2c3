"""Peak memory of the Python code that Inductor writes to run its kernels.

The code allocates, reuses, passes on and deletes its buffers by statements of a few forms, in one
function. Its statements are followed in order, with a reference count for each storage, so that
deletions and reuse count as they will happen.
"""

import ast
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

VIEWS = ("reinterpret_tensor", "_frozen_param")
"""Functions whose result shares the storage of their first argument."""


class WrapperCodeError(Exception):
    """The code has no function that runs the kernels."""


class Storage(NamedTuple):
    """A storage: its name, by which tensors share it, and its bytes."""

    name: str
    size: int


class Usage(NamedTuple):
    """Memory of a run of the code.

    Attributes:
        peak: most bytes of buffers and counted inputs at once.
        returned: storages of the results; None of uncounted inputs and of numbers.
    """

    peak: int
    returned: list[Storage | None]


def memory_usage(
    code: str,
    sizes: Mapping[str, int],
    workspace: Callable[[ast.Call], int],
    inputs: Sequence[Storage | None] = (),
) -> Usage:
    """Follow the function `call` of the code.

    `sizes` are bytes by name; all results of an op together have no size of their own. `workspace`
    is the scratch of a call while it runs. `inputs` are the storages of the first arguments, which
    exist at first and are freed with their last name. None, and arguments without one, are not
    counted: they exist before and after the call.

    Raises:
        WrapperCodeError: no function `call` in the code.
    """
    function = _function(code)
    buffers = _Buffers(sizes, workspace, _parts(function, sizes))
    returned: list[Storage | None] = []
    for statement in _statements(function.body):
        if isinstance(statement, ast.Assign) and _is_args(statement.value):
            names = _names(statement.targets[0])
            for name, storage in itertools.zip_longest(names, inputs[: len(names)]):
                buffers.give(name, storage)
        elif isinstance(statement, ast.Return):
            results = statement.value
            if isinstance(results, ast.Tuple | ast.List):
                returned = [buffers.storage(_source(value)) for value in results.elts]
        else:
            buffers.follow(statement)
    return Usage(buffers.peak, returned)


def _function(code: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            return node
    raise WrapperCodeError("Inductor's code has no function `call`")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With | ast.If | ast.For | ast.While):
            yield from _statements(statement.body)
        else:
            yield statement


def _parts(function: ast.FunctionDef, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Results of fallback ops, by the name of all together: they exist from the call on.

    A single result is assigned as a whole, several by index.
    """
    parts: dict[str, list[str]] = {}
    for statement in _statements(function.body):
        match statement:
            case ast.Assign(value=ast.Name(id=whole) | ast.Subscript(value=ast.Name(id=whole))) if (
                whole not in sizes
            ):
                parts.setdefault(whole, []).extend(_names(statement.targets[0]))
    return parts


def _is_args(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "args"


def _names(target: ast.expr) -> list[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return [part.id for part in parts if isinstance(part, ast.Name)]


class _Buffers:
    def __init__(
        self,
        sizes: Mapping[str, int],
        workspace: Callable[[ast.Call], int],
        parts: Mapping[str, list[str]],
    ) -> None:
        self._sizes, self._workspace, self._parts = sizes, workspace, parts
        self._results = {name for names in parts.values() for name in names}
        self._storage: dict[str, Storage] = {}  # by name
        self._users: dict[Storage, int] = {}
        self._uncounted: set[Storage] = set()
        self._now = self.peak = 0

    def storage(self, name: str | None) -> Storage | None:
        """The counted storage of a name."""
        found = self._storage.get(name or "")
        return None if found in self._uncounted else found

    def give(self, name: str, storage: Storage | None) -> None:
        """A name of an input."""
        named, size = storage or (name, 0)
        given = Storage(f"input {named}", size)
        if storage is None:
            self._uncounted.add(given)
        self._bind(name, given)

    def add(self, name: str) -> None:
        """A name of a new storage."""
        self._drop(name)
        self._bind(name, Storage(name, self._sizes.get(name, 0)))

    def follow(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                for name in _names(target):
                    self._drop(name)
            return
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign):
            source = _source(value)
            for name in _names(statement.targets[0]):
                if name in self._results:
                    continue
                if source in self._storage:
                    self._bind(name, self._storage[str(source)])
                else:
                    for part in (name, *self._parts.get(name, ())):
                        self.add(part)
        if isinstance(value, ast.Call):
            self.peak = max(self.peak, self._now + self._workspace(value))

    def _bind(self, name: str, storage: Storage) -> None:
        if storage not in self._users:
            self._users[storage] = 0
            self._now += storage.size
            self.peak = max(self.peak, self._now)
        self._users[storage] += 1
        self._drop(name)
        self._storage[name] = storage

    def _drop(self, name: str) -> None:
        storage = self._storage.pop(name, None)
        if storage is None:
            return
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._now -= storage.size


def _source(value: ast.expr | None) -> str | None:
    """The name whose storage an expression shares, if it does."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(VIEWS) and value.args:
        return _source(value.args[0])
    return None
