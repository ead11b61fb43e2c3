"""Source lines of the user's code for a graph that Dynamo traced."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from coop_plan.runtime.torch_internals.dynamo import outer_frame
from coop_plan.runtime.torch_internals.dynamo_graphs import graph_break

_FRAME = re.compile(r'File "(.+)", line (\d+)')
UNKNOWN = "an unknown line"
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_TORCH, str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class SourceLines:
    """Begin of a graph as `file:line`, and the graph break that ends it as `file:line (reason)`.

    A graph that has only ops of PyTorch's modules begins with the call of the compiled function.
    Either is `UNKNOWN` if there is none.
    """

    begin: str = UNKNOWN
    end: str = UNKNOWN

    @property
    def breaks(self) -> bool:
        """True if a graph break ends the graph."""
        return self.end != UNKNOWN

    @property
    def ends_at_experts(self) -> bool:
        """True if a graph break ends the graph at an index op of transformers' experts."""
        return "/transformers/models/" in self.end and "ynamic shape operator" in self.end


def source_lines_of(gm: fx.GraphModule) -> SourceLines:
    """Source lines of a graph that Dynamo passes to its backend."""
    traces = (str(node.meta.get("stack_trace") or "") for node in gm.graph.nodes)
    begin = next(filter(None, map(_innermost, traces)), None) or user_call()
    ended = graph_break(gm)
    if ended is None:
        return SourceLines(begin)
    file, line, reason = ended
    return SourceLines(begin, f"{file}:{line} ({next(iter(reason.splitlines()), '')})")


def user_call() -> str:
    """The line of the user's code that called into PyTorch, with the class of a called module."""
    frame, module = outer_frame(inspect.currentframe()), None
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        found = frame.f_locals.get("self")
        module = found if isinstance(found, torch.nn.Module) else module
        frame = frame.f_back
    if frame is None:
        return UNKNOWN
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    called = getattr(module, "_orig_mod", module)
    return line if called is None else f"{line} (call of {type(called).__name__})"


def _innermost(trace: str) -> str:
    """`file:line` of the innermost frame that is not PyTorch's own."""
    own = [frame for frame in _FRAME.findall(trace) if not frame[0].startswith(_TORCH)]
    return ":".join(own[-1]) if own else ""
