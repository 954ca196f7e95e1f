"""What the S3 layer needs of the store, as protocols: `kvobj.store.Store` has it, and so does the store of the tests.

The values that cross (`PutRequest`, `PutResult`, `CompletedPart`) are the store's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvobj.api.message import BodyStream, ByteSource
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BucketRow,
    Checksum,
    DeleteOutcome,
    ObjectRow,
    UploadRow,
    WriteCondition,
)
from kvobj.codec.checksums import Digester
from kvobj.store.following import Followed
from kvobj.store.groups import GroupStart, GroupState
from kvobj.store.ingest import WholeSource
from kvobj.store.multipart import CompletedPart
from kvobj.store.places import ChunkPlace
from kvobj.store.reader import HotRead
from kvobj.store.representation import Accepted
from kvobj.store.requests import PutRequest, PutResult


class Transfer(Protocol):
    """One body on its way in. Leaving the context without a commit frees everything."""

    @property
    def existing(self) -> ObjectRow | None:
        """KV bucket: the live row of this key found at the start."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def receive(self, source: ByteSource) -> None:
        """Pull exactly the declared number of bytes."""
        ...

    async def digests(self) -> Digester:
        """Wait until every digest that was asked for is there."""
        ...

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """Make the object or part visible."""
        ...


class Reader(BodyStream, Protocol):
    """An object's bytes on their way out."""

    @property
    def tier(self) -> str:
        """The tier that served the first of them."""
        ...


class Following(Protocol):
    """What is still being uploaded."""

    async def find(self, bucket: BucketRow, key: str) -> Followed | None:
        """What somebody uploads under the key of this bucket, to be read while it comes."""
        ...


class ObjectStore(Protocol):
    """One put, one get, one copy, one delete; names and listings come from `catalog`."""

    @property
    def catalog(self) -> Catalog:
        """The record of buckets, objects, uploads and users."""
        ...

    @property
    def following(self) -> Following:
        """Chunks on their way in."""
        ...

    async def start_put(self, request: PutRequest) -> Transfer:
        """Check the early conditions and reserve room; nothing is read yet."""
        ...

    def put_at_once(
        self, request: PutRequest, source: WholeSource, check: Callable[[Digester], tuple[Checksum, ...]]
    ) -> PutResult | None:
        """Write a small object whose body is here, before this returns, as `start_put` and what follows it would. `check` compares
        the digests that the request names with what was announced, and gives the checksums of the row.

        None, and nothing was stored: something has to be waited for, the write is to be refused, an earlier writer's chunk stands,
        or it is no object of class `memory`. The caller goes on with `start_put`, to which the source still gives all."""
        ...

    async def start_group_part(self, request: PutRequest) -> GroupStart:
        """Begin to write one part of a chunk that arrives in parts: what stands already, or the request for `start_put`."""
        ...

    async def end_group(
        self, request: PutRequest, transfer: Transfer | None = None, *, checksums: tuple[Checksum, ...] = ()
    ) -> GroupState:
        """Commit a part that was received, and the chunk if all its parts are there; None: an earlier writer's part stands."""
        ...

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """The live chunk that a writer of the key meets; where there is none, the parent has to be live (`ParentNotFoundError`)."""
        ...

    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:
        """A client asks for the chunk: it is live again if policy has condemned it, and held against policy for the grace time.
        `will_open`: the caller opens it next, and a store may do that then."""
        ...

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """The row that the user's pin lets it read, also where DELETE has hidden it; None: no such pin, or it does not cover it."""
        ...

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """What a reader that takes these codecs gets of the object: a row to `open`, or None where nothing will do."""
        ...

    async def open(self, row: ObjectRow, start: int, stop: int) -> Reader | None:
        """The bytes `[start, stop)`, or None where they are lost."""
        ...

    def open_hot(self, row: ObjectRow, start: int, stop: int) -> Reader | None:
        """`open`, at once, of bytes that lie in memory as they are read; None, and nothing was done, where they do not."""
        ...

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        """The whole of a live object as `look_up` and `open` give it, at once, where its bytes lie in memory as they are read.

        None where they do not, where something has to be waited for, or where there is no such object: nothing was done then.
        `only_short`: None, too, unless the object is so short that its bytes are in the answer.

        The caller has seen to it that who asks may do all with the bucket."""
        ...

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        """`read_hot` of who asks for no bytes: without them, and wherever they lie. A chunk whose digest is still being computed is
        waited for, and so None."""
        ...

    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        """Hide the keys at once. `NoSuchBucketError` (`made_ms` as of `Catalog.commit`)."""
        ...

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """Remove an empty bucket. Errors as `Catalog.delete_bucket`."""
        ...

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:
        """The row with its digest, waiting for it (unless told not to) where it is still being computed."""
        ...

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and its parts. `NoSuchUploadError`."""
        ...

    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        *,
        checksums: tuple[Checksum, ...] = (),
        checksum_algorithm: str | None = None,
    ) -> PutResult | None:
        """Write the source's bytes `[start, stop)` as the request's object or part; None where they are lost.

        `checksum_algorithm` (an S3 name, also in `request.algorithms`) is computed and stored instead of `checksums`.
        """
        ...

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
        *,
        condition: WriteCondition | None = None,
        checksums: tuple[Checksum, ...] = (),
        size_bytes: int | None = None,
    ) -> PutResult:
        """Make an object out of the listed parts; its row gets `checksums`."""
        ...
