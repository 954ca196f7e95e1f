"""The parts behind the KV API, put together over a node's: namespaces, chunks, what the policy is told, the stream of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from kvobj.api.kv.events import Events
from kvobj.catalog.history_protocol import History
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import Settings
from kvobj.errors import ConfigurationError, CorruptionError
from kvobj.gc.pacing import Pace
from kvobj.metrics import Metrics
from kvobj.policy.chunk_policy import chunk_names
from kvobj.store.byte_gate import ByteGate
from kvobj.store.chunks import ChunkStore
from kvobj.store.given_chunks import GivenChunks
from kvobj.store.key_wrapping import KeyWrapper, derived_wrapping_key
from kvobj.store.lossy_namespaces import LossyNamespaces
from kvobj.store.namespaces import NamespaceBook, no_profiles
from kvobj.store.request_feed import LearnsOfRequests, RequestFeed
from kvobj.store.store import Store
from kvobj.tiers.coded_blobs import CodedBlobs
from kvobj.tiers.coded_frames import spoken_name
from kvobj.tiers.dram import DramTier
from kvobj.tiers.in_use import BlobsInUse

BATCH_SHARE: Final = 4
"""Batches on their way in may have this share of the arena, one in so many: their bytes stay there until they are committed."""


@dataclass(frozen=True, slots=True)
class KvApi:
    """`events.aclose` comes before a server drains, `feed.aclose` after it. `gate` and `wrapping_key` are those of `chunks` and
    `book`, for worker processes."""

    book: NamespaceBook
    chunks: ChunkStore
    feed: RequestFeed
    events: Events
    gate: ByteGate
    wrapping_key: bytes = field(repr=False)


def wrapping_key_of(settings: Settings, store_key: bytes) -> bytes:
    """What wraps namespaces' keys and seals users' secrets: the configuration's, or one that follows from the data directory's."""
    return settings.security.wrapping_key or derived_wrapping_key(store_key)


def make_kv_api(
    settings: Settings,
    *,
    catalog: Catalog,
    store: Store,
    store_key: bytes,
    policy: LearnsOfRequests,
    dram: DramTier,
    coded_blobs: CodedBlobs,
    lossy: LossyNamespaces,
    in_use: BlobsInUse,
    arena_bytes: int,
    executor: Executor,
    hold: Callable[[ObjectRow], None],
    on_removed: Callable[[Sequence[ObjectRow]], None],
    clock: Clock,
    pace: Pace,
    on_namespace_changed: Callable[[NamespaceRow], None] = lambda _: None,
    check_profile: Callable[[NamespaceRow], Awaitable[None]] = no_profiles,
) -> KvApi:
    """`hold` and `pace` are the collector's, `store_key` the data directory's; `on_removed` is what the store tells of hidden
    rows."""
    wrapping_key = wrapping_key_of(settings, store_key)
    book = NamespaceBook(
        catalog.namespaces,
        wrapper=KeyWrapper(wrapping_key),
        clock=clock,
        on_changed=on_namespace_changed,
        check_profile=check_profile,
    )
    feed = RequestFeed(policy, names_of=chunk_names, clock=clock)
    gate = ByteGate(limit_bytes=arena_bytes // BATCH_SHARE, wait_seconds=settings.limits.reserve_timeout_seconds)

    def tiers_of(blob_ids: Sequence[bytes]) -> list[str]:
        return ["dram" if held else "nvme" for held in dram.held(blob_ids)]

    def codecs_of(blob_ids: Sequence[bytes]) -> dict[bytes, str]:
        if not (dram.coded_totals.blobs or coded_blobs.totals.blobs):
            return {}
        found: dict[bytes, str] = {}
        for blob_id, held in zip(blob_ids, dram.held(blob_ids), strict=True):
            coded = dram.find(blob_id) if held else coded_blobs.find(blob_id)
            if coded is not None:
                found[blob_id] = spoken_name(coded.codec)
        return found

    chunks = ChunkStore(
        catalog=catalog,
        book=book,
        clock=clock,
        in_use=in_use,
        executor=executor,
        gate=gate,
        start=store.start_in_batch,
        together=store,
        reached=store.reached,
        settle=store.settled,
        hold=hold,
        tiers_of=tiers_of,
        codecs_of=codecs_of,
        on_request=feed.tell,
        on_removed=on_removed,
        removed=store.removed,
        is_arriving=store.arriving.is_arriving,
        lease_ttl_ms=int(settings.gc.lease_ttl_seconds * 1000),
        pace=pace,
        given=GivenChunks(catalog, lossy=lossy, in_memory=dram.held, would_give=store.would_give),
        lossy=lossy,
    )
    return KvApi(book, chunks, feed, Events(catalog), gate, wrapping_key)


def register_events(metrics: Metrics, history: History) -> None:
    """Figures of the event log, read when they are asked for."""
    metrics.gauge_of("kvobj_events_kept", "events that readers can still go back to", history.kept)
    metrics.gauge_of("kvobj_events_last_sequence", "number up to which events are told", history.last_sequence)


async def check_wrapping_key(book: NamespaceBook, catalog: Catalog) -> None:
    """Open one declared namespace, so that a wrong wrapping key shows at the start and not at the first match.

    Raises `ConfigurationError`.
    """
    try:
        await book.check_key(await catalog.buckets())
    except CorruptionError as error:
        raise ConfigurationError([f"security.wrapping_key_env: {error}"]) from error
