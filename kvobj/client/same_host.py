"""The same-host path as one client has it: found by itself, kept up by itself, and given up for HTTP wherever it does not serve.

Nothing here raises for what a server or its absence does: the answer is "not here", and the caller uses HTTP. Who may not is asked
again seldom; after an outage it is tried again soon, and less and less often while that lasts.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Final

from kvobj.buffers import address_of
from kvobj.client.call_scope import current_scope
from kvobj.client.forking import forget_in_child
from kvobj.client.kv_values import NewChunk, StoredChunk
from kvobj.client.loans import Bell, Loans, Places
from kvobj.client.opened_ahead import AHEAD_SECONDS, OpenedAhead, Turn
from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.client.same_host_stores import (
    StoreBatch,
    outcome_of,
    prepare_for_more,
    store_in_place,
    store_in_turn,
    store_prepared,
    store_staged,
    take_rooms_for,
)
from kvobj.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    KvobjError,
    NotFoundError,
    UnavailableError,
)
from kvobj.same_host.copying import Piece, copiers
from kvobj.same_host.messages import (
    KEYS_AHEAD,
    KEYS_MAX,
    Extent,
    Open,
    Opened,
    StoredItem,
)

LANES_MAX: Final = 4
"""Connections of one client. One of them is never taken by a commit, so that none holds up an open."""
LENT_SECONDS: Final = 0.25
"""A read that finds all connections in use, of which none comes back for so long, goes over HTTP. Threads that only take turns give
theirs back within milliseconds; who keeps one for longer waits for something itself."""
RENEWALS_A_LEASE: Final = 3
REST_SECONDS: Final = 0.5
REST_SECONDS_MAX: Final = 10.0
HURRIED_SECONDS: Final = 1.0
"""A call that has less time than this may end a connection of a server that is only slow: the rest after it does not double."""
REFUSED_SECONDS: Final = 60.0
"""Who was told no asks again after so long: rights change, and servers do."""
ROOMS_SECONDS: Final = 2.0
"""Who has stored may store more; one that has not by then holds memory that others could use."""
_FLUSH_SECONDS: Final = 0.02
_BEHIND_SECONDS: Final = 0.25
"""A server that did not take all that it was told is told the rest after so long."""

_LATER: Final = (UnavailableError, CapacityError, CorruptionError)
"""What a server that does not answer, has no room or failed (500) is told by: it has not said no."""

Grant = Callable[[float], GrantAnswer]
"""Asks for a grant within so many seconds."""
Renew = Callable[[bytes], None]


class Held:
    """What an open found, in the order of its keys. Without an extent `sizes` says what is stored and has to come another way;
    None in both is a miss. The lane tells whether it holds. What was not released goes with the last who has this."""

    __slots__ = ("_left", "_path", "extents", "lane", "sizes")

    def __init__(
        self, lane: Lane, extents: Sequence[Extent | None], sizes: Sequence[int | None], path: SameHost
    ) -> None:
        self.lane = lane
        self.extents = extents
        self.sizes = sizes
        self._path = path
        self._left = {index for index, extent in enumerate(extents) if extent is not None}

    def __del__(self) -> None:
        if getattr(self, "_left", None):  # it was made to its end
            self.release()

    def memory(self, index: int) -> memoryview | None:
        """Where a chunk lies; None where it has to come another way."""
        extent = self.extents[index]
        if extent is None:
            return None
        try:
            return self.lane.piece(extent.region, extent.offset, extent.size_bytes)[1]
        except KvobjError:
            return None

    def size_of(self, index: int) -> int | None:
        """How large the chunk is; None for a miss."""
        extent = self.extents[index]
        if extent is not None:
            return extent.size_bytes
        return self.sizes[index] if self.sizes else None

    def digest(self, index: int) -> bytes | None:
        """BLAKE3 of a chunk that has an extent; None where it is not known yet."""
        extent = self.extents[index]
        return None if extent is None else extent.digest

    def copy_into(self, *copies: tuple[int, memoryview]) -> bool:
        """Copy chunks each to the start of its room, which is large enough; False where they do not hold any more, and what was
        copied is nothing."""
        pieces: list[Piece] = []
        for index, room in copies:
            extent = self.extents[index]
            assert extent is not None
            if room.readonly:
                raise TypeError("cannot modify read-only memory")
            assert len(room) >= extent.size_bytes
            try:
                mapping, _ = self.lane.piece(extent.region, extent.offset, extent.size_bytes)
            except KvobjError:
                return False  # a place that was never shown to this process
            source = mapping.address(extent.offset)
            pieces.append(Piece(address_of(room), source, extent.size_bytes, mapping, extent.offset))
        copiers.copy_all(pieces)
        return self.lane.is_valid

    def release(self, *indexes: int) -> None:
        """Let go of some; of all where none are named. Idempotent."""
        chosen = self._left.intersection(indexes) if indexes else set(self._left)
        # In this order: what an interrupt keeps from being queued is still here, and the server passes over what comes twice.
        self._path.release(self.lane, [extent.handle for i in chosen if (extent := self.extents[i]) is not None])
        self._left -= chosen


class SameHost:
    """See the module's text. Thread-safe. `grant` and `renew` ask over HTTP and raise typed errors; `is_wanted` False: never."""

    def __init__(self, grant: Grant, renew: Renew, *, timeout_seconds: float, is_wanted: bool = True) -> None:
        self._grant = grant
        self._renew = renew
        self._timeout_seconds = timeout_seconds
        self.is_wanted: Final = is_wanted and sys.platform.startswith("linux")
        """False: nothing ever goes this way."""
        self.opened = 0
        """Chunks that were opened here."""
        self.fallbacks = 0
        """Calls that went over HTTP though the server allows this path: it was away, or could not serve them here."""
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._given = Bell()
        self._given_back = 0
        self._idle: list[Lane] = []
        self._lanes: set[Lane] = set()
        self._loans: Loans[_LentLane] = Loans()
        self._storing = Places(LANES_MAX - 1)
        self._rest_until = 0.0
        self._rest_seconds = REST_SECONDS
        self._is_refused = False
        self._is_closed = False
        self.reason = ""
        """See `KvClient.same_host_reason`."""
        # Told from destructors, too: a queue that may be put to while it is being put to (and no lock of ours).
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._is_woken = False
        self._keeper: threading.Thread | None = None
        self._rooms_until: float | None = None
        self._behind_until: float | None = None
        self._ahead = OpenedAhead(self.release)

    def forget(self) -> None:
        """See `ForgetsInChild`. Lanes do by themselves, also those that another thread was connecting."""
        self._begin()

    @property
    def is_up(self) -> bool:
        """Whether chunks go this way now; tries it, if that is due. Waits for no connection that others use."""
        if self._idle or self.is_known_up:
            return True
        with self._lane(time.monotonic() + self._timeout_seconds) as lane:
            return lane is not None

    @property
    def is_known_up(self) -> bool:
        """Whether chunks went this way last, and still can; asks nobody and waits for nothing."""
        return any(lane.is_valid for lane in list(self._lanes))

    # -- reading -------------------------------------------------------------------------------------------------
    def open(
        self,
        keys: Sequence[str],
        *,
        namespace: str | None = None,
        layers: tuple[int, int] | None = None,
        pins: Sequence[bytes | None] = (),
        timeout_seconds: float | None = None,
    ) -> Held | None:
        """Where the chunks lie, at most `KEYS_MAX`; None: ask over HTTP. What is found is released by the caller."""
        if not self._may_try or len(keys) > KEYS_MAX:
            self._fall_back()
            return None
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        with self._lane(deadline, is_hurried=seconds < HURRIED_SECONDS, wait_seconds=LENT_SECONDS) as lane:
            if lane is None:
                self._fall_back()
                return None
            try:
                opened = lane.call(Open(list(keys), namespace, layers, list(pins)), Opened, deadline=deadline)
                if len(opened.extents) != len(keys) or len(opened.sizes) not in (0, len(keys)):
                    lane.close()
                    raise UnavailableError("the server answers for other keys")
                held = Held(lane, opened.extents, opened.sizes, self)
            except KvobjError:
                self._fall_back()
                return None
        self.opened += len(keys)
        return held

    def open_ahead(self, keys: Sequence[str], *, seconds: float) -> None:
        """Have the server show where chunks lie that `take_ahead` is going to be asked for within so many seconds. What it has not
        at hand, or no room to pin, is not shown, and nothing is where no connection is up and free. Bounds: `opened_ahead`."""
        due = time.monotonic() + min(AHEAD_SECONDS, seconds)  # in this order: of what is no number, the former
        turn, wanted = self._ahead.begin(keys)
        if not wanted:
            return
        try:
            with self._lane(None) as lane:
                if lane is not None and lane.opens_ahead:
                    self._open_ahead(turn, lane, wanted, due)
        except KvobjError:
            return  # whoever reads them finds out
        finally:
            self._ahead.end(turn)
        if len(self._ahead):
            self._wake_keeper()  # it has to know when their time is over

    def _open_ahead(self, turn: Turn, lane: Lane, wanted: list[str], due: float) -> None:
        for start in range(0, len(wanted), KEYS_AHEAD):
            some = wanted[start : start + KEYS_AHEAD]
            deadline = time.monotonic() + self._timeout_seconds
            extents = lane.call(Open(some, is_ahead=True), Opened, deadline=deadline).extents
            if len(extents) != len(some):
                lane.close()
                raise UnavailableError("the server answers for other keys", given=len(extents), wanted=len(some))
            self._ahead.keep(turn, lane, some, extents, due=due)

    def take_ahead(self, keys: Sequence[str]) -> Held | None:
        """All of these chunks as they were opened ahead, to be released by the caller; None: `open` them."""
        taken = self._ahead.take(keys)
        if taken is None:
            return None
        lane, extents = taken
        self.opened += len(keys)
        return Held(lane, extents, (), self)

    def drop_ahead(self, keys: Sequence[str]) -> None:
        """Let go of what was opened ahead, or is being: it is not going to be read."""
        self._ahead.drop(keys)

    def release(self, lane: Lane, handles: Sequence[int]) -> None:
        """Let go of extents of a lane: with its next call, or in a moment."""
        if handles:
            lane.release_later(handles)
            self._wake_keeper()

    def _wake_keeper(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._wake.put(None)

    # -- writing -------------------------------------------------------------------------------------------------
    def store(
        self,
        namespace: str,
        chunks: Sequence[NewChunk],
        *,
        durability: str | None,
        goes_on: bool = False,
        seconds: float | None = None,
    ) -> list[StoredChunk | KvobjError] | None:
        """Store chunks in one step; None: send them over HTTP, which tells why not. `goes_on`: as many may follow by
        `store_batches`. `seconds`: the timeout, where it is not the client's."""
        if not self._may_try or not 0 < len(chunks) <= KEYS_MAX:
            self._fall_back()
            return None
        seconds = self._timeout_seconds if seconds is None else max(0.0, seconds)
        deadline = time.monotonic() + seconds
        place = self._storing.take(seconds)
        if place is None:
            self._fall_back()
            return None
        try:
            return self._store(StoreBatch.of(namespace, chunks, durability), deadline, goes_on=goes_on)
        finally:
            place.leave()

    def _store(self, batch: StoreBatch, deadline: float, *, goes_on: bool) -> list[StoredChunk | KvobjError] | None:
        is_hurried = deadline - time.monotonic() < HURRIED_SECONDS
        with self._lane(deadline, is_hurried=is_hurried) as lane:
            if lane is None or not lane.grant.may_write:
                self._fall_back()
                return None
            store = store_in_place if lane.grant.is_trusted else store_staged
            try:
                told = store(lane, batch, deadline)
            except KvobjError:
                self._fall_back()
                return None
            if len(told) != len(batch.items):
                lane.close()
                self._fall_back()
                return None
            if goes_on and lane.grant.is_trusted:
                with suppress(KvobjError):  # what was stored is stored
                    self._prepare(lane, [batch], [told])
        return [outcome_of(item) for item in told]

    def store_batches(
        self, namespace: str, batches: Sequence[Sequence[NewChunk]], *, durability: str | None
    ) -> list[list[StoredChunk | KvobjError] | None]:
        """`store` of batches, one after the other; where it can be, the server is asked about one while another is copied."""
        answers: list[list[StoredChunk | KvobjError] | None] = [None] * len(batches)
        made = [StoreBatch.of(namespace, chunks, durability) for chunks in batches]
        until = time.monotonic() + self._timeout_seconds
        if self._store_prepared(made, answers) or not self._store_in_turn(made, answers):
            for index, chunks in enumerate(batches):
                if answers[index] is None:
                    seconds = (
                        None if any(answers) else until - time.monotonic()
                    )  # what only waited is not waited for again
                    goes_on = len(batches) == 1
                    answers[index] = self.store(
                        namespace, chunks, durability=durability, goes_on=goes_on, seconds=seconds
                    )
        return answers

    def _store_prepared(
        self, batches: Sequence[StoreBatch], answers: list[list[StoredChunk | KvobjError] | None]
    ) -> bool:
        """Store batches in rooms that were asked for behind the stores before; False, and nothing is done, where there are none for
        them."""
        if self._rooms_until is None or not self._may_try:
            return False
        told: list[list[StoredItem] | None] = [None] * len(batches)
        with ExitStack() as held, suppress(KvobjError):  # what it has not told of goes another way
            lane = self._lane_with_rooms(held)
            if lane is None:
                return False
            rooms = take_rooms_for(lane, batches, time.monotonic() + self._timeout_seconds)
            if rooms is None:
                return False
            store_prepared(lane, batches, rooms, told, seconds=self._timeout_seconds)
            self._keep_rooms(lane, told)
        _note_answers(batches, told, answers)
        return True

    def _lane_with_rooms(self, held: ExitStack) -> Lane | None:
        """The lane that has rooms, for as long as `held` is; None where there is none, or it is in use."""
        place = self._storing.take(0.0)
        if place is None:
            return None
        held.callback(place.leave)
        return held.enter_context(self._lane(None, has_rooms=True))

    def _prepare(self, lane: Lane, batches: Sequence[StoreBatch], told: Sequence[Sequence[StoredItem] | None]) -> None:
        """Ask for rooms for as much again, unless another lane has some."""
        if not any(each.has_rooms for each in list(self._lanes)):
            prepare_for_more(lane, batches, time.monotonic() + self._timeout_seconds)
            self._keep_rooms(lane, told)

    def _keep_rooms(self, lane: Lane, told: Sequence[Sequence[StoredItem] | None]) -> None:
        """Keep the rooms that a lane was asked for, for a while, unless some of what was just stored was there before: the next is
        then not to be copied before that is known."""
        if not lane.has_rooms:
            return
        if any(items is None or any(item.existed for item in items) for items in told):
            lane.prepare(0, 0, None, deadline=time.monotonic() + self._timeout_seconds)
            return
        with self._lock:  # `flush` looks at the lanes and decides under it
            is_known = self._rooms_until is not None
            self._rooms_until = time.monotonic() + ROOMS_SECONDS
        if not is_known:
            self._wake_keeper()  # it has to know when their time is over

    def _store_in_turn(
        self, batches: Sequence[StoreBatch], answers: list[list[StoredChunk | KvobjError] | None]
    ) -> bool:
        """Store batches by two lanes; False, and nothing is done, where there are no two."""
        is_fit = len(batches) > 1 and all(0 < len(batch.items) <= KEYS_MAX for batch in batches)
        if not is_fit or not self._may_try:
            return False
        deadline = time.monotonic() + self._timeout_seconds
        with ExitStack() as held:
            lanes: list[Lane] = []
            for _ in range(2):
                lane = self._free_lane(held, deadline)
                if lane is None or not (lane.grant.may_write and lane.grant.is_trusted):
                    return False
                lanes.append(lane)
            told: list[list[StoredItem] | None] = [None] * len(batches)
            with suppress(KvobjError):  # what it has not told of goes another way
                store_in_turn(lanes, batches, told, seconds=self._timeout_seconds)
                self._prepare(lanes[0], batches, told)
        _note_answers(batches, told, answers)
        for answer in answers:
            if answer is None:
                self._fall_back()
        return True

    def _free_lane(self, held: ExitStack, deadline: float) -> Lane | None:
        """A lane to store by, for as long as `held` is; None where others store by as many as there may be."""
        place = self._storing.take(0.0)
        if place is None:
            return None
        held.callback(place.leave)
        return held.enter_context(self._lane(deadline))

    def _fall_back(self) -> None:
        """Count a call that has to go over HTTP, unless it always does."""
        if self.is_wanted and not self._is_refused:
            self.fallbacks += 1

    # -- lanes ---------------------------------------------------------------------------------------------------
    @property
    def _may_try(self) -> bool:
        return self.is_wanted and not self._is_closed and (bool(self._lanes) or time.monotonic() >= self._rest_until)

    def _lane(
        self,
        deadline: float | None,
        *,
        has_rooms: bool = False,
        is_hurried: bool = False,
        wait_seconds: float = float("inf"),
    ) -> _LentLane:
        """A lane for a block. `deadline` None: one that is idle; `has_rooms`: one that has rooms, as far as is known.
        `wait_seconds`: how long it is waited for where others have all there may be and none gives one back."""
        return _LentLane(self, deadline, has_rooms=has_rooms, is_hurried=is_hurried, wait_seconds=wait_seconds)

    def lend(self, lent: _LentLane) -> None:
        """Give it a lane, if there is one for it."""
        deadline = lent.deadline
        scope = current_scope()
        if deadline is not None and scope is not None:
            deadline = min(deadline, scope.deadline)
        given_back, until = -1, 0.0
        while True:
            with self._lock:
                lane = self._idle_lane(has_rooms=lent.has_rooms)
                if lane is not None:
                    self._loans.add(lent)
                    self._idle.remove(lane)
                    lent.lane = lane  # last: whoever is interrupted before gives back what is still idle, or is lost
                    return
                if deadline is None or not self._may_try:
                    return
                now = time.monotonic()
                if len(self._idle) + len(self._loans) < LANES_MAX and now >= self._rest_until:
                    self._drop_lost()
                    self._loans.add(lent)
                    break
                if given_back != self._given_back:  # they are in use, and not stuck: others were only quicker
                    given_back, until = self._given_back, min(deadline, now + lent.wait_seconds)
                if now >= until or _is_cancelled():
                    return
                ticket = self._given.ticket()
            self._given.wait(ticket, until - now)
        made = self._connect(deadline)
        if made is not None:
            with self._lock:
                self._lanes.add(made)
                lent.lane = made

    def _idle_lane(self, *, has_rooms: bool) -> Lane | None:
        if has_rooms:
            return next((each for each in self._idle if each.has_rooms), None)
        while self._idle:
            lane = self._idle[-1]
            if lane.is_valid:
                return lane
            self._idle.pop()
            self._drop(lane)
        return None

    def _drop_lost(self) -> None:
        """Close the lanes that calls had which were interrupted as they gave them back: what is under way there is not known."""
        if len(self._lanes) <= len(self._idle) + len(self._loans):
            return
        lent = {each.lane for each in self._loans.alive()}
        for lane in [each for each in self._lanes if each not in lent and each not in self._idle]:
            self._lanes.discard(lane)
            lane.close()

    def _connect(self, deadline: float) -> Lane | None:
        seconds = deadline - time.monotonic()
        grant: GrantAnswer | None = None
        try:
            grant = self._grant(seconds)
            lane = Lane.connect(grant, deadline=min(deadline, time.monotonic() + self._timeout_seconds))
        except KvobjError as error:
            if not _is_cancelled():
                is_no = not isinstance(error, _LATER)
                self.reason = "" if grant is None else _reason(grant, error)
                self._is_refused = is_no
                self._rest(REFUSED_SECONDS if is_no else None, is_hurried=seconds < HURRIED_SECONDS)
            return None
        self._is_refused = False
        self.reason = ""
        try:
            self._start_keeper(lane.grant.lease_ms / 1000)
        except BaseException as error:
            lane.close()  # without renewals it would be revoked in the midst of something
            if not isinstance(error, RuntimeError):
                raise
            self._rest(None)  # the process can have no thread now, or is ending
            return None
        self._rest_seconds = REST_SECONDS
        return lane

    def _rest(self, seconds: float | None, *, is_hurried: bool = False) -> None:
        if seconds is None and is_hurried:
            seconds = REST_SECONDS
        elif seconds is None:
            seconds = self._rest_seconds
            self._rest_seconds = min(2 * seconds, REST_SECONDS_MAX)
        self._rest_until = time.monotonic() + seconds

    def give(self, lent: _LentLane) -> None:
        """What was lent comes back."""
        with self._lock:
            self._loans.remove(lent)
            lane, lent.lane = lent.lane, None
            if lane is not None and lane.is_usable and not self._is_closed:
                self._idle.append(lane)
                self._given_back += 1
                if lane.has_releases:  # of another thread, while the call had it: `flush` passed it over
                    self._wake_keeper()
                self._given.ring()
                return
            if lane is not None:
                self._drop(lane, is_hurried=lent.is_hurried)
            self._given.ring_all()  # where there is none to be had, they go another way

    def end_lane(self, lane: Lane) -> None:
        """Close a lane for the caller's own reasons, which say nothing of the server."""
        with self._lock:
            self._lanes.discard(lane)
        lane.close()

    def _drop(self, lane: Lane, *, is_hurried: bool = False) -> None:
        if lane in self._lanes:
            self._lanes.discard(lane)
            if not self._is_closed and not _is_cancelled():
                self._rest(None, is_hurried=is_hurried)
        lane.close()

    def close(self) -> None:
        """End all connections; views of theirs do not hold any more. What is being used ends with its call. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for lane in idle:
                self._drop(lane)
            self._drop_lost()
            self._given.ring_all()
        self._wake.put(None)

    # -- keeping it up -------------------------------------------------------------------------------------------
    def _start_keeper(self, lease_seconds: float) -> None:
        with self._lock:
            if self._keeper is None or not self._keeper.is_alive():
                pause = lease_seconds / RENEWALS_A_LEASE
                arguments = (weakref.ref(self), self._wake, pause)
                keeper = threading.Thread(target=_keep, args=arguments, name="kvobj-same-host", daemon=True)
                keeper.start()
                self._keeper = keeper

    def renew(self) -> bool:
        """Have the server decide again for every lane, and drop those that may not go on, or are gone; whether it was reached."""
        is_reached = True
        for lane in list(self._lanes):
            try:
                self._renew(lane.grant.id)
            except (AccessDeniedError, NotFoundError):
                self._retire(lane)
            except KvobjError:
                is_reached = False  # until the server revokes it, it holds
        return is_reached

    def _retire(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._idle:
                self._idle.remove(lane)
                self._drop(lane)

    @property
    def due(self) -> float | None:
        """When `flush` has something to do at the latest; None where it is told (`_wake`)."""
        times = (self._ahead.due, self._rooms_until, self._behind_until)
        return min((each for each in times if each is not None), default=None)

    def flush(self) -> bool:
        """Tell the server what was let go of on lanes that are not in use; whether the client is still open."""
        self._is_woken = False
        self._ahead.expire()
        now = time.monotonic()
        with self._lock:
            self._drop_lost()
            is_over = self._rooms_until is not None and now >= self._rooms_until
            for lane in self._idle:
                if is_over and lane.has_rooms:
                    lane.give_rooms_back()
                elif lane.has_releases:
                    lane.flush()
            is_behind = any(lane.has_releases for lane in self._idle)
            self._behind_until = now + _BEHIND_SECONDS if is_behind else None
            if is_over:  # those of one that is in use have their time anew
                self._rooms_until = now + ROOMS_SECONDS if any(lane.has_rooms for lane in self._lanes) else None
        return not self._is_closed


class _LentLane:
    """A context manager: a lane that a call has until the block's end, None where there is none for it. It counts from before it is
    connected, for as long as somebody has it (`loans`)."""

    __slots__ = ("__weakref__", "_path", "deadline", "has_rooms", "is_hurried", "lane", "wait_seconds")

    def __init__(
        self, path: SameHost, deadline: float | None, *, has_rooms: bool, is_hurried: bool, wait_seconds: float
    ) -> None:
        self._path = path
        self.deadline = deadline
        self.has_rooms = has_rooms
        self.is_hurried = is_hurried
        self.wait_seconds = wait_seconds
        self.lane: Lane | None = None

    def __enter__(self) -> Lane | None:
        try:
            self._path.lend(self)
        except BaseException:
            self._path.give(self)
            raise
        return self.lane

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.lane is not None and kind is not None and not issubclass(kind, Exception):
            self._path.end_lane(self.lane)  # an interrupt: what the server holds for the call is not known
        self._path.give(self)


def _reason(grant: GrantAnswer, error: KvobjError) -> str:
    why = error.data.get("reason", error.message)
    return f"shared memory at {grant.socket} cannot be opened: {why}"


def _is_cancelled() -> bool:
    """Whether the call that this thread makes was ended by another: what it failed with says nothing of the server."""
    scope = current_scope()
    return scope is not None and scope.is_cancelled


def _note_answers(
    batches: Sequence[StoreBatch],
    told: Sequence[Sequence[StoredItem] | None],
    answers: list[list[StoredChunk | KvobjError] | None],
) -> None:
    for index, (batch, items) in enumerate(zip(batches, told, strict=True)):
        if items is not None and len(items) == len(batch.items):
            answers[index] = [outcome_of(item) for item in items]


def _keep(client: weakref.ref[SameHost], wake: SimpleQueue[None], pause: float) -> None:
    """Renew and flush, for as long as there is a client."""
    renew_at = due = time.monotonic() + pause
    while True:
        with suppress(Empty):
            wake.get(timeout=max(0.0, due - time.monotonic()))
            time.sleep(_FLUSH_SECONDS)  # more is let go of meanwhile, and told together
        path = client()
        if path is None or not path.flush():
            return
        if time.monotonic() >= renew_at:
            is_reached = path.renew()
            renew_at = time.monotonic() + (pause if is_reached else pause / RENEWALS_A_LEASE)
        flush_at = path.due
        due = renew_at if flush_at is None else min(renew_at, flush_at)
        del path
