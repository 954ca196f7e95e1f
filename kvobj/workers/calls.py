"""What a worker process and the store process ask of each other. Annotations are the wire format (`wire.Signature`).

Two interfaces: `StoreCalls`, which the store process serves (`desk`), and `WorkerCalls`, which a worker serves. Methods that are
not async are told and never answered; they are done in the order in which they were sent, as all messages of one end arrive.

Handles name what a worker holds in the store process: a frame that it reads (given out by `open`), a transfer that it fills (by
`start_put`), uses of blobs and room in the batch gate (both numbered by the worker). All of them end with the worker.
"""

# Bodies are documentation only, and the arguments of a call are what it needs.
# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any

import msgspec

from kvobj.api.same_host.rights import Granted, Rights
from kvobj.catalog.history_protocol import EventPage
from kvobj.catalog.lease_protocol import PinsResult, Renewal
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import (
    BucketRow,
    Checksum,
    CommitOutcome,
    DeleteOutcome,
    Durability,
    NamespaceQuota,
    ObjectRow,
    PartRow,
    UploadRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate
from kvobj.store.chunk_values import Caller, MissExplanation
from kvobj.store.groups import GroupState
from kvobj.store.multipart import CompletedPart
from kvobj.store.places import ChunkPlace
from kvobj.store.representation import Accepted
from kvobj.store.requests import PutRequest, PutResult
from kvobj.store.upstream.health import UpstreamHealth
from kvobj.workers.wire import Failure


class _Value(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array."""


class Room(_Value, frozen=True, array_like=True, gc=False):
    """An extent as both ends map it (`arena.Extent`)."""

    region: int
    offset: int
    length: int
    generation: int


class OpenFrame(_Value, frozen=True, array_like=True, gc=False):
    """A pinned frame, under a handle. Where `total` is not 0 it still fills: `filled` leading bytes of its extent are there, of
    `total`, and `WorkerCalls.filled` tells of the rest. The other fields are those of `arena.PinnedFrame`."""

    handle: int
    room: Room
    frame_bytes: int
    start: int
    size: int
    origin: int
    tier: str
    filled: int = 0
    total: int = 0


class OpenTransfer(_Value, frozen=True, array_like=True):
    """What `start_put` found: a live chunk that answers, or room under a handle. `sizes` are the plain sizes of the body's blobs,
    `room` is that of the first; `algorithms` of the digests that the commit needs; `hash_later`: after the acknowledgement;
    `is_written_down`: while it arrives, so that each step of it is to be told."""

    existing: ObjectRow | None = None
    handle: int = 0
    sizes: list[int] = []
    room: Room | None = None
    algorithms: list[str] = []
    hash_later: bool = False
    is_written_down: bool = False


class SpareRoom(_Value, frozen=True, array_like=True, gc=False):
    """Room for a chunk that the worker has not been asked to store yet, under a handle, which is less than 0."""

    handle: int
    room: Room


class WrittenRow(_Value, frozen=True, array_like=True):
    """A `PutResult`, with its row by its kind."""

    object: ObjectRow | None
    part: PartRow | None
    existed: bool
    durability: Durability

    @classmethod
    def of(cls, result: PutResult) -> WrittenRow:
        """The result as it travels."""
        row = result.row
        if isinstance(row, ObjectRow):
            return cls(row, None, result.existed, result.durability)
        return cls(None, row, result.existed, result.durability)

    def result(self) -> PutResult:
        """The reverse."""
        row = self.object if self.object is not None else self.part
        assert row is not None
        return PutResult(row, existed=self.existed, durability=self.durability)


class FilledRoom(_Value, frozen=True, array_like=True):
    """A chunk that lies in the room of a handle. `digests` of the whole body, as `start_put` would ask for; `checksums` and
    `want_digest` as of `commit`; `rooms`: how many are wanted for the next chunks like it."""

    handle: int
    request: PutRequest
    digests: dict[str, bytes] = {}
    checksums: tuple[Checksum, ...] = ()
    want_digest: bool = False
    rooms: int = 0


class Stored(_Value, frozen=True, array_like=True):
    """What `put` did, and rooms for the next chunks like it: as many as were asked for, or fewer."""

    written: WrittenRow
    rooms: list[SpareRoom] = []


class Hashed(_Value, frozen=True, array_like=True, gc=False):
    """What a worker has computed of a blob, all of whose bytes are there: of the body's blob of this number."""

    handle: int
    blob: int
    digest: bytes
    block_crcs: list[int]


class GroupProgress(_Value, frozen=True, array_like=True):
    """A `GroupState` as it travels."""

    have: int
    count: int
    result: WrittenRow | None
    existed: bool

    @classmethod
    def of(cls, state: GroupState) -> GroupProgress:
        """The state as it travels."""
        return cls(
            state.have, state.count, None if state.result is None else WrittenRow.of(state.result), state.existed
        )

    def state(self) -> GroupState:
        """The reverse."""
        result = None if self.result is None else self.result.result()
        return GroupState(self.have, self.count, result, existed=self.existed)


class GroupBegin(_Value, frozen=True, array_like=True):
    """A `GroupStart` as it travels."""

    existing: ObjectRow | None
    part: PartRow | None
    request: PutRequest | None


class ChainOutcome(_Value, frozen=True, array_like=True):
    """One chunk of a batch after its commit: the outcome, or why there is none."""

    outcome: CommitOutcome | None
    failure: Failure | None


class Chunks(_Value, frozen=True, array_like=True):
    """A `ChunkList`: raw ids, or keys."""

    ids: bytes | None
    keys: list[str] | None


class Detail(_Value, frozen=True, array_like=True, gc=False):
    """One chunk of a detailed match, named by its key."""

    key: str
    size_bytes: int
    digest: bytes | None
    tier: str
    codec: str


class Matched(_Value, frozen=True, array_like=True):
    """A `MatchReply`. `encoded`: the details as the reply's own msgpack list, else `details`; neither where none were asked for."""

    matched: int
    tokens: int
    size_bytes: int
    expected_load_ms: int
    pin: bytes | None
    grant: int
    deadline_ms: int
    details: list[Detail] | None
    encoded: bytes | None
    explain: MissExplanation | None


class FollowedUpload(_Value, frozen=True, array_like=True):
    """An upload that is followed, under a handle; the other fields are those of `store.following.Followed`."""

    handle: int
    namespace: str
    tokens: int
    parent: str | None
    size_bytes: int | None
    group_parts: int
    in_parts: bool


class Figure(_Value, frozen=True, array_like=True, gc=False):
    """One sample of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(_Value, frozen=True, array_like=True):
    """One metric with all its samples, as Prometheus has them."""

    name: str
    documentation: str
    kind: str
    figures: list[Figure]


class WorkerFigures(_Value, frozen=True, array_like=True):
    """How a worker is doing: CPU seconds of its process, requests answered, open connections, its metrics, and how upstreams have
    been answering it."""

    cpu_seconds: float
    requests: int
    connections: int
    metrics: list[MetricFamily]
    upstreams: list[UpstreamHealth] = []


class StoreCalls:
    """What a worker asks of the store process."""

    # -- reading -------------------------------------------------------------------------------------------------
    async def open(self, row: ObjectRow, start: int, stop: int) -> OpenFrame | None:
        """The frame with the object's first bytes of `[start, stop)`, as `Store.look_up` and `Store.open` find it; None where it
        is lost. The row is what the worker found itself: that it was asked for is told by this."""
        raise NotImplementedError

    async def represent(self, row: ObjectRow, accepts: list[Accepted]) -> ObjectRow | None:
        """See `api.object_store.ObjectStore.represent`."""
        raise NotImplementedError

    async def open_blob(self, blob_id: bytes, start: int | None, stop: int | None) -> OpenFrame | None:
        """A later frame of an object, or the given encoded bytes of it (`Tier.get`)."""
        raise NotImplementedError

    def release(self, handles: list[int]) -> None:
        """Let go of frames."""
        raise NotImplementedError

    def kept_hits(self, reads: int, size_bytes: int) -> None:
        """So many reads, of so many bytes, were of frames that the worker had kept."""
        raise NotImplementedError

    def use(self, use: int, blob_ids: list[bytes]) -> None:
        """Keep blobs from being reaped until `unuse`."""
        raise NotImplementedError

    def unuse(self, use: int) -> None:
        """Let go of them."""
        raise NotImplementedError

    async def look_up(self, bucket: str, key: str) -> ObjectRow | None:
        """`Store.look_up`."""
        raise NotImplementedError

    async def lookup(self, bucket: str, keys: list[str], rescue: bool) -> list[ObjectRow | None]:  # noqa: FBT001
        """`Catalog.lookup`."""
        raise NotImplementedError

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """`Store.live_chunk`."""
        raise NotImplementedError

    async def pinned(self, bucket: str, key: str, pin: bytes, user_id: str) -> ObjectRow | None:
        """`Store.pinned`."""
        raise NotImplementedError

    async def settled(self, row: ObjectRow, wait: bool) -> ObjectRow:  # noqa: FBT001
        """`Store.settled`."""
        raise NotImplementedError

    async def follow(self, bucket: BucketRow, key: str) -> FollowedUpload | None:
        """`Following.find`."""
        raise NotImplementedError

    async def begin_follow(self, handle: int, span: tuple[int, int] | None, part_sizes: list[int] | None) -> None:
        """Begin to read what is followed (`Followed.views`)."""
        raise NotImplementedError

    async def next_followed(self, handle: int) -> bytes | None:
        """The next of its bytes, once they are there; None at its end."""
        raise NotImplementedError

    async def unfollow(self, handle: int) -> None:
        """Follow it no longer."""
        raise NotImplementedError

    # -- writing -------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest, in_batch: bool) -> OpenTransfer:  # noqa: FBT001
        """`Store.start_put`, or `start_in_batch`."""
        raise NotImplementedError

    def filled(self, handle: int, blob: int, filled: int) -> None:
        """So many leading bytes of the body's blob of this number are in its room."""
        raise NotImplementedError

    def hashed(self, hashes: list[Hashed]) -> None:
        """What the worker has computed; also after the commit."""
        raise NotImplementedError

    async def spare_rooms(self, request: PutRequest, count: int) -> list[SpareRoom]:
        """Room for so many chunks like this one that are still to come, or for fewer."""
        raise NotImplementedError

    def give_back(self, rooms: list[int]) -> None:
        """No chunk will come into these rooms, or it will not be whole: what was begun of it is undone."""
        raise NotImplementedError

    def begin(self, room: int, request: PutRequest) -> None:
        """A chunk is on its way into the room, and takes its time: that it arrives, and how far it has come (`filled`), is for
        others to know."""
        raise NotImplementedError

    async def put(self, filled: FilledRoom) -> Stored:
        """`start_put` and `commit` of a chunk whose bytes are there. Its room is the store's from here on, whatever comes of it."""
        raise NotImplementedError

    async def commit(
        self,
        handle: int,
        digests: dict[str, bytes],
        checksums: tuple[Checksum, ...],
        want_digest: bool,  # noqa: FBT001
    ) -> WrittenRow:
        """`PutTransfer.commit`. `digests`: those of the whole body that `start_put` asked for."""
        raise NotImplementedError

    async def place(self, handle: int, digests: dict[str, bytes], want_digest: bool) -> ObjectRow:  # noqa: FBT001
        """`PutTransfer.place`, of a chunk in a batch."""
        raise NotImplementedError

    async def commit_chain(
        self,
        handles: list[int],
        quota: NamespaceQuota | None,
        parent_tokens: int,
        to_remote: bool,  # noqa: FBT001
    ) -> list[ChainOutcome]:
        """Make placed chunks visible in one step, as `ChunkBatch.commit` does."""
        raise NotImplementedError

    async def reached(self, rows: list[ObjectRow], bucket: BucketRow, asked: Durability | None) -> list[ObjectRow]:
        """`Store.reached`."""
        raise NotImplementedError

    def leave(self, handle: int) -> None:
        """The transfer's context is left: what was not committed is undone."""
        raise NotImplementedError

    async def start_group_part(self, request: PutRequest) -> GroupBegin:
        """`Store.start_group_part`."""
        raise NotImplementedError

    async def end_group(
        self, request: PutRequest, handle: int, digests: dict[str, bytes], checksums: tuple[Checksum, ...]
    ) -> GroupProgress:
        """`Store.end_group`; `handle` 0: no part was received."""
        raise NotImplementedError

    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        checksums: tuple[Checksum, ...],
        checksum_algorithm: str | None,
    ) -> WrittenRow | None:
        """`Store.copy`."""
        raise NotImplementedError

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: list[CompletedPart],
        condition: WriteCondition | None,
        checksums: tuple[Checksum, ...],
        size_bytes: int | None,
    ) -> WrittenRow:
        """`Store.complete_upload`."""
        raise NotImplementedError

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """`Store.abort_upload`."""
        raise NotImplementedError

    async def delete(
        self, bucket: str, keys: list[str], conditions: list[WriteCondition | None], made_ms: int | None
    ) -> list[DeleteOutcome]:
        """`Store.delete`."""
        raise NotImplementedError

    # -- the catalog ---------------------------------------------------------------------------------------------
    async def create_bucket(self, bucket: BucketRow) -> None:
        """`Catalog.create_bucket`."""
        raise NotImplementedError

    async def update_bucket(self, name: str, update: BucketUpdate, made_ms: int | None) -> BucketRow:
        """`Catalog.update_bucket`."""
        raise NotImplementedError

    async def delete_bucket(self, name: str, made_ms: int | None) -> None:
        """`Store.delete_bucket`."""
        raise NotImplementedError

    async def create_upload(self, upload: UploadRow, made_ms: int | None, limit: int | None) -> None:
        """`Catalog.create_upload`."""
        raise NotImplementedError

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, sequence: int | None
    ) -> ObjectRow | None:
        """`Catalog.update_object`."""
        raise NotImplementedError

    async def last_event(self) -> int:
        """`History.last_sequence`."""
        raise NotImplementedError

    async def read_events(self, bucket: str | None, after: int, limit: int) -> EventPage:
        """`History.read`."""
        raise NotImplementedError

    async def wait_for_events(self, after: int, timeout_seconds: float) -> bool:
        """`History.wait`."""
        raise NotImplementedError

    # -- the KV API ----------------------------------------------------------------------------------------------
    async def declare_namespace(
        self,
        bucket: BucketRow,
        name: str,
        declaration: dict[str, Any],
        caller: Caller,
        key: bytes | None,
    ) -> tuple[NamespaceRow, bool, bool]:
        """`ChunkStore.declare_namespace`: the row, whether the caller may write, whether it is new."""
        raise NotImplementedError

    async def remove_namespace(self, bucket: BucketRow, name: str, caller: Caller) -> int:
        """`ChunkStore.remove_namespace`."""
        raise NotImplementedError

    async def match(
        self,
        bucket: BucketRow,
        namespace: str,
        chunks: Chunks,
        caller: Caller,
        tokens: bytes | None,
        session: bytes | None,
        detail: bool,  # noqa: FBT001
        may_encode: bool,  # noqa: FBT001
        explain: bool,  # noqa: FBT001
        partial_last: bool,  # noqa: FBT001
        hint: int,
        accepts: list[Accepted],
    ) -> Matched:
        """`ChunkStore.match` in a namespace that the caller may use, chunks named by their keys."""
        raise NotImplementedError

    async def find(self, bucket: BucketRow, chunks: Chunks, caller: Caller) -> list[ObjectRow | None]:
        """`ChunkStore.find`."""
        raise NotImplementedError

    async def open_session(self, bucket: BucketRow, holder: str, ttl_ms: int | None, caller: Caller) -> SessionRow:
        """`ChunkStore.open_session`."""
        raise NotImplementedError

    async def renew_session(
        self,
        bucket: BucketRow,
        session_id: bytes,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: list[bytes],
        caller: Caller,
        waited_ms: int,
    ) -> Renewal:
        """`ChunkStore.renew_session`."""
        raise NotImplementedError

    async def close_session(self, bucket: BucketRow, session_id: bytes, caller: Caller) -> None:
        """`ChunkStore.close_session`."""
        raise NotImplementedError

    async def pin_tails(
        self,
        bucket: BucketRow,
        session_id: bytes,
        tails: Chunks,
        release: list[bytes],
        caller: Caller,
        namespace: NamespaceRow | None,
        accepts: list[Accepted],
    ) -> PinsResult:
        """`ChunkStore.pin_tails`."""
        raise NotImplementedError

    def note_write(self, bucket: str, key: str, is_partial: bool, hint: int) -> None:  # noqa: FBT001
        """`ChunkStore.note_write`."""
        raise NotImplementedError

    async def grant(self, rights: Rights) -> Granted:
        """`Granting.grant`; `UnavailableError` where there is no same-host path."""
        raise NotImplementedError

    async def renew_grant(self, grant_id: bytes, rights: Rights) -> int:
        """`Granting.renew`."""
        raise NotImplementedError

    async def enter_gate(self, entry: int, size_bytes: int) -> None:
        """Room for a batch's bytes among those of all batches (`ByteGate.enter`)."""
        raise NotImplementedError

    def leave_gate(self, entry: int) -> None:
        """Give it back."""
        raise NotImplementedError

    # -- a worker's life -----------------------------------------------------------------------------------------
    def ready(self) -> None:
        """The worker can accept connections, once it is told to (`WorkerCalls.accept`)."""
        raise NotImplementedError


class WorkerCalls:
    """What the store process asks of a worker."""

    def filled(self, handle: int, filled: int) -> None:
        """So many leading bytes of an open frame's extent are there."""
        raise NotImplementedError

    def frame_failed(self, handle: int, failure: Failure) -> None:
        """A frame will not be filled."""
        raise NotImplementedError

    def transfer_failed(self, handle: int, failure: Failure) -> None:
        """A transfer cannot go on."""
        raise NotImplementedError

    def room(self, handle: int, blob: int, room: Room) -> None:
        """Where the next blob of a transfer goes."""
        raise NotImplementedError

    async def accept(self) -> str:
        """Accept connections from here on; how bodies are received (`HttpServer.receive_mode`)."""
        raise NotImplementedError

    async def reload(self, certificate: bytes, key: bytes) -> None:
        """Use this TLS certificate with its chain, and its key, which the store process has checked (PEM); returns when they are
        in use."""
        raise NotImplementedError

    async def figures(self) -> WorkerFigures:
        """How the worker is doing; that it answers says that it lives."""
        raise NotImplementedError

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more, finish what is in flight, then end."""
        raise NotImplementedError
