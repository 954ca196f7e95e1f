"""Host memory that is pinned for a device, so that copies from and to it need no staging: the arena's regions, each once.

Pinning a region takes a tenth of a second, so it is done in the background; copies before that are right, and slower. What cannot
be pinned (a limit on locked memory) stays as it is, and is counted.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from kvobj.errors import DeviceError
from kvobj.gpu.device import Device
from kvobj.tensors.kernels.host_memory import address_of


class RegisteredMemory:
    """The registrations of one device. `note` may be called from any thread, as often as one likes."""

    def __init__(self, device: Device, *, log: logging.Logger) -> None:
        self._device = device
        self._log = log
        self._lock = threading.Lock()
        # The views are kept: memory is not unmapped as long as the device knows it.
        self._known: dict[int, memoryview] = {}
        self._registered: list[int] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="register")
        self._is_closed = False
        self.registered_bytes = 0
        self.refused = 0

    def note(self, view: memoryview) -> None:
        """Have all of the view's memory pinned soon, unless it is already. A memory is always noted by the same view of it."""
        address = int(address_of(view))
        if address in self._known:
            return
        with self._lock:
            if self._is_closed or address in self._known:
                return
            self._known[address] = view
            self._thread.submit(self._register, address, view.nbytes)

    def wait(self) -> None:
        """Until what was noted is pinned, or refused. Blocks."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Unpin everything: before the memory goes, and when nothing copies any more. Idempotent. Blocks."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        for address in self._registered:
            try:
                self._device.unregister(address)
            except DeviceError as error:
                self._log.warning("host memory stays registered: %s", error)
        self._registered.clear()
        self._known.clear()

    def _register(self, address: int, size_bytes: int) -> None:
        try:
            self._device.register(address, size_bytes)
        except DeviceError as error:
            self.refused += 1
            self._log.warning("host memory cannot be pinned, copies are staged: %s", error)
        else:
            self._registered.append(address)
            self.registered_bytes += size_bytes
