"""Pages of the papers' figures with ours, docs/papers*.md; `make papers` writes them.

    python -m benchmarks.papers [--only SECTION,...] [--quick] [--output FOLDER]

Steps are captured for absent devices, so no GPU is needed. Two processes share the rows. --quick
measures the first row of each section, with half of the search time.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.papers import measures
from benchmarks.report import table
from benchmarks.variants import DEFAULTS, MONET, OUTPUTS

INTRO = """# The papers' figures

Published figures of the papers that coop-plan follows, and its own results on the same networks.
`make papers` prints this page and [that of exact programs](papers-exact.md); each section names its
own command.

*Overhead* is the cost of a plan ÷ the cost of every op once, minus 1. *Peak* is that of
keep-everything at its best placement: parameters, gradients and batch included, optimizer states
not. A *share* refers to that peak. Coop's authors take shares of their largest threshold, and
overheads against the best time of all methods; ours refer to the graph itself. Costs are
[rooflines](cli.md), not measured times, so overheads compare methods and predict no seconds. A dash
in *published* means that no figure for that row is known to us.
"""

EXACT_INTRO = """# The papers' exact programs

Published figures of integer programs, and coop-plan's own results. The terms are those of
[the papers' figures](papers.md).
"""

NOT_FILLED = """## Not filled

- Coop's own search latency, overheads and fragmentation are curves and bars in the paper, without
  numbers.
- T-Control (ASPLOS 2026): public text has neither its method nor its ratios.
"""

LONGEST = "delta"
"""Section that starts first: its rows take minutes each."""


@dataclass(frozen=True)
class Section:
    """Table of the page; the worker processes call `rows`."""

    name: str
    title: str
    text: str
    heads: tuple[str, ...]
    rows: tuple[Callable[[], list[str]], ...]


A100 = "a100-80gb"
NETWORKS = (
    *("unet", "bert_large", "resnet50", "swin_t", "unet_plus_plus", "densenet121"),
    *("gpt2", "bilstm", "inception_v3", "gpt3_2_7b", "spos"),
)
BATCHES = {"vgg19": 32, "mobilenet": 64, "resnet50": 32, "unet_416": 2, "fcn8": 4, "segnet": 4}
"""Of Checkmate's networks the batch that is captured first."""

SECTIONS = (
    Section(
        "coop",
        "Coop (NeurIPS 2023): methods on its networks",
        "Captured for an A100 in float32. Overheads at half of the peak; `arena` is the"
        " fragmentation of coop-offline's plan, `free at evictions` the mean share of the budget"
        " that is free when `coop` must evict, Coop's own metric."
        " Published: up to twice the memory saved, with less overhead, latency and fragmentation"
        " than DTR and DTE (abstract); we have no figure per network.",
        (
            *("network", "batch", "peak", "dtr", "dte", "coop", "coop-offline"),
            *("arena", "free at evictions"),
        ),
        tuple(partial(measures.methods, name, A100) for name in NETWORKS),
    ),
    Section(
        "shares",
        "Coop's networks from 80 % down to 30 %",
        "An A100 roofline, coop-offline. `arena` is its worst fragmentation at these shares;"
        " `smallest` the smallest feasible share, `proved` a lower bound on it for every schedule,"
        " `fixed` the share of parameters, gradients and batch, which no plan evicts.",
        (
            *("network", *(f"{share} %" for share in measures.SHARES)),
            *("arena", "smallest", "proved", "fixed"),
        ),
        tuple(partial(measures.shares, name, A100) for name in NETWORKS),
    ),
    Section(
        "latency",
        "Search latency of the methods",
        "Seconds of one core for a plan at half of the peak, all evictions of a step together.",
        ("network", "ops", "dtr", "dte", "coop", "coop-offline"),
        tuple(partial(measures.latency, name, A100) for name in NETWORKS),
    ),
    Section(
        "bounds",
        "Proved overheads of large transformers",
        "An A100 roofline; `auto` and the proved lower bound after a minute of search.",
        ("network", "share", "peak", "coop-offline", "auto", "bound"),
        (
            partial(measures.proved, "bert_large", A100, "50%"),
            partial(measures.proved, "gpt3_2_7b", A100, "50%"),
            partial(measures.proved, "llama3_8b", A100, "80%"),
        ),
    ),
    Section(
        "checkmate",
        "Checkmate (MLSys 2020): the largest batch at one extra forward",
        "A V100 of 16 * 10^9 bytes and no context, as the authors' code has it. The largest batch"
        " whose step is recomputed at no more than the cost of its forward, ÷ the largest that fits"
        " with nothing recomputed: of whole samples in `ratio`, and in `of parts` against one that"
        " may have parts of a sample, as the batch of their program may. Costs are FLOPs alone, as"
        " in the paper (products and convolutions: all else is free), or a V100's roofline."
        " Published: inputs up to 5.1 times as large (abstract).",
        ("network", "costs", "keep-all", "one extra forward", "ratio", "of parts", "published"),
        tuple(
            partial(measures.batches, name, first, "-", flops)
            for flops in (True, False)
            for name, first in BATCHES.items()
        ),
    ),
    Section(
        "solving",
        "Checkmate's program as the graph grows",
        "Training steps of GPTs op by op (`benchmarks.synthetic`), with 60 % of keep-everything's"
        f" arena and {measures.SEARCH_SECONDS:.0f} s for each: overhead, what is proved, and"
        " seconds on the wall. Published: optimal schedules in under an hour (abstract).",
        ("network", "ops", "checkmate", "s", "optimal", "s"),
        tuple(partial(measures.solving, layers) for layers in (1, 2, 3, 6, 12, 24)),
    ),
    Section(
        "speedup",
        "Checkmate's speed-up over heuristics",
        "A V100 roofline. Steps of DTR, DTE and Coop ÷ that of coop-offline, within the smallest"
        " budget that DTR meets. Published: up to 4.8 times over prior work, which then was"
        " checkpointing of chains (abstract).",
        ("network", "share", "dtr", "dte", "coop"),
        tuple(partial(measures.speed_up, name, "v100-16gb") for name in BATCHES),
    ),
    Section(
        "delta",
        "DELTA (2022): the largest batch at ten percent",
        "A V100 of 16 GiB, less 512 MiB for CUDA's context, roofline costs; by recomputation alone,"
        " and with tensors on the host, as"
        " DELTA has them, over a link of so many GB/s each way.",
        ("network", "link", "keep-all", "at most 10 %", "ratio", "published"),
        tuple(
            partial(measures.batches, network, first, published, False, 0.10, link)
            for network, first, published in (("resnet50", 32, "2.04"), ("resnet101", 16, "2.25"))
            for link in (0, 25_000_000_000)
        ),
    ),
    Section(
        "delta-saved",
        "DELTA: what saving memory costs",
        "The same V100 at the largest batch that fits with nothing recomputed: overheads where so"
        " much of the peak is saved. Published: 40 to 70 percent saved (abstract).",
        ("network", "batch", "link", *(f"{100 - share} % saved" for share in measures.SAVED)),
        tuple(
            partial(measures.saved, network, batch, link)
            for network, batch in (("resnet50", 186), ("resnet101", 125))
            for link in (0, 25_000_000_000)
        ),
    ),
    Section(
        "monet",
        "MONeT (ICLR 2021): operator variants",
        "Steps in ms with MONeT's measured variants on a P100, compared with its authors'"
        f" published solutions, which took up to a day each; ours have {measures.MONET_SECONDS:.0f}"
        " s. `ratio` is theirs ÷ ours.",
        ("graph", "GiB", "MONeT", "optimal", "bound", "ratio"),
        tuple(
            partial(measures.variants, name, gib)
            for name, published in MONET.items()
            for gib in list(published)[::2]
        ),
    ),
    Section(
        "monet-third",
        "MONeT (ICLR 2021): a third of the memory",
        "The paper's headline is 3 times less memory than PyTorch at 9 to 16 % of overhead. Peaks"
        " have parameters, batch, gradients of parameters and workspaces in them, at the best"
        " placement of keeping everything; overheads are against its step. *Default variants* save"
        " the inputs that the profiled ones read. *Gradients from outputs* saves an activation's"
        " output for its gradient, as PyTorch does: the paper's nearest reference."
        f" `auto`, {measures.MONET_SECONDS:.0f} s a plan; one whose first runs leave the program's"
        " order, for less than that order's bound, has the bound of every op once.",
        ("graph", "keeping everything", "GiB", "a third", "overhead there", "at least"),
        tuple(
            partial(measures.third, name, accounting)
            for name in MONET
            for accounting in (DEFAULTS, OUTPUTS)
        ),
    ),
)


PAGES = (
    ("papers.md", INTRO, ("coop", "shares", "latency", "delta", "delta-saved"), NOT_FILLED),
    (
        "papers-exact.md",
        EXACT_INTRO,
        ("bounds", "checkmate", "solving", "speedup", "monet", "monet-third"),
        "",
    ),
)
"""Pages: file, introduction, sections in order, end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", default=",".join(names), help="of " + ", ".join(names))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, help="a folder of pages whose other sections stay")
    args = parser.parse_args()
    if unknown := set(filter(None, args.only.split(","))) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    wanted = [section for section in SECTIONS if section.name in args.only.split(",")]
    tables: dict[str, str] = {}
    for file, *_ in PAGES:
        if args.output and (args.output / file).exists():
            tables |= _tables((args.output / file).read_text())
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            2, get_context("spawn"), measures.hurry if args.quick else None
        ) as pool,
    ):
        os.environ.setdefault("COOP_PLAN_CAPTURED", folder)
        rows = {
            section.name: [pool.submit(row) for row in section.rows[: 1 if args.quick else None]]
            for section in sorted(wanted, key=lambda section: section.name != LONGEST)
        }
        for section in wanted:
            made = []
            for row in rows[section.name]:
                made.append(row.result())
                print(" | ".join(made[-1]), file=sys.stderr, flush=True)
            tables[section.title] = _table(section, made, quick=args.quick)
    titles = {section.name: section.title for section in SECTIONS}
    for file, intro, order, end in PAGES:
        parts = [tables[titles[name]] for name in order if titles[name] in tables]
        lacking = [titles[name] for name in order if titles[name] not in tables]
        left = textwrap.fill("Not run for this page: " + "; ".join(lacking) + ".", 100)
        page = "\n".join([intro, *parts, *([end] if end else []), *([left, ""] if lacking else [])])
        if args.output:
            (args.output / file).write_text(page)
        else:
            print(page)


def _tables(page: str) -> dict[str, str]:
    """The sections of a page by their titles."""
    found = {}
    for part in page.split("\n## ")[1:]:
        title = part.partition("\n")[0]
        if any(title == section.title for section in SECTIONS):
            found[title] = "## " + part.rstrip("\n") + "\n"
    return found


def _table(section: Section, rows: list[list[str]], *, quick: bool) -> str:
    command = f"python -m benchmarks.papers --only {section.name}" + " --quick" * quick
    half = " Searches had half of that time." * quick
    text = textwrap.fill(f"`{command}`. {section.text}{half}", 100, break_long_words=False)
    return "\n".join([f"## {section.title}", "", text, "", table(section.heads, rows), ""])


if __name__ == "__main__":
    main()
