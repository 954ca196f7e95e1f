"""A trusted writer beside a node in this process: its calls without a socket, and its copies among them."""

from __future__ import annotations

from collections.abc import Sequence

from real_store import MIB

from kvobj.api.same_host.rights import Rights
from kvobj.api.same_host.writes import ExtentWrites, StagingBudget, reserved_bytes_max
from kvobj.app.node import Node
from kvobj.same_host.messages import Commit, Committed, NewItem, Prepare, Reserve, ReservedRoom

SIZE = 200_000
"""Of one chunk, unless another is said."""


class Writer:
    """What one connection of a trusted writer does. `told`: what it was answered, the last one last."""

    def __init__(self, node: Node, rights: Rights) -> None:
        self.node = node
        self.rights = rights
        self.told: list[Committed] = []
        self.writes = ExtentWrites(
            node.kv.chunks,
            node.hash_executor,
            StagingBudget(connection_bytes_max=MIB, total_bytes_max=MIB),
            node.prepared,
            reserved_bytes_max=reserved_bytes_max(node.kv.gate.limit_bytes),
        )

    def fill(self, room: ReservedRoom | None, data: bytes) -> None:
        assert room is not None
        region = self.node.arena._regions[room.region].room
        assert region is not None
        region[room.offset : room.offset + len(data)] = data

    async def reserve(self, *sizes: tuple[str, int]) -> tuple[int, list[ReservedRoom | None]]:
        items = [NewItem(key, size_bytes) for key, size_bytes in sizes]
        number, rooms = await self.writes.reserve(Reserve("default", items), self.rights)
        await self.writes.expect(number)
        return number, rooms

    async def commit_reserved(self, number: int) -> Committed:
        await self.writes.commit(Commit(number), self.rights, self.told.append)
        return self.told[-1]

    def prepare(self, *data: bytes, size_bytes: int = SIZE) -> list[int]:
        """Rooms that hold these bytes, by their numbers."""
        prepared = self.writes.prepare(Prepare(size_bytes, len(data)), self.rights)
        assert len(prepared.rooms) == len(data)
        for room, each in zip(prepared.rooms, data, strict=True):
            self.fill(room, each)
        return list(range(prepared.first, prepared.first + len(data)))

    async def commit(self, items: Sequence[NewItem], rooms: Sequence[int], durability: str | None = None) -> Committed:
        """Commit chunks of prepared rooms."""
        request = Commit(0, "default", list(items), durability, list(rooms))
        await self.writes.commit(request, self.rights, self.told.append)
        return self.told[-1]


async def writer_of(node: Node, bucket: str = "cache", *, is_trusted: bool = True) -> Writer:
    row = await node.catalog.bucket(bucket)
    assert row is not None
    return Writer(node, Rights(row, "root", is_owner=True, lane=None, may_write=True, is_trusted=is_trusted))
