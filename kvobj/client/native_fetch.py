"""A whole GET in one native call: signed, sent, and its answer received into the caller's memory (native/fetch.c).

Once megabytes have gone through the processor's caches every Python call is slow: those of a GET of 8 MiB took longer than what is
left of them here. Only the plain case is done: a kept connection without TLS, a path of unreserved characters, and an answer that
is chunk bytes and nothing else. With all others the ordinary reader goes on at the place where the native one stopped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from kvobj.client.sigv4 import SigningFrame
from kvobj.native import library

STASH_BYTES: Final = 8 * 1024
"""Received at most before the body's own place is known."""

UNFIT: Final = -1
STALE: Final = -2
HANDED: Final = -3
INTERRUPTED: Final = -4
BROKEN_HEAD: Final = -5
BROKEN_BODY: Final = -6
TIMED_OUT: Final = -7
"""What a fetch ends with instead of a number of bytes: see fetch.c."""


class FetchState(ctypes.Structure):
    """The front of `fetch_t` in fetch.c."""

    _fields_ = (("came", ctypes.c_uint64), ("digest_at", ctypes.c_uint64), ("error", ctypes.c_int64))


class FetchCalls(NamedTuple):
    """The native functions. Neither holds the interpreter's lock; memory that they are given must stay until they return."""

    ready: Callable[..., object]
    begin: Callable[..., int]
    go_on: Callable[[int], int]
    frame: Callable[..., int]
    state_bytes: int
    frame_bytes: int


@cache
def fetch_calls() -> FetchCalls | None:
    """None where there is no native library, or one that was built from an older source."""
    native = library()
    if native is None or not hasattr(native, "kvobj_fetch"):
        return None
    address, count = ctypes.c_void_p, ctypes.c_uint64
    begin, go_on, frame = native.kvobj_fetch, native.kvobj_fetch_on, native.kvobj_fetch_frame
    text = (ctypes.c_char_p, count)
    begin.argtypes = (address, address, *text, address, count, ctypes.c_double, ctypes.c_double)
    begin.restype = go_on.restype = ctypes.c_int64
    go_on.argtypes = [address]
    native.kvobj_fetch_ready.argtypes = [address, ctypes.c_int, address, count]
    frame.argtypes = (address, *text, *text, *text, *text)
    native.kvobj_fetch_bytes.restype = native.kvobj_fetch_frame_bytes.restype = count
    return FetchCalls(
        native.kvobj_fetch_ready, begin, go_on, frame, native.kvobj_fetch_bytes(), native.kvobj_fetch_frame_bytes()
    )


class NativeFrame:
    """The memory of a frame in fetch.c, and where it is."""

    __slots__ = ("_memory", "address")

    def __init__(self, memory: ctypes.Array[ctypes.c_char]) -> None:
        self._memory = memory
        self.address = ctypes.addressof(memory)


def native_frame(calls: FetchCalls, frame: SigningFrame, fields: str) -> NativeFrame | None:
    """What all requests of a second have in common, for the native call; `fields` end where the signature begins. None where that
    is too long for it."""
    made = ctypes.create_string_buffer(calls.frame_bytes)
    parts = (frame.mac.key, fields.encode("latin-1"), frame.canonical_fields.encode(), frame.text.encode())
    is_made = calls.frame(made, *[argument for part in parts for argument in (part, len(part))])
    return NativeFrame(made) if is_made else None
