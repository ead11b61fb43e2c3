"""One-line explanations of capture failures: the cause, the user's line, and what to do."""

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from coop_plan.runtime.capture.source_locations import FRAME, PYTORCH
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.dynamo import TorchRuntimeError

FAKE_TENSOR_FAILURE = "when running FX node"
"""Part of Dynamo's message for an op that fails on fake tensors outside its own checks."""

ADVICE = {
    r"data-dependent (branching|expression)": (
        "a branch depends on the values of a tensor, which are not known during tracing",
        "use torch.where, or branch outside the step",
    ),
    r"tensors to be on the same device": (
        "",
        "move the model and its inputs to one device with .to(...)",
    ),
    r"`backward`|Tensor\.backward\(": (
        "it calls backward()",
        "return the loss instead; coop-plan derives the backward from it",
    ),
    r"GradScaler": (
        "it calls a GradScaler",
        "return the loss as it is: scaling it changes no memory",
    ),
    r"had requires_grad_\(\) called on it": (
        "a tensor that requires_grad_() was called on in the step leads to its result",
        "leave out enable_input_require_grads(): a plan recomputes without it",
    ),
    r"transformers/generation/": (
        "it calls generate()",
        "call it outside of the step, which takes the result as an argument",
    ),
}
"""Pattern in Dynamo's message -> its meaning for a step (if it differs), and what to do."""

DEVELOPER_HINT = re.compile(r"please (file|report)|third-party C/C\+\+", re.IGNORECASE)
"""Hints of Dynamo that do not help a user."""

OURS = str(Path(__file__).parents[2])
INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    OURS,
    "<frozen ",
)
"""Beginnings of paths of files that are not the user's: Python, packages, and this one."""

DEFAULT_ADVICE = "move it out of the step"


def explain_failure(error: Exception) -> str:
    """The cause of a Dynamo error, the user's line, and Dynamo's hint or advice from `ADVICE`."""
    cause = getattr(error, "inner_exception", error)
    raised = re.search(r"debug context: raised exception (.+)", str(cause))
    if isinstance(cause, TorchRuntimeError) or FAKE_TENSOR_FAILURE in str(cause):
        # An op that fails on fake tensors: the op's own message is the root cause.
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            if isinstance(earlier, CaptureError):  # of an earlier capture
                break
            cause = earlier
    elif raised:  # by the user's code or a library it calls
        # PyTorch 2.11: ValueError([ConstantVariable(str: 'message')])
        message = re.sub(r"\[ConstantVariable\(\w+: (.*)\)\]", r"\1", raised[1])
        return f"it raises {message}" + _user_location(error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
    message, hints = lines[0], _lines_after("Hint: ", lines)
    if no_kernel := re.match(r"(\S+): attempted to run this operator with Meta tensors", message):
        message = (
            f"{no_kernel[1]} has no kernel for fake tensors: register one with"
            " torch.library.register_fake"
        )
    elif explanation := _lines_after("Explanation: ", lines):
        message = re.split(r"(?<=[.`])\s(?=[A-Z])", explanation[0])[0].removesuffix(".")
        hints = [hint for hint in hints if not DEVELOPER_HINT.search(hint)] or [DEFAULT_ADVICE]
    text = "\n".join([*lines[:3], *(file for file, _ in _frames(error))])
    for pattern, (meaning, advice) in ADVICE.items():
        if re.search(pattern, text, re.IGNORECASE):
            message, hints = meaning or message, [advice]
    return message + _user_location(error) + (f"; {hints[0]}" if hints else "")


def _lines_after(label: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(label) for line in lines if line.startswith(label)]


def user_location(frames: Sequence[tuple[str, object]]) -> str:
    """The innermost of the user's files and lines, and the library's that it calls, if any.

    `frames` are files and lines, the innermost last.
    """
    own = [frame for frame in frames if not frame[0].startswith(INSTALLED)] or frames[-1:]
    named = [frame for frame in frames if OURS not in frame[0] and PYTORCH not in frame[0]]
    libraries = named or own
    text = "{}, line {}".format(*own[-1])
    if libraries[-1] not in own and libraries[-1][0].startswith(INSTALLED):
        file, line = libraries[-1]
        text += f", in {file.rpartition('/site-packages/')[2]}, line {line}"
    return text


def _frames(error: Exception) -> list[tuple[str, str]]:
    """Files and lines of the user code in Dynamo's message."""
    found: list[tuple[str, str]] = FRAME.findall(str(error).partition("from user code")[2])
    return found


def _user_location(error: Exception) -> str:
    """The user's file and line in Dynamo's message, in parentheses."""
    frames = _frames(error)
    return f" ({user_location(frames)})" if frames else ""
