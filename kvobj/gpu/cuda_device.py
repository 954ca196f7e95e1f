"""An NVIDIA GPU through CuPy's driver calls. Imported only where one is asked for; CuPy, only once it is opened.

Runs on a GPU alone (`tests/gpu`): what can be tested without one stands on `HostDevice`, which has the same protocol.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from kvobj.errors import DeviceError, StoreFullError
from kvobj.gpu.cuda_launcher import CudaLauncher, KernelModule
from kvobj.gpu.device import CopyKind, DeviceFacts, DeviceKind, DeviceMemory, Event, Stream
from kvobj.tensors.kernels.launcher import Launcher

_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context
_HANDLE: Final = struct.Struct("<4sQ64s")
_HANDLE_MAGIC: Final = b"cud1"


def unavailable(ordinal: int = 0) -> str | None:
    """Why this GPU cannot be used, for people; None if it can."""
    try:
        import cupy  # noqa: PLC0415 - only where a GPU is asked for
    except Exception as error:  # noqa: BLE001 - a CuPy that finds no library of CUDA's raises more than ImportError
        return f"CuPy is not installed or does not load: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return None if 0 <= ordinal < count else f"there is no GPU {ordinal}, only {count}"


def described(ordinal: int = 0) -> str:
    """Which GPU this is, for people; it must be there. Opens nothing on it: a context of the driver's takes half a gigabyte of the
    GPU's memory until the process ends. `DeviceError` where the driver fails."""
    import cupy  # noqa: PLC0415 - only where a GPU is asked for

    try:
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError("the GPU's driver failed", cause=str(error)) from error
    return f"{_name(properties)}, {_arch(properties)}, {properties['totalGlobalMem'] >> 20} MiB"


def _name(properties: dict[str, Any]) -> str:
    name = properties["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def _arch(properties: dict[str, Any]) -> str:
    return f"sm_{properties['major']}{properties['minor']}"


class CudaEvent:
    """See `kvobj.gpu.device.Event`."""

    __slots__ = ("_cupy", "event")

    def __init__(self, cupy: Any) -> None:  # noqa: ANN401 - CuPy has no types
        self._cupy = cupy
        self.event = cupy.cuda.Event(disable_timing=True)

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        try:
            return bool(self.event.done)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError("work on the GPU failed", cause=str(error)) from error


class CudaStream:
    """See `kvobj.gpu.device.Stream`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current() as cupy:
            self.stream = cupy.cuda.Stream(non_blocking=True)

    @property
    def handle(self) -> int:
        """See `Stream.handle`."""
        return int(self.stream.ptr)

    def copy(self, destination: int, source: int, size_bytes: int, kind: CopyKind) -> None:
        """See `Stream.copy`."""
        with self._device.current() as cupy:
            cupy.cuda.runtime.memcpyAsync(destination, source, size_bytes, int(kind), self.handle)

    def record(self) -> Event:
        """See `Stream.record`."""
        with self._device.current() as cupy:
            event = CudaEvent(cupy)
            event.event.record(self.stream)
            return event

    def after(self, event: Event) -> None:
        """See `Stream.after`."""
        if not isinstance(event, CudaEvent):
            raise TypeError(f"not an event of a GPU: {event!r}")
        with self._device.current():
            self.stream.wait_event(event.event)

    def wait(self) -> None:
        """See `Stream.wait`."""
        with self._device.current():
            self.stream.synchronize()

    def close(self) -> None:
        """See `Stream.close`. The driver keeps it until its work is done."""


class CudaDevice:
    """See `kvobj.gpu.device.Device`. `max_sms` bounds how many of the GPU's multiprocessors kernels use (None: all), so that decode
    attention beside them is not disturbed. `DeviceError` that says why where the GPU cannot be used."""

    def __init__(self, ordinal: int = 0, *, max_sms: int | None = None) -> None:
        reason = unavailable(ordinal)
        if reason is not None:
            raise DeviceError(reason, ordinal=ordinal)
        import cupy  # noqa: PLC0415 - only where a GPU is asked for

        self._cupy = cupy
        self._ordinal = ordinal
        self._max_sms = max_sms
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._taken: dict[int, DeviceMemory] = {}
        self._foreign: dict[int, DeviceMemory] = {}
        self._launchers: list[CudaLauncher] = []
        self._module: KernelModule | None = None

    @property
    def kind(self) -> DeviceKind:
        """See `Device.kind`."""
        return "cuda"

    @property
    def ordinal(self) -> int:
        """See `Device.ordinal`."""
        return self._ordinal

    @contextmanager
    def current(self) -> Iterator[Any]:
        """Make this GPU the thread's own; gives CuPy. CUDA's errors come out as `DeviceError`, memory that is not there as
        `StoreFullError`."""
        try:
            with self._cupy.cuda.Device(self._ordinal):
                yield self._cupy
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            if error.status == _OUT_OF_MEMORY:
                raise StoreFullError("no room on the GPU", cause=str(error)) from error
            raise DeviceError("the GPU's driver failed", cause=str(error)) from error

    def facts(self) -> DeviceFacts:
        """See `Device.facts`."""
        with self.current() as cupy:
            properties = cupy.cuda.runtime.getDeviceProperties(self._ordinal)
            free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
        return DeviceFacts(
            kind="cuda",
            ordinal=self._ordinal,
            name=_name(properties),
            total_bytes=int(total_bytes),
            free_bytes=int(free_bytes),
            sms=int(properties["multiProcessorCount"]),
            arch=_arch(properties),
        )

    def take(self, size_bytes: int) -> DeviceMemory:
        """See `Device.take`."""
        with self.current() as cupy:
            memory = DeviceMemory(int(cupy.cuda.runtime.malloc(size_bytes)), size_bytes)
        with self._lock:
            self._taken[memory.address] = memory
        return memory

    def give_back(self, memory: DeviceMemory) -> None:
        """See `Device.give_back`."""
        with self._lock:
            del self._taken[memory.address]
        with self.current() as cupy:
            cupy.cuda.runtime.free(memory.address)

    def new_stream(self) -> Stream:
        """See `Device.new_stream`."""
        return CudaStream(self)

    def launcher(self, stream: Stream) -> Launcher:
        """See `Device.launcher`. The first compiles the kernels, or finds them compiled."""
        if not isinstance(stream, CudaStream):
            raise TypeError(f"not a stream of a GPU: {stream!r}")
        facts = self.facts()
        with self._compiling:  # for many seconds, in which memory is still taken and given back
            if self._module is None:
                with self.current() as cupy:
                    self._module = KernelModule.load(cupy, facts.arch)
        launcher = CudaLauncher(self, self._module, stream.stream, facts, max_sms=self._max_sms)
        with self._lock:
            self._launchers.append(launcher)
        return launcher

    def fence(self, stream: int) -> Event:
        """See `Device.fence`."""
        with self.current() as cupy:
            event = CudaEvent(cupy)
            cupy.cuda.runtime.eventRecord(event.event.ptr, stream)
            return event

    def register(self, address: int, size_bytes: int) -> None:
        """See `Device.register`."""
        with self.current() as cupy:
            cupy.cuda.runtime.hostRegister(address, size_bytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        with self.current() as cupy:
            cupy.cuda.runtime.hostUnregister(address)

    def export(self, memory: DeviceMemory) -> bytes:
        """See `Device.export`. Only of memory that `take` gave: another allocator's may begin elsewhere than its handle says."""
        if memory.address not in self._taken:
            raise DeviceError("only memory of this device can be exported", address=memory.address)
        with self.current() as cupy:
            handle = cupy.cuda.runtime.ipcGetMemHandle(memory.address)
        return _HANDLE.pack(_HANDLE_MAGIC, memory.size_bytes, bytes(handle))

    def open_exported(self, handle: bytes) -> DeviceMemory:
        """See `Device.open_exported`."""
        if len(handle) != _HANDLE.size:
            raise DeviceError("not a handle of device memory", size_bytes=len(handle))
        magic, size_bytes, inner = _HANDLE.unpack(handle)
        if magic != _HANDLE_MAGIC:
            raise DeviceError("not a handle of a GPU")
        with self.current() as cupy:
            memory = DeviceMemory(int(cupy.cuda.runtime.ipcOpenMemHandle(inner)), size_bytes)
        with self._lock:
            self._foreign[memory.address] = memory
        return memory

    def close_exported(self, memory: DeviceMemory) -> None:
        """See `Device.close_exported`."""
        with self._lock:
            del self._foreign[memory.address]
        with self.current() as cupy:
            cupy.cuda.runtime.ipcCloseMemHandle(memory.address)

    def close(self) -> None:
        """See `Device.close`."""
        with self._lock:
            launchers, self._launchers = self._launchers, []
        for launcher in launchers:
            launcher.close()
        with self._lock:
            taken, self._taken = self._taken, {}
            foreign, self._foreign = self._foreign, {}
        with suppress(DeviceError), self.current() as cupy:
            for memory in foreign.values():
                cupy.cuda.runtime.ipcCloseMemHandle(memory.address)
            for memory in taken.values():
                cupy.cuda.runtime.free(memory.address)
