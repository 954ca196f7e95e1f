"""The words of `lm://`: fixed heads of 32-bit numbers and a padded key. Pure.

Source: lmcache 0.5.6, `lmcache/v1/protocol.py` (ClientMetaMessage, ServerMetaMessage). That packs in the machine's own
order, unpadded, and every machine that engines run on is little-endian. A request is 9 numbers and a key of 150 bytes, followed by
`length` bytes where it is a PUT; a reply is 9 numbers, followed by `length` bytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, Self

from kvobj.errors import InvalidRequestError

KEY_BYTES: Final = 150
_REQUEST: Final = struct.Struct(f"<9i{KEY_BYTES}s")
_REPLY: Final = struct.Struct("<9i")
_NUMBERS: Final = 6
_INT32_MAX: Final = 2**31
BODY_BYTES_MAX: Final = _INT32_MAX - 1
"""No reply's head tells of more."""
_INT32_TEXT: Final = re.compile(r"-?[0-9]{1,10}", re.ASCII).fullmatch

REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size

HEALTH_CHECK_KEY: Final = "test@1@0@0@bfloat16"
"""What LMCache puts and gets to find out whether its server is well again: `CacheEngineKey("test", 1, 0, 0, bfloat16)` in
`lmcache/v1/health_monitor/checks/remote_backend_check.py`, with whatever lies in memory, and each time these very bytes have to
come back."""


class Command(IntEnum):
    """What a client asks for."""

    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5


class Code(IntEnum):
    """Whether the reply is what was asked for. A miss is a failure."""

    SUCCESS = 200
    FAIL = 400


@dataclass(frozen=True, slots=True)
class Form:
    """What the bytes of a chunk are to LMCache: numbers of its own, which are kept and given back as they came.

    `dimensions` are always four: LMCache pads shapes with trailing zeros.
    """

    fmt: int
    dtype: int
    dimensions: tuple[int, int, int, int]

    def to_text(self) -> str:
        """As it stands in a row's metadata: `fmt dtype d0 d1 d2 d3`."""
        return " ".join(map(str, (self.fmt, self.dtype, *self.dimensions)))

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """What `to_text` wrote; None for anything else, since a row's metadata is its writer's to choose."""
        numbers = _numbers(text or "")
        if numbers is None:
            return None
        fmt, dtype, first, second, third, fourth = numbers
        return cls(fmt, dtype, (first, second, third, fourth))


@lru_cache(maxsize=1024)
def _numbers(text: str) -> tuple[int, ...] | None:
    words = text.split(" ")
    if len(words) != _NUMBERS or any(not _INT32_TEXT(word) for word in words):
        return None
    numbers = tuple(map(int, words))
    return numbers if all(-_INT32_MAX <= number < _INT32_MAX for number in numbers) else None


NO_FORM: Final = Form(fmt=1, dtype=2, dimensions=(0, 0, 0, 0))
"""What LMCache's own server says where there is no chunk to speak of."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request's head. `body_bytes` follow it (PUT alone); `key` is None where it can be none, though the framing holds."""

    command: Command
    body_bytes: int
    form: Form
    key: str | None

    @classmethod
    def parse(cls, head: bytes) -> Self:
        """Read `REQUEST_BYTES` bytes. `InvalidRequestError` for a command or a length that there is not: what follows is anybody's
        guess then, and the connection of no use."""
        number, length, fmt, dtype, _, first, second, third, fourth, key = _REQUEST.unpack(head)
        try:
            command = Command(number)
        except ValueError as error:
            raise InvalidRequestError(f"there is no command {number}") from error
        if length < 0:
            raise InvalidRequestError(f"a body has no {length} bytes")
        form = Form(fmt, dtype, (first, second, third, fourth))
        return cls(command, length if command is Command.PUT else 0, form, _key(key))


def _key(padded: bytes) -> str | None:
    try:
        key = padded.decode().strip()
    except UnicodeDecodeError:
        return None
    return key if key and "\0" not in key else None


def reply_head(code: Code, *, body_bytes: int = 0, form: Form = NO_FORM) -> bytes:
    """A reply's head. The location, which only matters between LMCache's own parts, is none."""
    return _REPLY.pack(code, body_bytes, form.fmt, form.dtype, *form.dimensions, 0)


FOUND: Final = reply_head(Code.SUCCESS)
ABSENT: Final = reply_head(Code.FAIL)
