"""Tensors on a device: chunks in the pool, handed to torch and others by DLPack without a copy, and taken from them.

A chunk's memory is kept for as long as the chunk or any tensor made of it lives. Tensors share memory with the pool: what is in the
hbm tier is for reading alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, Self

from kvobj.errors import DeviceError, InvalidRequestError, StoreFullError
from kvobj.gpu import dlpack
from kvobj.gpu.copies import Copies, Copy, settled
from kvobj.gpu.device import CopyKind, Device, DeviceKind, Event
from kvobj.gpu.lane import StuckError
from kvobj.gpu.pins import MemoryPin
from kvobj.gpu.pool import DevicePool
from kvobj.tensors.form import ELEMENT_BYTES

_DLPACK_TYPES: Final[dict[DeviceKind, int]] = {"cuda": dlpack.CUDA, "host": dlpack.CPU}
_KINDS: Final = {number: kind for kind, number in _DLPACK_TYPES.items()}
_DEFAULT_STREAM: Final = 1


class DeviceChunk:
    """`size_bytes` of device memory from `offset` of a pinned extent on. Releases its pin exactly once: by `release`, or at
    the end of a `with`. Tensors have pins of their own. Thread-safe."""

    __slots__ = ("_device", "_pin", "offset", "size_bytes")

    def __init__(
        self,
        pin: MemoryPin,
        device: Device,
        *,
        offset: int = 0,
        size_bytes: int | None = None,
    ) -> None:
        self._pin = pin
        self._device = device
        self.offset = offset
        self.size_bytes = pin.size_bytes - offset if size_bytes is None else size_bytes
        if offset < 0 or self.size_bytes < 0 or offset + self.size_bytes > pin.size_bytes:
            raise ValueError(f"[{offset}, {offset + self.size_bytes}) is not in {pin.size_bytes} bytes")

    @property
    def address(self) -> int:
        """Where its bytes are on the device."""
        return self._pin.address + self.offset

    @property
    def pin(self) -> MemoryPin:
        """The pin that it holds."""
        return self._pin

    def view(self, shape: Sequence[int], dtype: str, *, offset: int = 0, read_only: bool = True) -> DeviceTensor:
        """Its bytes from `offset` on as a dense tensor, the last axis fastest: what `torch.from_dlpack` and NumPy's take.

        `dtype` as in a `TensorForm`. `InvalidRequestError` where the chunk has not that many bytes.
        """
        if dtype not in dlpack.DTYPES:
            raise InvalidRequestError("no dtype of tensors here", dtype=dtype)
        size_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
        if offset < 0 or any(size < 0 for size in shape) or offset + size_bytes > self.size_bytes:
            raise InvalidRequestError(
                "the chunk has not that many bytes", shape=tuple(shape), dtype=dtype, size_bytes=self.size_bytes
            )
        return DeviceTensor(self, self.address + offset, tuple(shape), dtype, read_only=read_only)

    def tensor(self, shape: Sequence[int], dtype: str, *, offset: int = 0) -> Any:  # noqa: ANN401 - torch has no types here
        """The same as a `torch.Tensor` over this memory, without a copy; for reading. `ModuleNotFoundError` without torch."""
        import torch  # noqa: PLC0415 - of engines, and of nobody else

        made = torch.from_dlpack(self.view(shape, dtype, offset=offset, read_only=False))
        return made.view(_torch_fp8(torch, dtype)) if dtype.startswith("fp8") else made

    def share(self) -> Self:
        """The same bytes under a pin of their own."""
        return type(self)(self._pin.share(), self._device, offset=self.offset, size_bytes=self.size_bytes)

    def release(self, after: Event | None = None) -> None:
        """Let go; the memory is used again once `after`, too, is done. A second release raises RuntimeError."""
        self._pin.release(after)

    @property
    def device(self) -> Device:
        """The device that it is on."""
        return self._device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class DeviceTensor:
    """Part of a chunk, to be given to `from_dlpack` of any library, any number of times, while the chunk is held. What is made
    of it keeps the memory by itself."""

    __slots__ = ("_address", "_chunk", "_dtype", "_is_read_only", "_shape")

    def __init__(
        self, chunk: DeviceChunk, address: int, shape: tuple[int, ...], dtype: str, *, read_only: bool
    ) -> None:
        self._chunk = chunk
        self._address = address
        self._shape = shape
        self._dtype = dtype
        self._is_read_only = read_only

    def __dlpack_device__(self) -> tuple[int, int]:
        """See the array API."""
        device = self._chunk.device
        return _DLPACK_TYPES[device.kind], device.ordinal

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:  # noqa: ANN401 - a capsule, which has no type before Python 3.13
        """See the array API. Chunks are complete when they are handed out, so no stream waits; the memory is used again once
        `stream` has done what it was given until the tensor went. Never a copy: BufferError for one."""
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a chunk of a device is handed out where it is, without a copy")
        pin, device = self._chunk.pin.share(), self._chunk.device
        handle = stream if isinstance(stream, int) else _DEFAULT_STREAM

        def let_go() -> None:
            pin.release(_fence(device, handle))

        device_type, ordinal = self.__dlpack_device__()
        return dlpack.capsule(
            self._address,
            device_type=device_type,
            ordinal=ordinal,
            dtype=self._dtype,
            shape=self._shape,
            on_released=let_go,
            versioned=max_version is not None and max_version[0] >= 1,
            read_only=self._is_read_only,
        )


class DeviceTensors:
    """Puts tensors into a pool: from the device itself, or from the host."""

    def __init__(self, device: Device, pool: DevicePool, copies: Copies) -> None:
        self._device = device
        self._pool = pool
        self._copies = copies

    def new_chunk(self, size_bytes: int) -> DeviceChunk:
        """Room for a chunk, contents undefined. `StoreFullError` where the pool has none."""
        pin = self._pool.try_reserve(size_bytes)
        if pin is None:
            raise StoreFullError("no room in the device pool", size_bytes=size_bytes)
        return DeviceChunk(pin, self._device)

    async def put(self, tensor: object) -> DeviceChunk:
        """Copy a contiguous tensor (anything with `__dlpack__`, of the host or of this device) into the pool, behind the work
        that makes it. `InvalidRequestError` for one that is not contiguous, empty or elsewhere; `StoreFullError` without room;
        errors of `Lane.submit`."""
        chunk, work = self.begin_put(tensor)
        try:
            await settled(work)
        except StuckError:
            raise  # the chunk's memory is never used again
        except BaseException:
            chunk.release()
            raise
        return chunk

    def begin_put(self, tensor: object) -> tuple[DeviceChunk, Future[None]]:
        """As `put`, for threads: the chunk holds the bytes once the future is done. The caller releases it then, whatever came."""
        device_type, ordinal = dlpack.device_of(tensor)
        kind = _KINDS.get(device_type)
        if kind is None or (kind == "cuda" and (self._device.kind, self._device.ordinal) != ("cuda", ordinal)):
            raise InvalidRequestError("a tensor of another device", device=(device_type, ordinal))
        way = CopyKind.ON_DEVICE if kind == self._device.kind else CopyKind.TO_DEVICE
        # The producer makes our stream wait for its own, as DLPack has it.
        taken = dlpack.take(tensor, stream=self._copies.stream_handle(way) if kind == "cuda" else None)
        try:
            chunk, work = self._begin_copy(taken, way)
        except BaseException:
            taken.release()
            raise
        work.add_done_callback(lambda done: None if isinstance(done.exception(), StuckError) else taken.release())
        return chunk, work

    def _begin_copy(self, taken: dlpack.TakenTensor, way: CopyKind) -> tuple[DeviceChunk, Future[None]]:
        if not taken.is_contiguous or not taken.size_bytes:
            raise InvalidRequestError("only contiguous tensors are put", shape=taken.shape, strides=taken.strides)
        chunk = self.new_chunk(taken.size_bytes)
        try:
            work = self._copies.begin(way, [Copy(chunk.address, taken.address, taken.size_bytes)])
        except BaseException:
            chunk.release()
            raise
        return chunk, work


class _Never:
    """See `Event`: of a device that cannot be asked any more."""

    def is_done(self) -> bool:
        return False


def _fence(device: Device, stream: int) -> Event:
    try:
        return device.fence(stream)
    except DeviceError:  # a finalizer raises nothing; the memory stays out of use
        return _Never()


def _torch_fp8(torch: Any, dtype: str) -> Any:  # noqa: ANN401 - torch has no types here
    return torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
