"""LMCache's multi-process server stores its chunks here: an L2 adapter (`v1/distributed/l2_adapters/base.py`, 0.5.6).

Loaded as `{"type": "plugin", "module_path": "kvobj.connectors.lmcache", "class_name": "KvobjL2Adapter", "adapter_params": {…}}`,
with the settings of `LinkSettings`, and `lookup_threads`, `load_threads`, `store_threads`, `capacity_bytes`.
Look-up-and-lock pins what it finds, for as long as there are pins, unlock lets go of it. Chunks have no parents: the controllers
hand over lists that may begin anywhere in a chain, and belong to several.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvobj.client.forking import forget_in_child
from kvobj.client.kv_values import NewChunk
from kvobj.connectors.ending_threads import CLOSE_SECONDS
from kvobj.connectors.link import StoreLink
from kvobj.connectors.link_settings import LinkSettings
from kvobj.connectors.lmcache.keys import ObjectName, may_be_cursor, model_prefix, object_name
from kvobj.connectors.lmcache.memory import ObjectMemory
from kvobj.connectors.lmcache.tasks import TaskRunner
from kvobj.connectors.storing import Outcome

_THREADS: Final = {"lookup_threads": 2, "load_threads": 4, "store_threads": 2}
_THREADS_MAX: Final = 64
_CAPACITY: Final = "capacity_bytes"
_BYTES_MAX: Final = 2**63 - 1
_USAGE_SECONDS: Final = 5.0
"""How old what is told of the store's usage may be: LMCache asks each second, and may not wait."""
_PAGE_MAX: Final = 1000
_SIZES_MAX: Final = 262_144
_NOT_STORED: Final = L2StoreResult(success=False, bytes_transferred=0)


class KvobjL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no types
    """See the module's text; contracts of the methods are LMCache's. Thread-safe. The constructor raises for wrong settings, and
    nothing else does, but `list_l2_keys` where it would have to call a store empty that does not tell."""

    def __init__(self, adapter_params: Mapping[str, object], l1_memory_desc: Any = None) -> None:  # noqa: ANN401
        own, settings = _own_settings(adapter_params)
        super().__init__(max_capacity_bytes=own[_CAPACITY])
        self._link = StoreLink(settings, store_threads=own["store_threads"])
        self._link.connect()
        self._memory = ObjectMemory(l1_memory_desc)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        store, lookup, load = self._notifiers
        self._stores = TaskRunner(
            "store", threads=own["store_threads"], failure=lambda _: _NOT_STORED, notify=store.notify
        )
        self._lookups = TaskRunner("lookup", threads=own["lookup_threads"], failure=Bitmap, notify=lookup.notify)
        self._loads = TaskRunner("load", threads=own["load_threads"], failure=Bitmap, notify=load.notify)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """What this process stored, of which LMCache counts the bytes by salt; the latest of them."""
        self._sizes_lock = threading.Lock()
        self._usage = (0, 0)
        self._usage_at = float("-inf")
        self._usage_asking = threading.Lock()
        self._is_closed = False
        forget_in_child(self)

    def forget(self) -> None:
        """See `ForgetsInChild`: a lock may be held by a thread that is not there."""
        self._sizes_lock, self._usage_asking = threading.Lock(), threading.Lock()

    # -- events --------------------------------------------------------------------------------------------------
    def get_store_event_fd(self) -> int:
        """Readable when a store task has its result."""
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up has its result."""
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when a load has its result."""
        return int(self._notifiers[2].fileno())

    # -- tasks ---------------------------------------------------------------------------------------------------
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store the objects' bytes straight from their memory. The task is a success where every chunk is stored afterwards."""
        return self._stores.submit(len(keys), lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of stores, each once; the bytes are those that were new to the store."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:  # noqa: ARG002
        """Which are stored; those are pinned until they are unlocked, as many as a session may pin. What is stored above that is
        found all the same: LMCache asks for a row of keys for each rank, a prefix needs all of them, and the load tells."""
        held: list[str | bytes] = []
        return self._lookups.submit(
            len(keys), lambda: self._look_up(keys, held), then=lambda: self._link.open_ahead(held)
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        """A look-up's result, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Let go of each once; what the store is not told, its lease ends."""
        self._link.release([object_name(key) for key in keys])

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fill the objects' memory. A chunk of another size than its object is a miss."""
        return self._loads.submit(len(keys), lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        """A load's result, once."""
        return self._loads.take(task_id)

    # -- the rest ------------------------------------------------------------------------------------------------
    def delete(self, keys: list[Any]) -> None:
        """Remove chunks; blocks for at most the link's deadline, after which some may be gone, and none is told as deleted."""
        names = [object_name(key) for key in keys]
        with self._sizes_lock:  # first: what is stored anew behind the delete is counted by who stores it
            sizes = {name: size for name in names if (size := self._sizes.pop(name, None)) is not None}
        if self._link.delete(names):
            self._tell(self._notify_keys_deleted, keys, [sizes.get(name, 0) for name in names])
        else:
            with self._sizes_lock:
                self._sizes.update({name: size for name, size in sizes.items() if name not in self._sizes})

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:  # noqa: ANN401
        """A page of the stored chunks, of all LMCache servers that use the namespace, in order of their names. The cursor is the
        last name of the page before. Keys that are not LMCache's are left out, and make a page short. ValueError for a size or
        a cursor that is none, and RuntimeError where the store does not tell: it cannot be reached, or the user may not list."""
        if page_size <= 0:
            raise ValueError(f"page_size must be positive (got {page_size})")
        if cursor is not None and not may_be_cursor(cursor):
            raise ValueError(f"cursor is not the end of a page (got {cursor!r})")
        limit = min(page_size, _PAGE_MAX)
        page = self._link.page(after=cursor or "", limit=limit, key_prefix=model_prefix(model_name))
        if page is None:
            raise RuntimeError(f"the store does not tell its keys: {self._link.report()['last_error']}")
        entries = [
            KeyEntry(
                key=EncodedObjectKey(
                    chunk_hash_hex=name.chunk_hash_hex,
                    model_name=name.model_name,
                    kv_rank=name.kv_rank,
                    object_group_id=name.object_group_id,
                    cache_salt=name.cache_salt,
                ),
                size_bytes=size,
            )
            for name, size in ((ObjectName.parse(key), size) for key, size in page)
            if name is not None
        ]
        return KeyListPage(entries=tuple(entries), next_page_token=page[-1][0] if len(page) == limit else None)

    def get_usage(self) -> Any:  # noqa: ANN401 - LMCache's AdapterUsage
        """Bytes of the namespace, at most some seconds old; by salt those alone that this process stored. Waits for nothing."""
        if time.monotonic() - self._usage_at > _USAGE_SECONDS and self._usage_asking.acquire(blocking=False):
            self._usage_at = time.monotonic()
            threading.Thread(target=self._ask_usage, name="kvobj-usage", daemon=True).start()
        counted = super().get_usage()
        return AdapterUsage(
            total_bytes_used=self._usage[1],
            total_capacity_bytes=counted.total_capacity_bytes,
            bytes_by_cache_salt=counted.bytes_by_cache_salt,
        )

    def report_status(self) -> dict[str, object]:
        """The link's report; healthy while the store answers."""
        report = self._link.report()
        return {
            "is_healthy": self._link.is_up and not self._is_closed,
            "type": type(self).__name__,
            "arena_bytes": self._memory.arena_bytes,
            **report,
        }

    def close(self) -> None:
        """End all tasks, then the link. Idempotent, bounded."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        for runner in (self._lookups, self._loads, self._stores):
            runner.close(deadline)
        self._link.close()
        for notifier in self._notifiers:
            notifier.close()

    # -- inside --------------------------------------------------------------------------------------------------
    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:  # noqa: ANN401 - LMCache's L2StoreResult
        views = [self._memory.view(each) for each in objects]
        chunks = [NewChunk(object_name(key), view) for key, view in zip(keys, views, strict=True)]
        outcomes = self._link.put(chunks)
        new = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.STORED]
        sizes = [len(views[index]) for index in new]
        if new:
            names = [str(chunks[index].id) for index in new]
            with self._sizes_lock:
                gone = {
                    index: self._sizes.pop(name) for index, name in zip(new, names, strict=True) if name in self._sizes
                }
                self._sizes.update(zip(names, sizes, strict=True))
                while len(self._sizes) > _SIZES_MAX:
                    self._sizes.popitem(last=False)
            if gone:  # by policy, or by another's delete: else they would not be new
                self._tell(self._notify_keys_deleted, [keys[index] for index in gone], list(gone.values()))
            self._tell(self._notify_keys_stored, [keys[index] for index in new], sizes)
        return L2StoreResult(Outcome.FAILED not in outcomes, sum(sizes))

    def _look_up(self, keys: Sequence[Any], held: list[str | bytes]) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        names = [object_name(key) for key in keys]
        answers = self._link.hold_or_find(names)
        found = [is_there for is_there, _ in answers]
        if any(found):
            held += [name for name, (_, is_held) in zip(names, answers, strict=True) if is_held]
            hits = [key for key, is_there in zip(keys, found, strict=True) if is_there]
            self._tell(self._notify_keys_accessed, hits)
        return _bitmap(found)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        return _bitmap(
            self._link.load([object_name(key) for key in keys], [self._memory.view(each) for each in objects])
        )

    def _ask_usage(self) -> None:
        try:
            usage = self._link.usage()
            if self._link.is_up:
                self._usage = usage
        finally:
            self._usage_asking.release()

    def _tell(self, notify: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """A listener's fault is not the task's."""
        try:
            notify(*arguments)
        except Exception:
            # Listeners are LMCache's, and others' on it, and raise what they like; the chunks are moved by then.
            self._link.log.exception("a listener of LMCache failed")


def _bitmap(found: Sequence[bool]) -> Any:  # noqa: ANN401 - LMCache's Bitmap
    bitmap = Bitmap(len(found))
    for index, is_there in enumerate(found):
        if is_there:
            bitmap.set(index)
    return bitmap


def _own_settings(params: Mapping[str, object]) -> tuple[dict[str, int], LinkSettings]:
    """The adapter's own settings with their defaults, and those of the link. `ConfigurationError` names every fault."""
    own = {**_THREADS, _CAPACITY: 0}
    problems = []
    for name, value in [(name, params.get(name, default)) for name, default in own.items()]:
        least, most = (1, _THREADS_MAX) if name in _THREADS else (0, _BYTES_MAX)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            own[name] = value
        else:
            problems.append(f"{name}: is no whole number from {least} to {most}")
    values = {name: value for name, value in params.items() if name not in own}
    return own, LinkSettings.parse(values, os.environ, problems=problems)
