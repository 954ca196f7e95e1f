"""Metrics as an argument: each component is given a `Metrics` and makes its own instruments; nothing is global.

A thin layer over prometheus_client with one registry per store, so that tests and several stores in one process never
share a counter. Names start with `kvobj_` and end in their unit, as Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_SECONDS: Sequence[float] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


class Metrics:
    """Makes instruments in one registry and renders them in Prometheus' text format."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; `_total` is added to its name when rendered."""
        return Counter(name, documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down."""
        return Gauge(name, documentation, labels, registry=self.registry)

    def gauge_of(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A gauge that asks `read` when it is scraped: for what a component knows anyway."""
        Gauge(name, documentation, registry=self.registry).set_function(read)

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_SECONDS,
    ) -> Histogram:
        """A distribution; the default buckets suit latencies in seconds."""
        return Histogram(name, documentation, labels, buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """The present state in Prometheus' text exposition format."""
        return generate_latest(self.registry)
