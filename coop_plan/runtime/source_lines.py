"""Source lines of the user's code for a graph that Dynamo traced."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from coop_plan.runtime.torch_internals.dynamo_graphs import graph_break

_FRAME = re.compile(r'File "(.+)", line (\d+)')
UNKNOWN = "an unknown line"
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class SourceLines:
    """Begin of a graph as `file:line`, and the graph break that ends it as `file:line (reason)`.

    Either is `UNKNOWN` if there is none.
    """

    begin: str = UNKNOWN
    end: str = UNKNOWN

    @property
    def breaks(self) -> bool:
        """True if a graph break ends the graph."""
        return self.end != UNKNOWN


def source_lines_of(gm: fx.GraphModule) -> SourceLines:
    """Source lines of a graph that Dynamo passes to its backend."""
    traces = (str(node.meta.get("stack_trace") or "") for node in gm.graph.nodes)
    begin = next(filter(None, map(_innermost, traces)), SourceLines.begin)
    ended = graph_break(gm)
    if ended is None:
        return SourceLines(begin)
    file, line, reason = ended
    return SourceLines(begin, f"{file}:{line} ({next(iter(reason.splitlines()), '')})")


def _innermost(trace: str) -> str:
    """`file:line` of the innermost frame that is not PyTorch's own."""
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return ":".join(own[-1]) if own else ""
