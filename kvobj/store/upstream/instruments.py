"""What upstreams cost and what comes of asking them, as metrics. Made once a process, for all of them together."""

from __future__ import annotations

from typing import Literal

from kvobj.metrics import Metrics
from kvobj.tiers.remote.instruments import RemoteInstruments

Outcome = Literal["hit", "miss", "passed", "failed", "disagrees"]
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class UpstreamInstruments(RemoteInstruments):
    """As `RemoteInstruments`, under names of their own, and what became of the chunks that were asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(
            "kvobj_upstream_requests", "Requests to upstreams by operation and outcome.", ["operation", "outcome"]
        )
        self._bytes = metrics.counter("kvobj_upstream_bytes", "Bytes of bodies by direction (up, down).", ["direction"])
        self._repeats = metrics.counter("kvobj_upstream_repeats", "Requests that were made again.", ["operation"])
        self._hedges = metrics.counter("kvobj_upstream_hedges", "Reads asked a second time.", ["outcome"])
        self._first_byte = metrics.histogram(
            "kvobj_upstream_first_byte_seconds", "Time to the head of an answer.", ["operation"], _SECONDS
        )
        self._whole = metrics.histogram(
            "kvobj_upstream_request_seconds", "Time of a request with its bodies.", ["operation"], _SECONDS
        )
        self._chunks = metrics.counter(
            "kvobj_upstream_chunks",
            "Chunks that upstreams were asked for, by outcome: hit (stored here), passed (handed on without being stored), miss, "
            "failed, disagrees (the namespace is another there).",
            ["outcome"],
        )

    def chunk(self, outcome: Outcome) -> None:
        """What became of one chunk that was asked for."""
        self._chunks.labels(outcome).inc()
