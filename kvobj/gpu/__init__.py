"""The GPU side: device memory in a pool, copies beside the program, tensors without copies, kernels in many chunks at once.

Importing it needs no torch, no CuPy and no GPU, and neither does asking what is missing:

    from kvobj import gpu
    gpu.status()    # GpuStatus(is_usable=False, detail="no GPU: CuPy is not installed …", …)

`open_device` opens a GPU, or host memory in its place (`HostDevice`), which is for tests. docs/gpu.md shows the whole.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

from kvobj.errors import UnavailableError
from kvobj.gpu.device import Device
from kvobj.gpu.host_device import HostDevice
from kvobj.gpu.nvrtc import find_nvrtc

__all__ = ["GpuStatus", "HostDevice", "open_device", "status"]


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """Whether a GPU can be used by this process; `detail` says which, or what is missing. The rest are the parts: `torch` is
    whether it is installed (it is not loaded to find out), `compiler` NVRTC's version, or why there is none."""

    is_usable: bool
    detail: str
    compiler: str
    torch: bool


@cache
def status() -> GpuStatus:
    """For people: what `kvobj-admin status` shows. Asked once a process; the first call may take a second, where CuPy is
    installed. Takes none of the GPU's memory."""
    from kvobj.gpu.cuda_device import described, unavailable  # noqa: PLC0415 - only for who asks

    try:
        compiler = "NVRTC {}.{}".format(*find_nvrtc().version)
    except UnavailableError as error:
        compiler = error.message
    reason = unavailable()
    detail = described() if reason is None else reason
    return GpuStatus(reason is None, detail, compiler, importlib.util.find_spec("torch") is not None)


def open_device(ordinal: int = 0, *, max_sms: int | None = None) -> Device:
    """The GPU of that number. `max_sms`: so many of its multiprocessors, at most, run kernels. `DeviceError` that says what is
    missing."""
    from kvobj.gpu.cuda_device import CudaDevice  # noqa: PLC0415 - only for who asks

    return CudaDevice(ordinal, max_sms=max_sms)
