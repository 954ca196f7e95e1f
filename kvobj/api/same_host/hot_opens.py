"""`Open` of chunks that dram holds already, answered where it arrives: where nothing has to be waited for, a task's turns and the
store's layers cost more than the answer.

All or nothing: where one chunk is a miss, is not in dram, or has to be looked at first, nothing is done, and `ExtentReads` is
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvobj.api.kv.bodies import SHORT_ID_BYTES
from kvobj.api.same_host.reads import Reads
from kvobj.api.same_host.rights import Rights
from kvobj.arena import Pin
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import KvobjError
from kvobj.same_host.messages import KEYS_AHEAD, Extent, Open, Opened
from kvobj.store.at_once import at_once
from kvobj.store.extents import ExtentLedger

KEYS_AT_ONCE: Final = KEYS_AHEAD
"""More are looked up on a thread."""
AHEAD_SHARE: Final = 2
"""Of what a holder, and all, may pin what is opened ahead of its reading takes so small a part: who reads now finds room."""
DIGESTS_MAX: Final = 16_384
"""Digests that are remembered of chunks whose rows have none yet: to read one out of its frame takes a third of an open."""
_TIER: Final = "dram"


class LookUp(Protocol):
    """`Catalog.lookup`."""

    def __call__(
        self, bucket: str, keys: Sequence[str], *, rescue: bool = False
    ) -> Coroutine[Any, Any, list[ObjectRow | None]]:
        """The live rows of keys."""
        ...


@dataclass(frozen=True, slots=True)
class HotOpened:
    """An answer, and the rows that it is about: `HotOpens.note` them once it is on its way."""

    reply: Opened
    rows: Sequence[ObjectRow]
    are_pinned: bool


def nothing_ahead(request: Open) -> HotOpened:
    """The answer to an `Open` ahead of a read where not all can be had at once: it is not worth more."""
    return HotOpened(Opened([None] * len(request.keys)), (), are_pinned=False)


@dataclass(frozen=True, slots=True)
class HotOpens:
    """See the module's text. Event-loop-only. `pin_hot` is `DramTier.pin_hot`; `on_read` is told of rows that were looked up and
    read, `on_pinned_read` of those that a client's pin holds; `count_hits` counts reads of dram and their bytes."""

    rows: Reads
    look_up: LookUp
    pin_hot: Callable[[bytes], tuple[Pin, int] | None]
    on_read: Callable[[ObjectRow], None]
    on_pinned_read: Callable[[ObjectRow], None]
    count_hits: Callable[[int, int], None]
    digests: dict[bytes, bytes] = field(default_factory=dict)
    """By blob id, whose bytes never change; the latest."""

    def open(self, request: Open, rights: Rights, ledger: ExtentLedger, shown: AbstractSet[int]) -> HotOpened | None:
        """The answer, with every extent under a handle; None: nothing was done. `shown`: the regions that the client has."""
        is_plain = rights.is_owner and rights.lane is None and request.namespace is None and request.layers is None
        if not is_plain or not 0 < len(request.keys) <= KEYS_AT_ONCE:
            return None
        try:
            found = self._found(request, rights)
        except KvobjError:  # `ExtentReads` tells
            return None
        if found is None:
            return None
        pins = self._pinned(found, ledger, shown, AHEAD_SHARE if request.is_ahead else 1)
        if pins is None:
            return None
        extents: list[Extent | None] = [
            self._extent(pin, row, ledger, is_ahead=request.is_ahead) for pin, row in zip(pins, found, strict=True)
        ]
        return HotOpened(Opened(extents), found, bool(request.pins))

    def note(self, opened: HotOpened) -> None:
        """Count what was opened as reads. Before anything else happens on the event loop."""
        on_read = self.on_pinned_read if opened.are_pinned else self.on_read
        size_bytes = 0
        for row in opened.rows:
            on_read(row)
            size_bytes += row.size_bytes
        self.count_hits(len(opened.rows), size_bytes)

    def _found(self, request: Open, rights: Rights) -> list[ObjectRow] | None:
        """The rows, if all keys are stored and no look-up has to wait."""
        keys, pins, bucket = request.keys, request.pins, rights.bucket.name
        if not pins:
            rows = at_once(self.look_up(bucket, keys, rescue=True))
        else:
            if len(pins) not in {1, len(keys)}:
                return None
            rows = []
            for index, key in enumerate(keys):
                pin = pins[0] if len(pins) == 1 else pins[index]
                if pin is None or len(pin) != SHORT_ID_BYTES:
                    return None
                row = at_once(self.rows.pinned(bucket, key, pin, user_id=rights.user_id))
                if row is None:
                    return None
                rows.append(row)
        return None if rows is None or None in rows else rows  # type: ignore[return-value]  # no None is among them

    def _pinned(
        self, rows: Sequence[ObjectRow], ledger: ExtentLedger, shown: AbstractSet[int], share: int
    ) -> list[Pin] | None:
        """A pin on each row's extent, or on none."""
        pins: list[Pin] = []
        extent_bytes = 0
        for row in rows:
            found = self.pin_hot(row.blobs[0].blob_id) if ledger.can_open(row) else None
            if found is None:
                break
            pins.append(found[0])
            extent_bytes += found[0].extent.length
            if found[0].extent.region not in shown:
                break
        else:
            if ledger.has_room_for(len(pins), extent_bytes, share=share):
                return pins
        for pin in pins:
            pin.release()
        return None

    def _extent(self, pin: Pin, row: ObjectRow, ledger: ExtentLedger, *, is_ahead: bool) -> Extent:
        extent, size_bytes, digest = pin.extent, row.size_bytes, row.digest
        if digest is None:
            digest = self.digests.get(row.blobs[0].blob_id) or self._settled_digest(row)
        offset = extent.offset + raw_payload_offset(size_bytes)
        handle = ledger.keep(pin, is_ahead=is_ahead)
        return Extent(handle, extent.region, offset, size_bytes, extent.generation, digest, _TIER)

    def _settled_digest(self, row: ObjectRow) -> bytes | None:
        settled = at_once(self.rows.settled(row, wait=False))
        digest = None if settled is None else settled.digest
        if digest is not None:
            digests = self.digests
            if len(digests) >= DIGESTS_MAX:
                del digests[next(iter(digests))]
            digests[row.blobs[0].blob_id] = digest
        return digest
