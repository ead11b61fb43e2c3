"""Dispatch of one compiled function for all sizes to the step planned for a call's sizes."""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from coop_plan.runtime.capture.sized_numbers import Numbers
from coop_plan.runtime.capture.tracing_rules import as_eager
from coop_plan.runtime.dynamic_shapes.symbolic_trace import Trace
from coop_plan.runtime.errors import CaptureError
from coop_plan.runtime.execute.invocation import Invocation, invocation_of
from coop_plan.runtime.execute.lower_to_fx import stubs
from coop_plan.runtime.execute.planned_step import PlannedStep
from coop_plan.runtime.torch_internals.dynamo_graphs import Symbols
from coop_plan.runtime.torch_internals.joint_graphs import aot_autograd, boxed, lazy_graph_code

Half = Callable[[list[Any]], Any]


class _Here(threading.local):
    halves: tuple[Half, Half] | None = None


class AllSizes:
    """Dynamo's graph compiled by AOTAutograd with symbolic sizes.

    `examples` are the graph's fake inputs, `inputs` those of a call. `static_inputs` and
    `num_fwd_outputs` are arguments of `capture_joint` for each graph that `trace` makes.
    `backwards` counts those that ran.

    Raises:
        Exception: PyTorch's, if the function cannot be traced so.
    """

    def __init__(self, gm: fx.GraphModule, examples: Sequence[Any], inputs: Sequence[Any]) -> None:
        symbols = Symbols(examples, inputs)
        self.trace: Trace
        self.num_fwd_outputs = self.backwards = 0
        self.static_inputs: Sequence[int] = ()
        self._here = _Here()
        self._backwards: weakref.WeakKeyDictionary[Invocation, Half] = weakref.WeakKeyDictionary()

        def partition(
            joint: fx.GraphModule,
            _: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: list[int] | None = None,
            **__: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            self.trace, self.num_fwd_outputs = Trace(symbols, joint), num_fwd_outputs
            self.static_inputs = static_lifetime_input_indices or ()
            output = next(iter(reversed(joint.graph.nodes)))
            return stubs(joint, output.args[0], num_fwd_outputs)

        backend = aot_autograd(
            fw_compiler=lambda *_: boxed(partial(self._forward)),
            bw_compiler=lambda *_: boxed(partial(self._backward)),
            inference_compiler=_refuse,
            partition_fn=partition,
        )
        with lazy_graph_code(), as_eager():
            self._run: Callable[..., Any] = backend(gm, symbols.inputs)

    def calling(self, step: PlannedStep, numbers: Numbers = ()) -> Callable[..., Any]:
        """The function for inputs with the sizes of `step`, or with these `numbers`."""
        halves = step.forward(numbers), step.backward()

        def run(*args: Any) -> Any:
            self._here.halves = halves
            try:
                return self._run(*args)
            finally:
                self._here.halves = None

        return run

    def _forward(self, args: list[Any]) -> Any:
        assert self._here.halves is not None
        forward, backward = self._here.halves
        made = forward(args)
        self._backwards[invocation_of(made[-1])] = backward
        return made

    def _backward(self, args: list[Any]) -> Any:
        self.backwards += 1
        return self._backwards[invocation_of(args[0])](args)


def _refuse(*_: Any) -> Any:
    raise CaptureError("without gradients there is nothing to plan")
