"""Source location of an op: the module's path and the line of the program."""

import functools
import re
from pathlib import Path
from typing import Any

from torch import fx

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
"""A frame of the traceback that Dynamo keeps of each node, the innermost last."""

PYTORCH = "/site-packages/torch/"


def source_of(node: fx.Node) -> str:
    """`blocks.3.attention, model.py:42`, either part alone, or an empty string.

    A backward op has the source of its forward op. Paths are relative to the working folder or to
    site-packages, else the bare file name: equal on all ranks, and without details of the machine.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = _module(next(reversed(list(stack.values())))) if stack else ""
    return ", ".join(filter(None, (module, _line(node.meta.get("stack_trace") or "", Path.cwd()))))


def _module(entry: Any) -> str:
    """The module's path as in `named_modules`, parsed from Dynamo's `L['self'].blocks.3`."""
    path = re.sub(r"\.?_modules\[|\[", ".", str(entry[0])).replace("]", "")
    parts = [part.strip("'\"") for part in path.split(".")]
    return ".".join(part for part in parts if part not in ("L", "G", "self", ""))


@functools.lru_cache(4096)
def _line(trace: str, folder: Path) -> str:
    frames: list[tuple[str, str]] = FRAME.findall(trace)
    own = [frame for frame in frames if PYTORCH not in frame[0]] or frames
    if not own:
        return ""
    file, line = own[-1]
    _, installed, below = file.rpartition("/site-packages/")
    path = Path(file)
    if installed:
        shown = below
    elif path.is_relative_to(folder):
        shown = path.relative_to(folder).as_posix()
    else:
        shown = path.name
    return f"{shown}:{line}"
