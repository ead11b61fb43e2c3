"""What the runtime refuses, each with one clear sentence."""


class RuntimeRefusalError(RuntimeError):
    """Base of the errors below."""


class CaptureError(RuntimeRefusalError):
    """The graph holds something that cannot be planned."""


class BuildError(RuntimeRefusalError):
    """The arena extension could not be compiled."""


class OptionsError(RuntimeRefusalError):
    """The options of `torch.compile(..., backend="coop")` are wrong."""


class StepInFlightError(RuntimeRefusalError):
    """A forward began while tensors of an earlier step still lie in the arena."""


class StepSpentError(RuntimeRefusalError):
    """A backward ran a second time through a step whose memory is already reused."""


class CudaGraphError(RuntimeRefusalError):
    """What a CUDA graph would have to capture, or has captured, cannot be run so."""


class GraphBreakError(RuntimeRefusalError):
    """One compiled function runs as several graphs, and the budget cannot bound their sum."""
