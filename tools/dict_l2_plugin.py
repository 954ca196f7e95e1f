"""An L2 adapter of LMCache's that is a dict in its own process: what a plug-in can reach at best, as a yardstick for others.

One memcpy each way and nothing else: values lie in one preallocated buffer, whose pages are touched before anything is timed.
`--l2-adapter '{"type": "plugin", "module_path": "dict_l2_plugin", "class_name": "DictL2Adapter", "adapter_params": {"bytes": N}}'`
with this folder on PYTHONPATH. A full buffer refuses what is new. One thread works off the tasks: a submitter may not be blocked.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

# ruff: noqa: D102 - the contracts are LMCache's
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

ALIGNMENT = 4096


class DictL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no types
    """See the module's text."""

    def __init__(self, adapter_params: Mapping[str, int], l1_memory_desc: object = None) -> None:  # noqa: ARG002 - LMCache's
        super().__init__()
        self._buffer = bytearray(adapter_params.get("bytes", 2**31))  # zeroed by calloc: not yet backed by pages
        self._base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._buffer))
        ctypes.memset(self._base, 1, len(self._buffer))
        self._places: dict[Any, tuple[int, int]] = {}
        self._end = 0
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._results: list[dict[int, Any]] = [{}, {}, {}]
        self._lock = threading.Lock()
        self._tasks = 0
        self._waiting: SimpleQueue[tuple[int, int, Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[2].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(0, lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            done, self._results[0] = self._results[0], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> int:  # noqa: ARG002 - LMCache's
        return self._submit(1, lambda: _bitmap([key in self._places for key in keys]))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        with self._lock:
            return self._results[1].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing leaves this adapter, so nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(2, lambda: _bitmap([self._load(*pair) for pair in zip(keys, objects, strict=True)]))

    def query_load_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        with self._lock:
            return self._results[2].pop(task_id, None)

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        for notifier in self._notifiers:
            notifier.close()

    def _submit(self, kind: int, run: Callable[[], Any]) -> int:
        with self._lock:
            self._tasks += 1
            number = self._tasks
        self._waiting.put((kind, number, run))
        return number

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            kind, number, run = task
            result = run()
            with self._lock:
                self._results[kind][number] = result
            self._notifiers[kind].notify()

    def _store(self, keys: list[Any], objects: list[Any]) -> Any:  # noqa: ANN401 - LMCache's L2StoreResult
        written = 0
        for key, memory in zip(keys, objects, strict=True):
            size = memory.get_size()
            start, room = self._places.get(key, (self._end, size))
            if room != size or start + size > len(self._buffer):
                return L2StoreResult(success=False, bytes_transferred=written)
            ctypes.memmove(self._base + start, memory.data_ptr, size)
            if key not in self._places:
                self._places[key] = (start, size)
                self._end = -(-(start + size) // ALIGNMENT) * ALIGNMENT
            written += size
        return L2StoreResult(success=True, bytes_transferred=written)

    def _load(self, key: Any, memory: Any) -> bool:  # noqa: ANN401 - LMCache's classes
        start, size = self._places.get(key, (0, -1))
        if size != memory.get_size():
            return False
        ctypes.memmove(memory.data_ptr, self._base + start, size)
        return True


def _bitmap(found: list[bool]) -> Any:  # noqa: ANN401 - LMCache's Bitmap
    bitmap = Bitmap(len(found))
    for index, is_there in enumerate(found):
        if is_there:
            bitmap.set(index)
    return bitmap
