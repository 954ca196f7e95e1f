"""The outbox: what changes publish for somebody outside, kept durably, in order, until it was told.

Guarantees: an entry is written in its change's own transaction, and so is the sum of what they take; positions ascend for ever,
over restarts and rebuilds, also when the outbox was emptied meanwhile (they are counted in the environment and, for a rebuild,
marked in the record log); a group that published is flushed, so that no position that anybody saw is ever given out again. Where
changes were not published (there was no outbox yet, or the database was opened without it) a gap is noted: only a snapshot then
tells everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvobj.clock import Clock
from kvobj.database.environment import Environment, translated
from kvobj.database.lmdb_types import Handle, Transaction
from kvobj.database.table import META, Table
from kvobj.database.views import Publication, ReadView, WriteView, range_of
from kvobj.errors import CorruptionError

OUTBOX: Final = Table("outbox", volatile=False)

ENTRY_BYTES: Final = 64
"""What an entry counts beside its content: position, time, and what LMDB needs for a key."""

_NEXT: Final = b"outbox_next"
_GAP: Final = b"outbox_gap"
_SIZE: Final = b"outbox_bytes"
_MARK: Final = b"\x80"
"""Kind of the record log's entries that tell how far positions have come; kinds below are other users'."""
_NUMBER_BYTES: Final = 8
_TOPICS_MAX: Final = 4096


class OutboxWriter:
    """Writes a group's publications; the writer thread's. `position`: the last one of all groups that were committed; `untold`:
    the last one of those that waited when the database was opened, 0 where none did."""

    def __init__(self, handles: Mapping[str, Handle], clock: Clock, position: int, *, untold: int) -> None:
        self._outbox, self._meta = handles[OUTBOX.name], handles[META.name]
        self._clock = clock
        self._written = position
        self._topics_written: dict[str, int] = {}
        # Read by the event loop: replaced or added to, never taken from.
        self._topics: dict[str, int] = {}
        self._floor = untold
        self.position = position

    def write(self, transaction: Transaction, published: Sequence[Publication]) -> bytes:
        """Store the contents in order; returns the record log's entry about it. Takes from the headroom."""
        first = _number(transaction.get(_NEXT, None, self._meta)) or 1
        since = self._clock.now_ms().to_bytes(_NUMBER_BYTES, "big")
        size_bytes = _number(transaction.get(_SIZE, None, self._meta))
        topics: dict[str, int] = {}
        for position, (content, topic) in enumerate(published, first):
            transaction.put(_key(position), since + content, db=self._outbox)
            size_bytes += len(content) + ENTRY_BYTES
            if topic:
                topics[topic] = position
        following = _key(first + len(published))
        transaction.put(_NEXT, following, db=self._meta)
        transaction.put(_SIZE, _key(size_bytes), db=self._meta)
        self._written = first + len(published) - 1
        self._topics_written = topics
        return _MARK + following

    def committed(self) -> None:
        """What was written last is committed."""
        self.position = self._written
        if len(self._topics) + len(self._topics_written) > _TOPICS_MAX:
            # Who asks for one of them is told a later position than its own: it waits longer than it need, once.
            self._floor = self.position
            self._topics = {}
        self._topics.update(self._topics_written)

    def position_of(self, topic: str) -> int:
        """The last position of a topic, or a later one. On any thread."""
        return max(self._topics.get(topic, 0), self._floor)


class GapWriter:
    """Stands in where the database has had an outbox and is open without it: notes that something was not published."""

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        self._meta = handles[META.name]

    def write(self, transaction: Transaction, _published: Sequence[Publication]) -> None:
        """Note the gap."""
        transaction.put(_GAP, b"1", db=self._meta)

    def committed(self) -> None:
        """Nobody reads positions here."""


def open_outbox(durable: Environment, clock: Clock | None) -> OutboxWriter | GapWriter | None:
    """What writes an environment's outbox; `clock` None: it is open without. New beside an older environment it begins with a gap.
    Everything in it is flushed when this returns."""
    meta = durable.handles[META.name]
    with translated(durable.directory), durable.begin(write=True) as transaction:
        following = _number(transaction.get(_NEXT, None, meta))
        if clock is None:
            return GapWriter(durable.handles) if following else None
        if not following:
            transaction.put(_NEXT, _key(1), db=meta)
            transaction.put(_GAP, b"1", db=meta)
        outbox = durable.handles[OUTBOX.name]
        is_waiting = bool(transaction.stat(outbox)["entries"])
        if not is_waiting or transaction.get(_SIZE, None, meta) is None:
            # A version that did not count may have been here.
            waiting = range_of(transaction, outbox, start=b"", stop=None, reverse=False)
            transaction.put(_SIZE, _key(sum(_counted(value) for _, value in waiting)), db=meta)
    durable.flush()
    position = max(following - 1, 0)
    return OutboxWriter(durable.handles, clock, position, untold=position if is_waiting else 0)


def stored_entries(view: ReadView, *, after: int, upto: int) -> Iterator[tuple[int, int, bytes]]:
    """Position, wall time in ms and content of entries with `after` < position <= `upto`, ascending."""
    for key, value in view.range(OUTBOX, _key(after + 1), _key(upto + 1)):
        since, content = value[:_NUMBER_BYTES], value[_NUMBER_BYTES:]
        yield int.from_bytes(key, "big"), int.from_bytes(since, "big"), content


def forget_entries(view: WriteView, positions: Sequence[int]) -> None:
    """Take entries out; those that are gone already are no matter."""
    freed_bytes = 0
    for position in positions:
        value = view.get(OUTBOX, _key(position))
        if value is not None:
            view.delete(OUTBOX, _key(position))
            freed_bytes += _counted(value)
    view.put(META, _SIZE, _key(max(stored_bytes(view) - freed_bytes, 0)), headroom=True)


def stored_bytes(view: ReadView) -> int:
    """What the entries take: their contents, and `ENTRY_BYTES` each."""
    return _number(view.get(META, _SIZE))


def has_gap(view: ReadView) -> bool:
    """Whether something was not published."""
    return view.get(META, _GAP) is not None


def close_gap(view: WriteView) -> None:
    """Everything is told: there is no gap any more."""
    view.delete(META, _GAP)


def begin_above(view: WriteView, next_position: int) -> None:
    """Of a database that is being rebuilt: positions go on here, and what was published before and is lost is a gap."""
    view.put(META, _NEXT, _key(next_position), headroom=True)
    view.put(META, _GAP, b"1", headroom=True)


def position_mark(view: ReadView) -> Iterator[bytes]:
    """The record log's entry about the positions, for a snapshot of it; none where there never was an outbox."""
    following = view.get(META, _NEXT)
    if following is not None:
        yield _MARK + following


def marked_position(entry: bytes) -> int | None:
    """The next position that an entry of the record log tells of; None: it is another user's. `CorruptionError`."""
    if entry[:1] != _MARK:
        return None
    if len(entry) != len(_MARK) + _NUMBER_BYTES:
        raise CorruptionError("record log entry about the outbox is malformed", length=len(entry))
    return int.from_bytes(entry[1:], "big")


def _counted(value: bytes) -> int:
    return len(value) - _NUMBER_BYTES + ENTRY_BYTES


def _key(position: int) -> bytes:
    return position.to_bytes(_NUMBER_BYTES, "big")


def _number(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "big")
