"""Chunks layer by layer: put in parts as each is made, and read while they are still being put."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Final

from blake3 import blake3

from kvobj.client.call_scope import pause
from kvobj.client.http_chunks import REQUEST_ID, new_room
from kvobj.client.incoming import Incoming
from kvobj.client.kv_values import StoredPart
from kvobj.client.transport import Transport
from kvobj.errors import CorruptionError, NoSuchKeyError, UnavailableError

PIECE_BYTES: Final = 1024 * 1024
_FIRST_PAUSE_SECONDS: Final = 0.001
_PAUSE_SECONDS_MAX: Final = 0.05
_OK: Final = 200
_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/\d{1,18}")


def follow(
    transport: Transport,
    path: str,
    *,
    layers: tuple[int, int] | None,
    wait_seconds: float,
    timeout_seconds: float,
    verify: bool,
) -> Iterator[memoryview]:
    """See `KvClient.follow_chunk`."""
    query = [("follow", "")]
    if layers is not None:
        query.append(("layers", f"{layers[0]}-{layers[1]}"))
    begins_by = time.monotonic() + wait_seconds
    pause_seconds = _FIRST_PAUSE_SECONDS
    while True:
        try:
            with transport.open("GET", path, query=query, timeout_seconds=timeout_seconds) as answer:
                if layers is not None:
                    yield from _by_layer(answer, layers[1] - layers[0] + 1, timeout_seconds)
                elif answer.status != _OK or REQUEST_ID not in answer.headers:
                    content_type = answer.headers.get("content-type")
                    raise UnavailableError("the answer is no chunk", status=answer.status, content_type=content_type)
                else:
                    yield from _by_piece(answer, timeout_seconds, verify=verify)
                return
        except NoSuchKeyError:
            if time.monotonic() + pause_seconds > begins_by:
                raise
        pause(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)


def _by_layer(answer: Incoming, count: int, timeout_seconds: float) -> Iterator[memoryview]:
    told = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    size_bytes, rest = divmod(int(told[2]) + 1 - int(told[1]), count) if told and count > 0 else (0, 1)
    if rest or size_bytes < 1:
        raise UnavailableError("the answer does not say which bytes it has")
    for _ in range(count):
        layer = new_room(size_bytes)
        answer.allow(timeout_seconds)  # for all of it: bytes that drip are no layer that comes
        filled = 0
        while filled < size_bytes:
            filled += _some(answer, layer[filled:])
        yield layer
    _expect_end(answer, timeout_seconds)


def _by_piece(answer: Incoming, timeout_seconds: float, *, verify: bool) -> Iterator[memoryview]:
    digest = answer.headers.get("x-kvobj-digest") if verify else None
    hasher = blake3()
    room = memoryview(b"")
    while True:
        if not room:
            room = memoryview(bytearray(PIECE_BYTES))
        answer.allow(timeout_seconds)
        count = answer.read_some(room)
        if not count:
            break
        if digest is not None:
            hasher.update(room[:count])
        yield room[:count]
        room = room[count:]
    if digest is not None and hasher.hexdigest() != digest:
        raise CorruptionError("the bytes that came are not those that were stored")


def _some(answer: Incoming, view: memoryview) -> int:
    count = answer.read_some(view)
    if not count:
        raise UnavailableError("the answer ends within a layer")
    return count


def _expect_end(answer: Incoming, timeout_seconds: float) -> None:
    """Only the end of the answer says that all of it was a chunk's."""
    answer.allow(timeout_seconds)
    if answer.read_some(memoryview(bytearray(1))):
        raise UnavailableError("the answer is longer than it said")


def stored_part(answer: Incoming) -> StoredPart:
    """What the server tells of a part that was put. `UnavailableError` for what is no answer to one."""
    have, slash, count = answer.headers.get("x-kvobj-parts", "").partition("/")
    if not slash or not (have.isascii() and have.isdigit() and count.isascii() and count.isdigit()):
        raise UnavailableError("the answer does not say how many parts there are")
    return StoredPart(existed=answer.headers.get("x-kvobj-existed") == "true", have=int(have), count=int(count))
