"""What gc tells Prometheus, and the same figures for `status`: read from the parts when asked, kept nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvobj.catalog.protocol import Catalog
from kvobj.gc.collector import Collector
from kvobj.gc.expiry import Expiry
from kvobj.gc.holds import Holds
from kvobj.gc.lifecycle import Lifecycle
from kvobj.gc.lost import LostObjects
from kvobj.gc.reaper import Reaper
from kvobj.gc.reconcile import Reconcile
from kvobj.gc.scrub import Scrub
from kvobj.metrics import Metrics


@dataclass(frozen=True, slots=True)
class GcParts:
    """The parts whose figures are shown."""

    catalog: Catalog
    collector: Collector
    reaper: Reaper
    holds: Holds
    expiry: Expiry
    scrub: Scrub
    reconcile: Reconcile
    lost: LostObjects
    lifecycle: Lifecycle

    def readers(self) -> Mapping[str, Callable[[], float]]:
        """What reads each figure of gc, by name with its unit; those that only grow are since the start of the process."""
        collector, reaper, holds, lifecycle = self.collector, self.reaper, self.holds, self.lifecycle
        counts, scrub = collector.counts, self.scrub.counts
        condemned = self.catalog.condemned
        return {
            "marked_chunks": lambda: condemned()[0],
            "waiting_for_pins_chunks": lambda: condemned()[1],
            "held_chunks": lambda: len(holds),
            "held_bytes": lambda: holds.size_bytes,
            "reclaim_lag_seconds": lambda: max(collector.lag_seconds, reaper.lag_seconds),
            "condemned_chunks": lambda: counts.condemned,
            "rescued_chunks": lambda: counts.rescued,
            "spared_chunks": lambda: counts.spared,
            "claimed_chunks": lambda: counts.claimed,
            "claimed_bytes": lambda: counts.claimed_bytes,
            "removed_for_writers_bytes": lambda: counts.pressed_bytes,
            "admitted_chunks": lambda: counts.admitted,
            "refused_chunks": lambda: counts.refused,
            "evicted_to_remote_objects": lambda: collector.evictions.objects,
            "evicted_to_remote_bytes": lambda: collector.evictions.size_bytes,
            "uploaded_for_room_objects": lambda: collector.evictions.uploaded,
            "reaped_blobs": lambda: reaper.reaped_blobs,
            "remote_reap_lag_seconds": lambda: reaper.remote_lag_seconds,
            "remote_reap_failures": lambda: reaper.remote_failures,
            "scrubbed_objects": lambda: scrub.objects,
            "scrubbed_bytes": lambda: scrub.hashed_bytes,
            "scrub_mismatches": lambda: scrub.mismatches,
            "scrub_repaired": lambda: scrub.repaired,
            "scrub_replaced_on_remote": lambda: scrub.replaced,
            "scrub_passes": lambda: scrub.passes,
            "reconciled_rows": lambda: self.reconcile.checked_rows,
            "dropped_lost_chunks": lambda: self.lost.dropped_chunks,
            "lost_objects": lambda: len(self.lost),
            "lifecycle_objects": lambda: lifecycle.counts.objects,
            "lifecycle_bytes": lambda: lifecycle.counts.size_bytes,
            "lifecycle_uploads": lambda: lifecycle.counts.uploads,
            "lifecycle_passes": lambda: lifecycle.counts.passes,
        }

    def lease_readers(self) -> Mapping[str, Callable[[], float]]:
        """The same of sessions and pins, now; `quiet` is 1 in quiet time."""
        usage, expiry = self.catalog.leases.usage, self.expiry
        return {
            "sessions": lambda: usage().sessions,
            "pins": lambda: usage().pins,
            "quiet": lambda: int(usage().quiet),
            "expired_sessions": lambda: expiry.expired_sessions,
        }

    def figures(self) -> Mapping[str, float]:
        """All figures of gc, as they are now."""
        return _read(self.readers())

    def leases(self) -> Mapping[str, float]:
        """All figures of sessions and pins, as they are now."""
        return _read(self.lease_readers())


_HELP: Mapping[str, str] = {
    "marked_chunks": "chunks that policy has condemned and nobody has claimed yet",
    "waiting_for_pins_chunks": "deleted chunks whose bytes wait for pins to end",
    "held_chunks": "chunks held against policy because a client asked for them a moment ago",
    "held_bytes": "bytes of chunks held against policy",
    "reclaim_lag_seconds": "how long the oldest garbage that could be reclaimed has been waiting",
    "evicted_to_remote_objects": "objects whose copies left nvme, since the remote has them, since the start",
    "evicted_to_remote_bytes": "bytes of such copies since the start",
    "uploaded_for_room_objects": "objects that were uploaded to the remote for the room that they took, since the start",
    "remote_reap_lag_seconds": "how long the oldest blob that the remote has failed to delete has been waiting",
    "lost_objects": "objects of ordinary buckets whose bytes no tier has",
    "lifecycle_objects": "objects removed because their time by a bucket's rules was over, since the start",
    "lifecycle_bytes": "bytes of such objects since the start",
    "lifecycle_uploads": "multipart uploads ended by a bucket's rules since the start",
    "lifecycle_passes": "passes over all buckets' rules since the start",
    "sessions": "sessions of holders that are open",
    "pins": "pins held",
    "quiet": "1 while policy removes nothing, because lease state was lost a moment ago",
}


def register(metrics: Metrics, parts: GcParts) -> None:
    """Make a gauge of every figure: `kvobj_gc_…` and `kvobj_lease_…`. Once a store."""
    _gauges(metrics, "kvobj_gc_", parts.readers())
    _gauges(metrics, "kvobj_lease_", parts.lease_readers())


def _gauges(metrics: Metrics, start: str, readers: Mapping[str, Callable[[], float]]) -> None:
    for name, read in readers.items():
        text = _HELP.get(name, f"{name.replace('_', ' ')} since the start")
        metrics.gauge_of(start + name, text, read)


def _read(readers: Mapping[str, Callable[[], float]]) -> Mapping[str, float]:
    return {name: read() for name, read in readers.items()}
