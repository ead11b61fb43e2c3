"""What one start measured the next one knows, and no state of the cache stops a run."""

import contextlib
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from coop_plan.runtime.cache import profiles
from coop_plan.runtime.cache.profiles import ProfileCache
from coop_plan.runtime.capture import op_timing, profiler
from coop_plan.runtime.device import build
from coop_plan.runtime.device.arena import process_bytes, reset_peak
from tests.runtime.starts import figures, in_a_new_process, start

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]


@pytest.fixture
def brief_timing():
    """Ops are timed as for a user."""


def profiled():
    return start()[0].profiled_ops


def rows(cache):
    with contextlib.closing(sqlite3.connect(cache / "profiles.sqlite3")) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        return dict(connection.execute("select key, record from profile"))


def test_what_a_kernels_workers_take_is_in_its_profile():
    """Attention's backward in bf16 packs its operands on each thread, where there is a kernel."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    torch.set_num_threads(2)
    try:
        q, k, v, out, grad = (torch.randn(2, 4, 64, 64, dtype=torch.bfloat16) for _ in range(5))
        args = (grad, q, k, v, out, torch.zeros(2, 64, 4).transpose(1, 2), 0.0, True)
        facts = profiler.profile_op(op, args, {})
        gc.collect()
        before = process_bytes()[0]
        reset_peak()
        made = op(*args)
        taken = process_bytes()[1] - before
    finally:
        torch.set_num_threads(1)
    sizes = sum(gradient.nbytes for gradient in made)
    assert sizes < taken <= sizes + facts.workspace_bytes + facts.worker_bytes


def test_what_a_worker_let_go_of_is_no_room_for_what_it_takes():
    """Python's garbage may be of a thread that works for a kernel, or had its number before."""
    ext = build.arena()
    with ThreadPoolExecutor(1) as worker:
        earlier = worker.submit(torch.ones, 100_000).result()
        ext.record_begin(False)
        first = worker.submit(torch.ones, 1000).result()
        del earlier
        second = worker.submit(torch.ones, 500).result()
        ext.record_end()
    assert ext.workers_peak() == first.nbytes + second.nbytes


def test_a_second_process_measures_traces_and_plans_nothing(cache):
    [[count, cached, loss, traced]], said = figures(in_a_new_process("80%"))
    assert count == len(rows(cache)) - 1 > 0  # and the launches
    assert traced > 0
    assert not cached
    assert "cache" not in said
    assert figures(in_a_new_process("80%"))[0] == [[0, True, loss, 0]]


def test_two_processes_at_once_share_the_cache(cache):
    both = [in_a_new_process("80%"), in_a_new_process("min")]
    for process in both:
        _, said = figures(process)
        assert "cache" not in said
    assert rows(cache)
    for budget in ("80%", "min"):
        report, _ = start(budget)
        assert report.profiled_ops == 0


@pytest.mark.parametrize("change", ["threads", "settings", "machine", "sources"])
def test_figures_of_other_conditions_are_not_used(change, monkeypatch):
    whole = profiled()
    if change == "threads":
        torch.set_num_threads(2)
    else:
        name = {"settings": "_settings", "machine": "_processor", "sources": "_source_digest"}[
            change
        ]
        monkeypatch.setattr(profiles, name, lambda *_: ["another"])
    assert profiled() == whole


@pytest.mark.parametrize(
    "damage", ["not json", "{}", '{"cost_us":"1","outputs":[],"allocations":[]}', "\0"]
)
def test_damaged_records_are_measured_again(cache, damage):
    whole = profiled()
    path = cache / "profiles.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("update profile set record = ?", (damage,))
    assert profiled() == whole
    assert damage not in rows(cache).values()
    assert profiled() == 0


@pytest.mark.parametrize("damage", ["text", "beginning", "middle"])
def test_a_damaged_file_costs_a_line_and_is_replaced(cache, damage, caplog):
    whole = profiled()
    path = cache / "profiles.sqlite3"
    content = bytearray(path.read_bytes())
    if damage == "text":
        content = bytearray(b"this is no database\n" * 300)
    else:
        begin = {"beginning": 0, "middle": len(content) // 2}[damage]
        content[begin : begin + 5000] = os.urandom(5000)
    path.write_bytes(content)
    assert profiled() > 0
    said = [r.getMessage() for r in caplog.records if "without the cache" in r.getMessage()]
    assert len(said) == 1
    assert str(path) in said[0]
    assert path.with_name("profiles.sqlite3.damaged").exists()
    assert profiled() == whole
    assert profiled() == 0


def test_a_cache_that_cannot_be_made_costs_a_line_each(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    report, _ = start()
    assert report.profiled_ops > 0
    assert report.steps_run == 1
    start()
    said = [r.getMessage() for r in caplog.records if "without the cache" in r.getMessage()]
    assert len(said) == 1  # of the folder that both need; once a process


def test_a_cache_that_cannot_be_written_is_read(cache):
    """As in an image."""
    obey = ()
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes everywhere, and there is no setpriv")
        obey = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    start()
    for path in cache.glob("*.sqlite3"):
        path.chmod(0o444)
    cache.chmod(0o555)
    try:
        (again, other), said = figures(in_a_new_process("80%", "min", prefix=obey))
    finally:
        cache.chmod(0o755)
    assert again[:2] == [0, True]
    assert other[:2] == [0, False]
    assert said.count("without the cache") == 1  # the plan for another budget cannot be kept


HAMMER = """
import sys
from coop_plan.runtime.cache import profiles
print("ready", flush=True)
for turn in range(10**9):
    with profiles.profile_session():
        for row in range(300):
            profiles.session().put(f"{turn} {row}", "x" * 1000)
"""


@pytest.mark.parametrize("seconds", [0.05, 0.21, 0.43])
def test_a_kill_while_it_writes_harms_nothing(cache, seconds):
    assert profiled() > 0
    whole = len(rows(cache))
    writer = subprocess.Popen([sys.executable, "-c", HAMMER], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"ready\n"
    time.sleep(seconds)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert profiled() == 0
    assert (len(rows(cache)) - whole) % 300 == 0  # whole sessions or none


def test_a_kill_while_it_profiles_harms_nothing(cache, caplog):
    process = in_a_new_process("80%")
    path = cache / "profiles.sqlite3"
    while not path.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    assert profiled() > 0
    assert profiled() == 0
    own = [record.getMessage() for record in caplog.records if record.name == "coop-plan"]
    assert not [line for line in own if "cache" in line]


def test_a_session_that_fails_keeps_what_it_measured(cache):
    with pytest.raises(RuntimeError), profiles.profile_session():
        profiles.session().put("signature", "record")
        raise RuntimeError
    store = ProfileCache(cache / "profiles.sqlite3")
    assert store.get("signature") == "record"
    store.close()


@torch.library.custom_op("coop_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (torch.ops.coop_test.double.default, (torch.ones(2),)),  # its code may change
        (torch.add, (torch.ones(2), 1)),
        (torch.ops.aten.bernoulli.default, (torch.ones(2), torch.Generator())),
    ],
)
def test_what_another_process_may_mean_by_other_things_is_not_kept(target, arguments):
    assert profiler.persistent_key(profiler.signature(target, arguments, {})) is None


def test_signatures_name_all_that_matters():
    def name(target, *arguments, **keywords):
        return profiler.persistent_key(profiler.signature(target, arguments, keywords))

    add, x = torch.ops.aten.add.Tensor, torch.ones(4, 4)
    names = {
        name(add, x, x),
        name(add, x, torch.ones(4, 4)),
        name(add, x, 1),
        name(add, x, 1.0),
        name(add, x, True),
        name(add, x, x, alpha=2),
        name(add, x.t(), x),
        name(add, x[:2], x),
        name(add, x.double(), x),
        name(add, x, x[1:, :1]),
        name(torch.ops.aten.sub.Tensor, x, x),
        name(torch.ops.aten.sum.dim_IntList, x, [0, 1]),
        name(torch.ops.aten.sum.dim_IntList, x, [0], True),
    }
    assert len(names) == 13
    assert None not in names


@given(
    op_us=st.floats(1, 1e5),
    code_us=st.floats(1, 100),
    read=st.integers(0, 64 << 20),
    made=st.integers(0, 64 << 20),
    rate=st.floats(1e3, 1e5),
)
def test_an_op_is_timed_as_in_a_step(op_us, code_us, read, made, rate):
    """Its operands are out of the caches; its code is there if one of its kind ran before.

    On full caches an op that is bound by memory looked several times too cheap; on emptied ones a
    short op of many looked three times too dear.
    """
    order, arrival = [], (read + made) / rate

    def clock(run):
        order.append("others" if run is op_timing.empty_caches else "op")
        if order[-1] == "others":
            return op_timing.CACHE_BYTES / rate
        return op_us + (code_us + arrival if order[-2:-1] == ["others"] else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_timing, "cpu_us", clock)
        patch.setattr(op_timing, "Arena", mock.MagicMock())
        patch.setattr(op_timing, "Run", mock.MagicMock())
        first_us, again_us = op_timing.time_op(lambda: None, [(made, 0)], read, None)
    is_short = op_us + arrival + code_us < op_timing.CODE_US
    assert first_us == pytest.approx(op_us + arrival + code_us)
    assert again_us == pytest.approx(op_us + arrival + code_us * (not is_short))
    assert order[:2] == ["others", "op"]
    assert all(one == "op" or next_ == "op" for one, next_ in pairwise(order))


def test_emptying_the_caches_takes_no_memory():
    pages = op_timing._library_pages()
    assert pages.nbytes == op_timing.CACHE_BYTES
    reset_peak()
    before = process_bytes()
    op_timing.empty_caches()
    assert process_bytes() == before
    assert not pages.flags.owndata
    assert not pages.flags.writeable


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
def test_synthetic_views_of_a_storage_take_it_once(chosen):
    """Queries, keys and values are views of one product: three copies took thrice that."""
    bases = [torch.ones(4, 6) for _ in range(4)]
    rows = [bases[base][row : row + 1] for base, row in chosen]
    ((synthetic,), _) = profiler.synthetic_arguments(aten.cat.default, (rows,), {})
    storages = [value.untyped_storage() for value in synthetic]
    taken = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(taken.values()) == bases[0].nbytes * len({base for base, _ in chosen})
    for made, value in zip(synthetic, rows, strict=True):
        assert (made.shape, made.stride()) == (value.shape, value.stride())
        assert made.storage_offset() == value.storage_offset()


def test_synthetic_indices_are_spread_in_place():
    """A count of 64 bits beside indices of 32 bits took twice their memory."""
    few = torch.zeros(1 << 20, dtype=torch.int32)
    gc.collect()
    before = process_bytes()[0]
    reset_peak()
    (_, index), _ = profiler.synthetic_arguments(aten.embedding.default, (TABLE[:, :1], few), {})
    assert process_bytes()[1] - before <= TABLE.nbytes + 2 * few.nbytes + 4096
    assert index.unique().numel() == len(TABLE)


def test_synthetic_masks_have_long_runs():
    """`where` and `masked_fill` branch: on a random mask they look several times too dear."""
    mask = profiler._synthesize(torch.empty(100, dtype=torch.bool), None, 0)
    assert mask.sum() == 50
    assert mask.diff().sum() == 1


def test_synthetic_values_repeat_too_late_for_a_processor_to_predict_them():
    """The processor predicted the branches of max pooling: it looked a third too cheap."""
    values = profiler._synthesize(torch.empty(100_000), None, 0)
    assert values.unique().numel() > 30_000


TABLE, FEW = torch.ones(999, 4), torch.zeros(100, dtype=torch.int64)
SAME = FEW[:, None].expand(100, 4)  # written as one element for each row


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.embedding.default, (TABLE, FEW)),
        (aten.embedding_dense_backward.default, (TABLE[:100], FEW, 999, -1, False)),
        (aten.index.Tensor, (TABLE, [FEW.int()])),
        (aten.index.Tensor, (TABLE.mT, [None, FEW])),
        (aten.index_put.default, (TABLE, [FEW], TABLE[:100], True)),
        (aten.index_add.default, (TABLE, 0, FEW, TABLE[:100])),
        (aten.gather.default, (TABLE, 0, SAME)),
        (aten.scatter_add.default, (TABLE, -2, SAME, TABLE[:100])),
    ],
)
def test_synthetic_indices_choose_rows_all_over(op, arguments):
    """The first row would stay in the caches: an embedding looked seven times too cheap."""
    given, _ = profiler.synthetic_arguments(op, arguments, {})
    (index,) = (v for v in tree_leaves(given) if torch.is_tensor(v) and not v.is_floating_point())
    rows = index.flatten().unique()
    assert len(rows) == 100
    assert rows.max() - rows.min() > 900


def test_an_op_that_waits_for_a_processor_costs_its_own_time():
    assert op_timing.cpu_us(lambda: time.sleep(0.05)) < 10_000
