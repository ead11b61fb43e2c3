"""`COOP_BUDGET` in the environment: budgets for training scripts that nobody may edit.

PyTorch calls `autoload` when it is imported (entry point group `torch.backends`). Without the
variable nothing happens; this file imports nothing else, so `import torch` costs what it did.
"""

VARIABLE = "COOP_BUDGET"
_started = False


def autoload() -> None:
    """Plan the models that this process trains within `COOP_BUDGET`, if it is set.

    `import torch` never fails by it: an installation that is broken is one line in the log.
    """
    global _started
    import os

    if os.environ.get(VARIABLE) and not _started:
        _started = True  # the import below imports PyTorch, which calls this function again
        import logging

        from coop_plan import incomplete

        reason = incomplete()
        if not reason:
            try:
                from coop_plan.runtime.integrations.autoload import plan_all_training

                plan_all_training(os.environ[VARIABLE])
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        if reason:
            logging.getLogger("coop-plan").error("%s: nothing is planned: %s", VARIABLE, reason)
