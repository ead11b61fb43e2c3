"""How far a roofline is from measured op times, on the CPU here: three architectures.

    python -m benchmarks.roofline_error [--device FILE]

The device is measured first (`coop-plan calibrate`), or is that of FILE. Each step is captured
twice, measured and modelled; the ratio of an op is modelled ÷ measured, or its inverse where that
is larger, and of a step the sums'. Ops that are measured below a launch are left out.
"""

import argparse
from statistics import median, quantiles

import torch

from benchmarks.papers import networks
from coop_plan.runtime.offline_capture.calibrate import calibrate
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.target import capture
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode

STEPS = {"resnet50": 2, "gpt2": 1, "swin_t": 2}
"""Networks of the papers, and batches that a CPU has time for."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    args = parser.parse_args()
    spec = device(args.device) if args.device else calibrate("cpu")
    print("| network | ops | median | 90th percentile | step, modelled ÷ measured |")
    print("| --- | --- | --- | --- | --- |")
    for name, batch in STEPS.items():
        torch.manual_seed(0)
        here = capture(*getattr(networks, name)(batch))
        with FakeTensorMode():
            step, inputs = getattr(networks, name)(batch)
        away = capture(step, inputs, model=Roofline(spec))
        pairs = [
            (modelled.cost_us, measured.cost_us)
            for modelled, measured in zip(away.ops, here.ops, strict=True)
            if measured.cost_us > spec.launch_us
        ]
        ratios = [max(m / t, t / m) for m, t in pairs if m]
        total = sum(m for m, _ in pairs) / sum(t for _, t in pairs)
        tail = quantiles(ratios, n=10)[-1]
        print(f"| {name} | {len(ratios)} | {median(ratios):.2f} | {tail:.2f} | {total:.2f} |")


if __name__ == "__main__":
    main()
