"""What upstreams cost and what comes of asking them, as metrics, by the bucket here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvobj.metrics import Metrics
from kvobj.tiers.remote.instruments import RemoteInstruments

Outcome = Literal["hit", "miss", "passed", "failed", "disagrees", "put", "existed", "refused", "unanswered"]
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class UpstreamMetrics:
    """The metrics of all upstreams of a process: made once for its `Metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "kvobj_upstream_requests",
            "Requests to upstreams by bucket, operation and outcome.",
            ["bucket", "operation", "outcome"],
        )
        self.bytes = metrics.counter(
            "kvobj_upstream_bytes", "Bytes of bodies by direction (up, down).", ["bucket", "direction"]
        )
        self.repeats = metrics.counter(
            "kvobj_upstream_repeats", "Requests that were made again.", ["bucket", "operation"]
        )
        self.first_byte = metrics.histogram(
            "kvobj_upstream_first_byte_seconds", "Time to the head of an answer.", ["bucket", "operation"], _SECONDS
        )
        self.whole = metrics.histogram(
            "kvobj_upstream_request_seconds", "Time of a request with its bodies.", ["bucket", "operation"], _SECONDS
        )
        self.chunks = metrics.counter(
            "kvobj_upstream_chunks",
            "Chunks that upstreams were asked for, by outcome: hit (stored here), passed (handed on without being stored), miss, "
            "failed, disagrees (the namespace is another there); and chunks of class shared that were put there: put, existed, "
            "refused, unanswered.",
            ["bucket", "outcome"],
        )
        self.failing = metrics.gauge(
            "kvobj_upstream_failing", "Processes of this store that have no answer from the upstream now.", ["bucket"]
        )


class UpstreamInstruments(RemoteInstruments):
    """As `RemoteInstruments`, of one bucket's upstream, and what became of the chunks that it was asked for."""

    def __init__(self, metrics: UpstreamMetrics, bucket: str) -> None:
        self._metrics = metrics
        self._bucket = bucket

    def count(self, operation: str, outcome: str) -> None:
        """A request came to its end."""
        self._metrics.requests.labels(self._bucket, operation, outcome).inc()

    def head(self, operation: str, seconds: float) -> None:
        """The head of an answer came."""
        self._metrics.first_byte.labels(self._bucket, operation).observe(seconds)

    def whole(self, operation: str, seconds: float, *, sent: int) -> None:
        """An exchange is over, with a body of so many bytes sent."""
        self._metrics.whole.labels(self._bucket, operation).observe(seconds)
        if sent:
            self._metrics.bytes.labels(self._bucket, "up").inc(sent)

    def received(self, size_bytes: int) -> None:
        """So many bytes of chunks came, also of a body that broke off."""
        self._metrics.bytes.labels(self._bucket, "down").inc(size_bytes)

    def repeat(self, operation: str) -> None:
        """A request is made again."""
        self._metrics.repeats.labels(self._bucket, operation).inc()

    def hedge(self, *, is_won: bool) -> None:
        """Nothing is asked of an upstream twice at a time."""

    def chunk(self, outcome: Outcome) -> None:
        """What became of one chunk that was asked for, or put."""
        self._metrics.chunks.labels(self._bucket, outcome).inc()

    def watch(self, is_failing: Callable[[], bool]) -> None:
        """Ask this, whenever figures are read, whether the upstream gives no answers now."""
        self._metrics.failing.labels(self._bucket).set_function(lambda: float(is_failing()))
