"""The router's own metrics, and its engines' with the label `engine_id` added.

The gauges are read from the fleet when somebody asks, so they cannot be older than the router's knowledge; how old that
is, is `kvyard_router_probe_age_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from api.router.fleet import Fleet


class RouterMetrics(Collector):
    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet, self._clock = fleet, clock
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvyard_router_requests", "Requests ended, by how", ["outcome"], registry=self.registry
        )
        self._retries = Counter(
            "kvyard_router_retries", "Asked another engine, by why", ["reason"], registry=self.registry
        )
        self.registry.register(self)

    def request_ended(self, outcome: str, retries: Sequence[str]) -> None:
        self._requests.labels(outcome).inc()
        for reason in retries:
            self._retries.labels(reason).inc()

    def collect(self) -> Iterable[Metric]:
        labels = ["engine_id", "role"]
        healthy = GaugeMetricFamily("kvyard_router_engine_healthy", "1: it gets requests", labels=labels)
        age = GaugeMetricFamily(
            "kvyard_router_probe_age_seconds", "Since the engine last answered a probe", labels=labels
        )
        for engine in self._fleet.engines:
            values = [engine.engine_id, engine.role]
            healthy.add_metric(values, float(engine.healthy))
            if engine.answered_at is not None:
                age.add_metric(values, self._clock() - engine.answered_at)
        return [healthy, age]

    def exposition(self, engines: Mapping[str, str]) -> bytes:
        """Prometheus text: the router's own, then those of `engines` (engine_id → its text), one family each."""
        registry = CollectorRegistry()
        registry.register(_Families([*self.registry.collect(), *_labelled(engines)]))
        return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._families


def _labelled(engines: Mapping[str, str]) -> list[Metric]:
    families: dict[str, Metric] = {}
    for engine_id, text in engines.items():
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                kept.add_sample(sample.name, {**sample.labels, "engine_id": engine_id}, sample.value)
    return list(families.values())
