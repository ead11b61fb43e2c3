"""`COOP_BUDGET` in the environment: training scripts that nobody may touch.

PyTorch calls `autoload` when it is imported, by the entry point group `torch.backends`. Without the
variable nothing happens; this file imports nothing, so that `import torch` costs what it did.
"""

VARIABLE = "COOP_BUDGET"
_begun = False


def autoload() -> None:
    """Plan whatever this process trains, if the environment says within what."""
    global _begun
    import os

    if os.environ.get(VARIABLE) and not _begun:
        _begun = True  # what follows imports PyTorch, which calls this again
        from coop_plan.runtime.integrations.autoload import plan_all_training

        plan_all_training(os.environ[VARIABLE])
