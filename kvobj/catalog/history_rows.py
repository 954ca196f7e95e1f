"""Events and removals as they are written inside the transactions that they tell of: `history_protocol`'s tables.

A stored event's number is the `sequence` of the last row in it, so that write-behind finds it again; all others draw a number. What
is told of a volatile row lies in the volatile table and goes with power as the row does; what is told of a durable row is durable.
Guarantees: no clock is read, nothing is looked up but what `made_durable` moves, every put takes from the headroom (what makes
room must work in a full store, and an event is no reason to refuse a commit). Stateless: every call works on the given view.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from kvobj.catalog.encoding import (
    EVENTS,
    EVENTS_VOLATILE,
    REMOVALS,
    REMOVALS_BY_TIME,
    encode_row,
    number_key,
)
from kvobj.catalog.history_protocol import EventRow, EventType, RemovalReason, RemovalRow
from kvobj.catalog.key_hash import KEY_HASH_BYTES, key_hash
from kvobj.catalog.rows import ObjectRow
from kvobj.database import WriteView

MAX_KEYS: Final = 256
"""Of one event: what is read at a time stays small. A longer run of rows is several events."""

_TIME: Final = struct.Struct(">Q")

decode_event = msgspec.msgpack.Decoder(EventRow).decode
decode_removal = msgspec.msgpack.Decoder(RemovalRow).decode


class RemovedRun(NamedTuple):
    """Rows of one namespace that went, parents first: their keys and numbers of tokens."""

    bucket: str
    namespace: str
    keys: Sequence[str]
    tokens: Sequence[int]


class HistoryRows:
    """See the module's text. Call it for rows of KV buckets only."""

    __slots__ = ("allocate", "on_told")

    def __init__(self, allocate: Callable[[], int]) -> None:
        self.allocate = allocate
        # Called inside every change that tells of something, on whatever thread it runs.
        self.on_told: Callable[[], None] = _nothing

    def stored(self, view: WriteView, rows: Sequence[ObjectRow], *, now_ms: int, volatile: bool) -> None:
        """Tell of rows that became visible; `row.sequence` is set. Consecutive rows of one chain are one event."""
        if len(rows) == 1:  # the common case, and on the path of every PUT
            self._tell(view, _stored_event(rows, now_ms), volatile=volatile)
        else:
            self._tell(view, *stored_events(rows, now_ms=now_ms), volatile=volatile)

    def removed(
        self, view: WriteView, rows: Sequence[ObjectRow], *, reason: RemovalReason, now_ms: int, volatile: bool
    ) -> None:
        """Tell of rows that went, and remember why. `volatile`: they were of class `memory` and not written down."""
        for event in removed_events(rows, self.allocate, reason=reason, now_ms=now_ms):
            self._tell(view, event, volatile=volatile)
            _remember(view, event, [key_hash(key.encode()) for key in event.keys], reason)

    def removed_run(
        self, view: WriteView, event: RemovedRun, hashes: Sequence[bytes], *, reason: RemovalReason, now_ms: int
    ) -> None:
        """`removed` of durable rows of one namespace, of which not more is known. `hashes`: `key_hash` of each of their keys."""
        keys, count = event.keys, len(event.keys)
        for start in range(0, count, MAX_KEYS):
            stop = min(start + MAX_KEYS, count)
            row = EventRow(
                sequence=self.allocate(),
                time_ms=now_ms,
                type=EventType.REMOVED,
                bucket=event.bucket,
                namespace=event.namespace,
                keys=tuple(keys[start:stop]),
                tokens=sum(event.tokens[start:stop]),
                reason=reason.value,
            )
            self._tell(view, row, volatile=False)
            _remember(view, row, hashes[start:stop], reason)

    def made_durable(self, view: WriteView, row: ObjectRow) -> None:
        """A row moved from the volatile to the durable table: its event goes along. Of an event with several rows the last one
        takes it (write-behind takes parents first)."""
        key = number_key(row.sequence)
        value = view.get(EVENTS_VOLATILE, key)
        if value is not None:
            view.put(EVENTS, key, value, headroom=True)
            view.delete(EVENTS_VOLATILE, key)

    def cleared(self, view: WriteView, bucket: str, namespace: str, *, now_ms: int) -> None:
        """Tell that nothing of a namespace is left; of the whole bucket where it is ""."""
        sequence = self.allocate()
        self._tell(view, EventRow(sequence, now_ms, EventType.CLEARED, bucket, namespace), volatile=False)

    def _tell(self, view: WriteView, *events: EventRow, volatile: bool) -> None:
        """Write events down, and wake who waits for one: all that is told goes through here."""
        table = EVENTS_VOLATILE if volatile else EVENTS
        if len(events) == 1:
            view.put(table, number_key(events[0].sequence), encode_row(events[0]), headroom=True)
        else:
            view.put_many(table, [(number_key(event.sequence), encode_row(event)) for event in events])
        self.on_told()


def _remember(view: WriteView, event: EventRow, hashes: Sequence[bytes], reason: RemovalReason) -> None:
    """Why the keys of a removal went."""
    number = number_key(event.sequence)
    removal = encode_row(RemovalRow(reason, event.time_ms, event.namespace, event.sequence))
    start = removals_of(event.bucket)
    view.put_many(REMOVALS, [(start + each, removal) for each in hashes])
    view.put(REMOVALS_BY_TIME, number, b"".join((_TIME.pack(event.time_ms), start, *hashes)), headroom=True)


def _nothing() -> None:
    """Nobody listens."""


def stored_events(rows: Sequence[ObjectRow], *, now_ms: int) -> Iterator[EventRow]:
    """The events that tell of rows: a run in which each row is the next one's parent, of equally many tokens, is one."""
    run: list[ObjectRow] = []
    for row in rows:
        if run and not (len(run) < MAX_KEYS and _goes_on(run[-1], row)):
            yield _stored_event(run, now_ms)
            run = []
        run.append(row)
    if run:
        yield _stored_event(run, now_ms)


def removed_events(
    rows: Sequence[ObjectRow], allocate: Callable[[], int], *, reason: RemovalReason, now_ms: int
) -> Iterator[EventRow]:
    """The events that tell of removals: consecutive rows of one namespace are one."""
    start = 0
    for stop in range(1, len(rows) + 1):
        first = rows[start]
        if stop < len(rows) and stop - start < MAX_KEYS:
            row = rows[stop]
            if row.namespace == first.namespace and row.bucket == first.bucket:
                continue
        gone = rows[start:stop]
        yield EventRow(
            sequence=allocate(),
            time_ms=now_ms,
            type=EventType.REMOVED,
            bucket=first.bucket,
            namespace=first.namespace,
            keys=tuple(row.key for row in gone),
            tokens=sum(row.tokens for row in gone),
            reason=reason.value,
        )
        start = stop


def removal_key(bucket: str, key: str) -> bytes:
    """Where the removal of a key is remembered; no bucket name holds a zero byte."""
    return removals_of(bucket) + key_hash(key.encode())


def removals_of(bucket: str) -> bytes:
    """What the places of a bucket's removals begin with."""
    return bucket.encode() + b"\0"


def unpack_removal_time(value: bytes) -> tuple[int, list[bytes]]:
    """When the removals of an entry of `REMOVALS_BY_TIME` were, and their keys in `REMOVALS`. An entry is of one event; older
    versions made one of each key."""
    hashes_at = value.index(b"\0", _TIME.size) + 1
    start = value[_TIME.size : hashes_at]
    names = [start + value[at : at + KEY_HASH_BYTES] for at in range(hashes_at, len(value), KEY_HASH_BYTES)]
    return _TIME.unpack_from(value)[0], names


def without_first_removals(value: bytes, count: int) -> bytes:
    """An entry of `REMOVALS_BY_TIME` without its first keys; b"" where none is left."""
    hashes_at = value.index(b"\0", _TIME.size) + 1
    rest_at = hashes_at + count * KEY_HASH_BYTES
    return value[:hashes_at] + value[rest_at:] if rest_at < len(value) else b""


def _goes_on(before: ObjectRow, row: ObjectRow) -> bool:
    return (
        row.parent == before.key
        and row.tokens == before.tokens
        and row.namespace == before.namespace
        and row.durability is before.durability
        and row.bucket == before.bucket
    )


def _stored_event(run: Sequence[ObjectRow], now_ms: int) -> EventRow:
    first = run[0]
    return EventRow(
        sequence=run[-1].sequence,
        time_ms=now_ms,
        type=EventType.STORED,
        bucket=first.bucket,
        namespace=first.namespace,
        keys=(first.key,) if len(run) == 1 else tuple(row.key for row in run),
        parent=first.parent,
        tokens=len(run) * first.tokens,
        durability=first.durability.value,
    )
