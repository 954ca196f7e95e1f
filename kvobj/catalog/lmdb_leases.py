"""The LMDB catalog's sessions, pins and match.

All of it runs on the event loop. A search of a chain and the pin on its tail are one synchronous step, unless a removal of the tail
is in flight in the durable writer; then the pin is checked again behind it, and where its row is gone the search starts over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvobj.catalog.catalog_rows import require_root, root_of
from kvobj.catalog.chunk_heads import ChunkHead, stored_head
from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.flight_keys import bucket_key, reliance_key, removal_key, session_key
from kvobj.catalog.followed import followed, on_success
from kvobj.catalog.lease_changes import (
    EXPIRY_SLACK_MS,
    ID_BYTES,
    EndSession,
    Granted,
    GrantPins,
    MarkSessions,
    NoteAlive,
    OpenSession,
    RenewSession,
    Resume,
    expired_sessions,
    holds_pins,
    living_session,
    marked_ttl_ms,
    pin_of,
    quiet_until_ms,
    session_of,
    totals,
    unmark_sessions,
)
from kvobj.catalog.lease_protocol import LeaseLimits, LeaseUsage, MatchResult, PinsResult, Renewal, TailPin
from kvobj.catalog.lease_rows import PinGuard, PinRow, SessionRow
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.renewals import Renewals
from kvobj.catalog.run_reader import RunReader
from kvobj.database import Database, ReadView
from kvobj.errors import BatchTooLargeError, BusyError, NoSuchSessionError

_INLINE_PINS: Final = 64
"""More at once are granted on the writer's thread."""
_SESSIONS_SLICE: Final = 256
_ANCESTORS_SLICE: Final = 128
_ATTEMPTS: Final = 16
_QUIET_SLACK_MS: Final = 1000
_EXPIRY_BATCH: Final = 16
_LOOK_AGAIN_MS: Final = 20_000
"""Sessions are looked at after so long at the latest, whatever is known of when the first is due."""


class _Agreed(NamedTuple):
    """What a holder said of its pins when it was right. Holds until a change of the session's pins is begun."""

    statement: tuple[str, str, int, int, bytes]
    ttl_ms: int
    expires_boot_ms: int


class LmdbLeases:
    """See the module's text and `lease_protocol.Leases`. Used on the event loop that the database was opened on.

    `forget_marks` takes policy's marks off (bucket, key) pairs; `is_claiming` says whether a claim of a (bucket, key) is on its
    way. `open` comes first.
    """

    def __init__(  # noqa: PLR0917 - parts of the catalog that makes it
        self,
        database: Database,
        objects: ObjectRows,
        guard: PinGuard,
        allocate: Callable[[], int],
        forget_marks: Callable[[Sequence[tuple[str, str]]], None],
        is_claiming: Callable[[str, str], bool],
        limits: LeaseLimits,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._database = database
        self._objects = objects
        self._guard = guard
        self._allocate = allocate
        self._forget_marks = forget_marks
        self._runs = RunReader(database, objects, forget_marks, is_claiming)
        self._limits = limits
        self._random_bytes = random_bytes
        self._renewals: Renewals
        self._agreed: dict[bytes, _Agreed] = {}
        self._none_due_before_ms = 0
        self._marked_ttl_ms = 0
        self._quiet_until_boot_ms = 0

    async def open(self, *, now_boot_ms: int) -> None:
        """Take up what an earlier start left. Before anything else of the catalog is used.

        The volatile environment is still there: sessions are extended by the time away. It is lost and sessions may have been
        open: quiet time begins, as long as the longest TTL among them and a second. A start that dies in it leaves the rest of
        it to the next.
        """
        database = self._database
        with database.read() as view:
            self._marked_ttl_ms = marked_ttl_ms(view, unknown_ms=self._limits.ttl_ms_max)
            until_ms = quiet_until_ms(view)
        whole_ms = now_boot_ms + self._marked_ttl_ms + _QUIET_SLACK_MS if self._marked_ttl_ms else 0
        # None: the first start with this environment. Further off than quiet time is long: the clock was put back.
        until_ms = whole_ms if until_ms is None else min(until_ms, whole_ms)
        self._quiet_until_boot_ms = until_ms
        self._guard.quiet = now_boot_ms < until_ms
        self._renewals = renewals = Renewals(database.directories[1])
        database.write_volatile(Resume(now_boot_ms, until_ms, renewals.recorded()))
        renewals.clear()

    def close(self) -> None:
        """After `open`, and after the last of all other calls. Idempotent."""
        self._renewals.close()

    # -- sessions ------------------------------------------------------------------------------------------------

    async def open_session(self, *, user: str, bucket: str, holder: str, ttl_ms: int, now_boot_ms: int) -> SessionRow:
        """See `Leases.open_session`."""
        ttl_ms = min(max(ttl_ms, self._limits.ttl_ms_min), self._limits.ttl_ms_max)
        if ttl_ms > self._marked_ttl_ms:
            with self._database.read() as view:
                require_root(view, bucket)
            await followed(self._database.submit(MarkSessions(ttl_ms)), on_success(self._note_marked))
        session = SessionRow(
            id=self._random_bytes(ID_BYTES),
            epoch=self._allocate(),
            user=user,
            bucket=bucket,
            holder=holder,
            ttl_ms=ttl_ms,
            expires_boot_ms=now_boot_ms + ttl_ms,
        )
        keys = [session_key(session.id)]
        try:
            await self._database.write_fast(OpenSession(session, self._limits), keys, shared=[bucket_key(bucket)])
        finally:
            due_ms = session.expires_boot_ms + EXPIRY_SLACK_MS
            self._none_due_before_ms = min(self._none_due_before_ms, due_ms)
        return session

    def _note_marked(self, ttl_ms: int) -> None:
        self._marked_ttl_ms = max(self._marked_ttl_ms, ttl_ms)

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
        """See `Leases.renew`. Nothing is written to the database where nothing is released."""
        if not release:
            renewal = self.renew_at_once(
                session_id,
                user=user,
                bucket=bucket,
                as_of=as_of,
                pins=pins,
                pins_digest=pins_digest,
                now_boot_ms=now_boot_ms,
            )
            if renewal is not None:
                return renewal
        until = self._changing(session_id)
        change = RenewSession(session_id, user, bucket, as_of, pins, pins_digest, release, now_boot_ms, until)
        return await self._database.write_fast(change, [session_key(session_id)])

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
    ) -> Renewal | None:
        """See `Leases.renew_at_once`."""
        if self._database.is_in_flight([session_key(session_id)]):
            return None
        return self._extend(session_id, (user, bucket, as_of, pins, pins_digest), now_boot_ms)

    def _extend(
        self, session_id: bytes, statement: tuple[str, str, int, int, bytes], now_boot_ms: int
    ) -> Renewal | None:
        """Renew a session of which no change is in flight, by its slot of `Renewals`; None: there is no room for one."""
        until = self._renewals.until(session_id)
        known = self._agreed.get(session_id)
        is_agreed = known is not None and known.statement == statement
        if known is None or not is_agreed or now_boot_ms > max(until, known.expires_boot_ms):
            user, bucket, as_of, pins, pins_digest = statement
            with self._database.read() as view:
                session = living_session(
                    view, session_id, user=user, bucket=bucket, now_boot_ms=now_boot_ms, renewed_until=until
                )
                is_agreed = holds_pins(view, session, as_of=as_of, pins=pins, pins_digest=pins_digest)
            known = _Agreed(statement, session.ttl_ms, session.expires_boot_ms)
            if is_agreed:
                self._agreed[session_id] = known
        # One that waited may come behind a later one of the same session, whose answer the holder has.
        if not self._renewals.extend(session_id, max(until, now_boot_ms + known.ttl_ms)):
            return None
        return Renewal(known.ttl_ms, reclaim=not is_agreed)

    def _changing(self, session_id: bytes) -> int:
        """Call it before a change of a session's pins; until when the session was renewed, for the change to know."""
        self._agreed.pop(session_id, None)
        return self._renewals.until(session_id)

    async def close_session(self, session_id: bytes, *, user: str, bucket: str) -> None:
        """See `Leases.close_session`. A crash in the middle leaves it ended, for `expire` to finish."""
        with self._database.read() as view:
            session_of(view, session_id, user=user, bucket=bucket)
        await self._end(EndSession(session_id))

    async def _end(self, step: EndSession) -> None:
        self._agreed.pop(step.session_id, None)
        self._renewals.forget(step.session_id)
        keys = [session_key(step.session_id)]
        self._none_due_before_ms = 0  # who is cancelled leaves the rest to `expire`
        is_done = await self._database.write_fast(step, keys)
        while not is_done:
            await asyncio.sleep(0)  # the next step is on this side: others get their turn in between
            is_done = await self._database.write_fast(step, keys)

    async def expire(self, *, now_boot_ms: int, limit: int = 1000) -> int:
        """See `Leases.expire`. Sessions are only looked at when one may be due: they are renewed, and then none is for long."""
        if now_boot_ms < self._none_due_before_ms:
            return 0
        due: list[bytes] = []
        # What is opened or ended meanwhile makes it sooner.
        self._none_due_before_ms = next_ms = now_boot_ms + _LOOK_AGAIN_MS
        after: bytes | None = b""
        while after is not None and len(due) < limit:
            with self._database.read() as view:
                found, first_ms, after = expired_sessions(
                    view, self._renewals.until, now_boot_ms=now_boot_ms, after=after, count=_SESSIONS_SLICE
                )
            due += found
            next_ms = next_ms if first_ms is None else min(next_ms, first_ms)
            await asyncio.sleep(0)
        self._none_due_before_ms = 0 if due else min(self._none_due_before_ms, next_ms)
        ended = 0
        for session_id in due[:limit]:
            if self._renewals.until(session_id) + EXPIRY_SLACK_MS > now_boot_ms:
                continue  # renewed since it was looked at
            await self._end(EndSession(session_id, expired_at=now_boot_ms))
            ended += 1
            if ended % _EXPIRY_BATCH == 0:
                await asyncio.sleep(0)
        return ended

    async def note_alive(self, *, now_boot_ms: int) -> None:
        """See `Leases.note_alive`."""
        self._database.write_volatile(NoteAlive(now_boot_ms))

    async def stopped_cleanly(self) -> None:
        """See `Leases.stopped_cleanly`. In quiet time the mark stays: holders of before may be there still."""
        if self._guard.quiet or not self._marked_ttl_ms:
            return
        before, self._marked_ttl_ms = self._marked_ttl_ms, 0

        def over(change: asyncio.Future[bool]) -> None:
            if change.cancelled() or change.exception() is not None or not change.result():
                self._note_marked(before)

        await followed(self._database.submit(unmark_sessions), over)

    def end_quiet(self, *, now_boot_ms: int) -> bool:
        """See `Leases.end_quiet`."""
        if self._guard.quiet and now_boot_ms >= self._quiet_until_boot_ms:
            self._guard.quiet = False
        return not self._guard.quiet

    def usage(self) -> LeaseUsage:
        """See `Leases.usage`."""
        with self._database.read() as view:
            sessions, pins = totals(view)
        return LeaseUsage(sessions, pins, self._guard.quiet)

    # -- match ---------------------------------------------------------------------------------------------------

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
        """See `Leases.match`. `BusyError` where the tail was gone time and again when it was to be pinned."""
        if pin_for is not None:
            until = self._renewals.until(pin_for)
            with self._database.read() as view:
                living_session(view, pin_for, user=user, bucket=bucket, now_boot_ms=now_boot_ms, renewed_until=until)
        one_by_one = False
        for _ in range(_ATTEMPTS):
            with ExitStack() as views:
                search = await self._runs.search(views, bucket, chunks, namespace=namespace, one_by_one=one_by_one)
                run, pin, granted = search.run, None, None
                if pin_for is not None and run.targets:
                    pin = self._random_bytes(ID_BYTES)
                    pins = [(pin, [head.key for head in run.targets])]
                    granted = await self._grant(
                        pin_for, pins, (), user=user, bucket=bucket, now_boot_ms=now_boot_ms, found=run.targets
                    )
                    if granted is None:
                        continue
                self._forget_marks([(bucket, head.key) for head in run.targets])
                found = await self._runs.rows(views, bucket, chunks, search) if rows else ()
            if found is None:
                # A loose chunk went meanwhile, or a name in the list only begins like the one that is in the sum.
                one_by_one = True
                if pin_for is not None and pin is not None:
                    await self._grant(pin_for, (), [pin], user=user, bucket=bucket, now_boot_ms=now_boot_ms)
                continue
            grant, deadline_ms = (0, 0) if granted is None else (granted.grant, granted.deadline_ms)
            return MatchResult(run.matched, run.tokens, run.size_bytes, search.tail, found, pin, grant, deadline_ms)
        raise BusyError("the chain changed too often while it was matched", bucket=bucket)

    # -- pins ----------------------------------------------------------------------------------------------------

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
        """See `Leases.pin_tails`. `BatchTooLargeError` above the pins of a session."""
        if max(len(tails), len(release)) > self._limits.pins_per_session:
            raise BatchTooLargeError("too many pins in one call", limit=self._limits.pins_per_session)
        pins = [(self._random_bytes(ID_BYTES), [tail]) for tail in tails]
        granted = await self._grant(session_id, pins, release, user=user, bucket=bucket, now_boot_ms=now_boot_ms)
        if granted is None:
            raise AssertionError("only a match that was overtaken is refused")
        live = [tail for tail, is_live in zip(tails, granted.live, strict=True) if is_live]
        self._forget_marks([(bucket, tail) for tail in live])
        answers = (
            TailPin(keys[0], pin_id if is_live else None)
            for (pin_id, keys), is_live in zip(pins, granted.live, strict=True)
        )
        return PinsResult(tuple(answers), granted.grant, granted.deadline_ms)

    async def _grant(
        self,
        session_id: bytes,
        pins: Sequence[tuple[bytes, Sequence[str]]],
        release: Sequence[bytes],
        *,
        user: str,
        bucket: str,
        now_boot_ms: int,
        found: Sequence[ChunkHead] | None = None,
    ) -> Granted | None:
        """`GrantPins`, behind whatever is in flight for its session and targets; many at once on the writer's thread."""
        until = self._changing(session_id)
        change = GrantPins(
            self._objects, self._limits, session_id, user, bucket, pins, release, now_boot_ms, until, found
        )
        keys = {reliance_key(bucket, key) for _, targets in pins for key in targets}
        keys.add(session_key(session_id))
        if len(keys) + len(release) > _INLINE_PINS:
            return await self._database.write(change, keys, synced=False)
        removals = [removal_key(bucket, key) for _, targets in pins for key in targets]
        return await self._database.write_fast(change, keys, shared=removals)

    async def pin(self, pin_id: bytes, *, user: str, bucket: str) -> PinRow | None:
        """See `Leases.pin`."""
        with self._database.read() as view:
            pin = pin_of(view, pin_id)
            if pin is None or pin.user != user or pin.bucket != bucket:
                return None
            try:
                session_of(view, pin.session_id, user=user, bucket=bucket)
            except NoSuchSessionError:
                return None
        return pin

    async def covers(self, pin: PinRow, key: str) -> bool:
        """See `Leases.covers`. ~4 µs an ancestor between the two."""
        if any(target.key == key for target in pin.targets):
            return True
        with self._database.read() as view:
            root = root_of(view, pin.bucket)
            wanted = None if root is None else stored_head(view, self._objects, root, key)
            if root is None or wanted is None:
                return False
            for target in pin.targets:
                if await self._is_above(view, root, wanted, target.key):
                    return True
        return False

    async def _is_above(self, view: ReadView, root: bytes, wanted: ChunkHead, key: str) -> bool:
        """Whether the row is an ancestor of a key's. Depths fall by one a step, so the walk is no longer than their difference."""
        head = stored_head(view, self._objects, root, key)
        while head is not None and head.parent and head.depth > wanted.depth:
            if head.parent == wanted.key:
                return True
            if head.depth % _ANCESTORS_SLICE == 0:
                await asyncio.sleep(0)
            head = stored_head(view, self._objects, root, head.parent)
        return False
