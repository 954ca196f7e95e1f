"""Addresses of the process's own buffers, for kernels."""

from __future__ import annotations

from kvobj import buffers
from kvobj.tensors.kernels.launcher import Address


def address_of(view: memoryview) -> Address:
    """See `kvobj.buffers.address_of`."""
    return Address(buffers.address_of(view))
