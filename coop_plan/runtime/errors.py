"""What the runtime refuses, each with one clear sentence."""


class RuntimeRefusalError(RuntimeError):
    """Base of the errors below."""


class CaptureError(RuntimeRefusalError):
    """The graph holds something that cannot be planned."""

    @classmethod
    def out_of_data(cls, op: object, what: str) -> "CaptureError":
        """The op makes `what`, a size or a number, that only its data tell."""
        return cls(
            f"{op} makes {what} out of data, which cannot be planned: keep sizes fixed"
            " (torch.where, or a product with a mask, instead of indexing by it), or leave it to"
            " code outside"
        )


class BuildError(RuntimeRefusalError):
    """The arena extension could not be compiled."""


class OptionsError(RuntimeRefusalError):
    """The options of `torch.compile(..., backend="coop")` are wrong."""


class PlanServerError(RuntimeRefusalError):
    """The planning service is away, or has no plan for a step."""


class StepSpentError(RuntimeRefusalError):
    """A backward needs a step whose memory was reused, and whose forward cannot run again."""


class CopyError(RuntimeRefusalError):
    """A copy to the host or back failed, or cannot be made; the step is given up."""


class CudaGraphError(RuntimeRefusalError):
    """What a CUDA graph would have to capture, or has captured, cannot be run so."""


class NothingPlannedError(RuntimeRefusalError):
    """A call that was to be planned ran, and nothing of it was."""


class BudgetExceededError(RuntimeRefusalError):
    """A step takes more than its budget, and was asked not to, or cannot be planned otherwise."""
