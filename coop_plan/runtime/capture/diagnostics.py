"""Why a step cannot be captured, in one line: what, where in the user's code, and what to do."""

import re
from pathlib import Path

import torch

from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.torch_internals.dynamo import TorchRuntimeError

WITH_FAKES = "when running FX node"
"""What Dynamo says first where an op fails on fake tensors in other ways than an op's own."""

ADVICE = {
    r"data-dependent (branching|expression)": (
        "it decides by what a tensor holds, which is not known before it runs",
        "use torch.where, or decide outside of the step",
    ),
    r"tensors to be on the same device": (
        "",
        "bring the model and all that it is given to one device with .to(...)",
    ),
    r"`backward`|Tensor\.backward\(": (
        "it calls backward()",
        "let it return the loss alone: the backward, and what follows, is made from it",
    ),
}
"""What Dynamo's words mean for a step, where that is not what they say, and what to do."""

FOR_DEVELOPERS = re.compile(r"please (file|report)|third-party C/C\+\+", re.IGNORECASE)
"""Hints that help nobody to go on."""

OUTSIDE = "leave it to code outside of the step"


def reason(error: Exception) -> str:
    """What Dynamo came upon, where in the user's code, and its advice or ours."""
    cause = getattr(error, "inner_exception", error)
    raised = re.search(r"debug context: raised exception (.+)", str(cause))
    if isinstance(cause, TorchRuntimeError) or WITH_FAKES in str(cause):
        # An op that fails on fake tensors: in its own words.
        while (earlier := cause.__cause__ or cause.__context__) is not None:
            if isinstance(earlier, CaptureError):  # of an attempt before this one
                break
            cause = earlier
    elif raised:  # by the user's own code, or by what it calls
        # PyTorch 2.11: ValueError([ConstantVariable(str: 'what it says')])
        said = re.sub(r"\[ConstantVariable\(\w+: (.*)\)\]", r"\1", raised[1])
        return f"it raises {said}" + _user_place(error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [repr(cause)]
    said, hints = lines[0], _after("Hint: ", lines)
    if lacking := re.match(r"(\S+): attempted to run this operator with Meta tensors", said):
        said = f"{lacking[1]} has no kernel for fake tensors: without one its results are not known"
    elif explanation := _after("Explanation: ", lines):
        said = re.split(r"(?<=[.`])\s(?=[A-Z])", explanation[0])[0].removesuffix(".")
        hints = [hint for hint in hints if not FOR_DEVELOPERS.search(hint)] or [OUTSIDE]
    words = "\n".join(lines[:3])
    for pattern, (meaning, advice) in ADVICE.items():
        if re.search(pattern, words, re.IGNORECASE):
            said, hints = meaning or said, [advice]
    return said + _user_place(error) + (f"; {hints[0]}" if hints else "")


def _after(label: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(label) for line in lines if line.startswith(label)]


def _user_place(error: Exception) -> str:
    """Where Dynamo was in the user's code, in brackets."""
    places = re.findall(r'File "([^"]+)", line (\d+)', str(error).partition("from user code")[2])
    users = [place for place in places if not place[0].startswith(str(Path(torch.__file__).parent))]
    places = users or places
    return f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
