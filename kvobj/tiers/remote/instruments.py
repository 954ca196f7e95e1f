"""What the remote costs and how it answers, as metrics: requests, bytes, repeats, hedges and times. Made once a store."""

from __future__ import annotations

from kvobj.metrics import Metrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class RemoteInstruments:
    """Labelled by operation, in S3's names: what a provider bills can be read off."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "kvobj_remote_requests",
            "Requests to the remote by operation and outcome (ok, missing, refused, busy, error, timeout, cancelled).",
            ["operation", "outcome"],
        )
        self._bytes = metrics.counter("kvobj_remote_bytes", "Bytes of bodies by direction (up, down).", ["direction"])
        self._repeats = metrics.counter("kvobj_remote_repeats", "Requests that were made again.", ["operation"])
        self._hedges = metrics.counter(
            "kvobj_remote_hedges",
            "Reads asked a second time because the answer was late, by whose answer came first (won: the second).",
            ["outcome"],
        )
        self._first_byte = metrics.histogram(
            "kvobj_remote_first_byte_seconds", "Time to the head of an answer.", ["operation"], _SECONDS
        )
        self._whole = metrics.histogram(
            "kvobj_remote_request_seconds", "Time of a request with its bodies.", ["operation"], _SECONDS
        )

    def count(self, operation: str, outcome: str) -> None:
        """A request came to its end."""
        self._requests.labels(operation, outcome).inc()

    def head(self, operation: str, seconds: float) -> None:
        """The head of an answer came."""
        self._first_byte.labels(operation).observe(seconds)

    def whole(self, operation: str, seconds: float, *, sent: int) -> None:
        """An exchange is over, with a body of so many bytes sent."""
        self._whole.labels(operation).observe(seconds)
        if sent:
            self._bytes.labels("up").inc(sent)

    def received(self, size_bytes: int) -> None:
        """So many bytes of objects came, also of a body that broke off."""
        self._bytes.labels("down").inc(size_bytes)

    def repeat(self, operation: str) -> None:
        """A request is made again."""
        self._repeats.labels(operation).inc()

    def hedge(self, *, is_won: bool) -> None:
        """A second request was made, and one of the two answered."""
        self._hedges.labels("won" if is_won else "lost").inc()
