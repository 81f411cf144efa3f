"""An engine's metrics: one registry, fed by the actors (as their Observer) and by the endpoint.

Names are the design's. No label beyond those named there: the router adds `engine_id` when it re-exports.
Counters whose actor reports a running total are read from the last report, so they cannot drift from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from actors.messages.stats import EngineStats

# Seconds. From a tenth of a decode step on a small model to a prompt of the whole context behind a full queue.
TIME_TO_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TIME_BETWEEN_TOKENS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TRANSFER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP = TIME_BETWEEN_TOKENS

OUTCOMES = ("stop", "length", "abort", "error", "refused")
LOAD_OUTCOMES = ("landed", "failed", "recomputed")


class EngineMetrics:
    """Implements `actors.observer.Observer`; the endpoint calls the rest. Not thread-safe: the engine's loop only."""

    def __init__(self, engine_id: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.incompatible_peers: dict[str, str] = {}
        self._requests = Counter(
            "kvyard_requests",
            "Requests ended, by how; refused ones were never accepted",
            ["outcome"],
            registry=registry,
        )
        self._first_token = Histogram(
            "kvyard_time_to_first_token_seconds",
            "Arrival of the request to its first token",
            buckets=TIME_TO_FIRST_TOKEN,
            registry=registry,
        )
        self._between_tokens = Histogram(
            "kvyard_time_between_tokens_seconds",
            "From one token of a request to its next",
            buckets=TIME_BETWEEN_TOKENS,
            registry=registry,
        )
        self._loads = Counter("kvyard_kv_loads", "Loads of KV blocks ended, by how", ["outcome"], registry=registry)
        self._received = Counter("kvyard_kv_transfer_bytes", "KV bytes received", registry=registry)
        self._sent = Counter("kvyard_kv_sent_bytes", "KV bytes of leases that a reader confirmed", registry=registry)
        self._transfer = Histogram(
            "kvyard_kv_transfer_seconds", "Loads that landed, open to release", buckets=TRANSFER, registry=registry
        )
        self._leases_expired = Counter("kvyard_leases_expired", "Leases that no reader released", registry=registry)
        self._peers_lost = Counter("kvyard_peers_lost", "Connections to peers that broke", registry=registry)
        self._layout_refusals = Counter(
            "kvyard_kv_layout_refusals", "Loads refused because the KV layouts differ", registry=registry
        )
        self._step = Histogram("kvyard_step_seconds", "Steps, plan to result", buckets=STEP, registry=registry)
        self._step_tokens = Counter("kvyard_step_tokens", "Tokens computed in steps", registry=registry)
        self._busy = Counter("kvyard_executor_busy_seconds", "Forward passes and sampling", registry=registry)
        self._idle = Counter(
            "kvyard_executor_idle_seconds",
            "No step was under way, although requests could have run or because none could",
            ["work"],
            registry=registry,
        )
        self._step_log_failed = Gauge(
            "kvyard_step_log_failed", "1 when the step log could not be written any more", registry=registry
        )
        # `engine`, not `engine_id`: that label is the router's to add.
        Gauge("kvyard_engine_info", "1, labelled with the engine's id", ["engine"], registry=registry).labels(
            engine_id
        ).set(1)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for work in ("runnable", "none"):
            self._idle.labels(work)
        for outcome in LOAD_OUTCOMES:
            self._loads.labels(outcome)
        self._stats = _StatsCollector()
        registry.register(self._stats)

    def exposition(self) -> tuple[bytes, str]:
        """The registry as text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    @property
    def stats(self) -> EngineStats:
        """The scheduler's last report."""
        return self._stats.latest

    # What the endpoint measures.

    def request_ended(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens_followed(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the one before them; tokens of one output share the time evenly."""
        for _ in range(count):
            self._between_tokens.observe(seconds / count)

    # The Observer's face.

    def stats_changed(self, stats: EngineStats) -> None:
        self._stats.latest = stats

    def step_completed(self, num_tokens: int, num_requests: int, seconds: float) -> None:
        self._step.observe(seconds)
        self._step_tokens.inc(num_tokens)

    def executor_worked(self, busy: float, idle: float, idle_although_runnable: float) -> None:
        self._busy.inc(busy)
        self._idle.labels("runnable").inc(idle_although_runnable)
        self._idle.labels("none").inc(idle - idle_although_runnable)

    def load_ended(self, outcome: str, seconds: float, num_bytes: int) -> None:
        self._loads.labels(outcome).inc()
        self._received.inc(num_bytes)
        if outcome == "landed":
            self._transfer.observe(seconds)

    def step_log_failed(self) -> None:
        self._step_log_failed.set(1)

    def blocks_sent(self, num_bytes: int) -> None:
        self._sent.inc(num_bytes)

    def lease_expired(self) -> None:
        self._leases_expired.inc()

    def peer_lost(self, engine_id: str) -> None:
        self._peers_lost.inc()

    def load_refused_by_layout(self, peer_engine_id: str, detail: str) -> None:
        self._layout_refusals.inc()
        self.incompatible_peers[peer_engine_id] = detail


class _StatsCollector(Collector):
    """The scheduler's last report."""

    def __init__(self) -> None:
        self.latest = EngineStats()

    def collect(self) -> Iterable[Metric]:
        stats = self.latest
        yield GaugeMetricFamily("kvyard_requests_running", "Requests in the running batch", value=stats.running)
        yield GaugeMetricFamily("kvyard_requests_waiting", "Requests waiting for admission", value=stats.waiting)
        yield GaugeMetricFamily(
            "kvyard_requests_skipped", "Requests parked, such as for KV blocks", value=stats.skipped
        )
        blocks = GaugeMetricFamily("kvyard_kv_blocks", "KV blocks by state", labels=["state"])
        for state in ("free", "held", "fenced", "leased", "quarantined"):
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        paused = GaugeMetricFamily(
            "kvyard_paused", "1: an operator has stopped admission (new) or all scheduling (all)", labels=["mode"]
        )
        for mode in ("new", "all"):
            paused.add_metric([mode], float(stats.paused == mode))
        yield paused
        yield CounterMetricFamily(
            "kvyard_prefix_cache_hit_tokens", "Prompt tokens found in the cache", value=stats.prefix_hit_tokens_total
        )
        yield CounterMetricFamily("kvyard_preemptions", "Preemptions", value=stats.preemptions_total)
        yield CounterMetricFamily(
            "kvyard_late_events", "Late, duplicate and unknown events ignored", value=stats.late_events_total
        )
