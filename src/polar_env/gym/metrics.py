"""What a server of rollouts tells Prometheus: counters read off finished rows, and how many rollouts wait and run.

A row holds all that happened to its rollout, wherever it ran, so nothing else has to be instrumented. Names and units
follow Prometheus' own rules (prometheus.io, "Metric and label naming"); no label can take more values than a run has
harnesses or this package has kinds.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text exposition format, as every scraper takes it."""

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""Bounds of the histograms: from a sandbox's start to an agent's budget."""

AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Bounds of the histogram of ages, in updates."""

_JOIN, _PHASE = "joins_", "seconds_"


class Metrics:
    """The numbers of one server. Use ``running`` around each rollout and ``observe`` on its row."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._in_flight = Gauge("polar_rollouts_in_flight", "Rows posted and not answered yet.", registry=registry)
        self._rollouts = Counter(
            "polar_rollouts", "Rollouts by how they ended.", ("harness", "outcome", "trained"), registry=registry
        )
        self._solved = Counter("polar_rollouts_resolved", "Rollouts with reward 1.", ("harness",), registry=registry)
        self._failures = Counter("polar_failures", "Masked rollouts by kind of failure.", ("kind",), registry=registry)
        self._calls = Counter("polar_model_calls", "Model calls recorded.", ("harness",), registry=registry)
        self._tokens = Counter(
            "polar_tokens", "Tokens sampled, and those of them in rows.", ("use",), registry=registry
        )
        self._left_out = Counter(
            "polar_calls_left_out", "Calls that do not train, and why.", ("why",), registry=registry
        )
        self._holes = Counter("polar_holes", "Broken capture contracts.", ("kind",), registry=registry)
        self._flags = Counter("polar_flags", "What gradings noticed.", ("flag",), registry=registry)
        self._joins = Counter("polar_joins", "How calls continued earlier ones.", ("join",), registry=registry)
        self._stale = Counter(
            "polar_stale_rollouts", "Rollouts over engine.max_policy_age.", ("harness",), registry=registry
        )
        self._ages = Histogram(
            "polar_policy_age_updates",
            "Updates the oldest delivered token of a rollout was behind.",
            buckets=AGES,
            registry=registry,
        )
        self._seconds = Histogram(
            "polar_phase_seconds", "Wall clock of a rollout's phases.", ("phase",), buckets=SECONDS, registry=registry
        )

    @contextmanager
    def running(self) -> Generator[None]:
        """A row is posted at the beginning of the block and answered at its end."""
        with self._in_flight.track_inprogress():
            yield

    def observe(self, row: Mapping[str, Any]) -> None:
        """Count one finished row (``gym.rows``)."""
        polar: Mapping[str, Any] = row.get("polar") or {}
        harness, masked = str(polar.get("harness") or ""), bool(row.get("mask_sample"))
        self._rollouts.labels(harness, polar.get("outcome", "unknown"), str(not masked).lower()).inc()
        self._solved.labels(harness).inc(float(row.get("reward", 0.0)))
        self._calls.labels(harness).inc(row.get("num_model_calls", 0.0))
        self._tokens.labels("sampled").inc(row.get("sampled_tokens", 0.0))
        self._tokens.labels("trainable").inc(row.get("trainable_tokens", 0.0))
        if masked:
            self._failures.labels(row.get("failure_kind") or "unknown").inc()
        left_out: Mapping[str, str] = polar.get("left_out") or {}
        for why in left_out.values():
            self._left_out.labels(why).inc()
        holes: Sequence[str] = polar.get("holes") or ()
        for hole in holes:
            self._holes.labels(hole.partition(":")[0]).inc()
        verdict: Mapping[str, Any] = polar.get("verdict") or {}
        flags: Sequence[str] = verdict.get("flags") or ()
        for flag in flags:
            self._flags.labels(flag).inc()
        self._stale.labels(harness).inc(row.get("policy_stale", 0.0))
        if row.get("num_model_calls"):
            self._ages.observe(row.get("policy_age", 0.0))
        self._numbers(row)

    def _numbers(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key.startswith(_JOIN):
                self._joins.labels(key.removeprefix(_JOIN)).inc(value)
            elif key.startswith(_PHASE):
                self._seconds.labels(key.removeprefix(_PHASE)).observe(value)

    def text(self) -> bytes:
        """Everything counted so far, for ``GET /metrics``."""
        return generate_latest(self._registry)
