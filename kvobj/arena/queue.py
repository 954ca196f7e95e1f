"""Who waits for room, in the order they came, and how room is asked for on their behalf.

First come, first served within a lane (the shared room, or a dedicated bucket's), so that a large request is served beside small
ones. But one that waits for room in one piece, where pins lie scattered, would stop everybody for as long as it waits: others pass
it once it has been the first for `ALONE_SECONDS` and nothing can be reclaimed for it. All that passed it hold no more together than
it asks for itself, and once they were given so much it has as long alone again: room comes free for it then, and for nobody else.

Only the first of a lane holds part of what it asked for, so no two half-served requests wait for each other. At most one reclaim
runs at a time. Every wait has a deadline. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final

from kvobj.arena.extent import Hold
from kvobj.arena.lane import Lane
from kvobj.errors import BusyError, KvobjError, UnavailableError

# One call of the reclaimer frees about this much at most, so that a long queue does not empty the cache in one go.
_RECLAIM_BYTES: Final = 256 * 1024 * 1024

ALONE_SECONDS: Final = 0.1
"""A first waiter has all that comes free to itself for so long, before others pass it: what a reclaim or a release makes room for
is there much sooner."""

Reclaim = Callable[[int], Awaitable[int]]


class Waiter:
    """One request for several extents at once; `held` are those it has so far, by position in `lengths`. Of one that is the first:
    until when nobody passes it, who did, and what they were given since it was alone last."""

    __slots__ = (
        "alone_until",
        "given_bytes",
        "granted",
        "held",
        "is_over",
        "lane",
        "lengths",
        "passed_by",
        "size_bytes",
    )

    def __init__(self, lengths: Sequence[int], lane: Lane | None) -> None:
        self.lengths = lengths
        self.size_bytes = sum(lengths)
        self.lane = lane
        self.held: dict[int, Hold] = {}
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False
        self.alone_until: float | None = None
        self.passed_by: list[Waiter] = []
        self.given_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What it has of the arena, also after it was served: for as long as anybody has a pin on it."""
        return sum(hold.extent.length for hold in self.held.values() if hold.pins or not self.is_over)


class ReservationQueue:
    """Waiters by lane. `take(length, lane)` reserves or returns None; `give_back(hold)` undoes it. Where `take` fails, so does whom
    it was for."""

    __slots__ = ("_closed", "_give_back", "_kicked", "_lanes", "_may_reclaim", "_reclaim", "_take", "_task", "_timer")

    def __init__(
        self,
        take: Callable[[int, Lane | None], Hold | None],
        give_back: Callable[[Hold], None],
        may_reclaim: Callable[[], bool],
    ) -> None:
        self._take = take
        self._give_back = give_back
        self._may_reclaim = may_reclaim
        self._lanes: dict[Lane | None, deque[Waiter]] = {}
        self._reclaim: Reclaim | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._kicked = False
        self._closed = False

    def set_reclaim(self, reclaim: Reclaim | None) -> None:
        """Whom to ask for room from now on; None: nobody."""
        self._reclaim = reclaim
        self.kick()

    def is_waiting(self, lane: Lane | None) -> bool:
        """Whether somebody waits in the lane, so that a newcomer must wait behind."""
        return lane in self._lanes

    def heads(self) -> list[tuple[int, Lane | None]]:
        """For each lane, the length that its first waiter lacks next, and the lane."""
        return [(self._next_length(lane[0]), name) for name, lane in self._lanes.items()]

    async def wait(self, lengths: Sequence[int], lane: Lane | None, timeout_seconds: float) -> list[Hold]:
        """All of the lengths, in order, when it is this request's turn (see the module). `BusyError` after the deadline,
        `UnavailableError` when the arena closes. Cancelled or failed, it leaves nothing behind."""
        if self._closed:
            raise UnavailableError("the arena is closed")
        waiter = Waiter(lengths, lane)
        self._lanes.setdefault(lane, deque()).append(waiter)
        deadline = asyncio.get_running_loop().call_later(max(0.0, timeout_seconds), _expire, waiter)
        try:
            self.serve()
            self.kick()
            await waiter.granted
        except BaseException:  # whatever ended the wait, what was held so far must go back
            self._leave(waiter)
            self._return_held(waiter)
            self.serve()
            self.kick()
            raise
        finally:
            deadline.cancel()
            waiter.is_over = True  # from here on pins tell whether it has its room
        return [waiter.held[position] for position in range(len(lengths))]

    def serve(self) -> None:
        """Give what there is to those whose turn it is."""
        for name in list(self._lanes):
            lane = self._lanes.get(name)
            while lane:
                waiter = lane[0]
                if not waiter.granted.done():
                    try:
                        if not self._try(waiter):
                            if self._may_pass(lane):
                                self._let_pass(lane)
                            break
                    except KvobjError as error:  # its own: not that of who has released something, or populates
                        waiter.granted.set_exception(error)
                    else:
                        waiter.granted.set_result(None)
                self._leave(waiter)

    def kick(self) -> None:
        """Something may be reclaimable now that was not: ask again if anybody waits. Cheap where nobody does."""
        if not self._lanes or self._reclaim is None or self._closed or not self._may_reclaim():
            return
        self._kicked = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="arena reclaim")

    async def aclose(self) -> None:
        """Fail everybody who waits and stop asking. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all(UnavailableError("the arena is closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _try(self, waiter: Waiter) -> bool:
        for position, length in enumerate(waiter.lengths):
            if position not in waiter.held:
                hold = self._take(length, waiter.lane)
                if hold is None:
                    return False
                waiter.held[position] = hold
        return True

    def _may_pass(self, lane: deque[Waiter]) -> bool:
        """Whether the first, which could not be served, may be passed now. If only the time is lacking, that is asked again."""
        first, now = lane[0], asyncio.get_running_loop().time()
        if first.alone_until is None:
            first.alone_until = now + ALONE_SECONDS
        if len(lane) == 1 or self._closed:
            return False
        if now < first.alone_until:
            self._serve_at(first.alone_until)
            return False
        if not self._may_reclaim():  # what is yet to be populated makes room for the first one, too
            self._serve_at(now + ALONE_SECONDS)
            return False
        return self._task is None  # which frees room for the first one, and asks again at its end

    def _let_pass(self, lane: deque[Waiter]) -> None:
        """Serve those behind the first that fit, as far as they may pass it."""
        first = lane[0]
        first.passed_by = [waiter for waiter in first.passed_by if waiter.held_bytes]
        left_bytes = first.size_bytes - sum(waiter.held_bytes for waiter in first.passed_by)
        unfit = first.size_bytes + 1  # a length of which there is no piece: for those as long none is looked for
        for waiter in list(islice(lane, 1, None)):
            if waiter.granted.done() or waiter.size_bytes > left_bytes or max(waiter.lengths) >= unfit:
                continue
            try:
                if not self._try(waiter):
                    unfit = min(unfit, self._next_length(waiter))
                    self._return_held(waiter)
                    continue
            except KvobjError as error:
                waiter.granted.set_exception(error)
                continue
            waiter.granted.set_result(None)
            self._leave(waiter)
            first.passed_by.append(waiter)
            left_bytes -= waiter.held_bytes
            first.given_bytes += waiter.held_bytes
            if first.given_bytes >= first.size_bytes:
                first.given_bytes, first.alone_until = 0, None
                self._may_pass(lane)  # not before it has been alone again
                return

    def _serve_at(self, when: float) -> None:
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.serve()

    def _next_length(self, waiter: Waiter) -> int:
        return next(length for position, length in enumerate(waiter.lengths) if position not in waiter.held)

    def _leave(self, waiter: Waiter) -> None:
        lane = self._lanes.get(waiter.lane)
        if lane and waiter in lane:
            lane.remove(waiter)
            if not lane:
                del self._lanes[waiter.lane]

    def _return_held(self, waiter: Waiter) -> None:
        held, waiter.held = waiter.held, {}
        for hold in held.values():
            self._give_back(hold)

    def _fail_all(self, error: KvobjError) -> None:
        for lane in list(self._lanes.values()):
            for waiter in list(lane):
                if not waiter.granted.done():
                    waiter.granted.set_exception(error)

    def _shortage_bytes(self) -> int:
        total = 0
        for lane in self._lanes.values():
            for waiter in lane:
                total += sum(length for at, length in enumerate(waiter.lengths) if at not in waiter.held)
                if total >= _RECLAIM_BYTES:
                    return _RECLAIM_BYTES
        return total

    async def _run(self) -> None:
        try:
            while self._kicked and self._lanes and self._reclaim is not None:
                self._kicked = False
                freed = await self._reclaim(self._shortage_bytes())
                self.serve()
                if freed:
                    self._kicked = True
                elif not self._kicked:
                    # Stuck: what a first waiter holds already may lie in the middle of the only place for the rest.
                    self._restart_heads()
        except Exception as error:  # noqa: BLE001 - it must reach those who wait, whatever it is, and not die with the task
            failure = UnavailableError("room could not be reclaimed")
            failure.__cause__ = error
            self._fail_all(failure)
        finally:
            self._task = None
            self.serve()  # nothing more is reclaimed for the first ones: others may pass them now

    def _restart_heads(self) -> None:
        for lane in list(self._lanes.values()):
            if lane and lane[0].held:
                self._return_held(lane[0])
        self.serve()


def _expire(waiter: Waiter) -> None:
    if not waiter.granted.done():
        lacking = sum(length for at, length in enumerate(waiter.lengths) if at not in waiter.held)
        waiter.granted.set_exception(BusyError("no room came free in time", lacking_bytes=lacking))
