"""What the KV API needs of the store, as protocols: `kvobj.store.chunks.ChunkStore` has it.

Values that cross are the store's and the catalog's own. Every call is made for a user: `user_id`, and `is_owner` for the bucket's
owner and root. A namespace that the user may not use is `NoSuchNamespaceError`, as an absent one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.lease_protocol import PinsResult, Renewal
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.namespace_protocol import NamespaceRow, NamespaceUsage
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.store.batch import ChunkBatch
from kvobj.store.chunk_values import Caller, MatchReply, OpenNamespace
from kvobj.store.given_chunks import PLAIN
from kvobj.store.representation import Accepted


class ChunkStore(Protocol):
    """Namespaces, sessions, pins and match; coordination over the catalog, the policy and the tiers."""

    async def declare_namespace(
        self,
        bucket: BucketRow,
        name: str,
        declaration: Mapping[str, object],
        *,
        caller: Caller,
        key: bytes | None = None,
    ) -> tuple[OpenNamespace, bool]:
        """Declare, or change the settings of what is declared equally; whether it is new. Only for owners. `key`: another store's,
        which the API takes from administrators alone (`NamespaceBook.declare`)."""
        ...

    async def namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> OpenNamespace:
        """One namespace. `NoSuchNamespaceError`."""
        ...

    async def namespaces(
        self, bucket: BucketRow, *, after: str, limit: int, caller: Caller
    ) -> tuple[tuple[OpenNamespace, NamespaceUsage], ...]:
        """Those that the caller may use, in name order."""
        ...

    async def remove_namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> int:
        """Recall its chunks and forget it; how many chunks went."""
        ...

    async def namespace_usage(self, bucket: BucketRow, name: str) -> NamespaceUsage:
        """Live chunks of one namespace and their bytes."""
        ...

    async def chunks_of_tokens(self, namespace: OpenNamespace, tokens: bytes) -> ChunkList:
        """The chunks that a sequence of tokens (little-endian u32) makes: `InvalidRequestError` where only an engine can name
        them, `BatchTooLargeError`."""
        ...

    async def match(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        chunks: ChunkList,
        *,
        caller: Caller,
        tokens: bytes | None = None,
        session: bytes | None = None,
        detail: bool = False,
        name: Callable[[str], str | bytes] = str,
        may_encode: bool = False,
        explain: bool = False,
        partial_last: bool = False,
        hint: int = 0,
        accepts: Sequence[Accepted] = PLAIN,
    ) -> MatchReply:
        """The longest live run, pinned where a session is given; the policy is told the whole request, after the answer. A chunk of
        which nothing is left that `accepts` takes counts as absent.

        `tokens`: those that the list was made of; `explain` looks for them in other namespaces. `detail`: every chunk of the run is
        told of, by what `name` makes of its key; `may_encode`: as `EncodedChunks` where that is possible, for ids that stay raw.
        """
        ...

    def note_write(self, bucket: str, key: str, *, is_partial: bool, hint: int) -> None:
        """A writer says what its request is like: the policy is told of a request that names this chunk alone, soon after."""
        ...

    async def find(self, bucket: BucketRow, chunks: ChunkList, *, caller: Caller) -> list[ObjectRow | None]:
        """The live rows that the caller may read, as GETs of each would find them: rescued, and held against policy."""
        ...

    def use(self, rows: Sequence[ObjectRow]) -> Callable[[], None]:
        """Keep the bytes of the rows from being reaped until the returned function is called, exactly once."""
        ...

    def batch(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """Room for chunks of so many bytes, committed in one step; entering it may raise `EntityTooLargeError`, `BusyError`.
        `check_shown` raises `ImmutableChunkError` for a live row that the writer may not know of."""
        ...

    async def open_session(self, bucket: BucketRow, *, holder: str, ttl_ms: int | None, caller: Caller) -> SessionRow:
        """See `Leases.open_session`; without a TTL the store's own."""
        ...

    async def renew_session(
        self,
        bucket: BucketRow,
        session_id: bytes,
        *,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: Sequence[bytes],
        caller: Caller,
        waited_ms: int = 0,
    ) -> Renewal:
        """See `Leases.renew`; from when it arrived, so long ago."""
        ...

    async def close_session(self, bucket: BucketRow, session_id: bytes, *, caller: Caller) -> None:
        """See `Leases.close_session`."""
        ...

    async def pin_tails(
        self,
        bucket: BucketRow,
        session_id: bytes,
        tails: ChunkList,
        *,
        release: Sequence[bytes],
        caller: Caller,
        namespace: NamespaceRow | None = None,
        accepts: Sequence[Accepted] = PLAIN,
    ) -> PinsResult:
        """See `Leases.pin_tails`. Tails of namespaces that the caller may not use, and those of which nothing is left that
        `accepts` takes, are answered as if they were not live. `namespace`: that of all of them, if that is known."""
        ...
