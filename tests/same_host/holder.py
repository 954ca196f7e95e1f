"""The child of `same_host_world.Holder`: opens, reserves and reads as its lines say. Started by tests, with endpoint and keys."""

from __future__ import annotations

import sys
import time

from kvobj.client import ChunkView, Credentials, KvClient
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
    if command == "reserve":
        return reserve(name, int(more[0]))
    return str(client.is_same_host)


def reserve(name: str, size_bytes: int) -> str:
    deadline = time.monotonic() + 5
    with client._same_host._lane(deadline) as lane:
        assert lane is not None
        reserved = lane.call(Reserve("default", [NewItem(name, size_bytes)]), Reserved, deadline=deadline)
        (room,) = reserved.rooms
        assert room is not None
        lane.piece(room.region, room.offset, room.size_bytes)[1][:4] = b"half"
    return "reserved"


for line in sys.stdin:
    sys.stdout.write(answer(*line.split()) + "\n")
    sys.stdout.flush()
