"""Device memory shown to another process: tickets, two real processes, and what is kept until when."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import BusyError, DeviceError
from kvobj.gpu.copies import Copies
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.ipc import Exports, Imports, Ticket
from kvobj.gpu.pool import DevicePool
from kvobj.gpu.tensors import DeviceTensors

MIB = 1 << 20

OTHER_PROCESS = """
import sys
import numpy as np
from kvobj.errors import DeviceError
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.ipc import Imports

closed = []
imports = Imports(HostDevice(1 << 20), on_closed=lambda number: closed.append(number))
for line in sys.stdin:
    try:
        chunk = imports.open(bytes.fromhex(line))
    except DeviceError as error:
        print("refused", error.message, flush=True)
        continue
    seen = np.from_dlpack(chunk.view((chunk.size_bytes,), "uint8"))
    total = int(seen.sum())
    chunk.release()
    assert not closed
    del seen
    imports.settle()
    print(total, *[number.hex() for number in closed], flush=True)
    closed.clear()
"""


class World:
    def __init__(self) -> None:
        self.device = HostDevice(16 * MIB)
        self.pool = DevicePool(self.device, capacity_bytes=4 * MIB, slab_bytes=MIB)
        self.copies = Copies(self.device)
        self.tensors = DeviceTensors(self.device, self.pool, self.copies)
        self.exports = Exports(self.device, exports_max=3)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.copies.close()
    world.pool.close()
    world.device.close()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


def answer(process: subprocess.Popen[str], ticket: bytes) -> list[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(ticket.hex() + "\n")
    process.stdin.flush()
    return process.stdout.readline().split()


async def test_another_process_reads_a_chunk_where_it_lies_and_says_when_it_is_done(
    world: World, other: subprocess.Popen[str]
) -> None:
    before = await world.tensors.put(np.full(1000, 9, np.uint8))
    chunk = await world.tensors.put(np.arange(200, dtype=np.uint8))
    ticket = world.exports.export(chunk, peer="other")
    assert len(ticket) <= 256
    chunk.release()
    total, number = answer(other, ticket)
    assert int(total) == sum(range(200))
    assert world.pool.usage().extents == 2
    assert world.exports.closed(bytes.fromhex(number))
    assert not world.exports.closed(bytes.fromhex(number))
    assert world.pool.usage().extents == 1
    before.release()


async def test_what_the_exporter_gave_back_cannot_be_opened(world: World, other: subprocess.Popen[str]) -> None:
    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    ticket = world.exports.export(chunk, peer="other")
    chunk.release()
    world.exports.peer_gone("other")
    world.pool.close()
    assert answer(other, ticket)[0] == "refused"


async def test_a_peer_that_is_gone_holds_nothing(world: World) -> None:
    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    for peer in ("a", "a", "b"):
        world.exports.export(chunk, peer=peer)
    with pytest.raises(BusyError):
        world.exports.export(chunk, peer="b")
    chunk.release()
    assert world.exports.peer_gone("a") == 2
    assert world.pool.usage().extents == 1
    assert world.exports.peer_gone("b") == 1
    assert len(world.exports) == 0
    assert world.pool.usage().extents == 0


async def test_an_allocation_is_opened_once_and_closed_with_the_last_of_its_tickets(world: World) -> None:
    closed: list[bytes] = []
    importer = HostDevice(MIB)
    imports = Imports(importer, on_closed=closed.append)
    chunks = [await world.tensors.put(np.full(100, n, np.uint8)) for n in range(3)]
    tickets = [world.exports.export(chunk, peer="us") for chunk in chunks]
    opened = [imports.open(ticket) for ticket in tickets]
    assert len(importer._foreign) == 1
    seen = [np.from_dlpack(chunk.view((100,), "uint8")) for chunk in opened]
    assert [int(each[0]) for each in seen] == [0, 1, 2]
    for chunk in opened:
        chunk.release()
    assert closed == []
    seen.pop()
    gc.collect()
    imports.settle()
    assert closed == [Ticket.unpack(tickets[2]).number]
    assert len(importer._foreign) == 1
    seen.clear()
    gc.collect()
    imports.settle()
    assert sorted(closed) == sorted(Ticket.unpack(ticket).number for ticket in tickets)
    assert not importer._foreign
    with pytest.raises(DeviceError):
        world.exports.export(imports.open(tickets[0]), peer="a third")
    for chunk in chunks:
        chunk.release()


async def test_a_ticket_of_more_than_its_allocation_is_refused(world: World) -> None:
    importer = HostDevice(MIB)
    imports = Imports(importer, on_closed=lambda _: None)
    chunk = await world.tensors.put(np.zeros(10, np.uint8))
    true = Ticket.unpack(world.exports.export(chunk, peer="us"))
    forged = Ticket(true.number, true.handle, MIB - 5, 10, true.generation)
    with pytest.raises(DeviceError, match="more than its allocation"):
        imports.open(forged.pack())
    assert not importer._foreign
    chunk.release()


@given(st.binary(max_size=300))
def test_anything_else_is_no_ticket(packed: bytes) -> None:
    with pytest.raises(DeviceError):
        Imports(HostDevice(MIB), on_closed=lambda _: None).open(packed)
