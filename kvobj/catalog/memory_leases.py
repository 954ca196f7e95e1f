"""The reference driver of sessions, pins and match: dicts, every verb read off the protocol's text, a match that walks.

Works over callables of the memory catalog, in whose steps it runs: nothing interleaves. `holds_row` and `holds_blob` are what that
catalog's guards ask. Keeps nothing over a restart; `lose_power` does what the loss of the volatile environment does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final

import msgspec

from kvobj.catalog.chunk_heads import matched_chunk
from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.lease_changes import EXPIRY_SLACK_MS, ID_BYTES, digest_of_pins, protected_bytes, target_of
from kvobj.catalog.lease_protocol import LeaseLimits, LeaseUsage, MatchResult, PinsResult, Renewal, TailPin
from kvobj.catalog.lease_rows import PinRow, SessionRow
from kvobj.catalog.rows import ObjectRow, is_same_namespace
from kvobj.errors import (
    BatchTooLargeError,
    NoSuchBucketError,
    NoSuchSessionError,
    PinLimitExceededError,
    SessionExpiredError,
)

_QUIET_SLACK_MS: Final = 1000

RowOf = Callable[[str, str], ObjectRow | None]
"""Gives the row of (bucket, key)."""


class MemoryLeases:
    """See the module's text and `lease_protocol.Leases`. `live` gives live rows, `stored` hidden ones too."""

    def __init__(
        self,
        *,
        has_bucket: Callable[[str], bool],
        live: RowOf,
        stored: RowOf,
        forget_marks: Callable[[Sequence[tuple[str, str]]], None],
        limits: LeaseLimits,
    ) -> None:
        self.quiet = False
        self._has_bucket = has_bucket
        self._live = live
        self._stored = stored
        self._forget_marks = forget_marks
        self._limits = limits
        self._sessions: dict[bytes, SessionRow] = {}
        self._pins: dict[bytes, PinRow] = {}
        self._epochs = count(1)
        self._longest_ttl_ms = 0
        self._quiet_until_boot_ms = 0

    # -- what guards ask -----------------------------------------------------------------------------------------

    def holds_row(self, bucket: str, key: str) -> bool:
        """See `PinGuard.holds_row`."""
        pinned = ((pin.bucket, target.key) for pin in self._pins.values() for target in pin.targets)
        return self.quiet or (bucket, key) in pinned

    def holds_blob(self, blob_id: bytes) -> bool:
        """See `PinGuard.holds_blob`."""
        pinned = (target for pin in self._pins.values() for target in pin.targets)
        return self.quiet or any(target.blob_id == blob_id for target in pinned)

    def lose_power(self, *, now_boot_ms: int) -> None:
        """Lose sessions and pins; quiet time begins if a session may have been open."""
        self._sessions.clear()
        self._pins.clear()
        if self._longest_ttl_ms:
            self.quiet = True
            self._quiet_until_boot_ms = now_boot_ms + self._longest_ttl_ms + _QUIET_SLACK_MS

    # -- sessions ------------------------------------------------------------------------------------------------

    async def open_session(self, *, user: str, bucket: str, holder: str, ttl_ms: int, now_boot_ms: int) -> SessionRow:
        """See `Leases.open_session`."""
        self._require_bucket(bucket)
        if sum(each.user == user for each in self._sessions.values()) >= self._limits.sessions_per_user:
            raise PinLimitExceededError("the user has too many sessions")
        ttl_ms = min(max(ttl_ms, self._limits.ttl_ms_min), self._limits.ttl_ms_max)
        session = SessionRow(
            id=secrets.token_bytes(ID_BYTES),
            epoch=next(self._epochs),
            user=user,
            bucket=bucket,
            holder=holder,
            ttl_ms=ttl_ms,
            expires_boot_ms=now_boot_ms + ttl_ms,
        )
        self._sessions[session.id] = session
        self._longest_ttl_ms = max(self._longest_ttl_ms, ttl_ms)
        return session

    async def renew(
        self,
        session_id: bytes,
        *,
        user: str,
        bucket: str,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: Sequence[bytes] = (),
        now_boot_ms: int,
    ) -> Renewal:
        """See `Leases.renew`."""
        session = self._living(session_id, user, bucket, now_boot_ms)
        self._release(session, release)
        return self.renew_at_once(
            session_id,
            user=user,
            bucket=bucket,
            as_of=as_of,
            pins=pins,
            pins_digest=pins_digest,
            now_boot_ms=now_boot_ms,
        )

    def renew_at_once(
        self,
        session_id: bytes,
        *,
        user: str,
        bucket: str,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        now_boot_ms: int,
    ) -> Renewal:
        """See `Leases.renew_at_once`. Nothing is ever waited for here."""
        session = self._living(session_id, user, bucket, now_boot_ms)
        self._change(session, expires_boot_ms=max(session.expires_boot_ms, now_boot_ms + session.ttl_ms))
        held = sorted(pin.id for pin in self._pins_of(session) if pin.grant <= as_of)
        same = len(held) == pins and digest_of_pins(held) == pins_digest
        return Renewal(session.ttl_ms, reclaim=not same)

    async def close_session(self, session_id: bytes, *, user: str, bucket: str) -> None:
        """See `Leases.close_session`."""
        self._end(self._session(session_id, user, bucket))

    async def expire(self, *, now_boot_ms: int, limit: int = 1000) -> int:
        """See `Leases.expire`."""
        over = [each for each in self._sessions.values() if each.expires_boot_ms + EXPIRY_SLACK_MS <= now_boot_ms]
        for session in over[:limit]:
            self._end(session)
        return len(over[:limit])

    async def note_alive(self, *, now_boot_ms: int) -> None:
        """See `Leases.note_alive`. There is no restart here."""

    async def stopped_cleanly(self) -> None:
        """See `Leases.stopped_cleanly`."""
        if not self._sessions and not self.quiet:
            self._longest_ttl_ms = 0

    def end_quiet(self, *, now_boot_ms: int) -> bool:
        """See `Leases.end_quiet`."""
        self.quiet = self.quiet and now_boot_ms < self._quiet_until_boot_ms
        return not self.quiet

    def usage(self) -> LeaseUsage:
        """See `Leases.usage`."""
        return LeaseUsage(len(self._sessions), len(self._pins), self.quiet)

    # -- match and pins ------------------------------------------------------------------------------------------

    async def match(
        self,
        bucket: str,
        chunks: ChunkList,
        *,
        namespace: str | None = None,
        rows: bool = False,
        pin_for: bytes | None = None,
        user: str = "",
        now_boot_ms: int,
    ) -> MatchResult:
        """See `Leases.match`."""
        session = None if pin_for is None else self._living(pin_for, user, bucket, now_boot_ms)
        self._require_bucket(bucket)
        run: list[ObjectRow] = []
        for index in range(len(chunks)):
            row = self._live(bucket, chunks.key(index))
            before = run[-1].key if run else ""
            if row is None or row.parent not in {None, before}:
                break
            if namespace is not None and not is_same_namespace(row.namespace, namespace):
                break
            run.append(row)
        targets = [row for row, after in zip(run, [*run[1:], None], strict=False) if not after or not after.parent]
        pin, grant, deadline_ms = None, 0, 0
        if session is not None and targets:
            self._check(session, targets, ())
            session = self._change(session, grant=session.grant + 1)
            pin = self._pin(session, targets)
            grant, deadline_ms = session.grant, session.expires_boot_ms - now_boot_ms
        self._forget_marks([(bucket, row.key) for row in targets])
        return MatchResult(
            matched=len(run),
            tokens=sum(row.tokens for row in run),
            size_bytes=sum(row.size_bytes for row in run),
            tail=run[-1] if run else None,
            rows=tuple(matched_chunk(row) for row in run) if rows else (),
            pin=pin,
            grant=grant,
            deadline_ms=deadline_ms,
        )

    async def pin_tails(
        self,
        session_id: bytes,
        tails: Sequence[str],
        *,
        release: Sequence[bytes] = (),
        user: str,
        bucket: str,
        now_boot_ms: int,
    ) -> PinsResult:
        """See `Leases.pin_tails`."""
        if max(len(tails), len(release)) > self._limits.pins_per_session:
            raise BatchTooLargeError("too many pins in one call", limit=self._limits.pins_per_session)
        session = self._living(session_id, user, bucket, now_boot_ms)
        found = [self._live(bucket, tail) for tail in tails]
        self._check(session, [row for row in found if row is not None], release)
        if any(found):
            session = self._change(session, grant=session.grant + 1)
        pins = [None if row is None else self._pin(session, [row]) for row in found]
        self._release(session, release)
        self._forget_marks([(bucket, row.key) for row in found if row is not None])
        answers = tuple(TailPin(tail, pin) for tail, pin in zip(tails, pins, strict=True))
        return PinsResult(answers, session.grant, session.expires_boot_ms - now_boot_ms)

    async def pin(self, pin_id: bytes, *, user: str, bucket: str) -> PinRow | None:
        """See `Leases.pin`."""
        pin = self._pins.get(pin_id)
        return pin if pin is not None and (pin.user, pin.bucket) == (user, bucket) else None

    async def covers(self, pin: PinRow, key: str) -> bool:
        """See `Leases.covers`."""
        for target in pin.targets:
            at: str | None = target.key
            while at:
                if at == key:
                    return True
                row = self._stored(pin.bucket, at)
                at = None if row is None else row.parent
        return False

    # -- what the verbs are made of --------------------------------------------------------------------------------

    def _session(self, session_id: bytes, user: str, bucket: str) -> SessionRow:
        session = self._sessions.get(session_id)
        if session is None or (session.user, session.bucket) != (user, bucket):
            raise NoSuchSessionError("no such session", bucket=bucket)
        return session

    def _living(self, session_id: bytes, user: str, bucket: str, now_boot_ms: int) -> SessionRow:
        session = self._session(session_id, user, bucket)
        if now_boot_ms > session.expires_boot_ms:
            raise SessionExpiredError("the session has expired", bucket=bucket)
        return session

    def _change(self, session: SessionRow, **fields: int) -> SessionRow:
        self._sessions[session.id] = msgspec.structs.replace(session, **fields)
        return self._sessions[session.id]

    def _end(self, session: SessionRow) -> None:
        self._release(session, [pin.id for pin in self._pins_of(session)])
        del self._sessions[session.id]

    def _pins_of(self, session: SessionRow) -> list[PinRow]:
        return [pin for pin in self._pins.values() if pin.session_id == session.id]

    def _pin(self, session: SessionRow, rows: Sequence[ObjectRow]) -> bytes:
        targets = tuple(target_of(row) for row in rows)
        pin_id = secrets.token_bytes(ID_BYTES)
        chain_bytes = sum(protected_bytes(row) for row in rows)
        pin = PinRow(pin_id, session.id, session.bucket, session.user, targets, session.grant, chain_bytes)
        self._pins[pin_id] = pin
        return pin_id

    def _release(self, session: SessionRow, pin_ids: Iterable[bytes]) -> None:
        for pin_id in pin_ids:
            if pin_id in self._pins and self._pins[pin_id].session_id == session.id:
                del self._pins[pin_id]

    def _check(self, session: SessionRow, rows: Sequence[ObjectRow], release: Sequence[bytes]) -> None:
        """`PinLimitExceededError` where these rows are too many beside what would be left."""
        kept = [pin for pin in self._pins.values() if pin.session_id != session.id or pin.id not in release]
        targets = sum(len(pin.targets) for pin in kept if pin.session_id == session.id)
        if rows and targets + len(rows) > self._limits.pins_per_session:
            raise PinLimitExceededError("the session has too many pins")
        limit = self._limits.pinned_bytes_per_user
        pinned = sum(pin.chain_bytes for pin in kept if pin.user == session.user)
        if rows and limit is not None and pinned + sum(protected_bytes(row) for row in rows) > limit:
            raise PinLimitExceededError("the user has too many bytes pinned")

    def _require_bucket(self, bucket: str) -> None:
        if not self._has_bucket(bucket):
            raise NoSuchBucketError("no such bucket", bucket=bucket)
