"""Names that are never reused: blob ids, session epochs, upload ids, request ids.

A blob id is (session epoch, sequence): the epoch is 64 random bits drawn once a start and recorded before
its first use, the sequence counts from one. So a paused writer or collector can only ever touch its own
dead name. To the interpreter ids are plain `bytes`: there are millions of them, and of a subclass the cyclic collector would
look at each again and again.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from typing import Final, NewType

_PAIR: Final = struct.Struct(">QQ")

BLOB_ID_BYTES: Final = 16
DIGEST_BYTES: Final = 32
_STAMP_DIGITS: Final = 12
_STAMP_MASK: Final = 16**_STAMP_DIGITS - 1
"""Milliseconds up to the year 10889."""

RandomBytes = Callable[[int], bytes]


BlobId = NewType("BlobId", bytes)
"""16 bytes: session epoch (u64, big-endian), sequence (u64, big-endian). Never reused, never renamed."""


def make_blob_id(epoch: int, sequence: int) -> BlobId:
    """The id of the given session epoch and sequence number."""
    return BlobId(_PAIR.pack(epoch, sequence))


def epoch_of(blob_id: bytes) -> int:
    """The session epoch that the id was drawn under."""
    return int(_PAIR.unpack(blob_id)[0])


def sequence_of(blob_id: bytes) -> int:
    """The position within its epoch, counting from one."""
    return int(_PAIR.unpack(blob_id)[1])


class BlobIdAllocator:
    """Hands out the blob ids of one session epoch, in order. Not thread-safe: the event loop owns it."""

    __slots__ = ("_next", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._next = 1

    def allocate(self) -> BlobId:
        """Return an id that no call has returned before."""
        sequence = self._next
        self._next += 1
        return make_blob_id(self.epoch, sequence)


def new_epoch(random_bytes: RandomBytes = os.urandom) -> int:
    """Draw a session epoch: 64 random bits, never zero (zero stands for "no session")."""
    while True:
        epoch = int.from_bytes(random_bytes(8), "big")
        if epoch:
            return epoch


def new_upload_id(now_ms: int, random_bytes: RandomBytes = os.urandom) -> str:
    """Draw an unguessable multipart upload id of 32 hex digits. Ids sort by when they were drawn: of one key's uploads S3 lists the
    oldest first, and catalogs list them by their ids."""
    return f"{max(now_ms, 0) & _STAMP_MASK:0{_STAMP_DIGITS}x}{random_bytes(10).hex()}"


def new_request_id(random_bytes: RandomBytes = random.randbytes) -> str:
    """Draw a request id of 16 upper-case hex digits, the shape S3 clients expect. It guards nothing, so that it costs no call of
    the system; each process has a sequence of its own."""
    return random_bytes(8).hex().upper()
