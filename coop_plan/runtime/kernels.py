"""Kinds of kernels that a step is planned over, and of its graphs."""

from typing import Literal

Kernels = Literal["eager", "fused"]
"""Eager's kernel for each op, or regions that Inductor compiles (`fused`)."""

GraphKind = Literal["eager", "fused", "split", "chunked"]
"""A graph over such kernels, over regions some of which are split (`split`, `fused.split`), or over
eager's kernels with heads in chunks (`chunked`)."""
