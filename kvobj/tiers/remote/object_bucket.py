"""As much of a bucket (`bucket.RemoteBucket`) as the tier, the store's identity and the search for leftovers need."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.bucket import RemoteObject, RemoteUpload
from kvobj.tiers.remote.capabilities import Capabilities
from kvobj.tiers.remote.health import RemoteHealth


class ObjectBucket(Protocol):
    """Objects by whole keys. Calls come from one event loop and end by deadlines of their own.

    `TierUnavailableError` where the server does not do it in time, `RemoteRefusedError` where no repeat would help,
    `StoreFullError` where it has no room.
    """

    @property
    def capabilities(self) -> Capabilities | None:
        """What the server can do; None as long as it has not been asked."""
        ...

    @property
    def health(self) -> RemoteHealth:
        """How it has been answering."""
        ...

    async def probe(self) -> Capabilities:
        """Ask what the server can do."""
        ...

    async def get(self, key: str, byte_range: ByteRange, into: memoryview, on_filled: Callable[[int], None]) -> bool:
        """The range's bytes into `into`, `on_filled` told how many leading ones are there; False: no such object. Once this has
        ended, in whatever way, nothing is written into `into`."""
        ...

    async def put(self, key: str, body: memoryview) -> str:
        """Whole or not at all; where it fails, an upload of parts is aborted. The ETag."""
        ...

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """A small object under a condition; None: it does not hold."""
        ...

    async def get_small(self, key: str, *, max_bytes: int) -> tuple[bytes, str] | None:
        """A small object's body and ETag."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Absent is fine."""
        ...

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[RemoteObject]:
        """Objects whose keys begin with `prefix` and come behind `after`, ascending."""
        ...

    def list_uploads(self, prefix: str) -> AsyncIterator[RemoteUpload]:
        """Unfinished uploads of parts."""
        ...

    async def abort(self, upload: RemoteUpload) -> None:
        """Give an unfinished upload up; absent is fine."""
        ...
