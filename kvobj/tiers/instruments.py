"""The instruments that the wrappers of all tiers share, made once a store: a name can be registered once only."""

from __future__ import annotations

from kvobj.metrics import Metrics


class TierInstruments:
    """Counters and histograms labelled by tier. Made once in the composition root and handed to every wrapper."""

    def __init__(self, metrics: Metrics) -> None:
        self.gets = metrics.counter(
            "kvobj_tier_gets", "Gets by tier and outcome (hit, miss, error).", ["tier", "outcome"]
        )
        self.puts = metrics.counter("kvobj_tier_puts", "Puts by tier and outcome (done, error).", ["tier", "outcome"])
        self.bytes = metrics.counter(
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
