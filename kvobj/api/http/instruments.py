"""What one HTTP server counts.

What every request is counted in are plain numbers of the event loop, told when somebody looks: four instruments that any thread may
use cost a request as much as parsing half of its head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from kvobj.metrics import LATENCY_BUCKETS_SECONDS, Family, Metrics

_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
_BOUNDS = tuple(LATENCY_BUCKETS_SECONDS)
_BOUND_LABELS = (*map(str, _BOUNDS), "+Inf")


class _Latencies:
    """How long requests of one method took: how many fell into each bucket, and seconds in all."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUND_LABELS)
        self.seconds = 0.0


class HttpInstruments:
    """Counters, a latency histogram a method, and gauges of what is open, all named `kvobj_<name>_...`. Event-loop-only."""

    def __init__(
        self,
        metrics: Metrics,
        name: str,
        *,
        connections: Callable[[], float],
        in_flight: Callable[[], float],
        handshakes: Callable[[], float],
    ) -> None:
        self._front = f"kvobj_{name}"
        self.cut_replies = metrics.counter(f"kvobj_{name}_cut_replies", "Replies that could not be sent whole.")
        self.refused_connections = metrics.counter(
            f"kvobj_{name}_refused_connections", "Connections over the limit, answered 503 or reset."
        )
        self.accept_waits = metrics.counter(
            f"kvobj_{name}_accept_waits",
            "Seconds in which no connection could be accepted for want of descriptors or memory.",
        )
        self.stalled_connections = metrics.counter(
            f"kvobj_{name}_stalled_connections", "Connections ended for a missed deadline, idle ones left out."
        )
        self.failed_handshakes = metrics.counter(
            f"kvobj_{name}_failed_tls_handshakes", "TLS handshakes that failed or missed their deadline."
        )
        metrics.gauge_of(f"kvobj_{name}_connections", "Open connections, TLS handshakes included.", connections)
        metrics.gauge_of(f"kvobj_{name}_tls_handshakes", "TLS handshakes under way.", handshakes)
        metrics.gauge_of(f"kvobj_{name}_requests_in_flight", "Requests being served.", in_flight)
        metrics.add_families(self._families)
        self._requests: dict[tuple[str, int], int] = {}
        self._latencies: dict[str, _Latencies] = {}
        self._bytes_in = 0
        self._bytes_out = 0

    def count(self, method: str, status: int, *, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count one request that was answered."""
        if method not in _METHODS:
            method = "other"
        kind = (method, status // 100)
        self._requests[kind] = self._requests.get(kind, 0) + 1
        latencies = self._latencies.get(method)
        if latencies is None:
            latencies = self._latencies[method] = _Latencies()
        latencies.counts[bisect_left(_BOUNDS, seconds)] += 1
        latencies.seconds += seconds
        self._bytes_in += bytes_in
        self._bytes_out += bytes_out

    def _families(self) -> Iterator[Family]:
        front = self._front
        requests = [
            (f"{front}_requests_total", {"method": method, "status": f"{hundreds}xx"}, float(count))
            for (method, hundreds), count in self._requests.items()
        ]
        yield Family(f"{front}_requests", "Requests answered, by method and class of status.", "counter", requests)
        yield Family(
            f"{front}_request_duration_seconds",
            "From the end of the head to the last byte of the reply.",
            "histogram",
            [sample for method, each in self._latencies.items() for sample in self._samples(method, each)],
        )
        for what, text, count in (
            ("received", "Bytes of request bodies.", self._bytes_in),
            ("sent", "Bytes of replies, heads included.", self._bytes_out),
        ):
            samples = [(f"{front}_{what}_bytes_total", dict[str, str](), float(count))]
            yield Family(f"{front}_{what}_bytes", text, "counter", samples)

    def _samples(self, method: str, latencies: _Latencies) -> Iterator[tuple[str, dict[str, str], float]]:
        name, total = f"{self._front}_request_duration_seconds", 0
        for bound, total in zip(_BOUND_LABELS, accumulate(latencies.counts), strict=True):
            yield f"{name}_bucket", {"method": method, "le": bound}, float(total)
        yield f"{name}_count", {"method": method}, float(total)
        yield f"{name}_sum", {"method": method}, latencies.seconds
