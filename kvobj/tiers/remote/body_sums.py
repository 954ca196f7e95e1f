"""The MD5 sums of bodies that are on their way up: those that are wanted at the same time are made side by side.

The parts of an upload are begun together, and others beside them. Each by itself, they take three times the processor's time, which
the rest of an upload, and a server on the same cores that makes the same sums, have a use for.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvobj.codec.md5_lanes import md5_digest, md5_digests, md5_lanes
from kvobj.task_endings import to_their_end
from kvobj.tiers.verified import INLINE_BYTES, RunOnPool

_ALONE_BYTES: Final = 2**20
"""What is shorter is made alone and at once (1.4 ms): it would wait for longer ones, for 20 ms."""


class BodySums:
    """`run`: the pool that sums of more than 64 KiB are made on; of those with company one job at a time, while which others gather
    for the next. Event loop only."""

    def __init__(self, run: RunOnPool) -> None:
        self._run = run
        self._at_once = md5_lanes()
        self._waiting: dict[asyncio.Future[bytes], memoryview] = {}
        self._taken: list[asyncio.Future[bytes]] = []
        self._job: asyncio.Future[list[bytes]] | None = None
        self._is_due = False

    async def md5(self, body: memoryview) -> bytes:
        """The 16 bytes of a body's sum. When this returns or raises, nothing reads `body` any more."""
        if len(body) <= INLINE_BYTES:
            return md5_digest(body)
        if len(body) < _ALONE_BYTES or not self._at_once:
            alone = asyncio.ensure_future(self._run(md5_digest, body))
            await to_their_end([alone])
            return alone.result()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[bytes] = loop.create_future()
        self._waiting[made] = body
        if self._job is None and not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin)  # in a moment: what is begun together asks together
        try:
            return await made
        except asyncio.CancelledError:
            if self._waiting.pop(made, None) is None and self._job is not None and made in self._taken:
                await to_their_end([self._job])
            raise

    def _begin(self) -> None:
        self._is_due = False
        self._taken = list(self._waiting)[: self._at_once]
        bodies = [self._waiting.pop(made) for made in self._taken]
        if bodies:
            self._job = asyncio.ensure_future(self._run(md5_digests, bodies))
            self._job.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Future[list[bytes]]) -> None:
        taken, self._job = self._taken, None
        self._begin()
        error = None if job.cancelled() else job.exception()
        for index, made in enumerate(taken):
            if made.done():  # who wanted it was cancelled
                continue
            if job.cancelled():
                made.cancel()
            elif error is not None:
                made.set_exception(error)
            else:
                made.set_result(job.result()[index])
