"""Metrics as an argument: each component is given a `Metrics` and makes its own instruments; nothing is global.

A thin layer over prometheus_client with one registry per store, so that tests and several stores in one process never
share a counter. Names start with `kvobj_` and end in their unit, as Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS_SECONDS: Sequence[float] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples: (name, labels, value). `kind` is Prometheus' word: counter, gauge, histogram."""

    name: str
    documentation: str
    kind: str
    samples: Sequence[tuple[str, dict[str, str], float]] = field(default_factory=tuple)


class ToldCounter(Counter):
    """A counter of which some is counted elsewhere, in plain numbers: `tell` adds that before it is looked at. To count on it costs
    more than a microsecond."""

    tell: Callable[[], None] = staticmethod(lambda: None)

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        self.tell()
        return super().collect()


class Metrics:
    """Makes instruments in one registry and renders them in Prometheus' text format."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; `_total` is added to its name when rendered."""
        return Counter(name, documentation, labels, registry=self.registry)

    def told_counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> ToldCounter:
        """`counter`, for what every request counts."""
        return ToldCounter(name, documentation, labels, registry=self.registry)

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

    def value(self, name: str, **labels: str) -> float:
        """The present value of one sample, 0.0 where there is none. Asks its own instrument alone: all of them take a
        millisecond."""
        for metric in self.registry.restricted_registry([name]).collect():
            for sample in metric.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0

    def render(self) -> bytes:
        """The present state in Prometheus' text exposition format."""
        return generate_latest(self.registry)

    def families(self) -> list[Family]:
        """The present state, as values."""
        return [
            Family(
                each.name,
                each.documentation,
                each.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in each.samples],
            )
            for each in self.registry.collect()
        ]

    def add_families(self, read: Callable[[], Iterable[Family]]) -> None:
        """Show families that are kept elsewhere; their names are in nothing else of this registry."""
        self.registry.register(_Elsewhere(read))


class _Elsewhere(Collector):
    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before it is read."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        for family in self._read():
            metric = Metric(family.name, family.documentation, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def summed(families: Iterable[Family], *, counters_only: bool = False) -> list[Family]:
    """Families of several processes as one: samples of one name and labels are added up, but for times, of which the latest (of
    what was created: the earliest) counts. `counters_only`: what is left of a process that ended."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in families:
        if counters_only and family.kind == "gauge":
            continue
        found.setdefault(family.name, family)
        of_family = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            place = (name, tuple(sorted(labels.items())))
            standing = of_family.get(place)
            if standing is None:
                of_family[place] = value
            elif name.endswith("_created"):
                of_family[place] = min(standing, value)
            elif name.endswith("_timestamp_seconds"):
                of_family[place] = max(standing, value)
            else:
                of_family[place] = standing + value
    return [
        Family(
            family.name,
            family.documentation,
            family.kind,
            [(name, dict(labels), value) for (name, labels), value in values[family.name].items()],
        )
        for family in found.values()
    ]
