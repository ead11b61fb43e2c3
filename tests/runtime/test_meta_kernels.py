"""Meta kernels return the layouts of the kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coop_plan.runtime.offline_capture.meta_kernels import register_meta_kernels

EIGHTHS = st.integers(1, 4).map(lambda count: 8 * count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouped", ["rows", "columns", "inner", "matrices"])
@settings(max_examples=10, deadline=None)
@given(rows=EIGHTHS, inner=EIGHTHS, columns=EIGHTHS, groups=st.integers(1, 3))
def test_a_grouped_product_has_the_kernels_layout(dtype, grouped, rows, inner, columns, groups):
    register_meta_kernels()
    sizes = {"rows": rows, "columns": columns, "inner": inner}
    ends = None
    if grouped != "matrices":
        ends = torch.linspace(0, sizes[grouped], groups + 1, dtype=torch.int32)[1:]
    a, b = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
    if grouped in ("columns", "matrices"):
        a = a.expand(groups, -1, -1).contiguous()
    if grouped in ("rows", "matrices"):
        b = b.expand(groups, -1, -1).contiguous()
    made = torch._grouped_mm(a, b, offs=ends)
    modelled = torch._grouped_mm(
        a.to("meta"), b.to("meta"), offs=None if ends is None else ends.to("meta")
    )
    assert (made.shape, made.stride(), made.dtype) == (
        *(modelled.shape, modelled.stride(), modelled.dtype),
    )
