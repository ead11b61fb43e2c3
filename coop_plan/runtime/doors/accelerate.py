"""Deprecated name of `coop_plan.runtime.integrations.accelerate`; removed in 0.3."""

from coop_plan.runtime.integrations.accelerate import budget_plugin

__all__ = ["budget_plugin"]
