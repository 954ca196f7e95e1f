"""The rows of sessions and pins, and the one question that gc and deletes ask of them: is this blob pinned?

Stateless but for quiet time; every call works on the given view, in the caller's transaction. A pin counts until its row is removed
(release, close, expiry), also past its session's deadline: guards need no clock.
"""

from __future__ import annotations

import msgspec

from kvobj.catalog.encoding import PINS_BY_BLOB
from kvobj.database import ReadView


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """One holder's registration. `epoch` ascends over all sessions of the store. Times are of `clock.boot_ms`.

    `grant` numbers the last grant of pins; `pins` and `pinned_bytes` count what the session holds.
    """

    id: bytes
    epoch: int
    user: str
    bucket: str
    holder: str
    ttl_ms: int
    expires_boot_ms: int
    grant: int = 0
    pins: int = 0
    pinned_bytes: int = 0


class PinTarget(msgspec.Struct, frozen=True, array_like=True):
    """What a pin protects: the chunk under this key with this first blob, and its ancestors."""

    key: str
    blob_id: bytes


class PinRow(msgspec.Struct, frozen=True, array_like=True):
    """One pin: set member of a session, never a counter. `chain_bytes` is the total of the chains it protects."""

    id: bytes
    session_id: bytes
    bucket: str
    user: str
    targets: tuple[PinTarget, ...]
    grant: int
    chain_bytes: int


class PinGuard:
    """Answers whether a blob is pinned. `quiet`: lease state was lost a moment ago, so every chunk counts as pinned."""

    __slots__ = ("quiet",)

    def __init__(self) -> None:
        self.quiet = False

    def is_pinned(self, view: ReadView, blob_id: bytes) -> bool:
        """Whether any pin names the blob. ~1 µs."""
        if self.quiet:
            return True
        for _ in view.range(PINS_BY_BLOB, blob_id, blob_id + b"\xff" * 17):
            return True
        return False
