"""Full fine-tuning of Llama 3.1 8B by AdamW on one card, parameters and states on the host.

    python -m benchmarks.full_training [--memory GB ...] [--links GB/s ...] [--batches N ...]

Weights are in bf16, masters and moments in fp32: 112 GB. Costs are those of an A100 (roofline), and
the host updates at 100 GB/s of its memory, an assumption. Texts have 4 096 tokens. Each row is the
batch of most tokens a second within the memory less a context of CUDA. Columns: the joint plan by
coop-offline, then rules at the same memory, each at its best batch: ZeRO-Offload's (all updates on
the host, weights fetched once) and layer-wise streaming (weights and states fetched before each
use). Copies overlap with compute in all. Plans are verified, and not run: on CUDA the runtime keeps
parameters on the device.
"""

from collections.abc import Mapping

import msgspec

from benchmarks.homes import joint, rule
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.runtime.offline_capture.devices import device
from coop_plan.runtime.offline_capture.fake_device import CaptureRequest, OfflineCapture
from coop_plan.runtime.offline_capture.optimizer_spec import OptimizerSpec
from coop_plan.schemas import Graph

LENGTH = 4096
HOST_BYTES_PER_S = 100e9


def best_batch(seconds: Mapping[int, float | None]) -> tuple[float, int] | None:
    """Most tokens a second, and its batch, from the seconds a step by batch; None if none fits."""
    rates = [(batch * LENGTH / taken, batch) for batch, taken in seconds.items() if taken]
    return max(rates, default=None)


def of_rule(graphs: Mapping[int, Graph], budget: int, *, on_host: bool) -> str | None:
    """Most tokens a second by a rule, and its batch, as text; None if no batch fits."""
    seconds: dict[int, float | None] = {}
    for batch, graph in graphs.items():
        found = rule(graph, budget, lambda _: not on_host, on_host=on_host)
        alone = sum(op.cost_us for op in graph.ops) * 1e-6
        seconds[batch] = None if found is None else (1 + found) * alone
    best = best_batch(seconds)
    return best and f"{best[0]:.0f} ({best[1]})"


def main() -> None:
    """Print the table and write the CSV."""
    arguments = parser(__doc__)
    arguments.add_argument("--memory", type=int, nargs="+", default=[24, 80], metavar="GB")
    arguments.add_argument("--links", type=float, nargs="+", default=[25.0, 55.0], metavar="GB/s")
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    args = arguments.parse_args()
    report = Report(
        Column("memory", "GB"),
        Column("link", "GB/s"),
        Column("batch"),
        Column("seconds", "s a step", scaled(1, ".2f")),
        Column("rate", "tokens/s", scaled(1, ".0f")),
        Column("overhead", form=".1%"),
        Column("host", "host GB", scaled(1e-9, ".1f")),
        Column("zero", "ZeRO-Offload's rule, tokens/s (batch)"),
        Column("streaming", "streaming, tokens/s (batch)"),
        title="Full fine-tuning of Llama 3.1 8B by AdamW",
        progress=True,
    )
    a100 = device("a100-80gb")
    with OfflineCapture() as captures:
        for link in args.links:
            rates = {"link_bytes_per_s": link * 1e9, "host_bytes_per_s": HOST_BYTES_PER_S}
            spec = msgspec.structs.replace(a100, **rates)
            graphs = {
                batch: captures.capture(
                    CaptureRequest(
                        target="benchmarks.contexts:whole_llama_8b",
                        spec=spec,
                        batch=batch,
                        length=LENGTH,
                        optimizer=OptimizerSpec(name="adamw", masters=True, update="fused"),
                        chunks=True,
                        iteration=True,
                    )
                ).graph
                for batch in args.batches
            }
            for memory in args.memory:
                budget = (memory << 30) - spec.context
                plans = {batch: joint(graph, budget) for batch, graph in graphs.items()}
                taken = {batch: made and made.cost_us * 1e-6 for batch, made in plans.items()}
                best = best_batch(taken)
                made = plans[best[1]] if best else None

                report.add(
                    memory=memory,
                    link=link,
                    batch=best and best[1],
                    seconds=best and taken[best[1]],
                    rate=best and best[0],
                    overhead=made and made.overhead,
                    host=made and made.host_arena_bytes,
                    zero=of_rule(graphs, budget, on_host=True),
                    streaming=of_rule(graphs, budget, on_host=False),
                )
    report.finish(args.csv)


if __name__ == "__main__":
    main()
