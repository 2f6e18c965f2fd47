"""What recovery counts, under the names of docs/reference/metrics.md.

Each engine has a registry of its own (`Relight.metrics.registry`): expose it with prometheus-client, or read single values
with `value`. prometheus-client is loaded with the first engine, not with `import relight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Nothing here is on a step's path: these move when something died."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram  # noqa: PLC0415 - see above

        self.registry: CollectorRegistry = CollectorRegistry()
        own = self.registry
        self.claims = Counter("relight_recovery_claims", "orphans claimed by this process", registry=own)
        self.decisions = Counter("relight_recovery_decisions", "what was done with orphans", ["action"], registry=own)
        self.detection = Histogram(
            "relight_recovery_detection_seconds",
            "from the lapse of a lease to the claim",
            buckets=SECONDS,
            registry=own,
        )
        self.resume = Histogram(
            "relight_recovery_resume_seconds", "from the claim to going on, for one pass", buckets=SECONDS, registry=own
        )
        self.steps_repeated = Counter("relight_steps_repeated", "steps executed again after a crash", registry=own)
        self.fenced = Counter("relight_fenced_writes", "commits refused since another owner has the run", registry=own)
        self.false_deaths = Counter(
            "relight_false_deaths", "runs of this process that others claimed although it was alive", registry=own
        )
        self.leases_lost = Counter(
            "relight_leases_lost", "how often the lease could not be renewed in time", registry=own
        )

    def value(self, name: str, **labels: str) -> float:
        """One sample, 0 if it has not been counted yet: value("relight_recovery_claims_total")."""
        found = self.registry.get_sample_value(name, labels)
        return 0.0 if found is None else found
