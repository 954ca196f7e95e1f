"""Lanes and copies over host memory in a GPU's place: in order, bounded, with deadlines, never a copy too early."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from kvobj.errors import BusyError, DeviceError, StoreFullError, UnavailableError
from kvobj.gpu.copies import Copies, Copy
from kvobj.gpu.device import CopyKind
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.lane import Lane, StuckError
from kvobj.gpu.registered import RegisteredMemory
from kvobj.tensors.kernels.host_memory import address_of

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice(16 * MIB)
    yield device
    device.close()


async def test_bytes_go_to_the_device_and_come_back(device: HostDevice) -> None:
    copies = Copies(device)
    memory = device.take(MIB)
    plain = memoryview(bytes(range(256)) * 4096)
    await copies.to_device(memory.address, plain)
    into = memoryview(bytearray(1000))
    await copies.to_host(into, memory.address + 77)
    assert into == plain[77:1077]
    await copies.to_host(into[:0], memory.address)
    copies.close()


async def test_copies_of_one_call_are_done_together(device: HostDevice) -> None:
    copies = Copies(device)
    memory = device.take(MIB)
    parts = [memoryview(bytes([n]) * 100) for n in range(5)]
    batch = [Copy(memory.address + 100 * n, address_of(part), 100) for n, part in enumerate(parts)]
    await asyncio.wrap_future(copies.begin(CopyKind.TO_DEVICE, batch))
    into = memoryview(bytearray(500))
    await copies.to_host(into, memory.address)
    assert into.tobytes() == b"".join(bytes(part) for part in parts)
    copies.close()


async def test_the_two_directions_do_not_wait_for_each_other(device: HostDevice) -> None:
    copies = Copies(device)
    memory = device.take(MIB)
    gate = threading.Event()
    stuck = copies._lanes[CopyKind.TO_DEVICE].submit(lambda stream: stream.run(gate.wait), 1)  # type: ignore[attr-defined]
    await copies.to_host(memoryview(bytearray(10)), memory.address)
    assert not stuck.done()
    gate.set()
    await asyncio.wrap_future(stuck)
    copies.close()


def test_so_many_bytes_are_on_their_way_and_the_rest_waits(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test", in_flight_bytes=100)
    gate, begun = threading.Event(), []
    futures = []
    for number in range(4):

        def work(stream: object, number: int = number) -> None:
            begun.append(number)
            stream.run(gate.wait)  # type: ignore[attr-defined]

        futures.append(lane.submit(work, 50))
    late = threading.Event()
    assert not late.wait(0.1)
    assert begun == [0, 1]
    assert lane.in_flight_bytes == 100
    gate.set()
    for future in futures:
        future.result(10)
    assert begun == [0, 1, 2, 3]
    lane.close()


def test_one_larger_than_the_bound_goes_alone(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test", in_flight_bytes=100)
    gates, begun = [threading.Event() for _ in range(3)], []
    futures = []
    for number, size_bytes in enumerate((50, 1000, 50)):

        def work(stream: object, number: int = number) -> None:
            begun.append(number)
            stream.run(gates[number].wait)  # type: ignore[attr-defined]

        futures.append(lane.submit(work, size_bytes))
    late = threading.Event()
    for number in range(3):
        assert not late.wait(0.1)
        assert begun == list(range(number + 1)), "nothing goes beside the large one"
        gates[number].set()
        futures[number].result(10)
    lane.close()


def test_a_queue_that_is_full_refuses(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test", in_flight_bytes=1, queued_max=2)
    gate = threading.Event()
    first = lane.submit(lambda stream: stream.run(gate.wait), 1)  # type: ignore[attr-defined]
    more = []
    with pytest.raises(BusyError):
        more += [lane.submit(lambda _: None, 1) for _ in range(4)]
    gate.set()
    first.result(10)
    lane.close()


def test_what_fails_on_the_device_is_told_to_who_waits(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test")

    def fail() -> None:
        raise ValueError("an illegal address")

    with pytest.raises(DeviceError, match="failed"):
        lane.submit(lambda stream: stream.run(fail), 1).result(10)  # type: ignore[attr-defined]
    lane.close()


def test_what_fails_before_it_reaches_the_device_is_told_as_it_is(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test")

    def fail(_: object) -> None:
        raise KeyError("no such kernel")

    with pytest.raises(KeyError):
        lane.submit(fail, 1).result(10)
    lane.submit(lambda _: None, 1).result(10)
    lane.close()


def test_a_device_that_hangs_ends_every_wait_and_takes_nothing_more(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test", in_flight_bytes=1, deadline_seconds=0.2)
    gate = threading.Event()
    hanging = lane.submit(lambda stream: stream.run(gate.wait), 1)  # type: ignore[attr-defined]
    queued = lane.submit(lambda _: None, 1)
    with pytest.raises(StuckError):
        hanging.result(10)
    with pytest.raises(UnavailableError):
        queued.result(10)
    with pytest.raises(StuckError):
        lane.submit(lambda _: None, 1)
    gate.set()
    lane.close()


def test_closing_finishes_what_was_accepted(device: HostDevice) -> None:
    lane = Lane(device.new_stream(), name="test")
    done: list[int] = []
    futures = [lane.submit(lambda stream, n=n: stream.run(lambda: done.append(n)), 1) for n in range(50)]  # type: ignore[misc]
    lane.close()
    lane.close()
    assert all(future.done() for future in futures)
    assert done == list(range(50))
    with pytest.raises(UnavailableError):
        lane.submit(lambda _: None, 1)


async def test_who_is_cancelled_waits_for_the_device(device: HostDevice) -> None:
    copies = Copies(device)
    memory = device.take(MIB)
    gate = threading.Event()
    held = copies._lanes[CopyKind.TO_HOST].submit(lambda stream: stream.run(gate.wait), 1)  # type: ignore[attr-defined]
    into = bytearray(100)
    copying = asyncio.create_task(copies.to_host(memoryview(into), memory.address))
    await asyncio.sleep(0)
    for _ in range(3):
        copying.cancel()
        await asyncio.sleep(0)
    assert not copying.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert held.done()
    copies.close()


def test_streams_wait_for_each_others_events(device: HostDevice) -> None:
    first, second = device.new_stream(), device.new_stream()
    gate, order = threading.Event(), []
    first.run(gate.wait)
    first.run(lambda: order.append("first"))
    second.after(first.record())
    second.run(lambda: order.append("second"))
    end = second.record()
    assert not end.is_done()
    gate.set()
    second.wait()
    assert order == ["first", "second"]
    assert end.is_done()


def test_a_device_gives_no_more_than_it_has(device: HostDevice) -> None:
    memory = device.take(10 * MIB)
    with pytest.raises(StoreFullError):
        device.take(10 * MIB)
    assert device.facts().free_bytes == 6 * MIB
    device.give_back(memory)
    assert device.facts().free_bytes == 16 * MIB


def test_memory_is_registered_once_and_a_refusal_is_only_slower(device: HostDevice) -> None:
    registered = RegisteredMemory(device, log=logging.getLogger("test"))
    views = [memoryview(bytearray(4096)) for _ in range(3)]
    device.register(int(address_of(views[2])), 1)  # so that the third is refused
    for _ in range(3):
        for view in views:
            registered.note(view)
    registered.wait()
    assert (registered.registered_bytes, registered.refused) == (8192, 1)
    assert device.registered_bytes == 8193
    registered.close()
    registered.close()
    assert device.registered_bytes == 1
    registered.note(memoryview(bytearray(10)))
    assert device.registered_bytes == 1
