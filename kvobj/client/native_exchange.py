"""A question and its answer on the same-host socket in one native call (native/exchange.c), which waits for the answer awake.

Where it comes before a processor would have fallen asleep and been woken, sleeping costs both sides more than the answer: a view of
one chunk took 310 µs with the socket's own two calls and 230 so (medians of eight runs in turn; two cores of a virtual machine).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable
from functools import cache
from typing import Final

from kvobj.native import library
from kvobj.same_host.messages import DESCRIPTORS_MAX

READ_BYTES: Final = 64 * 1024
AWAKE_NANOSECONDS: Final = 200_000
"""How long an answer is waited for awake: on slow machines the server takes 60 to 150 µs (with 60 nothing was gained there). Of a
store that is busy for longer a client loses this much of a processor, which nobody else wanted."""


class _State(ctypes.Structure):
    """`exchange_t` in exchange.c."""

    _fields_ = (
        ("sent", ctypes.c_uint64),
        ("came", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("descriptors", ctypes.c_uint32),
        ("numbers", ctypes.c_int32 * DESCRIPTORS_MAX),
    )


@cache
def _exchange_call() -> Callable[..., int] | None:
    native = library()
    if native is None or not hasattr(native, "kvobj_exchange"):
        return None
    native.kvobj_exchange_bytes.restype = ctypes.c_uint64
    if native.kvobj_exchange_bytes() != ctypes.sizeof(_State):
        return None
    call = native.kvobj_exchange
    address, count = ctypes.c_void_p, ctypes.c_uint64
    call.argtypes = (address, ctypes.c_int, ctypes.c_char_p, count, address, count, count)
    call.restype = ctypes.c_int
    return call


class NativeExchange:
    """The memory of one socket's exchanges. For one thread at a time, which alone may close the socket."""

    __slots__ = ("_addresses", "_call", "_read", "_state", "_view")

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self._state = _State()
        self._read = ctypes.create_string_buffer(READ_BYTES)
        self._view = memoryview(self._read).cast("B")
        self._addresses = ctypes.addressof(self._state), ctypes.addressof(self._read)

    @classmethod
    def made(cls) -> NativeExchange | None:
        """None where there is no native library, or one that was built from an older source."""
        call = _exchange_call()
        return None if call is None else cls(call)

    def __call__(self, connection: socket.socket, asked: bytes) -> tuple[memoryview, list[int], int] | None:
        """Send all of `asked`, and receive what comes first: bytes (none: the other side has ended the connection), which stay
        until the next exchange, descriptors, which are the caller's, and the flags of `recvmsg`. None: nothing has come yet, and
        the caller waits for it. `OSError` of either; `TimeoutError` where the socket's SO_SNDTIMEO has passed."""
        state, (state_at, read_at) = self._state, self._addresses
        state.sent = 0
        while True:  # a signal's handler runs between two calls, and what it raises leaves here
            ended = self._call(state_at, connection.fileno(), asked, len(asked), read_at, READ_BYTES, AWAKE_NANOSECONDS)
            if ended != errno.EINTR:
                break
        if ended == errno.EAGAIN and state.sent == len(asked):
            return None
        if ended == errno.EAGAIN:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if ended:
            raise OSError(ended, os.strerror(ended))
        return self._view[: state.came], state.numbers[: state.descriptors], state.flags
