"""`AsyncKvClient`: the calls of `KvClient` for an event loop. Their contracts stand there."""

from __future__ import annotations

from os import PathLike
from typing import Final, Self

from kvobj.client.aio.calls import OnThreads, awaited, iterated, streamed
from kvobj.client.aio.threads import CallThreads
from kvobj.client.connection import Endpoint
from kvobj.client.credentials import Credentials
from kvobj.client.kv import TIMEOUT_SECONDS, KvClient
from kvobj.client.retry import RetryRule
from kvobj.client.views import ChunkView

STREAMS_MAX: Final = 64
"""Streams that are open at once, or as many as there are connections where those are more. One for which there is no connection
waits in its thread."""
_LEASE_THREADS: Final = 2


def let_go_view(view: ChunkView | None) -> None:
    """Of what a cancelled call had opened nobody would know."""
    if view is not None:
        view.release()


def let_go_views(views: list[ChunkView | None]) -> None:
    """`let_go_view` of many."""
    for view in views:
        let_go_view(view)


class AsyncKvClient(OnThreads[KvClient]):
    """One KV bucket of one server, for one event loop at a time; tasks share it. `connections` is also the number of calls that are
    made at once: others wait, up to their deadline. Streams (`mget`, `read_many`) are none of those, but need a connection all the
    same, from their first item to their end; at most `STREAMS_MAX` are open. Callables that are given to a call are called in its
    thread.

    An iterator that is left before its end is closed with `aclose` (`contextlib.aclosing`), or when it is collected.
    """

    def __init__(
        self,
        endpoint: Endpoint | str,
        credentials: Credentials,
        bucket: str,
        *,
        connections: int = 8,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry: RetryRule | None = None,
        verify: bool = True,
        same_host: bool = True,
        verify_same_host: bool | None = None,
        region: str = "us-east-1",
        ca_bundle: str | PathLike[str] | None = None,
    ) -> None:
        core = KvClient(
            endpoint,
            credentials,
            bucket,
            connections=connections,
            timeout_seconds=timeout_seconds,
            retry=retry,
            verify=verify,
            same_host=same_host,
            verify_same_host=verify_same_host,
            region=region,
            ca_bundle=ca_bundle,
        )
        calls = CallThreads("kvobj-call", connections)
        streams = CallThreads("kvobj-stream", max(connections, STREAMS_MAX))
        leases = CallThreads("kvobj-lease", _LEASE_THREADS)
        super().__init__(core, calls, streams, leases, timeout_seconds=core.timeout_seconds)

    @property
    def is_closed(self) -> bool:
        """See `KvClient.is_closed`."""
        return self.core.is_closed

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.core.bucket

    @property
    def is_same_host(self) -> bool:
        """Whether chunk bytes go by shared memory, as far as the calls so far have found out: waits for nothing, as the event loop
        may not. False before the first call."""
        return self.core.is_same_host_now

    @property
    def is_same_host_now(self) -> bool:
        """The same as `is_same_host` here."""
        return self.core.is_same_host_now

    @property
    def same_host_reason(self) -> str:
        """See `KvClient.same_host_reason`."""
        return self.core.same_host_reason

    @property
    def same_host_fallbacks(self) -> int:
        """See `KvClient.same_host_fallbacks`."""
        return self.core.same_host_fallbacks

    async def close(self) -> None:
        """See `KvClient.close`. Calls and streams that are under way are ended, too: they raise the same. Those about sessions
        alone come to their own end, since the server is to hear of it. The threads end with them. Idempotent."""
        self.core.close()
        for threads in (self.calls, self.streams, *self._endless):
            threads.close()
        self.leases.close(ends_calls=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    is_answered = awaited(KvClient.is_answered, is_lease=True)

    declare_namespace = awaited(KvClient.declare_namespace)
    namespace = awaited(KvClient.namespace)
    namespaces = iterated(KvClient.namespaces)
    remove_namespace = awaited(KvClient.remove_namespace)

    put_chunk = awaited(KvClient.put_chunk)
    get_chunk = awaited(KvClient.get_chunk)
    get_stored = awaited(KvClient.get_stored)
    get_chunks = awaited(KvClient.get_chunks)
    open_ahead = awaited(KvClient.open_ahead)
    drop_ahead = awaited(KvClient.drop_ahead)
    view_chunk = awaited(KvClient.view_chunk, undo=let_go_view)
    view_chunks = awaited(KvClient.view_chunks, undo=let_go_views)
    put_part = awaited(KvClient.put_part)
    follow_chunk = streamed(KvClient.follow_chunk, is_endless=True)

    match = awaited(KvClient.match)
    mget = streamed(KvClient.mget)
    mput = awaited(KvClient.mput)
    mput_batches = awaited(KvClient.mput_batches)
    events = streamed(KvClient.events, is_endless=True)

    open_session = awaited(KvClient.open_session, is_lease=True)
    renew_session = awaited(KvClient.renew_session, is_lease=True)
    close_session = awaited(KvClient.close_session, is_lease=True)
    pin_tails = awaited(KvClient.pin_tails, is_lease=True)
