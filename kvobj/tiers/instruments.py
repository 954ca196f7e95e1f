"""The instruments that the wrappers of all tiers share, made once a store: a name can be registered once only."""

from __future__ import annotations

from threading import Lock

from kvobj.metrics import Metrics


class HotHits:
    """Hits of the dram tier and their bytes, in plain numbers that only grow: the event loop adds to them, who looks may be any
    thread."""

    __slots__ = ("_bytes", "_hits", "_lock", "_told", "reads", "size_bytes")

    def __init__(self, instruments: TierInstruments) -> None:
        """Tell `instruments` from now on."""
        self.reads = 0
        self.size_bytes = 0
        self._told = (0, 0)
        self._lock = Lock()
        self._hits = instruments.gets.labels("dram", "hit")
        self._bytes = instruments.bytes.labels("dram", "out")
        instruments.gets.tell = instruments.bytes.tell = self._tell

    def _tell(self) -> None:
        with self._lock:
            before, self._told = self._told, (self.reads, self.size_bytes)
            self._hits.inc(self._told[0] - before[0])
            self._bytes.inc(self._told[1] - before[1])


class TierInstruments:
    """Counters and histograms labelled by tier. Made once in the composition root and handed to every wrapper."""

    def __init__(self, metrics: Metrics) -> None:
        self.gets = metrics.told_counter(
            "kvobj_tier_gets", "Gets by tier and outcome (hit, miss, error).", ["tier", "outcome"]
        )
        self.puts = metrics.counter("kvobj_tier_puts", "Puts by tier and outcome (done, error).", ["tier", "outcome"])
        self.bytes = metrics.told_counter(
            "kvobj_tier_bytes", "Encoded bytes handed out and taken in, by tier.", ["tier", "direction"]
        )
        self.deleted_blobs = metrics.counter(
            "kvobj_tier_deleted_blobs", "Blobs asked to be deleted, by tier.", ["tier"]
        )
        self.get_latency_seconds = metrics.histogram(
            "kvobj_tier_get_latency_seconds", "Time until a get's frame is handed out (it may still fill).", ["tier"]
        )
        self.put_latency_seconds = metrics.histogram("kvobj_tier_put_latency_seconds", "Time a put takes.", ["tier"])
        self.corrupt_frames = metrics.counter(
            "kvobj_tier_corrupt_frames", "Frames that did not check out and were not served, by tier.", ["tier"]
        )
        self.verified_frames = metrics.counter(
            "kvobj_tier_verified_frames", "Whole frames whose digest was checked and right, by tier.", ["tier"]
        )
        self.shared_gets = metrics.counter(
            "kvobj_tier_shared_gets", "Gets that were served by another's read of the same blob, by tier.", ["tier"]
        )
        self.passed_over = metrics.counter(
            "kvobj_tier_passed_over", "Calls that went on without a tier because it failed, by tier.", ["tier"]
        )
        self.promotions = metrics.counter(
            "kvobj_tier_promotions",
            "Frames copied up after a slow hit, by outcome (done, refused, skipped, failed).",
            ["outcome"],
        )
        self.promoted_blobs = metrics.counter(
            "kvobj_tier_promoted_blobs", "Blobs copied up after a slow hit, by the tier that holds them now.", ["tier"]
        )
