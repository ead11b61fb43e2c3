"""Deprecated name of `coop_plan.runtime.integrations`; removed in 0.3."""

import warnings

warnings.warn(
    "coop_plan.runtime.doors is now coop_plan.runtime.integrations; 0.3 removes the old name",
    DeprecationWarning,
    stacklevel=2,
)
