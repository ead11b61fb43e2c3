"""Measured figures of a run, written into its step's report."""

from collections.abc import Sequence

from coop_plan.runtime.device.arena import Counters
from coop_plan.runtime.execute.invocation import Invocation
from coop_plan.runtime.reports import StepReport
from coop_plan.schemas import format_bytes


def note_counters(
    report: StepReport, counters: Counters, invocation: Invocation, before: int, *, on_cuda: bool
) -> None:
    """Note the counters of an invocation's run; `before` are the bytes of what existed before.

    On CUDA times are measured by events, and are noted later (`note_times`).
    """
    compiled, copies = invocation.compiled, invocation.transfers
    report.budget_bytes = compiled.budget_bytes
    report.measured_arena_bytes = counters.high_water_bytes
    report.measured_peak_bytes = before + counters.process_bytes
    report.outside_bytes = counters.outside_bytes
    found = []
    if counters.stray_count:
        many = "s" if counters.stray_count > 1 else ""
        found.append(
            f"{format_bytes(counters.stray_bytes)} in {counters.stray_count} tensor{many}, the"
            f" largest ({format_bytes(counters.largest_bytes)}) from {counters.largest_line}"
        )
    if counters.conflict_slot >= 0:
        kept = counters.conflicting_slot
        of = "another step" if kept < 0 else compiled.producer(kept)
        found.append(
            f"{format_bytes(counters.conflicting_bytes)} of {of}, still referenced, where"
            f" {compiled.producer(counters.conflict_slot)} was planned"
        )
    if found:
        report.outside_plan = "; ".join(found)
    if (host := invocation.host) is not None:
        report.measured_host_us, report.measured_host_stall_us = host.busy_us, host.stall_us
    if not on_cuda:
        report.measured_copies_us = counters.copies_us
        stalls = (0.0, 0.0) if copies is None else copies.stall_us
        note_times(report, counters.compute_us, counters.recompute_us, stalls)
    if copies is not None:
        report.measured_host_arena_bytes = copies.host_high_water
        report.copies = copies.spans


def note_times(
    report: StepReport, compute_us: float, recompute_us: float, stalls: Sequence[float]
) -> None:
    """Note times in first runs and in recomputations, and waits for transfers away and back, µs."""
    report.last_step_us = compute_us + recompute_us
    report.measured_offload_stall_us, report.measured_prefetch_stall_us = stalls
    if compute_us:
        once, host = compute_us + report.measured_host_us, report.measured_host_us
        more = recompute_us + sum(stalls) + report.measured_host_stall_us - host
        report.measured_overhead = more / once
