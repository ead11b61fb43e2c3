"""Python function of a half: straight-line code with few local slots and no Python frame an op.

CPython maps a chunk of its frame stack for a call at the end of the chunk before, and unmaps it at
the return. A half ends there by chance. So each op is called by its C function, which has no frame.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from coop_plan.runtime.capture.graph_builder import GETITEM
from coop_plan.runtime.capture.sized_numbers import place_of
from coop_plan.runtime.torch_internals.ops import c_function

INVOCATION = "invocation"
"""Name of the first input."""

NUMBERS = "numbers"
"""Name of the invocation's numbers, which depend on its sizes."""


FILE = "<planned half>"
"""File name of a half's code."""


def straight_line(graph: fx.Graph, module: fx.GraphModule) -> Callable[..., Any]:
    """The function of a half, as `function(invocation, inputs)`; `module` has its constants.

    The function clears each place of the list `inputs` after the last use, so that no tensor
    outlives it.
    """
    return _Writer(graph, module).function()


def op_at(half: Callable[..., Any], file: str, line: int) -> str:
    """Name of the op that a half calls at this line; empty if the file is not a half's."""
    return half.ops.get(line, "") if file == FILE else ""  # type: ignore[attr-defined]


class _Writer:
    """Lines of the function, written node by node.

    A value is in a local slot from its producer to its last use; then the slot is used again. The
    inputs have no slots: they stay in the list.
    """

    def __init__(self, graph: fx.Graph, module: fx.GraphModule) -> None:
        self._graph = graph
        self._module = module
        self._lines: list[str] = []
        self._globals: dict[str, Any] = {}
        self._place: dict[fx.Node, str] = {}
        self._free: list[str] = []  # slots
        self._slots = 0
        self._reads_numbers = False
        self._last_use: dict[fx.Node, fx.Node] = {}
        self._ops: dict[int, str] = {}  # by position among the lines

    def function(self) -> Callable[..., Any]:
        """Write all lines and compile them."""
        invocation, *inputs = self._graph.find_nodes(op="placeholder")
        assert invocation.name == INVOCATION
        self._place = {node: f"box[{i}]" for i, node in enumerate(inputs)}
        for node in inputs:
            if not node.users:
                self._lines.append(f"{self._place[node]} = None")
        self._place[invocation] = INVOCATION
        for node in self._graph.nodes:
            for used in node.all_input_nodes:
                self._last_use[used] = node
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._place[node] = self._constant(getattr(self._module, str(node.target)))
            elif node.op == "output":
                self._lines.append(f"return {self._text(node.args[0])}")
            elif node.op != "placeholder":
                self._call(node)
        if self._reads_numbers:
            self._lines.insert(0, f"{NUMBERS} = {INVOCATION}.numbers")
        head = f"def half({INVOCATION}, box):\n "
        code = compile(head + "\n ".join(self._lines) + "\n", FILE, "exec")
        exec(code, self._globals)  # noqa: S102
        half: Callable[..., Any] = self._globals.pop("half")
        above = 2 + self._reads_numbers
        half.ops = {i + above: op for i, op in self._ops.items()}  # type: ignore[attr-defined]
        return half

    def _call(self, node: fx.Node) -> None:
        """Write the line of a call, and release the places of values that are not used again."""
        line = self._expression(node)
        self._ops[len(self._lines)] = str(node.target)
        dead = [self._place[used] for used in node.all_input_nodes if self._last_use[used] is node]
        slots = [place for place in dead if place.startswith("v")]
        self._free += slots
        if node.users:
            self._place[node] = slot = self._slot()
            line = f"{slot} = {line}"
            dead = [place for place in dead if place != slot]
        self._lines.append(line)
        cleared = [place for place in dead if place in slots or place.startswith("box")]
        if cleared:
            self._lines.append(f"{' = '.join(cleared)} = None")

    def _slot(self) -> str:
        if self._free:
            return self._free.pop()
        self._slots += 1
        return f"v{self._slots}"

    def _expression(self, node: fx.Node) -> str:
        if node.target is GETITEM:
            value, position = node.args
            return f"{self._text(value)}[{self._text(position)}]"
        arguments = [self._text(value) for value in node.args]
        if node.op == "call_method":
            name = f"{arguments.pop(0)}.{node.target}"
        else:
            name = self._constant(c_function(node.target))
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        return f"{name}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        """Expression of an argument."""
        if isinstance(value, fx.Node):
            return self._place[value]
        if (place := place_of(value)) is not None:
            self._reads_numbers = True
            return f"{NUMBERS}[{place}]"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        if isinstance(value, list | tuple):
            texts = [self._text(part) for part in value]
            if isinstance(value, list):
                return f"[{', '.join(texts)}]"
            return f"({', '.join(texts)}{',' * bool(texts)})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Name of a global variable with this value."""
        name = f"c{id(value)}"
        self._globals[name] = value
        return name
