"""What recovery counts, under the names of docs/reference/metrics.md.

Each engine has its own (`Relight.metrics`): read single values with `value`, or expose `registry` with prometheus-client.
Counting itself needs no library. Loading prometheus-client takes longer than opening a store, so it is loaded when
`registry` is first used.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Counter:
    """Counts up, for each value of its label if it has one ("" otherwise)."""

    def __init__(self, name: str, meaning: str, label: str = "") -> None:
        self.name = name
        self.meaning = meaning
        self.label = label
        self.counts: dict[str, float] = {} if label else {"": 0.0}

    def inc(self, amount: float = 1.0, value: str = "") -> None:
        self.counts[value] = self.counts.get(value, 0.0) + amount


class Histogram:
    """How often something took how many seconds."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name = name
        self.meaning = meaning
        self.counts = [0] * (len(SECONDS) + 1)  # one per bucket, not cumulative; the last bucket has no upper bound
        self.sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(SECONDS, seconds)] += times
        self.sum += seconds * times


class Metrics:
    """All metrics of one engine. No step counts anything: these change when a process has died or lost its lease."""

    def __init__(self) -> None:
        self.claims = Counter("relight_recovery_claims", "orphans claimed by this process")
        self.decisions = Counter("relight_recovery_decisions", "what was done with orphans", "action")
        self.detection = Histogram("relight_recovery_detection_seconds", "from the lapse of a lease to the claim")
        self.resume = Histogram("relight_recovery_resume_seconds", "from the claim to going on, for one pass")
        self.steps_repeated = Counter(
            "relight_steps_repeated", "steps of recovered runs that may have been in flight when their owner died"
        )
        self.fenced = Counter(
            "relight_fenced_writes", "commits with entries that were refused since another owner has the run"
        )
        self.false_deaths = Counter(
            "relight_false_deaths", "runs of this process that others claimed although it was alive"
        )
        self.leases_lost = Counter("relight_leases_lost", "how often the lease could not be renewed in time")
        self._registry: CollectorRegistry | None = None

    @property
    def registry(self) -> CollectorRegistry:
        """For prometheus-client: `prometheus_client.start_http_server(9100, "127.0.0.1", rl.metrics.registry)`."""
        if self._registry is None:
            from prometheus_client import CollectorRegistry  # noqa: PLC0415 - see above

            self._registry = CollectorRegistry()
            self._registry.register(self)
        return self._registry

    def value(self, name: str, **labels: str) -> float:
        """One sample, 0 if it has not been counted yet: value("relight_recovery_claims_total")."""
        found = self.registry.get_sample_value(name, labels)
        return 0.0 if found is None else found

    def collect(self) -> Iterator[Metric]:
        """The method that prometheus-client calls on a collector."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily  # noqa: PLC0415 - see above

        for one in vars(self).values():
            if isinstance(one, Counter):
                counted = CounterMetricFamily(one.name, one.meaning, labels=[one.label] if one.label else None)
                for value, count in one.counts.items():
                    counted.add_metric([value] if one.label else [], count)
                yield counted
            elif isinstance(one, Histogram):
                measured = HistogramMetricFamily(one.name, one.meaning)
                bounds = [*map(str, SECONDS), "+Inf"]
                sums = [sum(one.counts[: place + 1]) for place in range(len(one.counts))]
                measured.add_metric([], list(zip(bounds, sums, strict=True)), one.sum)
                yield measured
