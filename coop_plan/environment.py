"""`COOP_BUDGET` in the environment: training scripts that nobody may touch.

PyTorch calls `autoload` when it is imported, by the entry point group `torch.backends`. Without the
variable nothing happens; this file imports nothing, so that `import torch` costs what it did.
"""

VARIABLE = "COOP_BUDGET"


def autoload() -> None:
    """Plan whatever this process trains, if the environment says within what."""
    import os

    if os.environ.get(VARIABLE):
        from coop_plan.runtime.doors.anything import plan_what_trains

        plan_what_trains(os.environ[VARIABLE])
