"""The doors for people and programs: the CLI, the REST service, the plan store."""

if __name__ != "coop_plan.api":  # found by a link of a checkout
    raise ImportError(f"import coop_plan.api, not {__name__}")
