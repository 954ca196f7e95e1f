"""What the admin API shows of a store: values, and the protocol that `app.py` implements over store and tiers.

The catalog's own verbs (users, buckets, listings) are not repeated here: `AdminService` is given the catalog as well.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvobj.arena import ArenaUsage
from kvobj.catalog.rows import ObjectRow
from kvobj.gc.plan import GcPlan, GcReport
from kvobj.gc.recall import RecallQuery, RecallReport


@dataclass(frozen=True, slots=True)
class CodecStatus:
    """What a tier holds in one codec: so many blobs of so many plain bytes, the bytes that they take, and plain over stored."""

    codec: str
    blobs: int
    plain_bytes: int
    stored_bytes: int
    ratio: float


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier. `hit_ratio` is hits per lookup since the start, None before the first; `mode` is how it does its I/O. `codecs` says
    how its blobs lie, `raw` standing for those that lie as they were put; `plain_bytes` is what all of them hold. `transfers` says
    what moves nvme's short frames: `kernel`, or `threads` and why."""

    name: str
    capacity_bytes: int
    used_bytes: int
    blobs: int
    mode: str = ""
    location: str = ""
    is_home: bool = False
    hit_ratio: float | None = None
    dirty_bytes: int = 0
    plain_bytes: int = 0
    codecs: tuple[CodecStatus, ...] = ()
    transfers: str = ""


@dataclass(frozen=True, slots=True)
class CatalogStatus:
    """The catalog: its driver, its live rows, and how much of each map is used."""

    kind: str
    buckets: int
    objects: int
    size_bytes: int
    map_bytes: int = 0
    map_used_bytes: int = 0
    volatile_map_bytes: int = 0
    volatile_map_used_bytes: int = 0
    record_log_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process. `pid` 0: the next is about to start. Requests and CPU seconds are those of its predecessors too;
    `restarts` counts them, `last_end` says what the last of them died of."""

    pid: int
    is_ready: bool
    requests: int
    connections: int
    cpu_seconds: float
    restarts: int = 0
    last_end: str = ""


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """The remote tier. `state` is ok, probing (not asked yet), degraded, down or refused, `reason` says why, `since_ms` since when
    (wall time); `breaker` is closed, open or half-open; `capabilities` are what the server was found to do, empty before it
    answered. `claim` is unclaimed, claimed, fenced or refused: whether the prefix is this store's to write to, in its `lineage`.

    `queue` is what waits to be uploaded, and what was since the start, `uploads_held_by` why nothing goes up now; `manifests` is
    what the remote is not told yet, and `manifests_problem` why; `requests` are counts since the start by operation, beside bytes.
    """

    endpoint: str
    bucket: str
    prefix: str
    state: str
    reason: str
    since_ms: int
    breaker: str
    clock_skew_seconds: float | None
    capabilities: Mapping[str, str | bool | int]
    lineage: int
    claim: str
    claim_reason: str
    queue: Mapping[str, float]
    uploads_held_by: str
    manifests: Mapping[str, float]
    manifests_problem: str
    requests: Mapping[str, float]
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """The upstream of one bucket. `state` is unasked, ok, down or refused, `reason` says why, `since_ms` since when (wall time);
    of several processes it is what the one found that was answered last, or was not. `is_held_back`: it is asked now and then
    only. `last_error` is kept when all is well again, `last_error_ms` 0: there was none. `namespaces` that are not used there,
    with why. `requests` are counts since the start by operation, `chunks` by what came of them, both of all processes."""

    bucket: str
    endpoint: str
    remote_bucket: str
    state: str
    reason: str
    since_ms: int
    is_held_back: bool
    last_error: str
    last_error_ms: int
    namespaces: Mapping[str, str]
    requests: Mapping[str, float]
    chunks: Mapping[str, float]
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """A store at one moment. `queues` are lengths by name (`delete`, `write_behind`, `reserve` …); `gc` and
    `leases` are counts, bytes and seconds with their unit in their name; `rates` are figures over
    the last minute with their unit in their name (`get_per_second`, `sent_bytes_per_second` …); `notes` are what an
    operator should know: buffered I/O, an arena outside shared memory, orphaned arenas; `workers` are there where there are more
    processes than this one, and `cpu_seconds` are this one's; `gpu` says what of a GPU is here, or is missing; `unfinished`
    are the bytes of parts of unfinished uploads by user, `unfinished_limit_bytes` is what one user but root may have of them;
    `remote` is there where a remote tier is configured, `upstreams` where there are any."""

    version: str
    store_id: str
    uptime_seconds: float
    is_ready: bool
    receive_mode: str
    tiers: tuple[TierStatus, ...]
    arena: ArenaUsage
    catalog: CatalogStatus
    queues: Mapping[str, int] = field(default_factory=dict)
    gc: Mapping[str, float] = field(default_factory=dict)
    leases: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    workers: tuple[WorkerStatus, ...] = ()
    gpu: Mapping[str, str] = field(default_factory=dict)
    unfinished_limit_bytes: int = 0
    unfinished: Mapping[str, int] = field(default_factory=dict)
    remote: RemoteStatus | None = None
    upstreams: tuple[UpstreamStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameStatus:
    """A frame's header as it was read from the first tier that holds it; `digest` in hex."""

    codec: str
    plain_bytes: int
    frame_bytes: int
    blocks: int
    digest: str


@dataclass(frozen=True, slots=True)
class BlobStatus:
    """Where one blob is: names of the tiers that hold it, fast to slow, and its frame if any could be read."""

    tiers: tuple[str, ...]
    frame: FrameStatus | None


@dataclass(frozen=True, slots=True)
class VerifiedObject:
    """One object that was read back from every tier that holds it and hashed again. `problem` is None where all is right."""

    bucket: str
    key: str
    size_bytes: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class FlushOutcome:
    """What a flush wrote down of what was only in memory, and what was uploaded meanwhile; whether all of it is done, and what is
    left otherwise: objects in memory, objects to upload and their bytes, and records that the remote is to be told."""

    blobs: int
    size_bytes: int
    uploaded_objects: int = 0
    uploaded_bytes: int = 0
    is_done: bool = True
    left_in_memory: int = 0
    left_in_memory_bytes: int = 0
    left_to_upload: int = 0
    left_to_upload_bytes: int = 0
    left_to_tell: int = 0
    held_by: str = ""
    """Why nothing goes to the remote now, if nothing does."""


class AdminView(Protocol):
    """What the admin API asks of the running store. Calls come from the event loop."""

    def is_ready(self) -> bool:
        """Whether S3 requests are being accepted: false while starting and while draining."""
        ...

    async def status(self) -> StoreStatus:
        """The present state. Cheap enough to be asked every second."""
        ...

    async def inspect(self, row: ObjectRow) -> tuple[BlobStatus, ...]:
        """Where each blob of the row is, in the row's order. A medium that fails counts as not holding it."""
        ...

    def verify(self, bucket: str | None) -> AsyncGenerator[VerifiedObject, None]:
        """Re-hash the objects of a bucket, or of all, one after another in key order. A failure of one object is its `problem`,
        never an exception. Closing the iterator stops the work."""
        ...

    async def gc_plan(self, limit: int) -> GcPlan:
        """What the collector would condemn now, and why, and what lifecycle rules would expire (of that some 10,000 objects are
        counted at most); at most `limit` are listed. Changes nothing."""
        ...

    async def collect(self) -> GcReport:
        """Run one cycle of the collector now, to its end."""
        ...

    async def start_recall(self, query: RecallQuery, *, dry_run: bool) -> RecallReport:
        """Begin to remove what fits. `ConflictError` while a recall is running, `NoSuchBucketError`, `InvalidRequestError`."""
        ...

    def recall_report(self) -> RecallReport:
        """How far the last recall is."""
        ...

    async def cancel_recall(self) -> RecallReport:
        """Stop the running recall, if any; what it hid stays hidden."""
        ...

    async def user_removed(self) -> None:
        """Before it is said that a user is gone: wait a little for the remote, if there is one, to be told (`Store.removed`)."""
        ...

    async def flush(self, *, local: bool, timeout_seconds: float) -> FlushOutcome:
        """Write down everything that is only in memory and, unless `local`, upload what waits for it and tell the remote of all;
        returns once that is done, or the time is over. `StoreFullError`, `UnavailableError`."""
        ...
