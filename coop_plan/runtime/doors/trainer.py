"""Deprecated name of `coop_plan.runtime.integrations.trainer`; removed in 0.3."""

from coop_plan.runtime.integrations.trainer import Budget

__all__ = ["Budget"]
