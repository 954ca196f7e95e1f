"""Tells the eviction policy of whole requests, after their replies: naming thousands of chunks must not delay an answer.

A bounded queue and one task; when requests come faster than they can be told, the oldest are forgotten: a policy that misses some
of its input decides a little worse, and nothing else happens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.catalog.chunk_list import ChunkList
from kvobj.clock import Clock, boot_ms

QUEUED_CHUNKS_MAX: Final = 262_144
SLICE_CHUNKS: Final = 256
"""Named in one go, about 0.3 ms where keys are hashed for it; then others run."""
TOLD_CHUNKS: Final = 4096
"""Told in one go, 1 to 2 ms of the event loop. Of a longer request the end comes first, as within one: what a piece begins with is
then all that is known of the prefix before it."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request as the policy is told of it. `partial_last`: its last chunk is not full; `hint`: see `ChunkPolicy.request`."""

    bucket: str
    chunks: ChunkList
    partial_last: bool = False
    hint: int = 0


class LearnsOfRequests(Protocol):
    """The policy, or who follows use beside it (`gc.collector`)."""

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        """See `ChunkPolicy.request`."""
        ...


class RequestFeed:
    """See the module's text. Event-loop-only. `names_of(bucket, lanes)` gives the policy's names of chunks, 16
    bytes each, from their lanes (`ChunkList.lanes`)."""

    def __init__(self, policy: LearnsOfRequests, *, names_of: Callable[[str, bytes], bytes], clock: Clock) -> None:
        self._policy = policy
        self._names_of = names_of
        self._clock = clock
        self._queue: deque[RequestTrace] = deque()
        self._queued_chunks = 0
        self._task: asyncio.Task[None] | None = None
        self.forgotten = 0
        """Requests that were never told."""

    def tell(self, trace: RequestTrace) -> None:
        """Queue a request; costs a microsecond."""
        if not len(trace.chunks):
            return
        self._queue.append(trace)
        self._queued_chunks += len(trace.chunks)
        while self._queued_chunks > QUEUED_CHUNKS_MAX and len(self._queue) > 1:
            self._queued_chunks -= len(self._queue.popleft().chunks)
            self.forgotten += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="policy-feed")

    async def _run(self) -> None:
        while self._queue:
            await asyncio.sleep(0)  # the reply that this request waits for goes first
            if not self._queue:
                return
            trace = self._queue.popleft()
            self._queued_chunks -= len(trace.chunks)
            names: list[bytes] = []
            for start in range(0, len(trace.chunks), SLICE_CHUNKS):
                stop = min(start + SLICE_CHUNKS, len(trace.chunks))
                names.append(self._names_of(trace.bucket, trace.chunks.lanes(start, stop)))
                await asyncio.sleep(0)
            await self._tell(b"".join(names), trace)

    async def _tell(self, chain: bytes, trace: RequestTrace) -> None:
        piece_bytes = len(chain) // len(trace.chunks) * TOLD_CHUNKS
        partial_last = trace.partial_last
        for start in reversed(range(0, len(chain), piece_bytes)):
            piece = chain[start : start + piece_bytes]
            self._policy.request(piece, now_ms=boot_ms(self._clock), partial_last=partial_last, hint=trace.hint)
            partial_last = False
            if start:
                await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Forget what is queued and end."""
        self._queue.clear()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task.result()
