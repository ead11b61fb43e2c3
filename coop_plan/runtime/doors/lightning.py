"""Deprecated name of `coop_plan.runtime.integrations.lightning`; removed in 0.3."""

from coop_plan.runtime.integrations.lightning import Budget

__all__ = ["Budget"]
