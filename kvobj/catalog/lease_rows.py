"""The rows of sessions and pins, and the questions that gc and deletes ask of them.

Stateless but for quiet time; every call works on the given view, in the caller's transaction. A pin counts until its row is removed
(release, close, expiry), also past its session's deadline: guards need no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvobj.catalog.encoding import PINS_BY_BLOB, PINS_BY_KEY
from kvobj.catalog.key_hash import key_hash
from kvobj.database import ReadView, Table


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """One holder's registration. `epoch` ascends over all sessions of the store. Times are of `clock.boot_ms`.

    `grant` numbers the last grant of pins; `pins`, `targets` of all of them and `pinned_bytes` count what the session holds.
    `ended`: it was closed and its last pins are being removed; to its holder it is gone.
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
    targets: int = 0
    ended: bool = False


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
    """The two questions that guards ask. `quiet`: lease state was lost a moment ago, so everything counts as pinned.

    Rows are held by key, queue entries by blob: a chunk that DELETE hid may be stored anew under another blob and be deleted again
    while its first pin lives; asked by blob, the second DELETE would take the ancestors that the pin protects
    (`tests/model`, mutant "pins-name-blobs-only").
    """

    __slots__ = ("quiet",)

    def __init__(self) -> None:
        self.quiet = False

    def over(self, view: ReadView) -> PinsInView:
        """The first question for many keys of one view."""
        return PinsInView(self, view)

    def holds_row(self, view: ReadView, bucket: str, key: str) -> bool:
        """Whether any pin names the key, whatever blob its row names by now. Guards of condemn, claim, DELETE and recall."""
        return self.quiet or _has_any(view, PINS_BY_KEY, pins_by_key(bucket, key))

    def holds_blob(self, view: ReadView, blob_id: bytes) -> bool:
        """Whether any pin names the blob. Guard of the delete queue (`QueueEntry.pinned`)."""
        return self.quiet or _has_any(view, PINS_BY_BLOB, blob_id)


class PinsInView:
    """`PinGuard.holds_row` for many keys over one view, which meanwhile gets no pin more: where there is none at all, which is the
    rule in a store that nobody holds anything of, no key is looked for."""

    __slots__ = ("_guard", "_is_any", "_view")

    def __init__(self, guard: PinGuard, view: ReadView) -> None:
        self._guard = guard
        self._view = view
        self._is_any = not view.is_empty(PINS_BY_KEY)

    def holds_row(self, bucket: str, key: str) -> bool:
        """See `PinGuard.holds_row`."""
        return self._guard.holds_row(self._view, bucket, key) if self._is_any else self._guard.quiet

    def held(self, bucket: str, keys: Sequence[str]) -> bytes | None:
        """`holds_row` of each of the keys as 1 or 0; None: none of them is held."""
        if not self._is_any and not self._guard.quiet:
            return None
        return bytes(self.holds_row(bucket, key) for key in keys)


def pins_by_key(bucket: str, key: str) -> bytes:
    """What the entries of PINS_BY_KEY for a chunk begin with; the pin's id follows."""
    return bucket.encode() + b"\0" + key_hash(key.encode())


def _has_any(view: ReadView, table: Table, start: bytes) -> bool:
    return bool(view.under(table, start, limit=1))
