"""?mget's stream by itself: what it opens ahead, what it does where there is no room, and what it lets go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import cast

import pytest
from kv_driver import parse_stream

from kvobj.api.kv.mget import BURST_BYTES, LOOK_AHEAD, BurstBudget, ChunkStream, Span
from kvobj.api.object_store import ObjectStore
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.errors import BusyError, TierUnavailableError


def row(key: str, size_bytes: int) -> ObjectRow:
    return ObjectRow("b", key, (), size_bytes, "kv-0", 0, "alice", Durability.LOCAL, digest=b"d" * 32)


class OneReader:
    """A chunk on its way out, in two views of one buffer."""

    tier = "dram"

    def __init__(self, store: Chunks, key: str, length: int) -> None:
        self.length = length
        self._store = store
        self._data = key.encode("latin-1") * length
        store.open_readers += 1

    async def views(self) -> AsyncIterator[memoryview]:
        if self._data[:1] == self._store.fails_in:
            raise TierUnavailableError("a blob vanished")
        buffer = bytearray(self._data[: self.length // 2])
        yield memoryview(buffer)
        buffer[:] = b"!" * len(buffer)
        yield memoryview(self._data)[self.length // 2 : self.length]

    async def aclose(self) -> None:
        self._store.open_readers -= 1


class WholeReader(OneReader):
    """A chunk whose bytes lie in memory, until the reader is closed."""

    def __init__(self, store: Chunks, key: str, length: int) -> None:
        super().__init__(store, key, length)
        self._memory = bytearray(self._data)

    def whole(self) -> memoryview:
        return memoryview(self._memory)

    async def aclose(self) -> None:
        await super().aclose()
        self._memory[:] = b"!" * len(self._memory)


class Chunks:
    """A store of chunks whose bytes repeat their key; those of `hot` lie in memory."""

    def __init__(
        self, *, busy: int = 0, lost: str = "", fails_in: bytes = b"", hot: str = "", broken: str = ""
    ) -> None:
        self.hot = hot
        self.broken = broken
        self.busy = busy
        self.lost = lost
        self.fails_in = fails_in
        self.open_readers = 0
        self.opened: list[str] = []

    def open_hot(self, found: ObjectRow, start: int, stop: int) -> WholeReader | None:
        return WholeReader(self, found.key, stop - start) if found.key in self.hot else None

    async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
        await asyncio.sleep(0)
        self.opened.append(found.key)
        if self.busy:
            self.busy -= 1
            raise BusyError("no room")
        if found.key in self.broken:
            raise OSError("a defect")
        return None if found.key in self.lost else OneReader(self, found.key, stop - start)

    async def settled(self, found: ObjectRow, *, wait: bool = True) -> ObjectRow:
        del wait
        return found


def stream_of(store: Chunks, *sizes: int, bursts: BurstBudget | None = None) -> tuple[ChunkStream, list[int]]:
    released: list[int] = []

    def spans() -> Iterator[Span]:
        for index, size_bytes in enumerate(sizes):
            yield Span(index, None, row(chr(97 + index), size_bytes), 0, size_bytes)

    budget = bursts or BurstBudget(2**30)
    return ChunkStream(spans(), cast("ObjectStore", store), lambda: released.append(1), bursts=budget), released


async def whole(stream: ChunkStream) -> bytes:
    body = b"".join([bytes(view) async for view in stream.views()])
    await stream.aclose()
    return body


@pytest.mark.parametrize("size_bytes", [1, 7, 20_000, 200_000])
async def test_every_chunk_comes_whole_and_every_reader_is_closed(size_bytes: int) -> None:
    store = Chunks()
    stream, released = stream_of(store, *[size_bytes] * 6)
    items = parse_stream(await whole(stream))
    assert [item.payload for item in items] == [bytes([97 + index]) * size_bytes for index in range(6)]
    assert (store.open_readers, released) == (0, [1])


async def test_no_more_than_the_look_ahead_is_open_beside_the_one_that_is_sent() -> None:
    store = Chunks()
    stream, _ = stream_of(store, *[50_000] * 10)
    most = 0
    async for _view in stream.views():
        most = max(most, store.open_readers)
    assert 1 < most <= LOOK_AHEAD + 1
    await stream.aclose()
    assert store.open_readers == 0


class Narrow(Chunks):
    """Has room for one chunk at a time."""

    async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
        await asyncio.sleep(0)
        self.opened.append(found.key)
        if self.open_readers:
            raise BusyError("no room")
        return OneReader(self, found.key, stop - start)


async def test_where_there_was_no_room_to_read_ahead_the_chunk_is_opened_in_its_turn() -> None:
    store = Narrow()
    stream, _ = stream_of(store, 10, 10)
    items = parse_stream(await whole(stream))
    assert [item.payload for item in items] == [b"a" * 10, b"b" * 10]
    assert sorted(store.opened) == ["a", "b", "b"]


async def test_what_lies_in_memory_leaves_before_a_chunk_is_opened_again_that_found_no_room_ahead() -> None:
    class Full(Chunks):
        async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
            if found.key == "c" and self.open_readers:
                self.opened.append(found.key)
                raise BusyError("no room")
            return await super().open(found, start, stop)

    store = Full(hot="b")
    stream, _ = stream_of(store, *[50_000] * 3)
    items = parse_stream(await whole(stream))
    assert [item.header["status"] for item in items] == [200] * 3
    assert store.opened.count("c") == 2


async def test_a_chunk_that_finds_no_room_in_its_turn_either_is_told_so_and_the_others_come() -> None:
    class Full(Chunks):
        async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
            if found.key in "bd":
                self.opened.append(found.key)
                raise BusyError("no room")
            return await super().open(found, start, stop)

    store = Full(hot="e")
    stream, released = stream_of(store, *[50_000] * 5)
    items = parse_stream(await whole(stream))
    assert [(item.header["i"], item.header["status"]) for item in items] == [
        (0, 200), (1, 503), (2, 200), (3, 503), (4, 200),
    ]  # fmt: skip
    assert [item.payload[:1] for item in items] == [b"a", b"", b"c", b"", b"e"]
    assert items[1].header["size_bytes"] == 0
    assert (store.open_readers, released) == (0, [1])


async def test_where_there_is_no_room_at_all_each_chunk_is_waited_for_once() -> None:
    store = Chunks(busy=100)
    stream, released = stream_of(store, 10, 10, 10, 10)
    items = parse_stream(await whole(stream))
    assert [item.header["status"] for item in items] == [503] * 4
    assert store.opened == ["a", "b", "c", "d"], "nothing that this stream held was in the way"
    assert (store.open_readers, released) == (0, [1])


async def test_chunks_behind_one_that_found_no_room_are_waited_for_a_moment_and_none_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvobj.api.kv.mget.SHORT_SECONDS", 0.01)
    cancelled: list[str] = []

    class Slow(Chunks):
        """Lets who finds no room wait, but for the first and the last: for ever."""

        async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
            if found.key == "a":
                raise BusyError("no room")
            if found.key < "e":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(found.key)
                    raise
            return await super().open(found, start, stop)

    store = Slow(hot="c")
    stream, released = stream_of(store, *[50_000] * 5)
    items = parse_stream(await whole(stream))
    assert [item.header["status"] for item in items] == [503, 503, 200, 503, 200]
    assert cancelled == ["b", "d"]
    assert (store.open_readers, released) == (0, [1])


async def test_a_lost_chunk_is_a_miss_and_one_that_breaks_fails_the_stream() -> None:
    stream, _ = stream_of(Chunks(lost="b"), 10, 10, 10)
    assert [item.header["status"] for item in parse_stream(await whole(stream))] == [200, 404, 200]
    broken = Chunks(fails_in=b"b")
    stream, released = stream_of(broken, 10, 10, 10, 10, 10)
    with pytest.raises(TierUnavailableError):
        async for _view in stream.views():
            pass
    await stream.aclose()
    assert (broken.open_readers, released) == (0, [1])


async def test_a_reader_that_leaves_at_any_view_leaves_nothing_open() -> None:
    for views in range(8):
        store = Chunks()
        stream, released = stream_of(store, *[50_000] * 5)
        running = stream.views()
        for _ in range(views):
            await anext(running)
        await running.aclose()  # type: ignore[attr-defined]
        await stream.aclose()
        assert (store.open_readers, released) == (0, [1])


async def test_others_run_while_a_long_list_of_misses_is_told() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    misses = (Span(index, None, None) for index in range(10_000))
    stream = ChunkStream(misses, cast("ObjectStore", Chunks()), lambda: None, bursts=BurstBudget(1))
    items = parse_stream(await whole(stream))
    running.cancel()
    assert len(items) == 10_000
    assert turns > 100


async def test_an_items_header_leads_the_first_of_its_bytes() -> None:
    stream, _ = stream_of(Chunks(), 200_000, 200_000)
    bursts = [[(bool(lead), len(view)) for lead, view in burst] async for burst in stream.bursts()]
    await stream.aclose()
    assert bursts == [[(True, 100_000)], [(False, 100_000)], [(True, 100_000)], [(False, 100_000)], [(True, 0)]]


ALL_HOT = "".join(chr(97 + index) for index in range(150))


async def test_what_lies_in_memory_is_one_burst_up_to_so_many_bytes() -> None:
    store = Chunks(hot=ALL_HOT)
    size_bytes = BURST_BYTES // 4
    stream, released = stream_of(store, *[size_bytes] * 10)
    sizes, body, most = [], b"", 0
    async for burst in stream.bursts():
        sizes.append([len(view) for _, view in burst])
        body += b"".join(bytes(part) for piece in burst for part in piece)
        most = max(most, store.open_readers)
    await stream.aclose()
    assert sizes == [[size_bytes] * 4, [size_bytes] * 4, [size_bytes] * 2 + [0]]
    assert [item.payload for item in parse_stream(body)] == [bytes([97 + index]) * size_bytes for index in range(10)]
    assert most <= 4 + LOOK_AHEAD + 1
    assert (store.open_readers, released, store.opened) == (0, [1], [])


async def test_a_burst_has_a_bounded_number_of_items() -> None:
    store = Chunks(hot=ALL_HOT)
    stream, _ = stream_of(store, *[20_000] * 150)
    counts = [len(burst) async for burst in stream.bursts()]
    await stream.aclose()
    assert max(counts) <= 64
    assert (sum(counts), store.open_readers) == (150 + 1, 0)


async def test_a_burst_does_not_wait_for_a_chunk_that_is_not_there_yet() -> None:
    store = Chunks(hot="abde")
    stream, _ = stream_of(store, *[50_000] * 5)
    bursts = [[len(view) for _, view in burst] async for burst in stream.bursts()]
    await stream.aclose()
    assert bursts[0] == [50_000, 50_000]
    assert store.opened == ["c"]
    assert store.open_readers == 0


async def test_what_a_burst_holds_is_given_back_before_a_chunk_is_opened_that_found_no_room() -> None:
    class Full(Chunks):
        async def open(self, found: ObjectRow, start: int, stop: int) -> OneReader | None:
            if self.open_readers:
                raise BusyError("no room")
            return await super().open(found, start, stop)

    stream, released = stream_of(Full(hot="ab"), *[50_000] * 3)
    items = parse_stream(await whole(stream))
    assert [item.payload for item in items] == [bytes([97 + index]) * 50_000 for index in range(3)]
    assert released == [1]


async def test_who_leaves_in_the_middle_of_bursts_leaves_nothing_open() -> None:
    for bursts in range(4):
        store = Chunks(hot=ALL_HOT)
        stream, released = stream_of(store, *[BURST_BYTES // 2] * 9)
        running = stream.bursts()
        for _ in range(bursts):
            await anext(running)
        await running.aclose()
        await stream.aclose()
        assert (store.open_readers, released) == (0, [1])


async def test_who_is_cancelled_while_a_chunk_opens_leaves_nothing_open() -> None:
    for turns in range(6):
        store = Chunks()
        stream, released = stream_of(store, *[50_000] * 5)
        sending = asyncio.create_task(whole(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await stream.aclose()
        assert (store.open_readers, released) == (0, [1])


async def test_a_defect_in_one_chunks_opening_leaves_no_other_open() -> None:
    store = Chunks(hot="ab", broken="c")
    bursts = BurstBudget(2**30)
    stream, released = stream_of(store, *[50_000] * 6, bursts=bursts)
    with pytest.raises(OSError, match="a defect"):
        await whole(stream)
    await stream.aclose()
    assert (store.open_readers, released, bursts.held_bytes) == (0, [1], 0)


async def test_what_is_there_does_not_wait_for_the_bytes_of_a_chunk_that_comes() -> None:
    class Slow(OneReader):
        async def views(self) -> AsyncIterator[memoryview]:
            await asyncio.Event().wait()
            yield memoryview(b"")

    class Opened(Chunks):
        def open_hot(self, found: ObjectRow, start: int, stop: int) -> WholeReader | None:
            reader = super().open_hot(found, start, stop) or Slow(self, found.key, stop - start)
            return cast("WholeReader", reader)

    store = Opened(hot="abc")
    stream, _ = stream_of(store, *[50_000] * 4)
    async with aclosing(stream.bursts()) as bursts:
        first = await anext(bursts)
        assert [len(view) for _, view in first] == [50_000] * 3
        assert store.open_readers == 1 + 3
        waiting = asyncio.create_task(anext(bursts))
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.open_readers == 1, "nothing of the burst that has left is kept meanwhile"
        waiting.cancel()
        await asyncio.wait([waiting])
    await stream.aclose()
    assert store.open_readers == 0


async def test_what_was_copied_into_a_burst_is_not_kept() -> None:
    store = Chunks(hot=ALL_HOT)
    stream, _ = stream_of(store, *[100] * 150)
    most = 0
    async for _burst in stream.bursts():
        most = max(most, store.open_readers)
    await stream.aclose()
    assert most <= LOOK_AHEAD + 1


async def test_bursts_that_nobody_takes_keep_no_more_than_their_budget_and_a_chunk_each() -> None:
    budget, size_bytes = BurstBudget(BURST_BYTES), BURST_BYTES // 8
    store = Chunks(hot=ALL_HOT)
    streams = [stream_of(store, *[size_bytes] * 16, bursts=budget)[0] for _ in range(5)]
    taken = [stream.bursts() for stream in streams]
    counts = [len(await anext(bursts)) for bursts in taken]
    assert counts == [8, 1, 1, 1, 1]
    assert budget.held_bytes == BURST_BYTES + 4 * size_bytes
    for bursts, stream in zip(taken, streams, strict=True):
        await bursts.aclose()
        await stream.aclose()
    assert (budget.held_bytes, store.open_readers) == (0, 0)
