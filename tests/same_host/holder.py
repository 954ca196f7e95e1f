"""The child of `same_host_world.Holder`: opens, reserves and reads as its lines say. Started by tests, with endpoint and keys."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count

from blake3 import blake3

from kvobj.client import ChunkView, Credentials, KvClient, NewChunk
from kvobj.same_host.messages import NewItem, Reserve, Reserved

client = KvClient(sys.argv[1], Credentials(sys.argv[2], sys.argv[3]), "cache", timeout_seconds=10.0)
views: dict[str, ChunkView] = {}


def answer(command: str, name: str, *more: str) -> str:
    if command == "view":
        view = client.view_chunk(name)
        assert view is not None
        views[name] = view
        return "shared" if view.is_shared else "copied"
    if command == "check":
        return f"{views[name].data[:8].hex()} {views[name].is_valid}"
    if command == "get":
        data = client.get_chunk(name)
        return "none" if data is None else data[:8].hex()
    if command == "ahead":
        is_up = client.is_same_host
        client.open_ahead([name])
        return str(is_up)
    if command in SIZED:
        return SIZED[command](name, int(more[0]))
    return str(client.is_same_host)


def read(name: str, size_bytes: int) -> str:
    room = bytearray(size_bytes)
    (size,) = client.get_chunks([name], [memoryview(room)])
    return "none" if size is None else bytes(room[:8]).hex()


def fork_ahead(name: str, size_bytes: int) -> str:
    """What parent and child read after the parent has opened ahead; the child's where they differ."""
    assert client.is_same_host
    client.open_ahead([name])
    told, telling = os.pipe()
    if os.fork() == 0:
        os.write(telling, read(name, size_bytes).encode())
        os._exit(0)
    own = read(name, size_bytes)
    childs = os.read(told, 100).decode()
    return own if own == childs else childs


def reserve(name: str, size_bytes: int) -> str:
    deadline = time.monotonic() + 5
    with client._same_host._lane(deadline) as lane:
        assert lane is not None
        reserved = lane.call(Reserve("default", [NewItem(name, size_bytes)]), Reserved, deadline=deadline)
        (room,) = reserved.rooms
        assert room is not None
        lane.piece(room.region, room.offset, room.size_bytes)[1][:4] = b"half"
    return "reserved"


def fill_late(name: str, size_bytes: int) -> str:
    """Stand still where a writer copies into its room, until somebody has this process go on; then copy."""
    deadline = time.monotonic() + 5
    with client._same_host._lane(deadline) as lane:
        assert lane is not None
        reserved = lane.call(Reserve("default", [NewItem(name, size_bytes)]), Reserved, deadline=deadline)
        (room,) = reserved.rooms
        assert room is not None
        memory = lane.piece(room.region, room.offset, room.size_bytes)[1]
    sys.stdout.write("reserved\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSTOP)
    memory[:] = b"\xee" * size_bytes
    return "written"


def store_on(name: str, size_bytes: int) -> str:
    """Four chunks in two batches."""
    chunks = [
        NewChunk(key, blake3(key.encode()).digest(length=size_bytes)) for key in (f"{name}-{at}" for at in range(4))
    ]
    told = client.mput_batches([chunks[:2], chunks[2:]])
    return "stored" if all(isinstance(each, list) for each in told) else "failed"


def store_for_ever(name: str, size_bytes: int) -> str:
    for turn in count():
        store_on(f"{name}-{turn}", size_bytes)
    return "ended"


SIZED = {
    "reserve": reserve,
    "fill-late": fill_late,
    "read": read,
    "fork-ahead": fork_ahead,
    "storing-on": store_on,
    "storing-for-ever": store_for_ever,
}

for line in sys.stdin:
    sys.stdout.write(answer(*line.split()) + "\n")
    sys.stdout.flush()
