"""Error of a roofline against op times measured on this CPU: three architectures.

    python -m benchmarks.roofline_error [--device FILE]

The device is measured first (`coop-plan calibrate`), or read from FILE. Each step is captured
twice, measured and modelled. The ratio of an op is modelled ÷ measured, or its inverse if that is
larger; the ratio of a step is that of the sums. Ops shorter than a launch are left out.
"""

from statistics import median, quantiles

import torch

from benchmarks.papers import networks
from benchmarks.report import Column, Report, parser
from coop_plan.runtime.offline_capture.calibrate import calibrate
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.roofline import Roofline
from coop_plan.runtime.offline_capture.target import capture
from coop_plan.runtime.torch_internals.fakes import FakeTensorMode

STEPS = {"resnet50": 2, "gpt2": 1, "swin_t": 2}
"""Networks of the papers, with batches small enough for a CPU."""


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--device")
    args = command.parse_args()
    spec = device(args.device) if args.device else calibrate("cpu")
    heads = {"median": "median", "tail": "90th percentile", "step": "step, modelled ÷ measured"}
    columns = (Column(field, head, ".2f") for field, head in heads.items())
    report = Report("network", "ops", *columns, progress=True)
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
        figures = {"median": median(ratios), "tail": quantiles(ratios, n=10)[-1], "step": total}
        report.add(network=name, ops=len(ratios), **figures)
    report.finish(args.csv)


if __name__ == "__main__":
    main()
