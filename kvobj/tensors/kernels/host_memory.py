"""The address of a buffer's bytes, for kernels: of read-only ones too, which ctypes' own `from_buffer` refuses."""

from __future__ import annotations

import ctypes
from typing import Final

from kvobj.tensors.kernels.launcher import Address

_SIMPLE: Final = 0  # PyBUF_SIMPLE: contiguous bytes


class _Buffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable ABI (3.11)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(view: memoryview) -> Address:
    """Where the view's bytes are. The caller keeps the view, and whatever it is of, alive as long as it uses the address.
    BufferError for a view that is not contiguous."""
    buffer = _Buffer()
    _get(view, ctypes.byref(buffer), _SIMPLE)
    try:
        return Address(buffer.buf or 0)
    finally:
        _release(ctypes.byref(buffer))
