"""Whole iterations under budgets, beside the loop in eager: numbers, memory and time, on the CPU.

    python -m benchmarks.iterations [--model gpt2 ...] [--links 0 2GB/s ...] [--csv FILE]

An iteration has the forwards and backwards of its micro-batches, clipping, and AdamW's step. Each
row runs in a process of its own, forked from one that has loaded the libraries, and trains for some
iterations. Op profiles are shared by the cache. A link of 0 is none. Bytes are those of PyTorch's
allocator, from its own counter, with parameters, states and batches; the peak is that of the
iterations after the first. `equal` says that losses, norms, parameters and states are eager's to
the bit. The losses that the script keeps are beside the budget. The makespan is the median of the
iterations after the first. With a link peaks are those of the reports, as the counter includes the
host's slab; `homes` are the bytes of parameters and states on the host between their uses. Exits 1
if a row is not equal, exceeds its budget or allocates outside its plan.
"""

import hashlib
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import coop_plan
from benchmarks import runtime_peers
from benchmarks.report import Column, Report, parser, scaled
from coop_plan.planner.inspect.buffers import replay_plan
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from coop_plan.runtime.iteration.recorder import TOLERANCE

ITERATIONS = 6
CLIP_NORM = 0.5
NO_LINK = "0"
BUDGETS = ("100%", "60%", "40%", "min")


def mixture() -> Any:
    """Qwen2-MoE of two layers of width 256, eight experts as grouped products, batch 4 x 256."""
    config = Qwen2MoeConfig(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=352,
        shared_expert_intermediate_size=352,
        num_hidden_layers=2,
        vocab_size=2000,
        max_position_embeddings=256,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    ids = torch.randint(0, 2000, (4, 256))
    return Qwen2MoeForCausalLM(config).train(), runtime_peers.loss_of, ids


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: runtime_peers.gpt2(2),
    "llama": lambda: runtime_peers.llama(2),
    "resnet": lambda: runtime_peers.resnet50(0),
    "moe": mixture,
}


def serve(name: str, budget: str, micro_batches: int, clip: bool, link: str) -> dict[str, Any]:
    """Train in this process; an empty budget means the loop in eager."""
    torch.manual_seed(0)
    process_bytes()  # counts from here on
    model, loss_of, batch = MODELS[name]()
    step = loss_of(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    clip_norm = CLIP_NORM if clip else None
    iteration: Any = None
    if budget:
        given = int(budget) if budget.isdigit() else budget
        options = {} if link == NO_LINK else {"link": link}
        iteration = coop_plan.train_iteration(
            step, optimizer, given, clip_norm=clip_norm, **options
        )
    seconds, makespans, digest = [], [], hashlib.sha256()
    for number in range(ITERATIONS):
        torch.manual_seed(number)
        if number == 1:
            reset_peak()
        batches = [batch] * micro_batches
        began = time.process_time()
        if iteration is not None:
            made = iteration(*batches)
            losses, norm = made if isinstance(made, list) else [made], iteration.grad_norm
            makespans.append(coop_plan.reports()[-1].measured_makespan_us)
        else:
            losses, norm = [], None
            optimizer.zero_grad()
            for each in batches:
                loss = step(each)
                loss.backward()
                losses.append(loss.detach())
                del loss
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
        seconds.append(time.process_time() - began)
        for value in (*losses, *([norm] if norm is not None else [])):
            digest.update(value.numpy().tobytes())
    peak = process_bytes()[1]
    optimizer.zero_grad()
    kept = [*model.state_dict().values()]
    kept += [v for p in parameters for v in optimizer.state.get(p, {}).values()]
    for value in kept:
        digest.update(value.detach().contiguous().numpy().tobytes())
    found: dict[str, Any] = {
        "digest": digest.hexdigest(),
        "peak": peak,
        "seconds": statistics.median(seconds[1:]),
    }
    if iteration is not None:
        report = coop_plan.reports()[-1]
        names = ("budget_bytes", "peak_bytes", "measured_peak_bytes", "outside_bytes")
        found |= {each: getattr(report, each) for each in names}
        found |= {"planned": report.planned_overhead, "paid": report.measured_overhead}
        found["makespan"] = statistics.median(makespans[1:]) / report.plan.cost_us
        at_home = {home.tensor for home in report.plan.homes}
        found["homes"] = sum(t.bytes for t in report.graph.tensors if t.id in at_home)
        host = "planned_host_us", "measured_host_us", "measured_host_stall_us"
        found |= {each: getattr(report, each) for each in host}
        moments = replay_plan(report.graph, report.plan).moments
        found["on_host"] = sum(moment.engine == "host" for moment in moments)
        if link != NO_LINK:
            found["peak"] = report.measured_peak_bytes
    return found


def run(*given: Any) -> dict[str, Any]:
    """`serve` in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as process:
        return process.apply(serve, given)


def measure(
    name: str, micro_batches: int, clip: bool, budgets: list[str], links: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of a model, one a budget and link."""
    eager = run(name, "", micro_batches, clip, NO_LINK)
    for budget, link in itertools.product(budgets, links):
        own = run(name, budget, micro_batches, clip, link)
        yield {
            **own,
            "model": name,
            "micro_batches": micro_batches,
            "clip": "yes" if clip else "no",
            "budget": budget,
            "link": link,
            "eager": eager["peak"],
            "ratio": own["seconds"] / eager["seconds"],
            "equal": own["digest"] == eager["digest"],
            "held": own["peak"] <= own["budget_bytes"] + TOLERANCE and not own["outside_bytes"],
        }


MB = scaled(1e-6, ".2f")
COLUMNS = (
    *("model", "micro_batches", "clip", "budget", "link"),
    Column("eager", "eager MB", MB),
    Column("budget_bytes", "budget MB", MB),
    Column("peak", "peak MB", MB),
    Column("homes", "homes MB", MB),
    Column("on_host", "on host"),
    Column("planned_host_us", "planned ms", scaled(1e-3, ".1f")),
    Column("measured_host_us", "measured", scaled(1e-3, ".1f")),
    Column("measured_host_stall_us", "waited", scaled(1e-3, ".1f")),
    Column("outside_bytes", "outside B"),
    Column("planned", "planned", ".1%"),
    Column("paid", "in step", ".1%"),
    Column("makespan", "makespan ÷ planned", ".2f"),
    Column("ratio", "CPU ÷ eager", ".2f"),
    Column("equal", form=lambda equal: "equal" if equal else "DIFFERENT"),
    Column("held", form=lambda held: "within" if held else "BEYOND"),
)


def main() -> int:
    """Returns 1 unless every row is equal and within its budget."""
    command = parser(__doc__)
    command.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    command.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    command.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    command.add_argument("--links", nargs="+", default=[NO_LINK])
    asked = command.parse_args()
    torch.set_num_threads(1)
    report = Report(*COLUMNS, progress=True)
    for name in asked.model:
        for micro_batches in asked.micro_batches:
            for clip in (False, True):
                for row in measure(name, micro_batches, clip, asked.budgets, asked.links):
                    report.add(**row)
    report.finish(asked.csv)
    return int(not all(row["held"] and row["equal"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
