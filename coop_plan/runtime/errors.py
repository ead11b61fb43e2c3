"""Errors of the runtime."""


class RuntimeRefusalError(RuntimeError):
    """Base of the errors below."""


class CaptureError(RuntimeRefusalError):
    """The graph contains an op or a value that cannot be planned."""

    @classmethod
    def out_of_data(cls, op: object, what: str) -> "CaptureError":
        """The op computes `what`, a size or a number, from data."""
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
    """The planning service is unreachable, or has no plan for a step."""


class StepSpentError(RuntimeRefusalError):
    """A backward needs an invocation whose memory was reused and whose forward cannot rerun."""


class CopyError(RuntimeRefusalError):
    """A transfer to the host or back failed; the step is aborted."""


class CudaGraphError(RuntimeRefusalError):
    """A CUDA graph captures, or would capture, work that cannot be replayed."""


class NothingPlannedError(RuntimeRefusalError):
    """A call that had to be planned ran without a plan."""


class BudgetExceededError(RuntimeRefusalError):
    """A step exceeds its budget and is strict, or cannot be planned within it."""


class PartlyUpdatedError(RuntimeRefusalError):
    """An iteration failed between its updates: some parameters are those of after it."""
