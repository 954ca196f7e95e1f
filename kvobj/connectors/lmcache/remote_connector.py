"""LMCache inside an engine's process stores its chunks here: a connector behind `plugin://kvobj` (`base_connector.py`, 0.5.6).

`remote_storage_plugins: ["kvobj"]`, and in `extra_config` `remote_storage_plugin.kvobj.module_path: kvobj.connectors.lmcache`,
`….class_name: KvobjConnectorAdapter` and the settings of `LinkSettings`, each as `remote_storage_plugin.kvobj.NAME`. A second
instance, `plugin://kvobj.b`, has its own under `remote_storage_plugin.kvobj.b.`, and of those it does not name the first one's.

LMCache's loop is never blocked: calls run on threads of the connector's own, puts on others than all else (`puts`), since a full
store lets them wait. What is to be put is kept by a reference until it is stored or given up, and what comes for a call that was
cancelled is given back, so that no thread touches memory that is another's by then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvobj.client.forking import forget_in_child
from kvobj.connectors.link import StoreLink
from kvobj.connectors.link_settings import LinkSettings
from kvobj.connectors.lmcache.engine_chunks import EngineChunks, give_back
from kvobj.connectors.lmcache.plugin_settings import plugin_settings
from kvobj.connectors.lmcache.puts import PUT_THREADS, Puts

PLUGIN: Final = "kvobj"

_URL: Final = "plugin://"
_THREADS: Final = 6
"""Of reads, look-ups and pings."""
_GIB: Final = 1024**3
_FAILED: Final = 1

T = TypeVar("T")
Names: TypeAlias = list[str]
Found: TypeAlias = list[Any]
"""LMCache's memory objects; None among them for a miss."""


class KvobjConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache ships no types
    """Makes the connector of `plugin://kvobj` and of `plugin://kvobj.INSTANCE`."""

    def __init__(self) -> None:
        super().__init__(_URL + PLUGIN)

    def create_connector(self, context: Any) -> KvobjConnector:  # noqa: ANN401 - LMCache's ConnectorContext
        """`ConfigurationError` for wrong settings, which LMCache tells in its log."""
        name = context.plugin_name or context.url.removeprefix(_URL).partition("?")[0].rstrip("/")
        return KvobjConnector(
            context.loop, context.local_cpu_backend, context.config, metadata=context.metadata, plugin_name=name
        )


class KvobjConnector(RemoteConnector):  # type: ignore[misc]  # LMCache ships no types
    """See the module's text; contracts of the methods are LMCache's. No method but the constructor raises for what a store does.

    In the scheduler's process there is no memory to load into, and LMCache asks for none: look-ups work.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local_cpu_backend: Any,  # noqa: ANN401 - LMCache's LocalCPUBackend, or its stand-in
        config: Any,  # noqa: ANN401 - LMCacheEngineConfig
        *,
        metadata: Any = None,  # noqa: ANN401 - LMCacheMetadata
        plugin_name: str = PLUGIN,
    ) -> None:
        metadata = metadata or getattr(local_cpu_backend, "metadata", None)
        super().__init__(config, metadata)
        self.loop = loop
        extra = config.extra_config or {}
        # as LMCache's RemoteBackend has it, which forgets it in batched_get_non_blocking
        is_shared = extra.get("remote_enable_mla_worker_id_as0", metadata.use_mla)
        settings = LinkSettings.parse(plugin_settings(extra, plugin_name), os.environ)
        link = StoreLink(settings, store_threads=PUT_THREADS)
        link.connect()
        self._chunks = EngineChunks(
            link,
            local_cpu_backend,
            full=(self.meta_shapes, self.meta_dtypes, self.meta_fmt),
            full_bytes=self.full_chunk_size_bytes,
            metadata_bytes=self.remote_metadata_bytes,
            is_shared_by_ranks=bool(is_shared and metadata.use_mla and metadata.world_size > 1),
        )
        self._puts = Puts(
            wait_seconds=2 * settings.timeout_seconds,
            waiting_bytes_max=int(config.max_local_cpu_size * _GIB)
            // 2,  # the other half is for what comes and is loaded
            gave_up=self._chunks.gave_up,
        )
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """See `ForgetsInChild`: a pool whose threads are not there would never come to what it is given."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvobj-lmcache")
        self._is_closed = False

    # -- what is stored ------------------------------------------------------------------------------------------
    async def exists(self, key: Any) -> bool:  # noqa: ANN401 - LMCache's CacheEngineKey, here and below
        """Whether the chunk is stored."""
        return await self._on_thread(self.exists_sync, key, otherwise=False)

    def exists_sync(self, key: Any) -> bool:  # noqa: ANN401
        """Whether the chunk is stored; blocks for at most the link's deadline."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """It does."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many at the head of the list are stored; blocks for at most the link's deadline."""
        return self._chunks.run(keys)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:  # noqa: ARG002, FBT001, FBT002
        """As `batched_contains`. `pin` is not needed: the store's eviction passes over what it told of, for its grace."""
        return await self._on_thread(self.batched_contains, keys, otherwise=0)

    # -- get -----------------------------------------------------------------------------------------------------
    async def get(self, key: Any) -> Any:  # noqa: ANN401
        """The chunk in memory of LMCache's; None for a miss, and where there is no memory."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """It does."""
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Found:
        """Each chunk in memory of LMCache's, or None."""
        return await self._on_thread(self._chunks.get, keys, otherwise=[None] * len(keys), dispose=give_back)

    def support_batched_get_non_blocking(self) -> bool:
        """It does."""
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Found:  # noqa: ARG002
        """The run of chunks at the head of the list that came; what came behind it is given back."""
        found = await self.batched_get(keys)
        run = next((index for index, each in enumerate(found) if each is None), len(found))
        give_back(found[run:])
        return found[:run]

    # -- put -----------------------------------------------------------------------------------------------------
    async def put(self, key: Any, memory_obj: Any) -> None:  # noqa: ANN401
        """As `batched_put`."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """It does."""
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks straight from their memory, or not: where too much waits to be stored, or it waited for too long, it is
        given up and counted as a failed store. Who calls gives up his references afterwards (`InstrumentedRemoteConnector`)."""
        for each in memory_objs:
            each.ref_count_up()
        put = partial(self._chunks.put, keys, memory_objs)
        if self._chunks.is_health_check(keys):  # which is not sent, and has nothing to wait for
            future = self._submitted(put, None)
        else:
            future = self._puts.submit(len(keys), sum(int(each.get_size()) for each in memory_objs), put)
        future.add_done_callback(lambda _: give_back(memory_objs))
        await asyncio.wrap_future(future)

    # -- the rest ------------------------------------------------------------------------------------------------
    async def list(self) -> Names:
        """The names of all stored chunks of the namespace, a million at most."""
        return await self._on_thread(self._chunks.names, otherwise=[])

    def remove_sync(self, key: Any) -> bool:  # noqa: ANN401
        """Whether the chunk is not stored any more; blocks for at most the link's deadline."""
        return self._chunks.remove(key)

    def support_ping(self) -> bool:
        """It does."""
        return True

    async def ping(self) -> int:
        """0 while the store answers and the namespace may be used."""
        return 0 if await self._on_thread(self._chunks.link.ping, otherwise=False) else _FAILED

    async def close(self) -> None:
        """Wait for what is under way, then end the link; what has not begun, and what comes later, is a miss. Idempotent, bounded
        by the link's deadlines."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def report(self) -> dict[str, object]:
        """The link's counts: hits, misses, errors and the last of them."""
        return self._chunks.link.report()

    # -- inside --------------------------------------------------------------------------------------------------
    async def _on_thread(
        self,
        call: Callable[..., T],
        *arguments: Any,  # noqa: ANN401
        otherwise: T,
        dispose: Callable[[T], None] | None = None,
    ) -> T:
        """What the call returns. Where nobody waits for it any more, `dispose` gets it."""
        future = self._submitted(partial(call, *arguments), otherwise)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if dispose is not None and not future.cancel():
                future.add_done_callback(lambda done: _dispose_of(done, dispose))
            raise

    def _submitted(self, call: Callable[[], T], otherwise: T) -> Future[T]:
        """The call on a thread; `otherwise` where the connector is closed before it begins. It is not cancelled then: a
        `CancelledError` is no `Exception`, of which LMCache makes a miss, and would end its task."""
        try:
            return self._threads.submit(lambda: otherwise if self._is_closed else call())
        except RuntimeError:  # it was closed before
            ended: Future[T] = Future()
            ended.set_result(otherwise)
            return ended

    def _close(self) -> None:
        self._is_closed = True
        self._puts.close()
        self._threads.shutdown(wait=True)
        self._chunks.link.close()


def _dispose_of(done: Future[T], dispose: Callable[[T], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        dispose(done.result())
