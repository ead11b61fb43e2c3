"""The user's source lines behind a graph that Dynamo traced."""

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
class Lines:
    """Where a graph begins, `file:line`; where and why a graph break ends it, `file:line (reason)`.

    `UNKNOWN` where there is none.
    """

    begin: str = UNKNOWN
    end: str = UNKNOWN

    @property
    def breaks(self) -> bool:
        """Whether a graph break ends the graph."""
        return self.end != UNKNOWN


def lines_of(gm: fx.GraphModule) -> Lines:
    """The lines of a graph as Dynamo hands it to its backend."""
    traces = (str(node.meta.get("stack_trace") or "") for node in gm.graph.nodes)
    begin = next(filter(None, map(_innermost, traces)), Lines.begin)
    ended = graph_break(gm)
    if ended is None:
        return Lines(begin)
    file, line, reason = ended
    return Lines(begin, f"{file}:{line} ({next(iter(reason.splitlines()), '')})")


def _innermost(trace: str) -> str:
    """`file:line` of the innermost frame that is not PyTorch's own."""
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return ":".join(own[-1]) if own else ""
