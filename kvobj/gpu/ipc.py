"""Device memory shown to another process of the same user: chunks are read where they lie, by CUDA IPC.

The exporter makes a *ticket*, a few bytes that travel by whatever channel the two have; the importer opens it and has a chunk. The
exporter keeps the memory until it is told that the ticket is closed, or that its peer is gone: a time limit would free memory
that a kernel may be reading. Whoever may open a ticket may write: processes that trust each other.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from kvobj.errors import BusyError, DeviceError
from kvobj.gpu.device import Device, DeviceMemory
from kvobj.gpu.pins import CountedPin, Held, PinCounts
from kvobj.gpu.pool import DevicePin
from kvobj.gpu.tensors import DeviceChunk

EXPORTS_MAX: Final = 4096
_TICKET: Final = struct.Struct("<4s16sQQQH")
_MAGIC: Final = b"kvt1"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A chunk of another process: which allocation, where in it, and the number by which it is closed."""

    number: bytes
    handle: bytes
    offset: int
    size_bytes: int
    generation: int

    def pack(self) -> bytes:
        """As it travels: at most 256 bytes."""
        head = _TICKET.pack(_MAGIC, self.number, self.offset, self.size_bytes, self.generation, len(self.handle))
        return head + self.handle

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """The reverse. `DeviceError` for anything else."""
        if len(packed) < _TICKET.size:
            raise DeviceError("not a ticket of device memory", size_bytes=len(packed))
        magic, number, offset, size_bytes, generation, handle_bytes = _TICKET.unpack_from(packed)
        handle = packed[_TICKET.size :]
        if magic != _MAGIC or len(handle) != handle_bytes:
            raise DeviceError("not a ticket of device memory", size_bytes=len(packed))
        return cls(number, handle, offset, size_bytes, generation)


class Exports:
    """What a process shows to others. Thread-safe."""

    def __init__(self, device: Device, *, exports_max: int = EXPORTS_MAX) -> None:
        self._device = device
        self._exports_max = exports_max
        self._lock = threading.Lock()
        self._held: dict[bytes, tuple[str, DevicePin]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def export(self, chunk: DeviceChunk, *, peer: str) -> bytes:
        """A ticket for a chunk, which is kept until `closed` or `peer_gone`. `peer` names who gets it. `BusyError` where too
        many are out; `DeviceError` where the memory cannot be exported."""
        if not isinstance(chunk.pin, DevicePin):
            raise DeviceError("a chunk of another process is not shown to a third")
        pin, slab = chunk.pin, chunk.pin.slab
        handle = self._device.export(slab)
        number = secrets.token_bytes(16)
        with self._lock:
            if len(self._held) >= self._exports_max:
                raise BusyError("too many chunks are shown to others", exports=len(self._held))
            self._held[number] = (peer, pin.share())
        return Ticket(number, handle, chunk.address - slab.address, chunk.size_bytes, pin.extent.generation).pack()

    def closed(self, number: bytes) -> bool:
        """The peer has closed this ticket; whether it was known. Its number counts once."""
        with self._lock:
            entry = self._held.pop(number, None)
        if entry is not None:
            entry[1].release()
        return entry is not None

    def peer_gone(self, peer: str) -> int:
        """The peer's process has ended; how many chunks it still held."""
        with self._lock:
            numbers = [number for number, (holder, _) in self._held.items() if holder == peer]
            pins = [self._held.pop(number)[1] for number in numbers]
        for pin in pins:
            pin.release()
        return len(pins)


class _Opened:
    """An allocation of another process, and how many tickets of it are open."""

    __slots__ = ("handle", "memory", "tickets")

    def __init__(self, handle: bytes, memory: DeviceMemory) -> None:
        self.handle = handle
        self.memory = memory
        self.tickets = 0


class _Imported(Held):
    __slots__ = ("address", "number", "opened", "size_bytes")

    def __init__(self, number: bytes, opened: _Opened, address: int, size_bytes: int) -> None:
        super().__init__()
        self.number = number
        self.opened = opened
        self.address = address
        self.size_bytes = size_bytes


class ImportedPin(CountedPin[_Imported]):
    """See `kvobj.gpu.pins.MemoryPin`: one reference on memory of another process."""

    __slots__ = ()

    @property
    def address(self) -> int:
        """See `MemoryPin.address`."""
        return self._held.address

    @property
    def size_bytes(self) -> int:
        """See `MemoryPin.size_bytes`."""
        return self._held.size_bytes


class Imports:
    """What a process sees of others. Each allocation is opened once, however many tickets are of it, and closed with the last one.
    Thread-safe.

    `on_closed(number)` is called when nothing of a ticket is in use any more, so that the exporter can be told. It may come from a
    finalizer: it must not block.
    """

    def __init__(self, device: Device, *, on_closed: Callable[[bytes], None]) -> None:
        self._device = device
        self._on_closed = on_closed
        self._counts = PinCounts(self._free)
        self._opened: dict[bytes, _Opened] = {}

    def open(self, packed: bytes) -> DeviceChunk:
        """The chunk that a ticket is of, for reading; the caller releases it. `DeviceError` where it cannot be had."""
        ticket = Ticket.unpack(packed)
        with self._counts.locked():
            opened = self._opened.get(ticket.handle)
            if opened is None:
                opened = _Opened(ticket.handle, self._device.open_exported(ticket.handle))
                self._opened[ticket.handle] = opened
            opened.tickets += 1
            if ticket.offset + ticket.size_bytes > opened.memory.size_bytes:
                self._close_one(opened)
                raise DeviceError("a ticket is of more than its allocation", offset=ticket.offset)
            address = opened.memory.address + ticket.offset
            pin = ImportedPin(self._counts, _Imported(ticket.number, opened, address, ticket.size_bytes))
        return DeviceChunk(pin, self._device)

    def settle(self) -> None:
        """Count what was let go and is over: for who has nothing else to ask here for a while."""
        with self._counts.locked():
            pass

    def _free(self, held: _Imported) -> None:
        self._close_one(held.opened)
        self._on_closed(held.number)

    def _close_one(self, opened: _Opened) -> None:
        opened.tickets -= 1
        if not opened.tickets:
            del self._opened[opened.handle]
            self._device.close_exported(opened.memory)
