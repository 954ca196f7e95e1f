"""One socket to a server, and what came on it and was not asked for yet. Every wait has a deadline, of `time.monotonic`.

Bytes that are asked for go from the kernel straight into the memory they are asked into, but for those that came along with a
head or a chunk's line: at most `_AHEAD_BYTES`, copied once. Raises `OSError` and `BrokenAnswerError` as they come.

A plain socket blocks, and the kernel keeps its deadlines (`kernel_timeout`): one call fills megabytes, where Python's own
timeouts come back for every hundred kilobytes, and each time wait for the interpreter's lock. TLS needs Python's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvobj.buffers import address_of
from kvobj.client.forking import forget_in_child
from kvobj.client.kernel_timeout import SHARE_LEFT, SHARE_SET, left_until, set_timeout
from kvobj.client.native_fetch import (
    HANDED,
    INTERRUPTED,
    STASH_BYTES,
    UNFIT,
    FetchCalls,
    FetchState,
    NativeFrame,
)
from kvobj.wire.response_head import HEAD_BYTES_MAX, HEAD_END, BrokenAnswerError, ResponseHead, parse_head

_AHEAD_BYTES: Final = 8 * 1024
_DIRECT_BYTES: Final = 4 * 1024
"""Less than this is not worth a system call of its own."""
_JOINED_BYTES: Final = 16 * 1024
"""Up to here, head and body are sent as one piece: cheaper than gathering two."""
_BUFFERS_AT_ONCE: Final = 512
_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Received at once: between two pieces the deadline is looked at."""
_INTERIM_HEADS_MAX: Final = 16
_UNSET: Final = -1.0
_DIGITS: Final = 64
_char_at: Final = ctypes.c_char.from_buffer
_addressof: Final = ctypes.addressof


class ServerClosedError(ConnectionError):
    """The server closed the connection before the first byte of an answer."""


class Wire:
    """A connection, from `connect` to `close`. For one thread, but for `abort`. In a forked child it is closed."""

    __slots__ = (
        "__weakref__",
        "_end",
        "_fetching",
        "_is_aborted",
        "_lock",
        "_poll",
        "_socket",
        "_start",
        "_stash",
        "_timeout",
        "_view",
    )

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._poll: select.poll | None = None
        self._lock = threading.Lock()
        self._is_aborted = False
        self._timeout = 0.0
        self._stash = bytearray(HEAD_BYTES_MAX)
        self._view = memoryview(self._stash)
        self._start = 0
        self._end = 0
        self._fetching: _Fetching | None = None
        forget_in_child(self)

    @property
    def is_open(self) -> bool:
        """Whether it is connected, as far as this side knows."""
        return self._socket is not None

    def connect(self, host: str, port: int, *, tls: ssl.SSLContext | None, deadline: float) -> None:
        """Connect to the first address of the host that takes it, within its share of the time: one that is silent leaves some to
        those behind it. Only the system's resolver has time limits of its own."""
        error: OSError | None = None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        whole = deadline
        for tried, (family, kind, protocol, _, address) in enumerate(found):
            now = time.monotonic()
            deadline = now + (whole - now) / (len(found) - tried)
            try:
                opened = self._adopt(socket.socket(family, kind, protocol))
                self._reach(opened, address, deadline)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    self._adopt(tls.wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False))
                    self._handshake(deadline)
                    self._poll = None
                else:
                    opened.settimeout(None)
                    self._timeout = _UNSET
                    self._poll = _poll_of(opened)
            except OSError as caught:
                self.close()
                if self._is_aborted:
                    raise
                error = caught
            else:
                return
        try:
            raise error or OSError("the host has no address")
        finally:
            # Else this frame and the error keep each other, and all frames above with what they hold (a server's memory, a caller's
            # buffers), until the interpreter looks for cycles.
            error = None

    def abort(self) -> None:
        """End what its thread waits for, from another: that fails with `OSError`. What came of it is known to nobody, so the
        connection is not to be used again."""
        with self._lock:
            self._is_aborted = True
            if self._socket is not None:
                with suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            closed, self._socket = self._socket, None
            self._start = self._end = 0
            self._fetching = None
            if closed is not None:
                closed.close()

    def forget(self) -> None:
        """See `ForgetsInChild`: the child's descriptor is closed, the parent's connection goes on."""
        self._lock = threading.Lock()
        self.close()

    def is_stale(self) -> bool:
        """Whether something came, or the end did, where nothing was asked for: no request may be sent on it any more. TLS has
        messages of its own, so there it is not known."""
        return self._start < self._end or (self._poll is not None and bool(self._poll.poll(0)))

    def send(self, head: bytes, body: Sequence[bytes | memoryview], *, deadline: float) -> None:
        """Send a head and what follows it, without a copy where that is large."""
        sent = 0 if body else self._send_head(head, deadline)
        if sent == len(head):  # as nearly every read does
            return
        left = [view for view in (memoryview(buffer).cast("B") for buffer in (head[sent:], *body)) if len(view)]
        if len(left) > 1 and sum(map(len, left)) <= _JOINED_BYTES:
            left = [memoryview(b"".join(left))]
        at = 0
        while at < len(left):
            sent = self._send_some(left, at, deadline)
            while sent and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def fetch(self, calls: FetchCalls, frame: NativeFrame, path: bytes, room: memoryview, *, seconds: float) -> int:
        """GET a path in one native call, into a room that is writable and not empty: how many bytes of it were filled, or one of
        `native_fetch`'s codes. After `HANDED` the answer is read by the other calls, from its beginning. After `UNFIT` nothing
        was sent; after the other codes the connection has to be closed."""
        opened = self._socket
        if opened is None or self._poll is None or self._start != self._end or seconds <= 0:
            return UNFIT
        if not self._timeout * SHARE_LEFT <= seconds <= self._timeout:
            self._set_timeout(opened, seconds)
        fetching = self._fetching
        if fetching is None:
            fetching = self._fetching = _Fetching(calls, opened.fileno(), self._view)
        into = _addressof(_char_at(room))
        told = calls.begin(fetching.address, frame.address, path, len(path), into, len(room), seconds, self._timeout)
        while told == INTERRUPTED:  # back here so that a signal's handler may run, and may raise
            told = calls.go_on(fetching.address)
        if told == HANDED:
            self._start, self._end = 0, fetching.state.came
        return told

    def fetched_digest(self) -> bytes | None:
        """What the last fetch that filled its room was told of it: BLAKE3 of the bytes."""
        fetching = self._fetching
        at = 0 if fetching is None else fetching.state.digest_at
        return bytes.fromhex(str(self._view[at : at + _DIGITS], "ascii")) if at else None

    def fetch_error(self) -> OSError:
        """Why the last fetch broke, at once after it."""
        number = 0 if self._fetching is None else self._fetching.state.error
        return OSError(number, os.strerror(number)) if number else ConnectionError("the connection ends early")

    def read_head(self, *, method: str, deadline: float) -> ResponseHead:
        """The next head that is no interim one. `ServerClosedError` where not a byte of it comes."""
        for _ in range(_INTERIM_HEADS_MAX):
            head = parse_head(self._through(HEAD_END, HEAD_BYTES_MAX, deadline), method=method)
            if not head.is_interim:
                return head
        raise BrokenAnswerError("interim answers without an end")

    def read_line(self, bytes_max: int, *, deadline: float) -> bytes:
        """A line with its end. `BrokenAnswerError` for a longer one."""
        return self._through(b"\n", bytes_max, deadline)

    def read_some(self, view: memoryview, *, deadline: float) -> int:
        """Fill the beginning of a view with what is there or comes first; how much that is, 0 at the connection's end."""
        if self._start == self._end:
            if len(view) >= _DIRECT_BYTES:
                return self._receive(view, deadline)
            if not self._fill(deadline):
                return 0
        size_bytes = min(len(view), self._end - self._start)
        view[:size_bytes] = self._view[self._start : self._start + size_bytes]
        self._start += size_bytes
        return size_bytes

    def read_into(self, view: memoryview, *, deadline: float) -> int:
        """Fill a view; how much that is, less than all of it only at the connection's end."""
        filled = 0
        while filled < len(view):
            is_direct = self._start == self._end and len(view) - filled >= _DIRECT_BYTES
            if is_direct:
                count = self._receive(view[filled : filled + _PIECE_BYTES], deadline, socket.MSG_WAITALL)
            else:
                count = self.read_some(view[filled:], deadline=deadline)
            if not count:
                break
            filled += count
        return filled

    # -- inside --------------------------------------------------------------------------------------------------
    def _adopt(self, opened: socket.socket) -> socket.socket:
        """The socket is this wire's from now on, and so is ended by `abort`."""
        with self._lock:
            self._socket = opened
            self._timeout = _UNSET
            if self._is_aborted:
                raise ConnectionAbortedError("the call was cancelled")
        return opened

    def _reach(self, opened: socket.socket, address: tuple[object, ...], deadline: float) -> None:
        """Connect, by the deadline."""
        opened.setblocking(False)  # noqa: FBT003 - the socket's own call
        failure = opened.connect_ex(address)
        if self._is_aborted:  # an abort up to here shut down what was not connecting yet, and so ended nothing
            raise ConnectionAbortedError("the call was cancelled")
        if failure == errno.EINPROGRESS:
            waiting = select.poll()
            waiting.register(opened, select.POLLOUT)
            if not waiting.poll(left_until(deadline) * 1000):
                raise TimeoutError("the server does not answer")
            failure = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        opened.settimeout(left_until(deadline))

    def _handshake(self, deadline: float) -> None:
        opened = self._allow(deadline)
        assert isinstance(opened, ssl.SSLSocket)
        opened.do_handshake()

    def _allow(self, deadline: float) -> socket.socket:
        """The socket, with its timeout set so that it keeps the deadline."""
        opened = self._socket
        if opened is None:
            raise ConnectionError("the connection is closed")
        left = left_until(deadline)
        if not self._timeout * SHARE_LEFT <= left <= self._timeout:
            self._set_timeout(opened, left)
        return opened

    def _set_timeout(self, opened: socket.socket, left: float) -> None:
        if self._poll is None:
            self._timeout = left * SHARE_SET
            opened.settimeout(self._timeout)
        else:
            self._timeout = set_timeout(opened, left)

    def _send_head(self, head: bytes, deadline: float) -> int:
        opened = self._allow(deadline)
        try:
            return opened.send(head)
        except BlockingIOError as error:  # as in `_receive`
            raise TimeoutError("timed out") from error

    def _send_some(self, left: Sequence[bytes | memoryview], at: int, deadline: float) -> int:
        """Send some of the buffers from the given one on; how many bytes that is."""
        opened = self._allow(deadline)
        if self._poll is None:  # TLS gathers nothing
            return opened.send(left[at][:_PIECE_BYTES])
        try:
            return opened.sendmsg(left[at : at + _BUFFERS_AT_ONCE])
        except BlockingIOError as error:  # as in `_receive`
            raise TimeoutError("timed out") from error

    def _receive(self, view: memoryview, deadline: float, flags: int = 0) -> int:
        opened = self._allow(deadline)
        try:
            return opened.recv_into(view, 0, flags) if self._poll is not None else opened.recv_into(view)
        except BlockingIOError as error:  # how the kernel tells that its timeout is over
            raise TimeoutError("timed out") from error

    def _fill(self, deadline: float) -> int:
        """Receive behind what is there; how much came, 0 at the end."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._stash):
            self._stash[: self._end - self._start] = self._stash[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        count = self._receive(self._view[self._end : self._end + _AHEAD_BYTES], deadline)
        self._end += count
        return count

    def _through(self, mark: bytes, bytes_max: int, deadline: float) -> bytes:
        """All up to and with the next mark."""
        searched = self._start
        while True:
            found = self._stash.find(mark, max(self._start, searched), self._end)
            if found >= 0:
                found += len(mark)
                break
            came = self._end - self._start
            if came >= bytes_max:
                break
            searched_bytes = max(0, came - len(mark) + 1)
            if not self._fill(deadline):
                raise (
                    BrokenAnswerError("the answer breaks off")
                    if came
                    else ServerClosedError("closed without an answer")
                )
            searched = self._start + searched_bytes
        if found < 0 or found - self._start > bytes_max:
            raise BrokenAnswerError("a line or a head that is too long", bytes_max)
        raw = bytes(self._view[self._start : found])
        self._start = found
        return raw


class _Fetching:
    """What a connection's fetches are made with; `state` and the stash are the native call's while it runs."""

    __slots__ = ("_memory", "_stash", "address", "state")

    def __init__(self, calls: FetchCalls, descriptor: int, stash: memoryview) -> None:
        self._stash = stash
        self._memory = ctypes.create_string_buffer(calls.state_bytes)
        self.address = ctypes.addressof(self._memory)
        self.state = FetchState.from_buffer(self._memory)
        calls.ready(self.address, descriptor, address_of(stash), STASH_BYTES)


def _poll_of(opened: socket.socket) -> select.poll:
    poll = select.poll()
    poll.register(opened, select.POLLIN)
    return poll
