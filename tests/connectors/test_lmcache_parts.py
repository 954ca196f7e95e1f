"""What the plug-ins for LMCache are made of, without LMCache and without a server; and how a link cuts its batches."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
from fakes import ManualClock
from forked import in_child
from hypothesis import example, given
from hypothesis import strategies as st

from kvobj.client.call_scope import CallScope, pause
from kvobj.client.kv_values import DEFAULT
from kvobj.connectors.helpers import Helpers
from kvobj.connectors.lmcache.keys import (
    ObjectName,
    engine_name,
    may_be_cursor,
    model_prefix,
    object_name,
    plain_engine_name,
)
from kvobj.connectors.lmcache.memory import ObjectMemory
from kvobj.connectors.lmcache.plugin_settings import plugin_settings
from kvobj.connectors.lmcache.puts import Puts
from kvobj.connectors.lmcache.stored_form import MAGIC, parse_head, with_head
from kvobj.connectors.lmcache.tasks import TaskRunner
from kvobj.connectors.pieces import bytes_for, cut, shared_out
from kvobj.errors import UnavailableError

WAIT_SECONDS = 10.0
sizes_of_batches = st.lists(st.integers(0, 100), max_size=50)


@dataclass(frozen=True)
class Key:
    """As LMCache's ObjectKey has its fields."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class EngineKey:
    """As LMCache's CacheEngineKey is asked for its name."""

    name: str

    def to_string(self) -> str:
        return self.name


class TestKeys:
    def test_names_are_those_of_lmcaches_s3_adapter(self) -> None:
        assert object_name(Key(bytes(range(4)), "org/model-8B", 0x02010201)) == "org/model-8B@02010201@0@00010203"
        assert object_name(Key(b"\xff", "m", 1, 17, "alice")) == "m@00000001@11@ff@alice"

    @given(
        st.binary(min_size=1, max_size=64),
        st.text(st.characters(exclude_characters="@"), min_size=1, max_size=40),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**20),
        st.text(st.characters(exclude_characters="@/\\\0"), max_size=128),
    )
    def test_every_key_is_told_by_its_name(self, digest: bytes, model: str, rank: int, group: int, salt: str) -> None:
        key = Key(digest, model, rank, group, salt)
        assert ObjectName.parse(object_name(key)) == ObjectName(model, rank, group, digest.hex(), salt)
        assert object_name(key).startswith(model_prefix(model))

    @pytest.mark.parametrize("name", ["", "a", "m@1@0@ff", "m@00000001@0@f", "m@00000001@0@ff@a/b", "@00000001@0@ff"])
    def test_other_keys_are_none_of_lmcaches(self, name: str) -> None:
        assert ObjectName.parse(name) is None

    @given(st.text())
    def test_any_text_is_a_name_or_none(self, text: str) -> None:
        parsed = ObjectName.parse(text)
        assert parsed is None or "@" in text

    def test_ranks_that_share_their_bytes_share_the_name_of_rank_0(self) -> None:
        key = EngineKey("org/m@8@5@abc@bfloat16@3@tag%v@w")
        assert engine_name(key, is_shared_by_ranks=False) == "org/m@8@5@abc@bfloat16@3@tag%v@w"
        assert engine_name(key, is_shared_by_ranks=True) == "org/m@8@0@abc@bfloat16@3@tag%v@w"

    @pytest.mark.parametrize(
        ("model", "front"),
        [
            ("../models/x", "@/models/x"),
            ("../../x", "@/@/x"),
            ("a/../../x", "a/@/@/x"),
            ("a/../x", "a/../x"),
            ("./..", "./.."),
            ("..", ".."),
            ("..x/y", "..x/y"),
        ],
    )
    def test_a_model_that_climbs_out_of_the_bucket_has_names_that_do_not(self, model: str, front: str) -> None:
        assert object_name(Key(b"\xff", model, 1)) == f"{front}@00000001@0@ff"
        for is_shared, rank in ((False, 5), (True, 0)):
            name = engine_name(EngineKey(f"{model}@8@5@abc@bfloat16"), is_shared_by_ranks=is_shared)
            assert name == f"{front}@8@{rank}@abc@bfloat16"
            assert plain_engine_name(name) == f"{model}@8@{rank}@abc@bfloat16"

    @given(st.lists(st.sampled_from(["..", ".", "", "a", "..b"]), min_size=1, max_size=7).map("/".join).filter(bool))
    def test_every_model_that_is_a_path_is_told_by_names_that_can_be_sent(self, model: str) -> None:
        name = object_name(Key(b"\xff", model, 1, 0, "salt"))
        assert DEFAULT.key_of(name) == name
        assert ObjectName.parse(name) == ObjectName(model, 1, 0, "ff", "salt")
        assert name.startswith(model_prefix(model))

    @pytest.mark.parametrize("front", ["@", "x@/y", "a/@/x", "@x/y", "@/..", "@/../../x"])
    def test_no_name_that_no_model_has_is_taken_for_ones(self, front: str) -> None:
        parsed = ObjectName.parse(f"{front}@00000001@0@ff")
        assert parsed is None or object_name(Key(b"\xff", parsed.model_name, 1)) == f"{front}@00000001@0@ff"

    def test_a_listing_goes_on_behind_what_could_be_a_name(self) -> None:
        assert may_be_cursor("../m@00000001@0@ff@\x01é")
        assert not any(map(may_be_cursor, ("\0junk", "m@\0", "\ud800", "x" * 1025, "é" * 513)))


class TestStoredForm:
    @given(st.binary(min_size=8, max_size=8), st.binary(max_size=200), st.integers(0, 300))
    def test_a_chunk_comes_back_from_behind_its_head_and_is_never_as_large_as_a_full_one(
        self, metadata: bytes, data: bytes, full: int
    ) -> None:
        stored = with_head(metadata, memoryview(data), full_bytes=full)
        assert len(stored) != full
        told = parse_head(memoryview(stored), metadata_bytes=8, parse=bytes, length_of=lambda _: len(data))
        assert told is not None
        assert told[0] == metadata
        assert bytes(told[1]) == data

    @given(st.binary(max_size=64), st.sampled_from([b"", MAGIC]), st.integers(0, 64))
    def test_any_other_bytes_have_no_head(self, body: bytes, front: bytes, length: int) -> None:
        told = parse_head(memoryview(front + body), metadata_bytes=8, parse=bytes, length_of=lambda _: length)
        if told is not None:
            assert (front + body).startswith(MAGIC)
            assert len(told[1]) == length

    def test_metadata_that_its_owner_cannot_read_is_no_head(self) -> None:
        def parse(_raw: bytes) -> int:
            raise KeyError("a format of another release")

        stored = with_head(bytes(8), memoryview(b"data"), full_bytes=100)
        assert parse_head(memoryview(stored), metadata_bytes=8, parse=parse, length_of=int) is None


@dataclass
class Memory:
    """As LMCache's memory object is asked for its bytes."""

    buffer: ctypes.Array[ctypes.c_ubyte]
    start: int
    size: int

    @property
    def data_ptr(self) -> int:
        return ctypes.addressof(self.buffer) + self.start

    def get_size(self) -> int:
        return self.size

    @property
    def byte_array(self) -> memoryview:
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.data_ptr))


@dataclass(frozen=True)
class Arena:
    """As LMCache's L1MemoryDesc has its fields."""

    ptr: int
    size: int


class TestMemory:
    def test_objects_in_the_arena_and_outside_of_it_are_the_same_bytes_that_lmcache_sees(self) -> None:
        arena, outside = (ctypes.c_ubyte * 1000)(), (ctypes.c_ubyte * 100)()
        memory = ObjectMemory(Arena(ctypes.addressof(arena), 1000))
        assert memory.arena_bytes == 1000
        for number, each in enumerate((Memory(arena, 0, 10), Memory(arena, 990, 10), Memory(outside, 5, 90)), start=1):
            view = memory.view(each)
            assert len(view) == each.size
            view[:] = bytes([number]) * each.size
            assert bytes(each.byte_array) == bytes([number]) * each.size
        assert ObjectMemory().arena_bytes == 0
        assert bytes(ObjectMemory().view(Memory(arena, 990, 10))) == bytes([2]) * 10


class TestTasks:
    @staticmethod
    def runner(threads: int = 2) -> tuple[TaskRunner[int], threading.Semaphore]:
        done = threading.Semaphore(0)
        return TaskRunner("test", threads=threads, failure=lambda size: -size, notify=done.release), done

    def test_each_result_is_given_once(self) -> None:
        runner, done = self.runner()
        numbers = [runner.submit(1, partial_of(value)) for value in range(5)]
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in numbers)
        assert runner.take(numbers[0]) == 0
        assert runner.take(numbers[0]) is None
        assert runner.take_all() == dict(zip(numbers[1:], range(1, 5), strict=True))
        assert runner.take_all() == {}
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_a_task_that_raises_has_failed_and_the_thread_goes_on(self) -> None:
        runner, done = self.runner(threads=1)

        def wrong() -> int:
            raise ValueError("a bug")

        numbers = [runner.submit(7, wrong), runner.submit(1, lambda: 5)]
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in numbers)
        assert [runner.take(number) for number in numbers] == [-7, 5]
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_what_has_not_begun_when_it_closes_fails_and_so_does_what_comes_later(self) -> None:
        runner, done = self.runner(threads=1)
        begun, may_end = threading.Event(), threading.Event()

        def slow() -> int:
            begun.set()
            may_end.wait(WAIT_SECONDS)
            return 1

        numbers = [runner.submit(2, slow), runner.submit(3, lambda: 1)]
        assert begun.wait(WAIT_SECONDS)
        closing = threading.Thread(target=runner.close, args=(time.monotonic(),))
        closing.start()
        while not runner._is_closed:
            assert closing.is_alive()
        numbers.append(runner.submit(4, lambda: 1))
        may_end.set()
        closing.join(WAIT_SECONDS)
        assert not closing.is_alive()
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in numbers)
        assert [runner.take(number) for number in numbers] == [1, -3, -4]

    def test_in_a_forked_process_every_task_fails_and_none_waits(self) -> None:
        runner, done = self.runner(threads=1)
        begun, may_end = threading.Event(), threading.Event()

        def slow() -> int:
            begun.set()
            may_end.wait(WAIT_SECONDS)
            return 1

        number = runner.submit(2, slow)
        assert begun.wait(WAIT_SECONDS)

        def used() -> bool:
            failed = runner.submit(3, lambda: 1)
            runner.close(time.monotonic() + WAIT_SECONDS)
            return (runner.take(number), runner.take(failed)) == (None, -3)

        with runner._lock:  # as another thread may have it at that moment
            assert in_child(used)
        may_end.set()
        assert done.acquire(timeout=WAIT_SECONDS)
        assert runner.take(number) == 1
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_calls_that_still_run_at_the_deadline_are_ended_before_it_is_closed(self) -> None:
        runner, _done = self.runner(threads=2)
        begun = threading.Barrier(3)

        def call() -> int:
            begun.wait(WAIT_SECONDS)
            pause(10 * WAIT_SECONDS)
            return 1

        numbers = [runner.submit(size, call) for size in (2, 3)]
        begun.wait(WAIT_SECONDS)
        runner.close(time.monotonic())
        assert [runner.take(number) for number in numbers] == [-2, -3]
        assert not any(thread.is_alive() for thread in runner._threads)

    def test_a_task_behind_the_close_of_its_event_fails_and_raises_nothing(self) -> None:
        runner = TaskRunner("test", threads=1, failure=lambda size: -size, notify=lambda: os.eventfd_write(-1, 1))
        runner.close(time.monotonic() + WAIT_SECONDS)
        assert runner.take(runner.submit(3, lambda: 1)) == -3

    def test_tasks_run_on_as_many_threads_as_there_are(self) -> None:
        runner, done = self.runner(threads=3)
        together = threading.Barrier(3)
        for _ in range(2):  # the second time by threads that were idle in between
            numbers = [runner.submit(1, lambda: together.wait(WAIT_SECONDS)) for _ in range(3)]
            assert all(done.acquire(timeout=WAIT_SECONDS) for _ in numbers)
            assert sorted(runner.take_all().values()) == [0, 1, 2]
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_what_waits_for_a_thread_is_run_in_order(self) -> None:
        runner, done = self.runner(threads=1)
        told: list[int] = []
        may_end = threading.Event()

        def tell(number: int) -> int:
            told.append(number)
            return number

        runner.submit(1, lambda: int(may_end.wait(WAIT_SECONDS)))
        for number in range(5):
            runner.submit(1, partial(tell, number))
        may_end.set()
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in range(6))
        assert told == list(range(5))
        runner.close(time.monotonic() + WAIT_SECONDS)

    @staticmethod
    def idle(runner: TaskRunner[int]) -> None:
        """Return once all threads are idle."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(runner._idle) < len(runner._threads):
            assert time.monotonic() < deadline

    def test_a_task_is_begun_by_who_is_free_first_however_late_the_woken_thread_comes(self) -> None:
        runner, done = self.runner(threads=1)
        begun, may_end = threading.Event(), threading.Event()
        told: list[int] = []

        def slow() -> int:
            begun.set()
            return int(may_end.wait(WAIT_SECONDS))

        def tell(number: int) -> int:
            told.append(number)
            return number

        runner.submit(1, slow)
        assert begun.wait(WAIT_SECONDS)
        runner._idle.append(SimpleQueue())  # of a thread that gets no processor
        for number in range(3):
            runner.submit(1, partial(tell, number))
        may_end.set()
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in range(4))
        assert told == [0, 1, 2]
        runner.close(time.monotonic() + WAIT_SECONDS)

    @pytest.mark.parametrize("interrupted", ["put", "append", "pop"])
    def test_an_interrupted_submit_costs_no_thread_and_no_task_of_others(self, interrupted: str) -> None:
        runner, done = self.runner(threads=2)

        def interrupt(_frame: FrameType, event: str, called: object) -> None:
            if event == "c_return" and getattr(called, "__name__", "") == interrupted:
                raise KeyboardInterrupt

        for _ in range(3):
            self.idle(runner)
            sys.setprofile(interrupt)
            try:
                with pytest.raises(KeyboardInterrupt):
                    runner.submit(1, lambda: 1)
            finally:
                sys.setprofile(None)
            if interrupted != "put":  # from then on it is known to the threads
                assert done.acquire(timeout=WAIT_SECONDS)
        self.idle(runner)
        together = threading.Barrier(2)
        for _ in range(2):
            runner.submit(1, lambda: together.wait(WAIT_SECONDS))
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in range(2))
        runner.close(time.monotonic() + WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in runner._threads)

    def test_closing_waits_for_nobody_who_was_interrupted_by_it(self) -> None:
        runner, _done = self.runner(threads=1)
        self.idle(runner)
        closed = threading.Event()

        def close() -> None:
            runner.close(time.monotonic())
            closed.set()

        with runner._lock:  # as a signal's handler over `submit` finds it
            threading.Thread(target=close, daemon=True).start()
            assert closed.wait(WAIT_SECONDS)
        runner._threads[0].join(WAIT_SECONDS)
        assert not runner._threads[0].is_alive()

    def test_no_thread_is_left_when_it_was_closed(self) -> None:
        runner, done = self.runner(threads=3)
        runner.submit(1, lambda: 1)
        assert done.acquire(timeout=WAIT_SECONDS)
        self.idle(runner)
        runner.close(time.monotonic() + WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in runner._threads)

    def test_an_idle_thread_keeps_nothing_of_its_last_task(self) -> None:
        runner, done = self.runner(threads=1)
        forgotten = threading.Event()

        def task(memory: set[int]) -> int:
            return len(memory)

        memory = {1}
        holder = partial(task, memory)
        weakref.finalize(holder, forgotten.set)
        runner.submit(1, holder)
        del holder
        assert done.acquire(timeout=WAIT_SECONDS)
        assert forgotten.wait(WAIT_SECONDS)
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_of_the_idle_threads_the_one_that_ran_last_is_woken(self) -> None:
        runner, done = self.runner(threads=3)
        ran: list[threading.Thread] = []

        def run() -> int:
            ran.append(threading.current_thread())
            return 1

        for _ in range(5):
            self.idle(runner)
            runner.submit(1, run)
            assert done.acquire(timeout=WAIT_SECONDS)
        assert len(set(ran)) == 1
        runner.close(time.monotonic() + WAIT_SECONDS)

    def test_what_follows_a_task_comes_after_its_result_and_not_before_tasks_that_wait(self) -> None:
        runner, done = self.runner(threads=1)
        told: list[object] = []
        may_end = threading.Event()

        def slow() -> int:
            may_end.wait(WAIT_SECONDS)
            return 0

        def wrong() -> int:
            raise ValueError("a bug")

        numbers = [
            runner.submit(1, slow, then=lambda: told.append("others wait")),
            runner.submit(1, wrong, then=lambda: told.append("it has failed")),
            runner.submit(1, lambda: 2, then=lambda: told.append(runner.take(numbers[2]))),
        ]
        may_end.set()
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in numbers)
        runner.close(time.monotonic() + WAIT_SECONDS)
        assert told in ([2], []), "closing may come first"
        assert "others wait" not in told
        assert "it has failed" not in told


def partial_of(value: int) -> Callable[[], int]:
    return lambda: value


class TestSettings:
    def test_an_instance_has_its_own_settings_over_those_of_its_kind(self) -> None:
        extra: dict[str, object] = {
            "remote_storage_plugin.kvobj.module_path": "kvobj.connectors.lmcache",
            "remote_storage_plugin.kvobj.class_name": "KvobjConnectorAdapter",
            "remote_storage_plugin.kvobj.endpoint": "http://a:1",
            "remote_storage_plugin.kvobj.bucket": "one",
            "remote_storage_plugin.kvobj.b.bucket": "two",
            "remote_storage_plugin.other.bucket": "three",
            "use_exists_sync": True,
        }
        assert plugin_settings(extra, "kvobj") == {"endpoint": "http://a:1", "bucket": "one"}
        assert plugin_settings(extra, "kvobj.b") == {"endpoint": "http://a:1", "bucket": "two"}


class TestPieces:
    @given(sizes_of_batches, st.integers(1, 200), st.integers(1, 20))
    def test_pieces_are_all_of_the_batch_and_within_the_bounds(
        self, sizes: list[int], bytes_max: int, count_max: int
    ) -> None:
        pieces = list(cut(sizes, bytes_max, count_max))
        assert [index for start, stop in pieces for index in range(start, stop)] == list(range(len(sizes)))
        for start, stop in pieces:
            assert 1 <= stop - start <= count_max
            assert stop - start == 1 or sum(sizes[start:stop]) <= bytes_max

    @given(sizes_of_batches.filter(bool), st.integers(1, 8))
    def test_parts_are_all_of_the_piece_and_no_more_than_were_asked_for(self, sizes: list[int], parts: int) -> None:
        bounds = shared_out(sizes, 0, len(sizes), parts)
        assert (bounds[0], bounds[-1]) == (0, len(sizes))
        assert bounds == sorted(set(bounds))
        assert len(bounds) - 1 <= parts

    @given(sizes_of_batches, st.integers(1, 8))
    @example([1, 1, 1], 2)
    def test_a_batch_is_cut_into_no_more_pieces_than_were_wanted(self, sizes: list[int], wanted: int) -> None:
        assert len(list(cut(sizes, bytes_for(sizes, wanted), 1000))) <= wanted

    def test_a_third_of_a_batch_is_a_whole_number_of_chunks(self) -> None:
        for count in (31, 32, 33):
            sizes = [10] * count
            assert list(cut(sizes, bytes_for(sizes, 3), 1000)) == [(0, 11), (11, 22), (22, count)]

    def test_equal_chunks_are_shared_out_equally(self) -> None:
        assert shared_out([10] * 32, 0, 32, 4) == [0, 8, 16, 24, 32]
        assert shared_out([10] * 8, 2, 8, 2) == [2, 5, 8]


class TestPuts:
    @staticmethod
    def puts(clock: ManualClock) -> tuple[Puts, list[int]]:
        given_up: list[int] = []
        puts = Puts(wait_seconds=10.0, waiting_bytes_max=100, gave_up=given_up.append, threads=1, now=clock.monotonic)
        return puts, given_up

    @staticmethod
    def occupied(puts: Puts) -> tuple[threading.Event, Future[None]]:
        """Its one thread has a put that ends when it is told to."""
        begun, may_end = threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            assert may_end.wait(WAIT_SECONDS)

        first = puts.submit(1, 1000, slow)
        assert begun.wait(WAIT_SECONDS)
        return may_end, first

    def test_what_waited_for_too_long_is_given_up_and_counted(self) -> None:
        clock, ran = ManualClock(), list[str]()
        puts, given_up = self.puts(clock)
        may_end, first = self.occupied(puts)
        late = [puts.submit(3, 10, partial(ran.append, "late")) for _ in range(2)]
        clock.advance(6)
        timely = puts.submit(1, 10, partial(ran.append, "timely"))
        clock.advance(5)
        assert not any(each.done() for each in late)
        may_end.set()
        for each in (first, *late, timely):
            assert each.result(WAIT_SECONDS) is None
        puts.close()
        assert (ran, given_up) == (["timely"], [6])

    def test_what_comes_finds_out_what_waited_for_too_long_while_all_threads_are_busy(self) -> None:
        clock = ManualClock()
        puts, given_up = self.puts(clock)
        may_end, _first = self.occupied(puts)
        late = puts.submit(3, 90, lambda: None)
        clock.advance(11)
        next_one = puts.submit(1, 90, lambda: None)
        assert late.done()
        assert not next_one.done()
        assert given_up == [3]
        may_end.set()
        puts.close()

    def test_what_comes_while_too_much_waits_is_given_up_at_once_but_one_may_always_wait(self) -> None:
        ran: list[int] = []
        puts, given_up = self.puts(ManualClock())
        may_end, _first = self.occupied(puts)
        waiting = [puts.submit(1, size, partial(ran.append, size)) for size in (90, 10)]
        refused = puts.submit(2, 1, partial(ran.append, 1))
        assert refused.done()
        assert given_up == [2]
        may_end.set()
        for each in waiting:
            each.result(WAIT_SECONDS)
        may_end, _first = self.occupied(puts)
        large = puts.submit(1, 500, partial(ran.append, 500))
        may_end.set()
        large.result(WAIT_SECONDS)
        puts.close()
        assert ran == [90, 10, 500]
        assert given_up == [2]

    def test_a_put_that_raises_or_was_cancelled_keeps_none_from_being_run(self) -> None:
        def wrong() -> None:
            raise ValueError("a type that has no name")

        ran: list[int] = []
        puts, _ = self.puts(ManualClock())
        may_end, _first = self.occupied(puts)
        raises, cancelled, last = (
            puts.submit(1, 1, each) for each in (wrong, partial(ran.append, 1), partial(ran.append, 2))
        )
        assert cancelled.cancel()
        may_end.set()
        last.result(WAIT_SECONDS)
        assert isinstance(raises.exception(), ValueError)
        assert ran == [2]
        puts.close()

    def test_what_has_not_begun_when_it_closes_is_not_run_and_neither_is_what_comes_later(self) -> None:
        ran: list[int] = []
        puts, given_up = self.puts(ManualClock())
        may_end, first = self.occupied(puts)
        waiting = puts.submit(1, 1, partial(ran.append, 1))
        closing = threading.Thread(target=puts.close)
        closing.start()
        assert waiting.result(WAIT_SECONDS) is None
        assert puts.submit(1, 1, partial(ran.append, 2)).result(0) is None
        assert closing.is_alive(), "what is under way is waited for"
        may_end.set()
        closing.join()
        assert first.done()
        puts.close()
        assert (ran, given_up) == ([], [])

    def test_a_forked_child_has_threads_of_its_own_and_nothing_of_what_waits(self) -> None:
        ran: list[int] = []
        puts, _ = self.puts(ManualClock())
        may_end, _first = self.occupied(puts)
        puts.submit(1, 90, partial(ran.append, 1))

        def check() -> bool:
            puts.submit(1, 90, partial(ran.append, 2)).result(WAIT_SECONDS)
            return ran == [2]

        assert in_child(check)
        may_end.set()
        puts.close()


class TestHelpers:
    def test_a_batch_gets_those_that_are_free_and_gives_them_back(self) -> None:
        helpers = Helpers(2)
        assert helpers.take(-1) == 0
        assert helpers.take(1) == 1
        assert helpers.take(5) == 1
        assert helpers.take(5) == 0
        ran: list[int] = []
        helpers.run([lambda: ran.append(0), lambda: ran.append(1), lambda: ran.append(2)], taken=2)
        assert sorted(ran) == [0, 1, 2]
        assert helpers.take(5) == 2
        helpers.close()

    def test_what_a_part_raises_is_raised_once_all_have_ended(self) -> None:
        helpers = Helpers(1)
        ended = threading.Event()

        def wrong() -> None:
            raise UnavailableError("gone")

        for parts in ([wrong, ended.set], [ended.set, wrong]):
            ended.clear()
            with pytest.raises(UnavailableError):
                helpers.run(parts, taken=helpers.take(1))
            assert ended.is_set()
        assert helpers.take(2) == 1
        helpers.close()

    @pytest.mark.parametrize("failing", [(1,), (0, 1), (1, 2)])
    def test_what_failed_parts_had_in_hand_is_let_go_with_what_they_raised(self, failing: tuple[int, ...]) -> None:
        class Memory:
            """As the engine's, which stays mapped for as long as anybody has it."""

        def part(index: int, memory: Memory) -> None:
            if index in failing:
                raise ValueError(f"part {index} of {memory}")

        helpers, gone = Helpers(2), threading.Event()

        def call() -> None:
            memory = Memory()
            weakref.finalize(memory, gone.set)
            with pytest.raises(ValueError, match=f"part {failing[0]}"):
                helpers.run([partial(part, index, memory) for index in range(3)], taken=helpers.take(2))

        gc.disable()
        try:
            call()
            assert gone.wait(WAIT_SECONDS), "a cycle has it"  # a helper lets go of its part once it has told of it
        finally:
            gc.enable()
        assert helpers.take(3) == 2
        helpers.close()

    def test_a_batch_that_meets_the_close_is_told_so_and_what_has_begun_of_it_ends_first(self) -> None:
        helpers, may_go, ended = Helpers(2), threading.Event(), threading.Event()

        def begun() -> None:
            may_go.wait(10)
            ended.set()

        class ClosedInBetween(list[Callable[[], None]]):
            """The pool is closed while its second part is about to be given to it."""

            def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - as `list` has it
                return map(self.part, range(2)) if isinstance(index, slice) else super().__getitem__(index)

            def part(self, index: int) -> Callable[[], None]:
                if index:
                    helpers.close()
                    threading.Timer(0.05, may_go.set).start()
                return begun

        parts = ClosedInBetween([lambda: None] * 3)
        with pytest.raises(UnavailableError, match="closed"):
            helpers.run(parts, taken=helpers.take(2))
        assert ended.is_set(), "it goes on writing behind its caller's back"

    def test_all_parts_of_a_call_that_is_ended_are(self) -> None:
        helpers = Helpers(2)
        scope = CallScope()
        begun = threading.Barrier(4)

        def part() -> None:
            begun.wait(WAIT_SECONDS)
            pause(10 * WAIT_SECONDS)

        def call() -> None:
            with scope.entered(), pytest.raises(UnavailableError):
                helpers.run([part] * 3, taken=helpers.take(2))

        calling = threading.Thread(target=call)
        calling.start()
        begun.wait(WAIT_SECONDS)
        scope.cancel()
        calling.join(WAIT_SECONDS)
        assert not calling.is_alive()
        assert helpers.take(3) == 2
        with scope.entered(), pytest.raises(UnavailableError):
            helpers.run([part] * 3, taken=2)
        assert helpers.take(3) == 2
        helpers.close()
