"""DLPack, both ways, by ctypes alone: how memory is handed to torch, CuPy, JAX and NumPy without a copy, and taken from them.

Layouts and rules: DLPack 1.0 (dmlc/dlpack `dlpack.h`, and the Python array API's page on it). A capsule is used once; whoever
takes it renames it and calls its deleter. Deleters may come on any thread, at any point, also inside the garbage collector.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

CPU: Final = 1
CUDA: Final = 2
"""`DLDeviceType`."""

DTYPES: Final[dict[str, tuple[int, int]]] = {
    "int8": (0, 8), "uint8": (1, 8), "fp16": (2, 16), "fp32": (2, 32), "bf16": (4, 16),
    "fp8_e4m3": (1, 8), "fp8_e5m2": (1, 8),
}  # fmt: skip
"""`DLDataType` code and bits of each dtype of a `TensorForm`. fp8 goes as bytes: few consumers know its own codes."""

_NAME: Final = b"dltensor"
_USED_NAME: Final = b"used_dltensor"
_VERSIONED: Final = b"dltensor_versioned"
_USED_VERSIONED: Final = b"used_dltensor_versioned"
_MAJOR: Final = 1
_DIMENSIONS_MAX: Final = 64


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor`: what every consumer takes."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """`DLManagedTensorVersioned`: what says whether it may be written."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_READ_ONLY: Final = 1
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)  # called by Python itself, which holds its lock

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)  # fmt: skip
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
# For destructors, which see an object without references: as an address, so that none is made.
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """Somebody's tensor, taken by `take`. Strides in elements; `release` exactly once, when its memory is no longer used."""

    address: int
    device_type: int
    ordinal: int
    code: int
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    release: Callable[[], None]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.bits // 8

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, the last axis fastest."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


# What is handed out, by number: the structures and what is called when the consumer is done.
_out: dict[int, tuple[object, Callable[[], None]]] = {}
_numbers = itertools.count(1)


def capsule(
    address: int,
    *,
    device_type: int,
    ordinal: int,
    dtype: str,
    shape: Sequence[int],
    on_released: Callable[[], None],
    versioned: bool = False,
    read_only: bool = False,
) -> object:
    """A capsule of a dense tensor at `address`. `on_released` is called once, when the consumer, or the unused capsule, is
    gone; it must not raise and not block. `versioned` where the consumer knows DLPack 1.0: only then is `read_only` told."""
    code, bits = DTYPES[dtype]
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))(*_dense(shape))
    number = next(_numbers)
    tensor = _Tensor(address, _Device(device_type, ordinal), len(shape), _DataType(code, bits, 1), sizes, strides, 0)
    managed: _Managed | _ManagedVersioned
    if versioned:
        flags = _READ_ONLY if read_only else 0
        managed = _ManagedVersioned(_MAJOR, 0, number, ctypes.cast(_delete_versioned, ctypes.c_void_p), flags, tensor)
    else:
        managed = _Managed(tensor, number, ctypes.cast(_delete, ctypes.c_void_p))
    _out[number] = ((managed, sizes, strides), on_released)
    destructor = _drop_versioned if versioned else _drop
    return _new(
        ctypes.addressof(managed), _VERSIONED if versioned else _NAME, ctypes.cast(destructor, ctypes.c_void_p)
    )  # fmt: skip


def device_of(source: object) -> tuple[int, int]:
    """Device type and number of anything with `__dlpack__`; TypeError of anything else."""
    ask = getattr(source, "__dlpack_device__", None)
    if ask is None:
        raise TypeError(f"{type(source).__name__} has no __dlpack_device__")
    device_type, ordinal = ask()
    return int(device_type), int(ordinal)


def take(source: object, *, stream: int | None = None) -> TakenTensor:
    """Take a tensor from anything with `__dlpack__`; `stream` is the handle of the CUDA stream that will use it (None: of no
    device).

    TypeError where it is no such thing or has more than one lane or axes than DLPack knows.
    """
    give = getattr(source, "__dlpack__", None)
    if give is None:
        raise TypeError(f"{type(source).__name__} has no __dlpack__")
    given = give() if stream is None else give(stream=stream)
    for name, used, structure in (
        (_NAME, _USED_NAME, _Managed),
        (_VERSIONED, _USED_VERSIONED, _ManagedVersioned),
    ):
        if _is_valid(given, name):
            managed = structure.from_address(_pointer(given, name))
            _set_name(given, used)
            return _taken(managed)
    raise TypeError("__dlpack__ gave no DLPack capsule")


def _taken(managed: _Managed | _ManagedVersioned) -> TakenTensor:
    tensor = managed.tensor
    dimensions = tensor.dimensions
    deleter = managed.deleter

    def release() -> None:
        if deleter:
            _Deleter(deleter)(ctypes.addressof(managed))

    if tensor.dtype.lanes != 1 or not 0 <= dimensions <= _DIMENSIONS_MAX:
        release()
        raise TypeError(f"a tensor of {dimensions} axes and {tensor.dtype.lanes} lanes")
    shape = tuple(tensor.shape[axis] for axis in range(dimensions))
    strides = tuple(tensor.strides[axis] for axis in range(dimensions)) if tensor.strides else _dense(shape)
    return TakenTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        device_type=tensor.device.type,
        ordinal=tensor.device.ordinal,
        code=tensor.dtype.code,
        bits=tensor.dtype.bits,
        shape=shape,
        strides=strides,
        release=release,
    )


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _end(number: int) -> None:
    entry = _out.pop(number, None)
    if entry is not None:
        entry[1]()


def _delete_managed(address: int) -> None:
    _end(_Managed.from_address(address).context)


def _delete_managed_versioned(address: int) -> None:
    _end(_ManagedVersioned.from_address(address).context)


def _drop_capsule(address: int) -> None:
    if _raw_is_valid(address, _NAME):  # nobody has taken it
        _delete_managed(_raw_pointer(address, _NAME))


def _drop_versioned_capsule(address: int) -> None:
    if _raw_is_valid(address, _VERSIONED):
        _delete_managed_versioned(_raw_pointer(address, _VERSIONED))


_delete: Final = _Deleter(_delete_managed)
_delete_versioned: Final = _Deleter(_delete_managed_versioned)
_drop: Final = _Destructor(_drop_capsule)
_drop_versioned: Final = _Destructor(_drop_versioned_capsule)
for _kept in (_delete, _delete_versioned, _drop, _drop_versioned):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))  # consumers may call them after this module is gone
