"""The same-host path of a node: who may use it, by the configuration, and its socket."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from kvobj.api.kv_store import ChunkStore
from kvobj.api.same_host.connection import Parts
from kvobj.api.same_host.hot_opens import HotOpens
from kvobj.api.same_host.reads import ExtentReads
from kvobj.api.same_host.rights import Grants, Levels
from kvobj.api.same_host.server import SameHostServer
from kvobj.api.same_host.writes import StagingBudget, reserved_bytes_max
from kvobj.app.node import Node
from kvobj.arena import Pin, PinnedFrame
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.errors import UnavailableError
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.store.extents import PinnedBudget

HOLDER_SHARE = 4
"""One client may keep this share of the arena pinned, one in so many; all together twice that."""
MARGIN_SECONDS = 1.0
"""By how much a client's hold outlives its lease: what its renewal may take on the way."""


@dataclass(frozen=True, slots=True)
class SameHost:
    """`grants` and `levels` are for the HTTP service; `server` listens, and is closed before the node is."""

    grants: Grants
    levels: Levels
    server: SameHostServer


def start_same_host(
    node: Node, chunks: ChunkStore, *, clock: Clock, metrics: Metrics, log: logging.Logger
) -> SameHost | None:
    """Listen. `chunks`: the node's, with upstreams in front of them where there are any. None where the configuration says no, or
    the socket cannot be bound (logged): clients then use HTTP."""
    settings = node.settings.same_host
    if not settings.enabled:
        return None
    path = (settings.socket or node.data.path / "same-host.sock").absolute()
    lease_seconds = node.settings.gc.lease_ttl_seconds
    grants = Grants(socket=str(path), lease_ms=int(lease_seconds * 1000), margin_seconds=MARGIN_SECONDS, clock=clock)
    pinned = PinnedBudget(
        holder_bytes_max=node.arena.capacity_bytes // HOLDER_SHARE,
        total_bytes_max=2 * node.arena.capacity_bytes // HOLDER_SHARE,
    )
    staging = StagingBudget(connection_bytes_max=settings.staging_bytes, total_bytes_max=settings.staging_total_bytes)
    hits, hit_bytes = node.instruments.gets.labels("dram", "hit"), node.instruments.bytes.labels("dram", "out")

    def count_hits(reads: int, size_bytes: int) -> None:
        hits.inc(reads)
        hit_bytes.inc(size_bytes)

    def pin_hot(blob_id: bytes) -> tuple[Pin, int] | None:
        return node.dram.pin_hot(cast("BlobId", blob_id))

    def on_pinned_read(row: ObjectRow) -> None:
        node.collector.touched(row)
        node.dram_transcoding.touched(row)

    def on_read(row: ObjectRow) -> None:
        node.collector.held_and_touched(row)
        node.dram_transcoding.touched(row)

    def hot_frame(row: ObjectRow) -> PinnedFrame | None:
        frame = node.dram.get_hot(cast("BlobId", row.blobs[0].blob_id))
        if frame is not None:
            on_pinned_read(row)
        return frame

    def is_far(blob_id: bytes) -> bool:
        return node.remote is not None and node.nvme.frame_bytes(cast("BlobId", blob_id)) is None

    parts = Parts(
        store=node.store,
        hot_frame=hot_frame,
        reads=ExtentReads(node.store, chunks, node.dram.held, count_hits, node.catalog.bucket, is_far),
        hot=HotOpens(node.store, node.catalog.lookup, pin_hot, on_read, on_pinned_read, count_hits),
        chunks=chunks,
        arena=node.arena,
        grants=grants,
        pinned=pinned,
        host_reads=node.host_reads,
        staging=staging,
        prepared=node.prepared,
        reserved_bytes_max=reserved_bytes_max(node.kv.gate.limit_bytes),
        executor=node.hash_executor,
        reserve_seconds=node.settings.limits.reserve_timeout_seconds,
        log=log,
    )
    server = SameHostServer(path, parts, lease_seconds=lease_seconds, connections_max=settings.connections, log=log)
    try:
        server.listen()
    except UnavailableError as error:
        log.warning("clients on this machine use HTTP: %s", error)
        return None
    metrics.gauge_of("kvobj_same_host_connections", "same-host clients' connections", lambda: server.connections)
    metrics.gauge_of(
        "kvobj_same_host_pinned_bytes",
        "bytes of whole extents of the arena that same-host clients have pinned",
        lambda: pinned.pinned_bytes,
    )
    metrics.gauge_of(
        "kvobj_same_host_handles", "handles that same-host clients have on extents of the arena", lambda: pinned.handles
    )
    metrics.gauge_of("kvobj_same_host_staging_bytes", "staging rooms of same-host clients", lambda: staging.total_bytes)
    metrics.gauge_of(
        "kvobj_same_host_prepared_bytes",
        "room in the arena for what same-host clients and workers may store next",
        lambda: node.prepared.bytes_out,
    )
    levels = Levels(
        users={user.id: user.same_host for user in node.settings.users},
        own_buckets=frozenset(bucket.name for bucket in node.settings.buckets if bucket.regions == "own"),
    )
    return SameHost(grants, levels, server)
