"""Copies between host memory and a device, beside each other and beside the event loop.

One lane for each direction, since a GPU has an engine for each. A caller that is cancelled waits for the device all the same: no
memory is given back that a device still reads or writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from kvobj.gpu.device import CopyKind, Device, Stream
from kvobj.gpu.lane import DEADLINE_SECONDS, IN_FLIGHT_BYTES, Lane
from kvobj.tensors.kernels.host_memory import address_of


@dataclass(frozen=True, slots=True)
class Copy:
    """`size_bytes` from one address to another, one of which is the device's, or both."""

    destination: int
    source: int
    size_bytes: int


class Copies:
    """The copies of one device. The waiting forms belong to event loops, the others (futures) to threads.

    Both memories stay valid until a copy has ended, in whatever way but `StuckError`: then they are never used again.
    """

    def __init__(
        self, device: Device, *, in_flight_bytes: int = IN_FLIGHT_BYTES, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        streams = {kind: device.new_stream() for kind in CopyKind}
        self._handles = {kind: stream.handle for kind, stream in streams.items()}
        self._lanes = {
            kind: Lane(
                stream,
                name=kind.name.lower().replace("_", " "),
                in_flight_bytes=in_flight_bytes,
                deadline_seconds=deadline_seconds,
            )
            for kind, stream in streams.items()
        }

    def stream_handle(self, kind: CopyKind) -> int:
        """The stream of a direction, for who makes memory that is copied: the stream must wait for that first."""
        return self._handles[kind]

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on their way now, all directions together."""
        return sum(lane.in_flight_bytes for lane in self._lanes.values())

    def begin(self, kind: CopyKind, copies: Sequence[Copy]) -> Future[None]:
        """Begin copies of one direction; the future is done when all are. Errors as of `Lane.submit`."""

        def work(stream: Stream) -> None:
            for copy in copies:
                stream.copy(copy.destination, copy.source, copy.size_bytes, kind)

        return self._lanes[kind].submit(work, sum(copy.size_bytes for copy in copies))

    async def to_device(self, address: int, view: memoryview) -> None:
        """Copy the view's bytes to a device address. Errors as of `Lane.submit`."""
        if view.nbytes:
            await settled(self.begin(CopyKind.TO_DEVICE, [Copy(address, address_of(view), view.nbytes)]))

    async def to_host(self, view: memoryview, address: int) -> None:
        """Fill the view from a device address. Errors as of `Lane.submit`."""
        if view.nbytes:
            await settled(self.begin(CopyKind.TO_HOST, [Copy(address_of(view), address, view.nbytes)]))

    def close(self) -> None:
        """Finish what was accepted. Idempotent. Blocks."""
        for lane in self._lanes.values():
            lane.close()


async def settled(work: Future[None]) -> None:
    """Wait for work on a device; cancelled, only once it has ended."""
    waiting = asyncio.wrap_future(work)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # read, so that nobody is told of it later
        raise
