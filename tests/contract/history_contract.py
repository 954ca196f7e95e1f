"""What every history must do. A driver's tests subclass `HistoryContract` and give the `teller` fixture."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvobj.catalog.history_protocol import EventPage, EventRow, EventType, History, RemovalReason
from kvobj.catalog.rows import Durability, ObjectRow

BUCKET = "chunks"
OTHER = "others"
DAY_MS = 86_400_000


def chunk(
    key: str,
    *,
    parent: str | None = None,
    tokens: int = 16,
    namespace: str = "llama",
    bucket: str = BUCKET,
    sequence: int = 0,
) -> ObjectRow:
    return ObjectRow(
        bucket=bucket,
        key=key,
        blobs=(),
        size_bytes=0,
        etag="",
        modified_ms=1,
        owner="main",
        durability=Durability.MEMORY,
        parent=parent,
        tokens=tokens,
        namespace=namespace,
        sequence=sequence,
    )


def chain(*keys: str, tokens: int = 16) -> list[ObjectRow]:
    parents = ["", *keys]
    return [chunk(key, parent=parents[place], tokens=tokens) for place, key in enumerate(keys)]


class Teller(Protocol):
    """Tells a history as a catalog's verbs do: every call is one change."""

    @property
    def history(self) -> History: ...

    async def make_bucket(self, name: str) -> None:
        """Make a bucket, in the place of one of this name if there is one."""
        ...

    async def stored(self, rows: Sequence[ObjectRow], *, now_ms: int = 5, volatile: bool = True) -> list[ObjectRow]:
        """The rows with the numbers that they got."""
        ...

    async def removed(
        self,
        rows: Sequence[ObjectRow],
        *,
        reason: RemovalReason = RemovalReason.DELETED,
        now_ms: int = 6,
        volatile: bool = True,
    ) -> None: ...

    async def removed_run(self, rows: Sequence[ObjectRow], *, now_ms: int = 6) -> None:
        """`removed` of durable rows of one namespace, as a claim of many tells it."""
        ...

    async def made_durable(self, row: ObjectRow) -> None: ...

    def bound(self, max_events: int) -> None:
        """Set the bound on the number of events, and of removals."""
        ...


async def told(teller: Teller, *, after: int = 0, bucket: str | None = BUCKET) -> list[EventRow]:
    page = await teller.history.read(bucket, after=after)
    assert not page.more
    return list(page.events)


async def keys_told(teller: Teller) -> list[tuple[str, ...]]:
    return [event.keys for event in await told(teller)]


async def rest(history: History, *, bucket: str | None = BUCKET, limit: int) -> list[EventRow]:
    """All pages one after the other."""
    events: list[EventRow] = []
    after = 0
    while True:
        page = await history.read(bucket, after=after, limit=limit)
        assert len(page.events) <= limit
        assert page.last > after
        events += page.events
        after = page.last
        if not page.more:
            return events


class HistoryContract:
    async def test_a_stored_chunk_is_told_with_its_place_and_the_number_of_its_row(self, teller: Teller) -> None:
        (row,) = await teller.stored([chunk("a", parent="p", tokens=256)], now_ms=77)
        assert await told(teller) == [
            EventRow(row.sequence, 77, EventType.STORED, BUCKET, "llama", ("a",), "p", 256, "", "memory")
        ]

    async def test_a_first_chunk_and_a_loose_key_are_told_apart(self, teller: Teller) -> None:
        await teller.stored([chunk("a", parent="")])
        await teller.stored([chunk("b")])
        assert [event.parent for event in await told(teller)] == ["", None]

    async def test_a_batch_of_one_chain_is_one_event(self, teller: Teller) -> None:
        rows = await teller.stored(chain("a", "b", "c"))
        (event,) = await told(teller)
        assert (event.keys, event.parent, event.tokens) == (("a", "b", "c"), "", 48)
        assert event.sequence == rows[-1].sequence

    async def test_what_is_no_single_chain_of_equal_chunks_is_several_events(self, teller: Teller) -> None:
        tail = chunk("tail", parent="b", tokens=3)
        await teller.stored([*chain("a", "b"), tail, chunk("x", parent="a"), chunk("y", namespace="other")])
        assert await keys_told(teller) == [("a", "b"), ("tail",), ("x",), ("y",)]

    async def test_a_removal_is_told_and_remembered_with_its_reason(self, teller: Teller) -> None:
        await teller.removed([chunk("a"), chunk("b")], reason=RemovalReason.EVICTED, now_ms=99)
        (event,) = await told(teller)
        assert (event.type, event.keys, event.reason, event.tokens) == (EventType.REMOVED, ("a", "b"), "evicted", 32)
        removal = await teller.history.why_removed(BUCKET, "b")
        assert removal is not None
        assert (removal.reason, removal.when_ms, removal.namespace) == (RemovalReason.EVICTED, 99, "llama")
        assert await teller.history.why_removed(BUCKET, "c") is None
        assert await teller.history.why_removed(OTHER, "a") is None

    async def test_removals_of_several_namespaces_are_told_apart(self, teller: Teller) -> None:
        await teller.removed([chunk("a"), chunk("b", namespace="other"), chunk("c", namespace="other")])
        assert [(event.namespace, event.keys) for event in await told(teller)] == [
            ("llama", ("a",)),
            ("other", ("b", "c")),
        ]

    async def test_the_last_removal_of_a_key_is_the_one_remembered(self, teller: Teller) -> None:
        await teller.removed([chunk("a")], reason=RemovalReason.EVICTED, now_ms=1)
        await teller.removed([chunk("a")], reason=RemovalReason.RECALLED, now_ms=2, volatile=False)
        removal = await teller.history.why_removed(BUCKET, "a")
        assert removal is not None
        assert (removal.reason, removal.when_ms) == (RemovalReason.RECALLED, 2)

    async def test_more_keys_than_an_event_takes_are_several_events(self, teller: Teller) -> None:
        await teller.removed([chunk(f"k{number}") for number in range(600)])
        events = await told(teller)
        assert [len(event.keys) for event in events] == [256, 256, 88]
        assert await teller.history.why_removed(BUCKET, "k599") is not None

    async def test_volatile_and_durable_events_come_in_one_order(self, teller: Teller) -> None:
        for number in range(6):
            await teller.stored([chunk(f"k{number}")], volatile=number % 2 == 0)
        events = await told(teller)
        assert [event.keys[0] for event in events] == [f"k{number}" for number in range(6)]
        assert [event.sequence for event in events] == sorted({event.sequence for event in events})

    async def test_an_event_that_became_durable_is_told_once_at_its_place(self, teller: Teller) -> None:
        (row,) = await teller.stored([chunk("a")])
        await teller.stored([chunk("b")])
        await teller.made_durable(row)
        assert await keys_told(teller) == [("a",), ("b",)]

    async def test_a_reader_reads_on_where_it_stopped(self, teller: Teller) -> None:
        await teller.stored([chunk("a")])
        page = await teller.history.read(BUCKET, after=0)
        assert await told(teller, after=page.last) == []
        await teller.stored([chunk("b")])
        assert [event.keys for event in await told(teller, after=page.last)] == [("b",)]

    async def test_pages_are_bounded_and_leave_nothing_out(self, teller: Teller) -> None:
        for number in range(300):
            await teller.stored([chunk(f"k{number}")], volatile=number % 3 != 0)
        for limit in (1, 64, 65, 299, 300, 1000):
            events = await rest(teller.history, limit=limit)
            assert [event.keys[0] for event in events] == [f"k{number}" for number in range(300)]

    async def test_events_of_other_buckets_are_left_out(self, teller: Teller) -> None:
        for number in range(400):
            await teller.stored([chunk(f"k{number}", bucket=OTHER)])
        await teller.stored([chunk("mine")])
        assert [event.keys for event in await rest(teller.history, limit=50)] == [("mine",)]
        assert len(await rest(teller.history, bucket=None, limit=50)) == 401

    async def test_a_bucket_made_again_has_no_past(self, teller: Teller) -> None:
        await teller.stored([chunk("a")])
        await teller.removed([chunk("a")])
        await teller.make_bucket(BUCKET)
        assert await told(teller) == []
        assert await teller.history.why_removed(BUCKET, "a") is None
        await teller.stored([chunk("b")])
        assert await keys_told(teller) == [("b",)]

    async def test_an_absent_bucket_has_no_events(self, teller: Teller) -> None:
        page = await teller.history.read("absent", after=0)
        assert page.events == ()
        assert await teller.history.why_removed("absent", "a") is None
        assert not await teller.history.remembers_all("absent")

    async def test_a_cleared_namespace_is_told(self, teller: Teller) -> None:
        await teller.history.tell_cleared(BUCKET, "llama", now_ms=8)
        (event,) = await told(teller)
        assert (event.type, event.namespace, event.time_ms, event.keys) == (EventType.CLEARED, "llama", 8, ())

    async def test_from_the_last_number_on_there_is_only_what_comes(self, teller: Teller) -> None:
        await teller.stored([chunk("a")])
        after = teller.history.last_sequence()
        await teller.stored([chunk("b")], volatile=False)
        assert [event.keys for event in await told(teller, after=after)] == [("b",)]

    async def test_waiting_ends_when_something_is_told(self, teller: Teller) -> None:
        for volatile in (True, False):
            waiting, after = await self._wait_for_more(teller)
            await teller.stored([chunk("a")], volatile=volatile)
            assert await waiting
            assert len((await teller.history.read(BUCKET, after=after)).events) == 1

    async def test_waiting_ends_when_a_removal_is_told(self, teller: Teller) -> None:
        for volatile in (True, False):
            waiting, after = await self._wait_for_more(teller)
            await teller.removed([chunk("a"), chunk("b", namespace="other")], volatile=volatile)
            assert await waiting
            told_since = (await teller.history.read(BUCKET, after=after)).events
            assert [event.type for event in told_since] == [EventType.REMOVED] * 2

    async def test_waiting_ends_when_a_run_of_removals_is_told(self, teller: Teller) -> None:
        waiting, after = await self._wait_for_more(teller)
        await teller.removed_run([chunk("a"), chunk("b")])
        assert await waiting
        told_since = (await teller.history.read(BUCKET, after=after)).events
        assert [(event.type, event.keys) for event in told_since] == [(EventType.REMOVED, ("a", "b"))]

    async def test_waiting_ends_when_a_cleared_namespace_is_told(self, teller: Teller) -> None:
        waiting, after = await self._wait_for_more(teller)
        await teller.history.tell_cleared(BUCKET, "llama", now_ms=8)
        assert await waiting
        assert len((await teller.history.read(BUCKET, after=after)).events) == 1

    @staticmethod
    async def _wait_for_more(teller: Teller) -> tuple[asyncio.Task[bool], int]:
        """A reader that has read all and waits, and up to which number it has read."""
        after = (await teller.history.read(BUCKET, after=0)).last
        waiting = asyncio.create_task(teller.history.wait(after, timeout_seconds=10))
        await asyncio.sleep(0)
        assert not waiting.done()
        return waiting, after

    async def test_waiting_for_what_was_told_already_is_no_wait(self, teller: Teller) -> None:
        after = (await teller.history.read(BUCKET, after=0)).last
        await teller.stored([chunk("a")])
        assert await teller.history.wait(after, timeout_seconds=10)

    async def test_waiting_ends_at_its_deadline(self, teller: Teller) -> None:
        await teller.stored([chunk("a")])
        after = (await teller.history.read(BUCKET, after=0)).last
        assert not await teller.history.wait(after, timeout_seconds=0.01)

    async def test_nothing_is_forgotten_before_its_time(self, teller: Teller) -> None:
        await teller.stored([chunk("a")], now_ms=DAY_MS)
        await teller.removed([chunk("a")], now_ms=DAY_MS)
        assert await teller.history.trim(now_ms=2 * DAY_MS, retention_ms=DAY_MS) == 0
        page = await teller.history.read(BUCKET, after=0)
        assert len(page.events) == 2
        assert page.first_kept == 0
        assert await teller.history.remembers_all(BUCKET)

    async def test_what_is_older_than_the_retention_is_forgotten_and_the_gap_told(self, teller: Teller) -> None:
        (old,) = await teller.stored([chunk("a")], now_ms=1)
        await teller.removed([chunk("a")], now_ms=2, volatile=False)
        last_old = (await told(teller))[-1].sequence
        await teller.stored([chunk("b")], now_ms=DAY_MS)
        forgotten = await teller.history.trim(now_ms=DAY_MS + 10, retention_ms=DAY_MS)
        assert forgotten == 3  # two events and a removal
        page = await teller.history.read(BUCKET, after=0)
        assert [event.keys for event in page.events] == [("b",)]
        assert old.sequence < page.first_kept == last_old + 1
        assert await teller.history.why_removed(BUCKET, "a") is None
        assert not await teller.history.remembers_all(BUCKET)

    async def test_a_bucket_made_after_the_gap_misses_nothing(self, teller: Teller) -> None:
        await teller.stored([chunk("a")], now_ms=1)
        await teller.removed([chunk("a")], now_ms=2)
        await teller.history.trim(now_ms=DAY_MS, retention_ms=1)
        await teller.make_bucket(BUCKET)
        assert (await teller.history.read(BUCKET, after=0)).first_kept == 0
        assert await teller.history.remembers_all(BUCKET)

    async def test_the_bound_on_their_number_forgets_the_oldest(self, teller: Teller) -> None:
        teller.bound(3)
        for number in range(8):
            await teller.stored([chunk(f"k{number}")], volatile=number % 2 == 0)
        await teller.history.trim(now_ms=5, retention_ms=DAY_MS)
        kept = await keys_told(teller)
        assert kept[-1] == ("k7",)
        assert len(kept) in {2, 3}  # a driver's marks may count
        assert kept == [(f"k{number}",) for number in range(8 - len(kept), 8)]

    async def test_one_step_of_trimming_is_bounded(self, teller: Teller) -> None:
        for number in range(10):
            await teller.stored([chunk(f"k{number}")], now_ms=1)
        await teller.removed([chunk(f"k{number}") for number in range(10)], now_ms=1)
        assert await teller.history.trim(now_ms=DAY_MS, retention_ms=1, limit=4) == 4
        assert [keys[0] for keys in await keys_told(teller)][:6] == [f"k{number}" for number in range(4, 10)]
        steps: list[int] = []
        while not steps or steps[-1]:
            steps.append(await teller.history.trim(now_ms=DAY_MS, retention_ms=1, limit=4))
        assert steps == [4, 4, 4, 4, 1, 0]  # seven events and ten removals were left

    async def test_a_key_removed_again_outlives_its_first_removal(self, teller: Teller) -> None:
        await teller.removed([chunk("a")], now_ms=1)
        await teller.removed([chunk("a")], now_ms=DAY_MS)
        await teller.history.trim(now_ms=DAY_MS + 5, retention_ms=DAY_MS)
        removal = await teller.history.why_removed(BUCKET, "a")
        assert removal is not None
        assert removal.when_ms == DAY_MS

    async def test_a_page_is_a_value_that_can_be_sent(self, teller: Teller) -> None:
        await teller.stored(chain("a", "b"))
        page = await teller.history.read(BUCKET, after=0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(page), type=EventPage) == page
