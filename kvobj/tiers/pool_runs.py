"""Work on a pool's threads that writes into memory which its caller gives back: cancelled is whoever waits, never the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

from kvobj.tiers.verified import RunOnPool

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


def to_its_end(executor: Executor) -> RunOnPool:
    """Runs work so that whoever is cancelled while it runs goes on when it has ended, and not before.

    A thread cannot be stopped. Were its caller to go on at once, the extent that it fills would be released, and be another
    writer's while it is still being written. Work that no thread has begun is dropped.
    """

    async def run(work: Callable[[*_Arguments], _Result], /, *arguments: *_Arguments) -> _Result:
        job = executor.submit(work, *arguments)
        result = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            while not (job.cancel() or result.done()):
                try:
                    await asyncio.wait([result])
                except asyncio.CancelledError:
                    continue  # once is enough
            if result.done() and not result.cancelled():
                result.exception()  # whatever it is, nobody waits for it
            raise

    return run
