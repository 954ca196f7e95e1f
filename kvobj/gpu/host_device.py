"""Host memory in a GPU's place: the same protocol, streams that are threads, memory that another process can open.

For tests, for trying the hbm tier out without a GPU, and for nothing else: a copy here is a `memmove`. Memory is anonymous shared
memory (`memfd_create`), so none is left behind by a process that dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from kvobj.errors import DeviceError, StoreFullError
from kvobj.gpu.device import CopyKind, DeviceFacts, DeviceKind, DeviceMemory, Event, Stream
from kvobj.tensors.kernels.host_launcher import host_launcher
from kvobj.tensors.kernels.launcher import Address, Launcher

# Process, descriptor, device and inode of the file, size.
_HANDLE: Final = struct.Struct("<4sIIQQQ")
_HANDLE_MAGIC: Final = b"hdm1"
_JOIN_SECONDS: Final = 10.0


class HostEvent:
    """See `kvobj.gpu.device.Event`."""

    __slots__ = ("_done", "_error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise DeviceError("work on the device failed", cause=str(self._error)) from self._error
        return True

    def happen(self, error: BaseException | None) -> None:
        """Everything before it is done, or has failed."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Until it has happened: on a stream's own thread."""
        self._done.wait()


class HostStream:
    """See `kvobj.gpu.device.Stream`: a thread that takes jobs in order. After a job that failed, every event says so."""

    __slots__ = ("_error", "_jobs", "_thread")

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | HostEvent | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="host stream", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> int:
        """See `Stream.handle`."""
        return 0

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` in turn, on the stream's thread."""
        self._jobs.put(work)

    def copy(self, destination: int, source: int, size_bytes: int, kind: CopyKind) -> None:
        """See `Stream.copy`."""
        del kind  # all of it is host memory
        self.run(lambda: ctypes.memmove(destination, source, size_bytes))

    def record(self) -> Event:
        """See `Stream.record`."""
        event = HostEvent()
        self._jobs.put(event)
        return event

    def after(self, event: Event) -> None:
        """See `Stream.after`."""
        if not isinstance(event, HostEvent):
            raise TypeError(f"not an event of a host device: {event!r}")
        self.run(event.wait)

    def wait(self) -> None:
        """See `Stream.wait`."""
        event = HostEvent()
        self._jobs.put(event)
        event.wait()
        event.is_done()

    def close(self) -> None:
        """See `Stream.close`."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, HostEvent):
                job.happen(self._error)
                continue
            try:
                job()
            except Exception as error:  # noqa: BLE001 - as a GPU does: it is told by the events that follow
                self._error = error


class _InTurn:
    """See `kvobj.tensors.kernels.launcher.Launcher`: the CPU's, behind what a stream still has to do."""

    __slots__ = ("_inner", "_stream")

    def __init__(self, inner: Launcher, stream: HostStream) -> None:
        self._inner = inner
        self._stream = stream

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def is_host(self) -> bool:
        return True

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        self._stream.wait()
        self._inner.launch(kernel, warps, *arguments)

    def scratch(self, slot: str, size_bytes: int) -> Address:
        return self._inner.scratch(slot, size_bytes)

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        self._stream.wait()
        self._inner.upload(to, data)

    def download(self, at: Address, into: memoryview) -> None:
        self._stream.wait()
        self._inner.download(at, into)


class HostDevice:
    """See `kvobj.gpu.device.Device`. `total_bytes` bounds what may be taken at once."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}
        self._foreign: dict[int, mmap.mmap] = {}
        self._registered: dict[int, int] = {}
        self._streams: list[HostStream] = []

    @property
    def kind(self) -> DeviceKind:
        """See `Device.kind`."""
        return "host"

    @property
    def ordinal(self) -> int:
        """See `Device.ordinal`."""
        return 0

    @property
    def registered_bytes(self) -> int:
        """Host memory that is registered now."""
        return sum(self._registered.values())

    def facts(self) -> DeviceFacts:
        """See `Device.facts`."""
        return DeviceFacts("host", 0, "host memory", self._total_bytes, self._total_bytes - self._taken_bytes, 0, "")

    def take(self, size_bytes: int) -> DeviceMemory:
        """See `Device.take`."""
        with self._lock:
            if self._taken_bytes + size_bytes > self._total_bytes:
                raise StoreFullError("no room on the device", size_bytes=size_bytes, total_bytes=self._total_bytes)
            self._taken_bytes += size_bytes
        descriptor = os.memfd_create("kvobj-device", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        mapped = mmap.mmap(descriptor, size_bytes)
        memory = DeviceMemory(_address_of(mapped), size_bytes)
        with self._lock:
            self._maps[memory.address] = (mapped, descriptor)
        return memory

    def give_back(self, memory: DeviceMemory) -> None:
        """See `Device.give_back`."""
        with self._lock:
            _, descriptor = self._maps.pop(memory.address)
            self._taken_bytes -= memory.size_bytes
        os.close(descriptor)

    def new_stream(self) -> HostStream:
        """See `Device.new_stream`."""
        stream = HostStream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def launcher(self, stream: Stream) -> Launcher:
        """See `Device.launcher`. Kernels run on the thread that launches them, once what the stream was given before is done.
        `UnavailableError` where the CPU kernels are missing."""
        if not isinstance(stream, HostStream):
            raise TypeError(f"not a stream of a host device: {stream!r}")
        return _InTurn(host_launcher(), stream)

    def fence(self, stream: int) -> Event:
        """See `Device.fence`. Who works on host memory has done so when it lets go."""
        del stream
        event = HostEvent()
        event.happen(None)
        return event

    def register(self, address: int, size_bytes: int) -> None:
        """See `Device.register`. Only noted."""
        with self._lock:
            if address in self._registered:
                raise DeviceError("host memory is registered already", address=address)
            self._registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        with self._lock:
            if self._registered.pop(address, None) is None:
                raise DeviceError("host memory is not registered", address=address)

    def export(self, memory: DeviceMemory) -> bytes:
        """See `Device.export`. The handle names this process and its descriptor: who opens it must be allowed to trace us."""
        with self._lock:
            _, descriptor = self._maps[memory.address]
        status = os.fstat(descriptor)
        return _HANDLE.pack(
            _HANDLE_MAGIC, os.getpid(), descriptor, status.st_dev, status.st_ino, memory.size_bytes
        )  # fmt: skip

    def open_exported(self, handle: bytes) -> DeviceMemory:
        """See `Device.open_exported`. The file is compared with the one that was exported: descriptors are used again."""
        if len(handle) != _HANDLE.size:
            raise DeviceError("not a handle of device memory", size_bytes=len(handle))
        magic, process, number, device, inode, size_bytes = _HANDLE.unpack(handle)
        if magic != _HANDLE_MAGIC:
            raise DeviceError("not a handle of a host device")
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError("memory of another process cannot be opened", cause=str(error)) from error
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino, status.st_size) != (device, inode, size_bytes):
                raise DeviceError("memory of another process is gone", process=process)
            mapped = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        memory = DeviceMemory(_address_of(mapped), size_bytes)
        with self._lock:
            self._foreign[memory.address] = mapped
        return memory

    def close_exported(self, memory: DeviceMemory) -> None:
        """See `Device.close_exported`."""
        with self._lock:
            del self._foreign[memory.address]

    def close(self) -> None:
        """See `Device.close`. Mappings go with the last view of them."""
        with self._lock:
            streams, self._streams = self._streams, []
            maps, self._maps = self._maps, {}
            self._foreign.clear()
            self._taken_bytes = 0
        for stream in streams:
            stream.close()
        for _, descriptor in maps.values():
            os.close(descriptor)


def _address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
