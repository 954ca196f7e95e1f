"""Hashing beside the wire: digests of a body are computed while it is still arriving.

One pipeline serves one transfer. It hashes blobs strictly in order (the body's own digests run through all of them), one
job at a time on the hash pool, so that a digester is never used by two threads. Pieces of up to 64 KiB are hashed
where they are: a hop to the pool costs more (60 µs) than hashing them (10 µs).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from blake3 import blake3

from kvobj.codec.block_crcs import BlockCrcs
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import block_count
from kvobj.errors import InvalidRequestError
from kvobj.ids import DIGEST_BYTES

INLINE_BYTES: Final = 64 * 1024
# A job is worth its hop from here on; it also bounds how far hashing trails a body that is still arriving.
STEP_BYTES: Final = 1024 * 1024
# What is hashed by one function before the next: each gives the interpreter's lock back and has to wait for it again, and what the
# one has read is still in the cache when the next one does. The CRCs come first: they read memory as fast as it goes, and BLAKE3,
# which reads sixteen streams at once, does not (GB/s of both, of bytes that no cache holds: 4.6 so, 3.7 the other way round).
PIECE_BYTES: Final = 2 * 1024 * 1024


class BlobHash:
    """The running BLAKE3 and block checksums of one blob's plain bytes, which are filled from the front."""

    __slots__ = ("_crcs", "_finished", "_hasher", "available_bytes", "block_crcs", "digest", "hashed_bytes", "payload")

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload
        self.available_bytes = 0
        self.hashed_bytes = 0
        self.block_crcs: list[int] = []
        self.digest: bytes | None = None
        self._crcs = BlockCrcs()
        self._hasher = blake3()
        self._finished: asyncio.Future[None] | None = None

    def advance(self, upto: int, body: Digester | None) -> None:
        """Hash the bytes up to `upto`. Runs on any thread, but never on two at once."""
        if self.digest is not None:
            return
        position = self.hashed_bytes
        while position < upto:
            piece = self.payload[position : min(upto, position + PIECE_BYTES)]
            self._crcs.update(piece)
            if body is not None:
                body.update(piece)
            self._hasher.update(piece)
            position += len(piece)
        self.hashed_bytes = position
        if position == len(self.payload):
            self._crcs.finish()
            self.block_crcs = self._crcs.values
            self.digest = self._hasher.digest()

    def adopt(self, digest: bytes, block_crcs: Sequence[int]) -> None:
        """Take over what somebody else has computed of the whole payload. `InvalidRequestError` for what no payload has."""
        if len(digest) != DIGEST_BYTES or len(block_crcs) != block_count(len(self.payload)):
            raise InvalidRequestError("not the hash of a blob of this size", size_bytes=len(self.payload))
        self.hashed_bytes = len(self.payload)
        self.block_crcs = list(block_crcs)
        self.digest = digest

    @property
    def finished(self) -> bool:
        """Whether every byte of the blob is hashed."""
        return self.digest is not None

    def wake(self) -> None:
        """Tell who waits for the digest that it is there (event loop only)."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Tell who waits for the digest that there will be none (event loop only)."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    async def wait(self) -> bytes:
        """The digest, once every byte has been hashed."""
        if self.digest is None:
            if self._finished is None:
                self._finished = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._finished)
        assert self.digest is not None
        return self.digest


def _keep_up(blob: BlobHash, body: Digester | None) -> None:
    """Hash what has come, and what comes meanwhile, as long as it is worth it: one hop to the pool for many pieces."""
    upto = blob.available_bytes
    while True:
        blob.advance(upto, body)
        upto = blob.available_bytes
        pending = upto - blob.hashed_bytes
        if pending < STEP_BYTES and (not pending or upto < len(blob.payload)):
            return


class HashPipeline:
    """Hashes the blobs of one transfer in order. Event-loop-only but for the jobs it sends to `executor`."""

    __slots__ = ("_blobs", "_executor", "_running", "body", "is_body_apart", "is_elsewhere")

    def __init__(self, executor: Executor, *, body: Digester | None) -> None:
        self._executor = executor
        self._blobs: deque[BlobHash] = deque()
        self._running = False
        self.body = body
        self.is_body_apart = False
        """Whether who fills the bytes feeds the body's own digests, too: then jobs do without."""
        self.is_elsewhere = False
        """Whether who fills the bytes hashes them, too: what is fed is only noted, until the hash is adopted."""

    def begin(self, payload: memoryview) -> BlobHash:
        """Start the next blob; its bytes are `payload`, to be filled from the front."""
        blob = BlobHash(payload)
        if not payload:
            blob.advance(0, None)
        else:
            self._blobs.append(blob)
        return blob

    def adopt(self, blob: BlobHash, digest: bytes, block_crcs: Sequence[int]) -> None:
        """Finish a blob that was begun and never fed with a hash from elsewhere."""
        blob.adopt(digest, block_crcs)
        if blob in self._blobs:
            self._blobs.remove(blob)
        blob.wake()

    def hash_here(self, blob: BlobHash) -> None:
        """Who was to hash a blob whose bytes are all there is gone: hash it after all."""
        if not blob.finished:
            self.is_elsewhere = False
            self.feed(blob, len(blob.payload))

    def feed(self, blob: BlobHash, available_bytes: int) -> None:
        """Say that the first `available_bytes` of the blob have arrived."""
        blob.available_bytes = available_bytes
        if self.is_elsewhere:
            return
        if not self._running and (
            available_bytes - blob.hashed_bytes >= STEP_BYTES or available_bytes == len(blob.payload)
        ):
            self._next_job()

    def _next_job(self) -> None:
        while self._blobs:
            blob = self._blobs[0]
            upto = blob.available_bytes
            pending = upto - blob.hashed_bytes
            if pending == 0 or (pending < STEP_BYTES and upto < len(blob.payload)):
                return
            if pending > INLINE_BYTES:
                self._running = True
                body = None if self.is_body_apart else self.body
                job = asyncio.get_running_loop().run_in_executor(self._executor, _keep_up, blob, body)
                job.add_done_callback(self._job_done)
                return
            blob.advance(upto, None if self.is_body_apart else self.body)
            self._retire(blob)

    def _job_done(self, job: asyncio.Future[None]) -> None:
        self._running = False
        error = None if job.cancelled() else job.exception()
        if error is not None:
            for blob in self._blobs:
                blob.fail(error)
            self._blobs.clear()
            return
        if self._blobs:
            self._retire(self._blobs[0])
        self._next_job()

    def _retire(self, blob: BlobHash) -> None:
        if blob.finished:
            self._blobs.popleft()
            blob.wake()
