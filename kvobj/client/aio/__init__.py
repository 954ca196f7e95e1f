"""The client for asyncio (and uvloop): the calls of `kvobj.client`, awaited.

A thin layer over the blocking client: each call runs on one of a few threads, where the bytes go from the kernel into the caller's
memory without the interpreter's lock, and the event loop does no work for them. There is one place for the protocol, its retries
and the holder's rule. What a call takes, answers and raises is what the method of the same name of `KvClient` or `Session` does.

Cancelling a task that awaits a call ends the call: its connection is shut down and not used again, and `CancelledError` is raised
once the call's thread has let go, so that a buffer that was to be filled is the caller's again.
"""

from __future__ import annotations

from kvobj.client.aio.kv import AsyncKvClient
from kvobj.client.aio.session import AsyncSession

__all__ = ["AsyncKvClient", "AsyncSession"]
