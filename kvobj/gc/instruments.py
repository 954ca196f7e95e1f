"""What gc tells Prometheus, and the same figures for `status`: read from the parts when asked, kept nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

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

    def figures(self) -> Mapping[str, float]:
        """Of gc, by name with its unit; those that only grow are since the start of the process."""
        counts, scrub = self.collector.counts, self.scrub.counts
        marked, waiting = self.catalog.condemned()
        return {
            "marked_chunks": marked,
            "waiting_for_pins_chunks": waiting,
            "held_chunks": len(self.holds),
            "held_bytes": self.holds.size_bytes,
            "reclaim_lag_seconds": max(self.collector.lag_seconds, self.reaper.lag_seconds),
            "condemned_chunks": counts.condemned,
            "rescued_chunks": counts.rescued,
            "spared_chunks": counts.spared,
            "claimed_chunks": counts.claimed,
            "claimed_bytes": counts.claimed_bytes,
            "removed_for_writers_bytes": counts.pressed_bytes,
            "admitted_chunks": counts.admitted,
            "refused_chunks": counts.refused,
            "evicted_to_remote_objects": self.collector.evictions.objects,
            "evicted_to_remote_bytes": self.collector.evictions.size_bytes,
            "uploaded_for_room_objects": self.collector.evictions.uploaded,
            "reaped_blobs": self.reaper.reaped_blobs,
            "remote_reap_lag_seconds": self.reaper.remote_lag_seconds,
            "remote_reap_failures": self.reaper.remote_failures,
            "scrubbed_objects": scrub.objects,
            "scrubbed_bytes": scrub.hashed_bytes,
            "scrub_mismatches": scrub.mismatches,
            "scrub_repaired": scrub.repaired,
            "scrub_replaced_on_remote": scrub.replaced,
            "scrub_passes": scrub.passes,
            "reconciled_rows": self.reconcile.checked_rows,
            "dropped_lost_chunks": self.lost.dropped_chunks,
            "lost_objects": len(self.lost),
            "lifecycle_objects": self.lifecycle.counts.objects,
            "lifecycle_bytes": self.lifecycle.counts.size_bytes,
            "lifecycle_uploads": self.lifecycle.counts.uploads,
            "lifecycle_passes": self.lifecycle.counts.passes,
        }

    def leases(self) -> Mapping[str, float]:
        """Of sessions and pins, now; `quiet` is 1 in quiet time."""
        usage = self.catalog.leases.usage()
        return {
            "sessions": usage.sessions,
            "pins": usage.pins,
            "quiet": int(usage.quiet),
            "expired_sessions": self.expiry.expired_sessions,
        }


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
    _gauges(metrics, "kvobj_gc_", parts.figures)
    _gauges(metrics, "kvobj_lease_", parts.leases)


def _gauges(metrics: Metrics, start: str, read: Callable[[], Mapping[str, float]]) -> None:
    for name in read():
        text = _HELP.get(name, f"{name.replace('_', ' ')} since the start")
        metrics.gauge_of(start + name, text, partial(_figure, read, name))


def _figure(read: Callable[[], Mapping[str, float]], name: str) -> float:
    return read()[name]
