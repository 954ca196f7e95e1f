"""The LMDB history against the reference, over crashes, power losses, clean stops and retention."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from history_contract import BUCKET, OTHER, Teller, chunk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lmdb_teller import LmdbTeller
from memory_teller import MemoryTeller

from kvobj.catalog.history_protocol import EventRow, History, RemovalReason
from kvobj.catalog.rows import ObjectRow

T = TypeVar("T")

KEYS = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=4, unique=True)
BUCKETS = st.sampled_from([BUCKET, OTHER])
NAMESPACES = st.sampled_from(["", "llama"])
LIMITS = (1, 3, 1000)


def told_by(event: EventRow) -> tuple[object, ...]:
    """An event without its number, which drivers draw as they like."""
    return (event.time_ms, event.type, event.bucket, event.namespace, event.keys, event.parent, event.reason)


async def all_of(history: History, bucket: str | None, limit: int) -> tuple[list[tuple[object, ...]], bool, int]:
    """What is told page by page, whether there is a gap, and how much of what is told lies inside it."""
    events: list[EventRow] = []
    after = 0
    while True:
        page = await history.read(bucket, after=after, limit=limit)
        events += page.events
        after = page.last
        if not page.more:
            break
    assert [event.sequence for event in events] == sorted({event.sequence for event in events})
    inside = sum(event.sequence < page.first_kept for event in events)
    return [told_by(event) for event in events], page.first_kept > 0, inside


class HistoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvobj-machine-", dir="/dev/shm"))
        self.runner = asyncio.Runner()
        self.model = MemoryTeller()
        self.lmdb = LmdbTeller(self.directory)
        self.boots = count(1)
        self.boot = str(next(self.boots))
        self.now_ms = 1000
        self.volatile: list[tuple[ObjectRow, ObjectRow]] = []
        self.run(self.lmdb.open(boot_id=self.boot))
        for name in (BUCKET, OTHER):
            self.make_bucket(name)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def tellers(self) -> tuple[Teller, Teller]:
        return self.model, self.lmdb

    def teardown(self) -> None:
        self.run(self.lmdb.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    @rule(name=BUCKETS)
    def make_bucket(self, name: str) -> None:
        for teller in self.tellers:
            self.run(teller.make_bucket(name))

    @rule(keys=KEYS, bucket=BUCKETS, namespace=NAMESPACES, volatile=st.booleans(), is_chain=st.booleans())
    def store(self, *, keys: list[str], bucket: str, namespace: str, volatile: bool, is_chain: bool) -> None:
        parents = [None, *keys] if is_chain else [None] * len(keys)
        rows = [
            chunk(key, parent=parent, bucket=bucket, namespace=namespace)
            for key, parent in zip(keys, parents, strict=False)
        ]
        stored = [self.run(teller.stored(rows, now_ms=self.now_ms, volatile=volatile)) for teller in self.tellers]
        if volatile:
            self.volatile += zip(*stored, strict=True)

    @rule(keys=KEYS, bucket=BUCKETS, volatile=st.booleans(), reason=st.sampled_from(RemovalReason))
    def remove(self, *, keys: list[str], bucket: str, volatile: bool, reason: RemovalReason) -> None:
        rows = [chunk(key, bucket=bucket) for key in keys]
        for teller in self.tellers:
            self.run(teller.removed(rows, reason=reason, now_ms=self.now_ms, volatile=volatile))

    @precondition(lambda self: self.volatile)
    @rule(data=st.data())
    def write_behind(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.volatile) - 1))
        for teller, row in zip(self.tellers, self.volatile.pop(place), strict=True):
            self.run(teller.made_durable(row))

    @rule(bucket=BUCKETS, namespace=NAMESPACES)
    def clear(self, bucket: str, namespace: str) -> None:
        for teller in self.tellers:
            self.run(teller.history.tell_cleared(bucket, namespace, now_ms=self.now_ms))

    @rule(milliseconds=st.integers(1, 20))
    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(retention_ms=st.integers(0, 40))
    def trim(self, retention_ms: int) -> None:
        for teller in self.tellers:
            while self.run(teller.history.trim(now_ms=self.now_ms, retention_ms=retention_ms, limit=7)):
                pass

    @rule()
    def crash(self) -> None:
        self.run(self.lmdb.reopen(boot_id=self.boot))

    @rule()
    def lose_power(self) -> None:
        self.model.history.lose_power()
        self.volatile.clear()
        self._reboot()

    @rule()
    def stop_cleanly(self) -> None:
        for teller in self.tellers:
            assert self.run(teller.history.write_down())
        self.model.history._removals.clear()
        self.model.history._removals_forgotten = self.model.allocate()
        self.volatile.clear()
        self._reboot()

    def _reboot(self) -> None:
        self.boot = str(next(self.boots))
        self.run(self.lmdb.reopen(boot_id=self.boot))

    @invariant()
    def both_tell_the_same(self) -> None:
        for bucket in (BUCKET, OTHER, None):
            expected = self.run(all_of(self.model.history, bucket, 1000))
            for limit in LIMITS:
                assert self.run(all_of(self.lmdb.history, bucket, limit)) == expected

    @invariant()
    def both_remember_the_same(self) -> None:
        for bucket in (BUCKET, OTHER):
            remembered = [self.run(teller.history.remembers_all(bucket)) for teller in self.tellers]
            assert remembered[0] is remembered[1]
            for key in ("a", "b", "c", "d"):
                one, other = [self.run(teller.history.why_removed(bucket, key)) for teller in self.tellers]
                assert (one and (one.reason, one.when_ms)) == (other and (other.reason, other.when_ms))


HistoryMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestHistoryMachine = HistoryMachine.TestCase
