"""What the KV API needs of the store, as protocols: `kvobj.store.chunks.ChunkStore` has it.

Values that cross are the store's and the catalog's own. Every call is made for a user: `user_id`, and `is_owner` for the bucket's
owner and root. A namespace that the user may not use is `NoSuchNamespaceError`, as an absent one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.lease_protocol import PinsResult, Renewal
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.namespace_protocol import NamespaceRow, NamespaceUsage
from kvobj.catalog.rows import BucketRow, ObjectRow


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `is_owner`: the bucket's owner or root, who may use every namespace of it."""

    user_id: str
    is_owner: bool


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """A namespace that the caller may use, with its key."""

    row: NamespaceRow
    key: bytes
    may_write: bool


@dataclass(frozen=True, slots=True)
class MatchedChunk:
    """One chunk of a detailed match. `digest` is None only where nobody knows it (several blobs)."""

    key: str
    size_bytes: int
    digest: bytes | None
    tier: str
    codec: str


@dataclass(frozen=True, slots=True)
class MissExplanation:
    """Where a chain breaks and why (`kv-api` §5)."""

    at: int
    reason: str
    when_ms: int | None
    namespace_differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MatchReply:
    """What `?match` answers. `expected_load_ms` is what reading the run is thought to take, from the tiers it lies in."""

    matched: int
    tokens: int
    size_bytes: int
    expected_load_ms: int
    pin: bytes | None
    grant: int
    deadline_ms: int
    chunks: tuple[MatchedChunk, ...] | None
    explain: MissExplanation | None


class ChunkStore(Protocol):
    """Namespaces, sessions, pins and match; coordination over the catalog, the policy and the tiers."""

    async def declare_namespace(
        self, bucket: BucketRow, name: str, declaration: Mapping[str, object], *, caller: Caller
    ) -> tuple[OpenNamespace, bool]:
        """Declare, or change the settings of what is declared equally; whether it is new. Only for owners."""
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

    async def match(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        chunks: ChunkList,
        *,
        caller: Caller,
        session: bytes | None = None,
        detail: bool = False,
        explain: bool = False,
        partial_last: bool = False,
        hint: int = 0,
    ) -> MatchReply:
        """The longest live run, pinned where a session is given; the policy is told the whole request, after the answer."""
        ...

    async def open_session(self, bucket: BucketRow, *, holder: str, ttl_ms: int, caller: Caller) -> SessionRow:
        """See `Leases.open_session`."""
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
    ) -> Renewal:
        """See `Leases.renew`."""
        ...

    async def close_session(self, bucket: BucketRow, session_id: bytes, *, caller: Caller) -> None:
        """See `Leases.close_session`."""
        ...

    async def pin_tails(
        self, bucket: BucketRow, session_id: bytes, tails: Sequence[str], *, release: Sequence[bytes], caller: Caller
    ) -> PinsResult:
        """See `Leases.pin_tails`. Only tails of namespaces that the caller may use are found."""
        ...

    async def look_up(self, bucket: str, key: str) -> ObjectRow | None:
        """A client asks for the object: rescued if policy condemned it, and held against policy for the grace time."""
        ...

    async def pinned(self, bucket: BucketRow, key: str, pin: bytes, *, caller: Caller) -> ObjectRow | None:
        """The row that a pin lets its holder read, also where DELETE hid it; None: no such pin, or it does not cover the key."""
        ...
