"""Kinds of kernels that a step is planned over, and of its graphs."""

from typing import Literal

Kernels = Literal["eager", "fused"]
"""Eager's kernel for each op, or regions that Inductor compiles (`fused`)."""

GraphKind = Literal["eager", "fused", "chunked"]
"""A graph over such kernels, or over eager's with heads in chunks (`chunked`)."""
