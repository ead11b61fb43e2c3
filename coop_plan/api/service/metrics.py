"""Metrics of `/metrics` in Prometheus' text format; `docker/grafana.json` is their dashboard."""

import functools
from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = ("queued", "running")

REQUEST_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
SOLVE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 150, 300, 600)
GAPS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        requests = counter(
            "coop_plan_requests", "Requests that were answered", ("method", "route", "status")
        )
        seconds = histogram(
            "coop_plan_request_seconds",
            "Time from a request's head to the end of its answer",
            ("method", "route"),
            buckets=REQUEST_SECONDS,
        )
        plans = counter(
            "coop_plan_plans",
            "Plans that were sent, by what the cache had (Coop-Plan-Cache)",
            ("cache",),
        )
        # A look-up by labels takes a lock and 3 µs.
        self._request_count = functools.cache(requests.labels)
        self._request_time = functools.cache(seconds.labels)
        self._plan_count = functools.cache(plans.labels)
        self.dropped = counter(
            "coop_plan_verify_failures",
            "Kept records that were damaged, or did not hold for what was asked",
        )
        self._jobs = Gauge("coop_plan_jobs", "Solves by state", ("state",), registry=registry)
        self._solve_seconds = histogram(
            "coop_plan_solve_seconds",
            "Time of solves from queue to end",
            ("state",),
            buckets=SOLVE_SECONDS,
        )
        self._gap = histogram(
            "coop_plan_gap_at_end",
            "How far a plan may be from the best one when its solve ended, where a bound is known",
            buckets=GAPS,
        )

    def observe_request(
        self, method: str, route: str, status: int, seconds: float, cache: str
    ) -> None:
        """Count an answered request; `cache` is the Coop-Plan-Cache of its response."""
        self._request_count(method, route, str(status)).inc()
        self._request_time(method, route).observe(seconds)
        if cache:
            self._plan_count(cache).inc()

    def observe_solve(self, state: str, seconds: float, gap: float | None) -> None:
        """Count a finished solve."""
        self._solve_seconds.labels(state).observe(seconds)
        if gap is not None:
            self._gap.observe(gap)

    def watch_jobs(self, states: Callable[[], Mapping[str, int]]) -> None:
        """Report the numbers of jobs by state, from `states`, at each scrape."""

        def count(state: str) -> float:
            return states().get(state, 0)

        for state in STATES:
            self._jobs.labels(state).set_function(functools.partial(count, state))

    def text(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self._registry)
