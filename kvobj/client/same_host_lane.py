"""One connection of the same-host path: calls one after the other, regions as they are handed over, and whether all of it holds.

What was opened on a lane holds until it is released, the server says otherwise on the control page, or the server is gone. Both
can be seen without asking it, so whoever used memory looks afterwards (`is_valid`) before the bytes are taken for right.
"""

from __future__ import annotations

import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from itertools import chain, tee
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from kvobj.client.call_scope import current_scope
from kvobj.client.errors import error_of
from kvobj.client.forking import forget_in_child, unforked
from kvobj.client.kernel_timeout import SHARE_LEFT, left_until, set_timeout
from kvobj.client.native_exchange import READ_BYTES, NativeExchange
from kvobj.errors import UnavailableError
from kvobj.same_host.descriptors import CONTROL_BYTES, at_path, is_sealed_in_size
from kvobj.same_host.framing import Unframer, framed
from kvobj.same_host.mapping import Mapping, mapped
from kvobj.same_host.messages import (
    DESCRIPTORS_MAX,
    RELEASES_MAX,
    REPLY_BYTES_MAX,
    VERSION,
    Abandon,
    Failed,
    Hello,
    Open,
    Prepare,
    Prepared,
    Regions,
    Release,
    Reply,
    Request,
    ReservedRoom,
    Stage,
    Staged,
    Welcome,
    decode_reply,
    encode,
)
from kvobj.same_host.revocation import is_revoked

_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
_ENDED: Final = getattr(select, "POLLRDHUP", 0)  # Linux, where the path is; the module is imported elsewhere, too
_DESCRIPTORS_LOST: Final = int(socket.MSG_CTRUNC)  # a number: an enum's operators cost more than the call
_QUICK_KEYS: Final = 8
"""So few are opened while their client waits awake; more take longer than it would."""
_second: Final = itemgetter(1)
_third: Final = itemgetter(2)
_numbers_of: Final = partial(array, "i")
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLNVAL | _ENDED

ReplyT = TypeVar("ReplyT", bound=Reply)


class GrantAnswer(msgspec.Struct, frozen=True):
    """What ?same-host answers."""

    socket: str
    id: bytes
    token: bytes
    lease_ms: int
    may_write: bool = False
    is_trusted: bool = False


class Lane:
    """See the module's text. Made by `connect`. Calls by one thread at a time; `is_valid` and `release_later` by any."""

    def __init__(self, connection: socket.socket, grant: GrantAnswer) -> None:
        self.grant = grant
        self.staging: Mapping | None = None
        self._socket = connection
        self._process = os.getpid()
        self._native = NativeExchange.made()
        self._unframer = Unframer(REPLY_BYTES_MAX)
        self._descriptors: deque[FileIO] = deque()
        """Those that came and were not needed yet. As files, which close themselves, since an interrupt may leave one to nobody."""
        self._regions: dict[int, Mapping] = {}
        self._control: memoryview | None = None
        self._leaving: deque[int] = deque()
        self._unsent = b""
        """What `flush` could not send: it goes before whatever is sent next."""
        self._is_closed = False
        self._timeout = 0.0
        self.owes = 0
        """Answers that have been asked for and are still to come."""
        self.opens_ahead = False
        """Whether the server knows an `Open` ahead of a read."""
        self.prepares = False
        """Whether the server knows `Prepare`."""
        self.has_rooms = False
        """Whether there are rooms here that were asked for and not taken, as far as is known."""
        self._preparing = 0
        self._rooms_durability: str | None = None
        self._first_room = 0
        self._rooms: list[ReservedRoom] = []
        forget_in_child(
            self
        )  # from before it connects: a child's duplicate would keep the connection, and all it holds, alive

    @classmethod
    def connect(cls, grant: GrantAnswer, *, deadline: float) -> Lane:
        """Use a grant. `UnavailableError` where the socket is not there, or nobody who knows the token is behind it."""
        try:
            with unforked():
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
                lane = cls(connection, grant)
        except OSError as error:  # no descriptor is left, for one
            raise UnavailableError(
                "no same-host socket", path=grant.socket, reason=error.strerror or str(error)
            ) from error
        try:
            connection.settimeout(left_until(deadline))
            at_path(Path(grant.socket), connection.connect)
            connection.settimeout(None)  # from here on the kernel keeps deadlines: Python polls before each call
            welcome = lane.call(Hello(VERSION, grant.token), Welcome, deadline=deadline)
            lane.opens_ahead, lane.prepares = welcome.opens_ahead, welcome.prepares
            lane._control = lane._take_control()
        except OSError as error:
            lane.close()
            raise UnavailableError(
                "no same-host socket", path=grant.socket, reason=error.strerror or str(error)
            ) from error
        except BaseException:
            lane.close()
            raise
        return lane

    @property
    def is_usable(self) -> bool:
        """Whether nothing is known that ends it; whether the server is there it does not ask."""
        control = self._control
        return not self._is_closed and control is not None and not is_revoked(control) and os.getpid() == self._process

    @property
    def is_valid(self) -> bool:
        """Whether everything that was opened here, and is not released, still is what it was. A few microseconds."""
        if not self.is_usable:
            return False
        watch = select.poll()  # one of its own: two threads may not use one at a time
        try:
            watch.register(self._socket, _ENDED)
            return not any(events & _GONE for _, events in watch.poll(0))
        except (OSError, ValueError):
            return False

    def piece(self, region: int, offset: int, size_bytes: int) -> tuple[Mapping, memoryview]:
        """Memory that the server has named. `UnavailableError` for a region that it never handed over."""
        found = self._regions.get(region)
        if found is None:
            raise UnavailableError("the server names a region that it has not handed over", region=region)
        return found, found.piece(offset, size_bytes)

    # -- calls ---------------------------------------------------------------------------------------------------
    def call(self, request: Request, kind: type[ReplyT], *, deadline: float) -> ReplyT:
        """Ask, and wait for the answer. The typed error that the server answers with leaves the lane in use; `UnavailableError`
        (no answer in time, the server is gone) closes it."""
        reply = self._exchange(request, deadline)
        return self._checked(reply, kind)

    def ask(self, request: Request, *, deadline: float) -> None:
        """Ask, and leave the answer to `answer`: they come in the order of what was asked. `UnavailableError` closes it."""
        self._exchange(request, deadline, waits=False)
        self.owes += 1

    def answer(self, kind: type[ReplyT], *, deadline: float) -> ReplyT:
        """Wait for the oldest answer that is owed. Errors as `call`."""
        reply = self._exchange(None, deadline)
        self.owes -= 1
        return self._checked(reply, kind)

    def prepare(self, size_bytes: int, count: int, durability: str | None, *, deadline: float) -> None:
        """Ask for rooms in place of those that are left; none where `count` is 0. What is answered is found by `take_rooms`, or on
        the way to another answer. Errors as `ask`."""
        self._exchange(Prepare(size_bytes, count, durability), deadline, waits=False)
        self._asked_for_rooms(count, durability)

    def _asked_for_rooms(self, count: int, durability: str | None) -> None:
        self._rooms, self.has_rooms = [], count > 0
        self._rooms_durability = durability
        self._preparing += 1

    def take_rooms(
        self, size_bytes: int, count: int, durability: str | None, *, deadline: float
    ) -> list[tuple[int, ReservedRoom]]:
        """Rooms of that size with their numbers, the caller's from now on; [] where there are not so many, or of that class.
        An answer that is under way is waited for. Errors as `answer`."""
        if self._preparing:
            self._exchange(None, deadline, for_rooms=True)
        rooms, self._rooms, self.has_rooms = self._rooms, [], False
        is_other = durability != self._rooms_durability
        if is_other or len(rooms) < count or any(room.size_bytes != size_bytes for room in rooms):
            return []
        return list(enumerate(rooms[:count], start=self._first_room))

    def _checked(self, reply: Reply | None, kind: type[ReplyT]) -> ReplyT:
        if isinstance(reply, Failed):
            raise error_of(reply.status, reply.code, reply.message, reply.detail)
        if not isinstance(reply, kind):
            self.close()
            raise UnavailableError("the server answers something else", kind=type(reply).__name__)
        return reply

    def stage(self, size_bytes: int, *, deadline: float) -> Mapping:
        """A staging room of at least so many bytes."""
        if self.staging is None or self.staging.size_bytes < size_bytes:
            self.staging = None
            staged = self.call(Stage(size_bytes), Staged, deadline=deadline)
            with self._descriptor() as descriptor:
                if not is_sealed_in_size(descriptor):
                    raise UnavailableError("a staging room whose size may change")
                self.staging = Mapping(descriptor, staged.size_bytes, is_writable=True)
        return self.staging

    def release_later(self, handles: Sequence[int]) -> None:
        """Let go of extents with the next call, or `flush`. Takes no lock: it is called from destructors, too."""
        self._leaving.extend(handles)

    def flush(self) -> None:
        """Tell the server what is let go of. Waits for nothing: what a server that stands still does not take goes with the next
        call, or `flush`. Errors close the lane."""
        messages = self._behind(b"")
        try:
            sent = self._socket.send(messages, socket.MSG_DONTWAIT) if messages else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        self._unsent = messages[sent:]

    def give_rooms_back(self) -> None:
        """Rooms that are left here are the server's again, as `flush` tells it."""
        self._unsent += framed(encode(Prepare(0, 0, None)))
        self._asked_for_rooms(0, None)
        self.flush()

    def abandon(self, batch: int) -> None:
        """Give reserved room back. Errors close the lane, which gives it back, too."""
        try:
            self._socket.sendall(self._behind(framed(encode(Abandon(batch)))))
        except OSError:
            self.close()

    @property
    def has_releases(self) -> bool:
        """Whether `flush` has something to tell."""
        return bool(self._leaving or self._unsent)

    def close(self) -> None:
        """End the connection; nothing that was opened here holds from now on. Idempotent."""
        self._is_closed = True
        self._socket.close()
        while self._descriptors:
            self._descriptors.popleft().close()

    def forget(self) -> None:
        """See `ForgetsInChild`: the connection is the parent's."""
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------
    def _exchange(
        self, request: Request | None, deadline: float, *, waits: bool = True, for_rooms: bool = False
    ) -> Reply | None:
        """Send what is asked, if anything is, and wait for the next answer unless told not to; `for_rooms`: until all rooms have
        come that were asked for, of a lane that owes no answer. What it raises closes the lane, but for a request that cannot be
        written, and an `Open` that has no time left or was ended before it was sent: nothing of it was sent, and what other calls
        have opened here still holds."""
        scope = current_scope()
        if scope is not None:
            deadline = min(deadline, scope.deadline)
        asked = (
            None if request is None else framed(encode(request))
        )  # what cannot be written is the caller's fault alone
        is_kept = isinstance(request, Open) and not self.owes
        try:
            if scope is not None:
                scope.guard(self._abort)
            if asked is not None:
                self._allow(deadline)
                is_kept = False
                self._send(asked, is_quick=waits and _is_quick(request))
            return self._next_reply(deadline, for_rooms=for_rooms) if waits else None
        except BaseException as error:
            if not is_kept or not isinstance(error, Exception):
                self.close()
            if isinstance(error, (OSError, EOFError)):
                raise UnavailableError("no answer on the same-host socket", reason=str(error)) from error
            raise
        finally:
            if scope is not None:
                scope.unguard()

    def _send(self, message: bytes, *, is_quick: bool) -> None:
        message = self._behind(message)
        if self._native is None or not is_quick:
            self._socket.sendall(message)
            return
        came = self._native(self._socket, message)
        if came is not None:
            data, descriptors, flags = came
            self._descriptors.extend(map(FileIO, descriptors))
            self._take_in(data, flags)

    def _next_reply(self, deadline: float, *, for_rooms: bool) -> Reply | None:
        """The next answer; None, `for_rooms`, once none of them is under way."""
        while True:
            message = self._unframer.take()
            if message is None:
                self._receive(deadline)
                continue
            reply = decode_reply(message)
            if isinstance(reply, Prepared):
                self._note_rooms(reply)
                if for_rooms and self._preparing <= 0:
                    return None
            elif isinstance(reply, Regions):
                self._map(reply)
            else:
                return reply

    def _abort(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _receive(self, deadline: float) -> None:
        self._allow(deadline)
        # `recvmsg`, and a file of every descriptor that comes along, in one step that no signal's handler comes into: numbers that
        # an interrupt leaves to nobody stay open. Nothing else comes along on a Unix socket that was not asked for it.
        came, told = tee(map(self._socket.recvmsg, (READ_BYTES,), (_ANCILLARY_BYTES,), (socket.MSG_CMSG_CLOEXEC,)))
        numbers = map(_numbers_of, map(_third, chain.from_iterable(map(_second, came))))
        self._descriptors.extend(map(FileIO, chain.from_iterable(numbers)))
        data, _, flags, _ = next(told)
        self._take_in(data, flags)

    def _take_in(self, data: bytes | memoryview, flags: int) -> None:
        if flags & _DESCRIPTORS_LOST:
            raise EOFError("descriptors were lost on the way")
        if not data:
            raise EOFError("the server has ended the connection")
        self._unframer.feed(data)

    def _allow(self, deadline: float) -> None:
        """Have the kernel end a wait at the deadline, or a little later."""
        left = left_until(deadline)
        if not self._timeout * SHARE_LEFT <= left <= self._timeout:
            self._timeout = set_timeout(self._socket, left)

    def _map(self, told: Regions) -> None:
        for region in told.regions:
            with self._descriptor() as descriptor:
                self._regions[region.number] = mapped(
                    descriptor, region.size_bytes, is_writable=self.grant.is_trusted, life=region.life
                )

    def _note_rooms(self, told: Prepared) -> None:
        self._preparing -= 1
        self._first_room, self._rooms = told.first, told.rooms
        if not self._preparing:
            self.has_rooms = bool(told.rooms)

    def _take_control(self) -> memoryview:
        with self._descriptor() as descriptor:
            return Mapping(descriptor, CONTROL_BYTES, is_writable=False).room

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        """The oldest of those that came, closed at the block's end. Until then `forget` finds it in a forked child."""
        if not self._descriptors:
            raise UnavailableError("a descriptor is missing")
        oldest = self._descriptors[0]
        try:
            yield oldest.fileno()
        finally:
            oldest.close()
            if self._descriptors:
                self._descriptors.popleft()

    def _behind(self, message: bytes) -> bytes:
        """A message behind all that has to be sent before it."""
        if not self._leaving and not self._unsent:
            return message
        unsent, self._unsent = self._unsent, b""
        return unsent + self._releases() + message

    def _releases(self) -> bytes:
        leaving = self._leaving
        handles = [leaving.popleft() for _ in range(len(leaving))]  # by whoever uses the lane, and nobody else
        return b"".join(
            framed(encode(Release(handles[start : start + RELEASES_MAX])))
            for start in range(0, len(handles), RELEASES_MAX)
        )


def _is_quick(request: Request | None) -> bool:
    return isinstance(request, Open) and len(request.keys) <= _QUICK_KEYS
