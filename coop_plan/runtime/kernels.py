"""Kinds of kernels that a step is planned over."""

from typing import Literal

Kernels = Literal["eager", "fused"]
"""Eager's kernel for each op, or regions that Inductor compiles (`fused`)."""
