"""What one HTTP server counts.

Label children are looked up once and kept: a lookup a request would cost as much as parsing its head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvobj.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})


class HttpInstruments:
    """Counters, a latency histogram a method, and gauges of what is open, all named `kvobj_<name>_...`."""

    def __init__(
        self,
        metrics: Metrics,
        name: str,
        *,
        connections: Callable[[], float],
        in_flight: Callable[[], float],
        handshakes: Callable[[], float],
    ) -> None:
        self._requests = metrics.counter(
            f"kvobj_{name}_requests", "Requests answered, by method and class of status.", ("method", "status")
        )
        self._seconds = metrics.histogram(
            f"kvobj_{name}_request_duration_seconds",
            "From the end of the head to the last byte of the reply.",
            ("method",),
        )
        self._bytes_in = metrics.counter(f"kvobj_{name}_received_bytes", "Bytes of request bodies.")
        self._bytes_out = metrics.counter(f"kvobj_{name}_sent_bytes", "Bytes of replies, heads included.")
        self.cut_replies = metrics.counter(f"kvobj_{name}_cut_replies", "Replies that could not be sent whole.")
        self.refused_connections = metrics.counter(
            f"kvobj_{name}_refused_connections", "Connections over the limit, answered 503 or reset."
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
        self._request_children: dict[tuple[str, int], Counter] = {}
        self._seconds_children: dict[str, Histogram] = {}

    def count(self, method: str, status: int, *, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count one request that was answered."""
        method = method if method in _METHODS else "other"
        requests = self._request_children.get((method, status // 100))
        if requests is None:
            requests = self._requests.labels(method, f"{status // 100}xx")
            self._request_children[method, status // 100] = requests
        requests.inc()
        duration = self._seconds_children.get(method)
        if duration is None:
            duration = self._seconds_children[method] = self._seconds.labels(method)
        duration.observe(seconds)
        if bytes_in:
            self._bytes_in.inc(bytes_in)
        self._bytes_out.inc(bytes_out)
