"""Changes of sessions and pins: what each does within one transaction of a `WriteView`. Pure but for the view.

All of them write volatile tables only, so they run inline on the event loop unless one of their keys (the session's; the targets'
objects') is in flight in the durable writer. A change may run again and checks before it changes. Sums over users are kept
as counters, which both writers may add to; a session's own row and pins are changed under the session's key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
from blake3 import blake3

from kvobj.catalog.catalog_rows import require_root, root_of
from kvobj.catalog.chunk_heads import ChunkHead, is_same_chunk, live_head
from kvobj.catalog.encoding import (
    LEASE_META,
    LEASE_USAGE,
    META,
    PINS,
    PINS_BY_BLOB,
    PINS_BY_KEY,
    PINS_BY_SESSION,
    SESSIONS,
    encode_row,
    number_key,
)
from kvobj.catalog.lease_protocol import LeaseLimits, Renewal
from kvobj.catalog.lease_rows import PinRow, PinTarget, SessionRow, pins_by_key
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import ObjectRow
from kvobj.database import ReadView, WriteView
from kvobj.errors import NoSuchSessionError, PinLimitExceededError, SessionExpiredError

EXPIRY_SLACK_MS: Final = 500
"""So long after a session's end its pins still protect: holders stop relying on them before, by their own clocks."""

ID_BYTES: Final = 16
"""Of sessions and pins: random, unguessable (`kv-api` §5)."""

_STEP_TARGETS: Final = 256
"""Targets that one step of removing a session lets go of (~1 ms)."""
_MARKER: Final = b"session_ttl_ms"
_UNKNOWN: Final = b"?"
_ALIVE: Final = b"alive"
_QUIET: Final = b"quiet"
_BEHIND_IDS: Final = b"\xff" * 17
_TOTAL: Final = b"t"

_decode_session = msgspec.msgpack.Decoder(SessionRow).decode
_decode_pin = msgspec.msgpack.Decoder(PinRow).decode


def user_key(user: str) -> bytes:
    """A user's entry among the counters: sessions, pinned bytes."""
    return b"u" + user.encode()


def session_of(view: ReadView, session_id: bytes, *, user: str, bucket: str) -> SessionRow:
    """The session's row; `NoSuchSessionError` to all but its user in its bucket."""
    value = view.get(SESSIONS, session_id) if len(session_id) == ID_BYTES else None
    session = None if value is None else _decode_session(value)
    if session is None or session.ended or session.user != user or session.bucket != bucket:
        raise NoSuchSessionError("no such session", bucket=bucket)
    return session


def living_session(
    view: ReadView, session_id: bytes, *, user: str, bucket: str, now_boot_ms: int, renewed_until: int = 0
) -> SessionRow:
    """`session_of`, or `SessionExpiredError`. `renewed_until`: what `Renewals` says of it, which the row may not know yet."""
    session = session_of(view, session_id, user=user, bucket=bucket)
    if renewed_until > session.expires_boot_ms:
        session = msgspec.structs.replace(session, expires_boot_ms=renewed_until)
    if now_boot_ms > session.expires_boot_ms:
        late_ms = now_boot_ms - session.expires_boot_ms
        raise SessionExpiredError("the session has expired", bucket=bucket, late_ms=late_ms)
    return session


def pin_of(view: ReadView, pin_id: bytes) -> PinRow | None:
    """A pin's row."""
    value = view.get(PINS, pin_id) if len(pin_id) == ID_BYTES else None
    return None if value is None else _decode_pin(value)


def totals(view: ReadView) -> tuple[int, int]:
    """Sessions and pins of the store."""
    sessions, pins = view.counters(LEASE_USAGE, _TOTAL) or (0, 0)
    return sessions, pins


def expired_sessions(
    view: ReadView, renewed_until: Callable[[bytes], int], *, now_boot_ms: int, after: bytes, count: int
) -> tuple[list[bytes], int | None, bytes | None]:
    """Of the next so many sessions in order of their ids: those whose pins may go, when the first of the others may be due, and
    where to go on. ~1 µs a session."""
    page = list(islice(view.range(SESSIONS, after + b"\0"), count))
    due: list[bytes] = []
    next_ms: int | None = None
    for session in (_decode_session(value) for _, value in page):
        due_ms = max(session.expires_boot_ms, renewed_until(session.id)) + EXPIRY_SLACK_MS
        if session.ended or due_ms <= now_boot_ms:
            due.append(session.id)
        elif next_ms is None or due_ms < next_ms:
            next_ms = due_ms
    return due, next_ms, page[-1][0] if len(page) == count else None


# -- the marker and the heartbeat ------------------------------------------------------------------------------------


def marked_ttl_ms(view: ReadView, *, unknown_ms: int) -> int:
    """The longest TTL of any session that may have been open when the store was last heard of; 0: none was."""
    value = view.get(META, _MARKER)
    return unknown_ms if value == _UNKNOWN else int.from_bytes(value or b"", "big")


def mark_unknown(view: WriteView) -> None:
    """Record that nobody knows who held what: a rebuilt catalog's first start is quiet for the longest TTL there may be."""
    view.put(META, _MARKER, _UNKNOWN, headroom=True)


@dataclass(frozen=True, slots=True)
class MarkSessions:
    """Record durably, before a session is opened, that losing the volatile environment loses leases of up to this long."""

    ttl_ms: int

    def __call__(self, view: WriteView) -> int:
        """Run it; returns what is recorded from now on."""
        ttl_ms = max(self.ttl_ms, marked_ttl_ms(view, unknown_ms=self.ttl_ms))
        view.put(META, _MARKER, number_key(ttl_ms), headroom=True)
        return ttl_ms


def unmark_sessions(view: WriteView) -> bool:
    """Take `MarkSessions` back where no session is left; whether it is taken back."""
    if any(True for _ in view.range(SESSIONS)):
        return False
    view.delete(META, _MARKER)
    return True


@dataclass(frozen=True, slots=True)
class NoteAlive:
    """`Leases.note_alive` as a change."""

    now_boot_ms: int

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        view.put(LEASE_META, _ALIVE, number_key(self.now_boot_ms), headroom=True)


@dataclass(frozen=True, slots=True)
class Resume:
    """Extend all sessions by the time since the last heartbeat, by a TTL at most, and beat: holders could not renew meanwhile.
    Record until when it is quiet (0: it is not). Where the clock is behind the heartbeat (another time namespace, a machine that
    was moved), sessions have left what they had left then. `renewed`: what `Renewals` has recorded beside the rows."""

    now_boot_ms: int
    quiet_until_boot_ms: int
    renewed: Mapping[bytes, int]

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        alive = view.get(LEASE_META, _ALIVE)
        away_ms = 0 if alive is None else self.now_boot_ms - int.from_bytes(alive, "big")
        for session in [_decode_session(value) for _, value in view.range(SESSIONS)]:
            until = max(session.expires_boot_ms, self.renewed.get(session.id, 0))
            expires = max(0, until + min(away_ms, session.ttl_ms))
            _put_session(view, msgspec.structs.replace(session, expires_boot_ms=expires))
        view.put(LEASE_META, _QUIET, number_key(self.quiet_until_boot_ms), headroom=True)
        view.put(LEASE_META, _ALIVE, number_key(self.now_boot_ms), headroom=True)


def quiet_until_ms(view: ReadView) -> int | None:
    """Until when a start that found lease state lost keeps quiet; None: no start has looked yet."""
    value = view.get(LEASE_META, _QUIET)
    return None if value is None else int.from_bytes(value, "big")


# -- sessions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSession:
    """`Leases.open_session` as a change."""

    session: SessionRow
    limits: LeaseLimits

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        session = self.session
        require_root(view, session.bucket)
        held = (view.counters(LEASE_USAGE, user_key(session.user)) or (0, 0))[0]
        if held >= self.limits.sessions_per_user:
            raise PinLimitExceededError("the user has too many sessions", sessions=held)
        view.put(SESSIONS, session.id, encode_row(session))
        view.add(LEASE_USAGE, user_key(session.user), (1, 0))
        view.add(LEASE_USAGE, _TOTAL, (1, 0))


@dataclass(frozen=True, slots=True)
class RenewSession:
    """`Leases.renew` as a change, for what releases pins or waits its turn. ~15 µs, and 0.5 µs a pin."""

    session_id: bytes
    user: str
    bucket: str
    as_of: int
    pins: int
    pins_digest: bytes
    release: Sequence[bytes]
    now_boot_ms: int
    renewed_until: int

    def __call__(self, view: WriteView) -> Renewal:
        """Run it."""
        now = self.now_boot_ms
        session = living_session(
            view,
            self.session_id,
            user=self.user,
            bucket=self.bucket,
            now_boot_ms=now,
            renewed_until=self.renewed_until,
        )
        session = _without(view, session, _own_pins(view, session, self.release))
        # Never sooner than before: a start may have extended it further than this renewal would (`Resume`).
        until = max(session.expires_boot_ms, now + session.ttl_ms)
        _put_session(view, msgspec.structs.replace(session, expires_boot_ms=until))
        same = holds_pins(view, session, as_of=self.as_of, pins=self.pins, pins_digest=self.pins_digest)
        return Renewal(session.ttl_ms, reclaim=not same)


def holds_pins(view: ReadView, session: SessionRow, *, as_of: int, pins: int, pins_digest: bytes) -> bool:
    """Whether the pins granted up to `as_of` are so many, and have this digest."""
    entries = view.range(PINS_BY_SESSION, session.id, session.id + _BEHIND_IDS) if session.pins else ()
    held = [entry[ID_BYTES:] for entry, grant in entries if int.from_bytes(grant, "big") <= as_of]
    return len(held) == pins and digest_of_pins(held) == pins_digest


def digest_of_pins(sorted_ids: Iterable[bytes]) -> bytes:
    """BLAKE3 over the sorted raw pin ids (`kv-api` §5)."""
    return blake3(b"".join(sorted_ids)).digest()


@dataclass(frozen=True, slots=True)
class EndSession:
    """One step of removing a session with its pins: at most ~256 targets. `expired_at`: only if it may expire by then."""

    session_id: bytes
    expired_at: int | None = None

    def __call__(self, view: WriteView) -> bool:
        """Run it; whether nothing is left to do."""
        value = view.get(SESSIONS, self.session_id)
        if value is None:
            return True
        session = _decode_session(value)
        is_over = session.ended or self.expired_at is None
        if not is_over and session.expires_boot_ms + EXPIRY_SLACK_MS > (self.expired_at or 0):
            return True
        pins: list[PinRow] = []
        targets = 0
        for entry, _ in view.range(PINS_BY_SESSION, session.id, session.id + _BEHIND_IDS):
            pin = pin_of(view, entry[ID_BYTES:])
            if pin is not None:
                pins.append(pin)
                targets += len(pin.targets)
            if targets >= _STEP_TARGETS:
                break
        session = _without(view, session, pins)
        if session.pins:
            _put_session(view, msgspec.structs.replace(session, ended=True))
            return False
        view.delete(SESSIONS, session.id)
        view.add(LEASE_USAGE, user_key(session.user), (-1, 0))
        view.add(LEASE_USAGE, _TOTAL, (-1, 0))
        return True


# -- pins ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """Pins that are there from now on: whether each asked-for one is, the grant's number, and until when they hold."""

    live: tuple[bool, ...]
    grant: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class GrantPins:
    """Release pins of a session and add others, in one step. A pin is asked for by its new id and its chunks' keys.

    `found`: the rows that a match found under all keys, in order. One that is not live any more, or another's, and the answer
    is None and nothing is changed: match again. Without it a pin lands on whatever row is live, or on none.
    """

    objects: ObjectRows
    limits: LeaseLimits
    session_id: bytes
    user: str
    bucket: str
    pins: Sequence[tuple[bytes, Sequence[str]]]
    release: Sequence[bytes]
    now_boot_ms: int
    renewed_until: int
    found: Sequence[ChunkHead] | None = None

    def __call__(self, view: WriteView) -> Granted | None:
        """Run it."""
        now = self.now_boot_ms
        session = living_session(
            view,
            self.session_id,
            user=self.user,
            bucket=self.bucket,
            now_boot_ms=now,
            renewed_until=self.renewed_until,
        )
        root = root_of(view, self.bucket)
        keys = [key for _, keys in self.pins for key in keys]
        heads = [None if root is None else live_head(view, self.objects, root, key) for key in keys]
        if self.found is not None:
            for head, found in zip(heads, self.found, strict=True):
                if head is None or not is_same_chunk(head, found):
                    return None
        grant = session.grant + 1
        rows = _new_rows(session, self.pins, heads, grant=grant)
        released = _own_pins(view, session, self.release)
        self._check(view, session, rows, released)
        for row in rows:
            _put_pin(view, row)
        if rows:
            pinned_bytes = sum(row.chain_bytes for row in rows)
            session = msgspec.structs.replace(
                session,
                grant=grant,
                pins=session.pins + len(rows),
                targets=session.targets + sum(len(row.targets) for row in rows),
                pinned_bytes=session.pinned_bytes + pinned_bytes,
            )
            view.add(LEASE_USAGE, user_key(session.user), (0, pinned_bytes))
            view.add(LEASE_USAGE, _TOTAL, (0, len(rows)))
        session = _without(view, session, released)
        _put_session(view, session)
        granted = {row.id for row in rows}
        live = tuple(pin_id in granted for pin_id, _ in self.pins)
        return Granted(live, session.grant, session.expires_boot_ms - now)

    def _check(self, view: ReadView, session: SessionRow, rows: Sequence[PinRow], released: Sequence[PinRow]) -> None:
        limits = self.limits
        targets = session.targets + _targets(rows) - _targets(released)
        if rows and targets > limits.pins_per_session:
            raise PinLimitExceededError("the session has too many pins", pins=targets, limit=limits.pins_per_session)
        if not rows or limits.pinned_bytes_per_user is None:
            return
        held = (view.counters(LEASE_USAGE, user_key(session.user)) or (0, 0))[1]
        held += sum(row.chain_bytes for row in rows) - sum(row.chain_bytes for row in released)
        if held > limits.pinned_bytes_per_user:
            limit = limits.pinned_bytes_per_user
            raise PinLimitExceededError("the user has too many bytes pinned", pinned_bytes=held, limit=limit)


def _new_rows(
    session: SessionRow, pins: Sequence[tuple[bytes, Sequence[str]]], heads: Sequence[ChunkHead | None], *, grant: int
) -> list[PinRow]:
    rows: list[PinRow] = []
    following = iter(heads)
    for pin_id, keys in pins:
        live = [head for head in islice(following, len(keys)) if head is not None]
        if len(live) == len(keys):
            targets = tuple(target_of(head) for head in live)
            chain_bytes = sum(protected_bytes(head) for head in live)
            rows.append(PinRow(pin_id, session.id, session.bucket, session.user, targets, grant, chain_bytes))
    return rows


def target_of(row: ChunkHead | ObjectRow) -> PinTarget:
    """What a pin on a row remembers of it. An object without bytes has no blob."""
    return PinTarget(row.key, row.blobs[0].blob_id if row.blobs else b"")


def protected_bytes(row: ChunkHead | ObjectRow) -> int:
    """Plain bytes of a row and its ancestors."""
    return max(row.size_bytes, row.chain_bytes)


def _targets(pins: Sequence[PinRow]) -> int:
    return sum(len(pin.targets) for pin in pins)


def _own_pins(view: ReadView, session: SessionRow, pin_ids: Sequence[bytes]) -> list[PinRow]:
    """The rows of those pins that are the session's."""
    pins = [pin_of(view, pin_id) for pin_id in dict.fromkeys(pin_ids)]
    return [pin for pin in pins if pin is not None and pin.session_id == session.id]


def _put_session(view: WriteView, session: SessionRow) -> None:
    view.put(SESSIONS, session.id, encode_row(session), headroom=True)


def _put_pin(view: WriteView, pin: PinRow) -> None:
    """The first put may raise `StoreFullError`, before anything is changed; so many more fit below the watermark."""
    view.put(PINS, pin.id, encode_row(pin))
    view.put(PINS_BY_SESSION, pin.session_id + pin.id, number_key(pin.grant))
    for target in pin.targets:
        view.put(PINS_BY_KEY, pins_by_key(pin.bucket, target.key) + pin.id, b"")
        view.put(PINS_BY_BLOB, target.blob_id + pin.id, b"")


def _without(view: WriteView, session: SessionRow, pins: Sequence[PinRow]) -> SessionRow:
    """Remove pins of a session; returns its row without them, which the caller stores."""
    if not pins:
        return session
    for pin in pins:
        for target in pin.targets:
            view.delete(PINS_BY_KEY, pins_by_key(pin.bucket, target.key) + pin.id)
            view.delete(PINS_BY_BLOB, target.blob_id + pin.id)
        view.delete(PINS_BY_SESSION, session.id + pin.id)
        view.delete(PINS, pin.id)
    pinned_bytes = sum(pin.chain_bytes for pin in pins)
    view.add(LEASE_USAGE, user_key(session.user), (0, -pinned_bytes))
    view.add(LEASE_USAGE, _TOTAL, (0, -len(pins)))
    return msgspec.structs.replace(
        session,
        pins=session.pins - len(pins),
        targets=session.targets - _targets(pins),
        pinned_bytes=session.pinned_bytes - pinned_bytes,
    )
