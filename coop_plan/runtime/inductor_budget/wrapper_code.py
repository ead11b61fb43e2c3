"""Peak memory of the Python code that Inductor writes to run its kernels.

The code allocates, reuses, passes on and deletes its buffers by statements of a few forms, in one
function. Its statements are followed in order, with a reference count for each storage, so that
deletions and reuse count as they will happen.
"""

import ast
from collections.abc import Callable, Iterator, Mapping

VIEWS = ("reinterpret_tensor", "_frozen_param")
"""Functions whose result shares the storage of their first argument."""


class WrapperCodeError(Exception):
    """The code has no function that runs the kernels."""


def peak_bytes(
    code: str,
    sizes: Mapping[str, int],
    workspace: Callable[[str], int],
    is_counted: Callable[[str], bool],
) -> int:
    """Most bytes of buffers and counted inputs at once.

    `sizes` are bytes by name; all results of an op together have no size of their own. `workspace`
    is the scratch of the library op with this result.
    `is_counted` says if an input is counted; the others exist before and after the call.

    Raises:
        WrapperCodeError: no function `call` in the code.
    """
    function = _function(code)
    buffers = _Buffers(sizes, workspace, _parts(function, sizes))
    for statement in _statements(function.body):
        if isinstance(statement, ast.Assign) and _is_args(statement.value):
            for name in _names(statement.targets[0]):
                buffers.add(name, is_counted(name))
        else:
            buffers.follow(statement)
    return buffers.peak


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
        workspace: Callable[[str], int],
        parts: Mapping[str, list[str]],
    ) -> None:
        self._sizes, self._workspace, self._parts = sizes, workspace, parts
        self._results = {name for names in parts.values() for name in names}
        self._storage: dict[str, str] = {}  # by name: the name that its storage was made with
        self._users: dict[str, int] = {}
        self._counted: set[str] = set()
        self._now = self.peak = 0

    def add(self, name: str, counted: bool = True) -> None:
        self._drop(name)
        self._storage[name] = name
        self._users[name] = 1
        if counted:
            self._counted.add(name)
            self._now += self._sizes.get(name, 0)
        self.peak = max(self.peak, self._now)

    def follow(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                for name in _names(target):
                    self._drop(name)
            return
        value = getattr(statement, "value", None)
        made: list[str] = []
        if isinstance(statement, ast.Assign):
            made = _names(statement.targets[0])
            source = _source(value)
            for name in made:
                if name in self._results:
                    continue
                if source in self._storage:
                    self._share(name, str(source))
                else:
                    for part in (name, *self._parts.get(name, ())):
                        self.add(part)
        if isinstance(value, ast.Call):
            made += [
                word.value.id
                for word in value.keywords
                if word.arg == "out" and isinstance(word.value, ast.Name)
            ]
            scratch = max(map(self._workspace, made), default=0)
            self.peak = max(self.peak, self._now + scratch)

    def _share(self, name: str, source: str) -> None:
        storage = self._storage[source]
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
            if storage in self._counted:
                self._counted.discard(storage)
                self._now -= self._sizes.get(storage, 0)


def _source(value: ast.expr | None) -> str | None:
    """The name whose storage an expression shares, if it does."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(VIEWS) and value.args:
        return _source(value.args[0])
    return None
