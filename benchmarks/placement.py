"""Placement by instance and algorithm: peak over the lower bound, and CPU seconds.

    python -m benchmarks.placement [FOLDER] [--large] [--time-limit 10] [--csv build/placement.csv]

FOLDER has MiniMalloc CSV files; a number in the name (`A.1048576.csv`) is a capacity to fit.
Generated instances follow, with --large up to 62 000 buffers. CPU seconds are of this process,
after one placement that loads the compiled kernels. `=` marks a proved optimum, `!` a peak above
the capacity.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.report import parser, table, write_csv
from coop_plan.planner.core.arrays import Ints
from coop_plan.planner.importers.buffers_csv import read_buffers
from coop_plan.planner.placement import place
from coop_plan.planner.placement.bound import lower_bound
from coop_plan.planner.placement.first_fit import first_fit
from coop_plan.planner.placement.greedy import FIRST_FIT_MOST, ORDERS
from coop_plan.planner.placement.instance import Instance, build
from coop_plan.planner.placement.keys import order_by, sort_keys
from coop_plan.planner.placement.skyline import skyline

DATA = Path(__file__).parents[2] / "shared" / "data" / "allocation"

Lifetimes = dict[str, Ints]
"""`lower`, `upper` and `size` of each buffer, as `place` takes them."""


@dataclass(frozen=True)
class Row:
    instance: str
    buffers: int
    algorithm: str
    capacity: int | None
    fits: bool | None
    peak: int
    lower_bound: int
    ratio: float
    optimal: bool
    cpu_seconds: float


def training_like(count: int, seed: int) -> Lifetimes:
    """Activations allocated in the forward pass and freed in reverse, and short temporaries."""
    random = np.random.default_rng(seed)
    layers = count // 4
    size = 64 * 2 ** random.integers(0, 12, 4 * layers)
    born = 2 * np.arange(layers)
    dead = 4 * layers - born
    lower = np.concatenate([born, born, dead - 1, dead - 1])
    upper = np.concatenate([dead, born + random.integers(1, 4, layers), dead, dead + 2])
    return {"lower": lower, "upper": upper, "size": size}


def repeated(base: Lifetimes, count: int, seed: int, overlap: float) -> Lifetimes:
    """Repetitions of a trace with perturbed sizes and ends; one buffer in 100 lives longer."""
    random = np.random.default_rng(seed)
    span, parts, start = int(base["upper"].max()), [], 0
    while sum(part.shape[1] for part in parts) < count:
        end = base["upper"] + random.integers(-3, 4, len(base["upper"]))
        stays = random.random(len(end)) < 0.01
        end[stays] += random.integers(0, 10 * span, int(stays.sum()))
        size = (base["size"] * np.exp(random.normal(0, 0.2, len(end)))).astype(np.int64)
        end = np.maximum(end, base["lower"] + 1)
        parts.append(np.stack([base["lower"] + start, end + start, np.maximum(1, size)]))
        start += int(span * (1 - overlap))
    table = np.concatenate(parts, axis=1)[:, :count]
    return dict(zip(("lower", "upper", "size"), table, strict=True))


def read(path: Path) -> Lifetimes:
    buffers = read_buffers(path.read_text(), str(path))
    columns = {"lower": buffers.lower, "upper": buffers.upper, "size": buffers.size}
    return {name: np.array(values, np.int64) for name, values in columns.items()}


def instances(folder: Path, large: bool) -> Iterator[tuple[str, Lifetimes, int | None]]:
    """Yields (name, buffers, capacity)."""
    files = sorted(folder.glob("*.csv"))
    for path in files:
        _, _, number = path.stem.rpartition(".")
        yield path.stem, read(path), int(number) if number.isdigit() else None
    for count in (1_000, 10_000):
        yield f"training {count}", training_like(count, 1), None
    if large:
        yield "training 62000", training_like(62_000, 1), None
        for path in (path for path in files if not path.stem.rpartition(".")[2].isdigit()):
            for count, overlap in ((18_000, 0.1), (62_000, 0.5)):
                name = f"{path.stem} to {count}, overlap {overlap}"
                yield name, repeated(read(path), count, 1, overlap), None


def best_of(pack: Callable[[Instance, Ints], Ints], instance: Instance) -> int:
    """The lowest peak over the portfolio's plain orders."""
    keys = sort_keys(instance.first, instance.last, instance.height, instance.sections)
    return min(instance.peak(pack(instance, order_by(name, keys))) for name in ORDERS)


def measure(name: str, buffers: Lifetimes, capacity: int | None, limit: float) -> Iterator[Row]:
    count = len(buffers["size"])
    began = time.process_time()
    instance = build(buffers["lower"], buffers["upper"], buffers["size"], 1)
    bound = lower_bound(instance)
    building = time.process_time() - began

    def row(algorithm: str, peak: int, bound: int, seconds: float, within: int | None) -> Row:
        fits = None if within is None else peak <= within
        ratio = peak / max(1, bound)
        return Row(name, count, algorithm, within, fits, peak, bound, ratio, peak <= bound, seconds)

    for algorithm, pack in (("first-fit", first_fit), ("skyline", skyline)):
        if algorithm == "first-fit" and count > FIRST_FIT_MOST:
            continue
        began = time.process_time()
        peak = best_of(pack, instance)
        yield row(algorithm, peak, bound, building + time.process_time() - began, None)
    ways = [
        ("greedy", None, {"work": 0}),
        ("place", None, {}),
        (f"place, {limit:g} s", None, {"time_limit": limit}),
    ]
    if capacity is not None:
        ways.append(("fit", capacity, {"time_limit": limit}))
    for algorithm, within, options in ways:
        began = time.process_time()
        made = place(**buffers, capacity=within, **options)
        seconds = time.process_time() - began
        yield row(algorithm, made.peak, made.lower_bound, seconds, within)


def print_table(rows: list[Row]) -> None:
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    lines = []
    for name in dict.fromkeys(row.instance for row in rows):
        of_instance = {row.algorithm: row for row in rows if row.instance == name}
        cells = [name, str(next(iter(of_instance.values())).buffers)]
        for row in map(of_instance.get, algorithms):
            mark = "" if row is None else "!" if row.fits is False else "=" if row.optimal else ""
            cells.append(f"{row.ratio:.4f}{mark} {row.cpu_seconds:6.2f}" if row else "")
        lines.append(cells)
    print("peak / lower bound, CPU seconds")
    print(table(["instance", "buffers", *algorithms], lines))
    fitted = [row for row in rows if row.capacity is not None]
    if fitted:
        spent = sum(row.cpu_seconds for row in fitted)
        done = sum(bool(row.fits) for row in fitted)
        print(f"fit: {done} of {len(fitted)} instances in {spent:.2f} CPU seconds")


def main() -> None:
    command = parser(__doc__, "build/placement.csv")
    command.add_argument("folder", type=Path, nargs="?", default=DATA)
    command.add_argument("--large", action="store_true", help="up to 62 000 buffers")
    command.add_argument("--time-limit", type=float, default=10.0)
    args = command.parse_args()
    place([0, 0], [1, 1], [1, 1], time_limit=1)
    rows: list[Row] = []
    for name, buffers, capacity in instances(args.folder, args.large):
        rows += measure(name, buffers, capacity, args.time_limit)
    print_table(rows)
    write_csv(args.csv, [field.name for field in fields(Row)], map(vars, rows))


if __name__ == "__main__":
    main()
