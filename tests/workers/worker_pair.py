"""A worker's store and the store process's desk in one event loop, over a real socket pair: what passes between the two processes,
with a test in control of both."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from kv_driver import KvDriver
from s3_driver import Driver

from kvobj.api.object_store import ObjectStore
from kvobj.clock import SystemClock
from kvobj.workers.calls import Room, StoreCalls, WorkerCalls
from kvobj.workers.channel import LONG_STORE_CALLS, Channel
from kvobj.workers.desk import Desk, StoreParts
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.mapped_arena import MappedArena
from kvobj.workers.store import WorkerStore
from kvobj.workers.wire import Failure, error_from


class _WorkerEnd(WorkerCalls):
    """What of a worker's calls has to do with writes."""

    store: WorkerStore

    def answered(self, result: object) -> None:
        self.store.answered(result)

    def unwanted(self, call: str, result: object) -> None:
        self.store.unwanted(call, result)

    def room(self, handle: int, blob: int, room: Room) -> None:
        self.store.room(handle, blob, room)

    def transfer_failed(self, handle: int, failure: Failure) -> None:
        self.store.transfer_failed(handle, error_from(failure))

    def filled(self, handle: int, filled: int) -> None:
        self.store.frames.filled(handle, filled)

    def frame_failed(self, handle: int, failure: Failure) -> None:
        self.store.frames.failed(handle, error_from(failure))


@dataclass
class WorkerPair:
    """`driver` sends requests through the worker's store; `calls` counts what the worker has asked and waited for."""

    kv: KvDriver
    desk: Desk
    channel: Channel
    store: WorkerStore
    driver: Driver

    @property
    def calls(self) -> int:
        return self.channel._next_number - 1

    async def die(self) -> None:
        """End the pair as the death of the worker does; returns when the store process has taken everything back."""
        assert self.channel._transport is not None
        self.channel._transport.abort()
        await self.desk.channel.lost
        await self.desk.aclose()


@asynccontextmanager
async def worker_pair(kv: KvDriver) -> AsyncIterator[WorkerPair]:
    """The pair, over the driver's node."""
    node, loop, log = kv.node, asyncio.get_running_loop(), logging.getLogger("test")
    parts = StoreParts(
        catalog=node.catalog,
        store=node.store,
        chunks=node.kv.chunks,
        gate=node.kv.gate,
        tiers=node.read_tier,
        dram=node.dram,
        in_use=node.in_use,
        clock=SystemClock(),
        on_asked=node.on_asked,
        on_read=node.collector.touched,
        on_hot_read=node.collector.held_and_touched,
        count_hits=lambda _reads, _size_bytes: None,
        prepared=node.prepared,
        workers=1,
    )
    desk = Desk(parts, log=log, on_ready=lambda: None)
    ours, theirs = socket.socketpair()
    await desk.connect(ours)
    end = _WorkerEnd()
    channel = Channel(
        serves=end,
        interface=WorkerCalls,
        calls=StoreCalls,
        log=log,
        long_calls=LONG_STORE_CALLS,
        on_unwanted=end.unwanted,
        on_answer=end.answered,
    )
    await loop.create_connection(lambda: channel, sock=theirs)
    arena = MappedArena(node.arena.directory, huge_pages=False)
    with ThreadPoolExecutor(2) as executor:
        end.store = WorkerStore(
            catalog=node.catalog,
            channel=channel,
            calls=channel.proxy(StoreCalls),
            arena=arena,
            keeping=Keeping(0, 0.0),
            executor=executor,
        )
        driver = Driver(store=cast("ObjectStore", end.store))
        try:
            yield WorkerPair(kv, desk, channel, end.store, driver)
        finally:
            await end.store.later.drain()
            end.store.spare.close()
            await channel.aclose()
            await desk.aclose()
            arena.close()
