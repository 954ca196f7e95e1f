"""The native core and its pure twin decide alike, whatever they are told in whatever order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvobj.native import library
from kvobj.policy import CacheTier, GipePolicy
from kvobj.policy.chunk_policy import NAME_BYTES
from kvobj.policy.gipe_native import NativeCore

T = TypeVar("T")
IDS = st.integers(1, 40)
TIERS = st.sampled_from(list(CacheTier))
SIZES = st.integers(8, 12)
FANOUT = 3


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def parent_of(number: int) -> int | None:
    """Chains that share beginnings: a tree over the numbers."""
    return number // FANOUT or None


def chain_to(number: int) -> bytes:
    names: list[bytes] = []
    at: int | None = number
    while at is not None:
        names.append(name(at))
        at = parent_of(at)
    return b"".join(reversed(names))


class Twins(RuleBasedStateMachine):
    @initialize(
        dram=st.sampled_from([30, 100]),
        nvme=st.sampled_from([0, 50, 300]),
        log_factor=st.sampled_from([1, 16]),
        log_least=st.sampled_from([5, 100]),
        duplicate_factor=st.sampled_from([0.1, 1.0]),
    )
    def make(self, dram: int, nvme: int, log_factor: int, log_least: int, duplicate_factor: float) -> None:
        self.now_ms = 1_000_000
        self.policies = [
            GipePolicy(
                {CacheTier.DRAM: dram, CacheTier.NVME: nvme},
                log_factor=log_factor,
                log_least=log_least,
                log_most=1000,
                duplicate_factor=duplicate_factor,
                use_native=use_native,
            )
            for use_native in (True, False)
        ]

    def both(self, ask: Callable[[GipePolicy], T]) -> T:
        native, pure = (ask(policy) for policy in self.policies)
        assert native == pure
        return native

    @rule(milliseconds=st.sampled_from([0, 15, 16, 1999, 2000, 30_000, 900_000, 10**8]))
    def time_passes(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(number=IDS, partial=st.booleans(), hint=st.integers(-1, 9), times=st.integers(1, 60))
    def request(self, number: int, times: int, hint: int, *, partial: bool) -> None:
        for _ in range(times):
            self.both(lambda p: p.request(chain_to(number), now_ms=self.now_ms, partial_last=partial, hint=hint))

    @rule(number=IDS)
    def access(self, number: int) -> None:
        self.both(lambda p: p.access(name(number), now_ms=self.now_ms))

    @rule(number=IDS, tier=TIERS, size_bytes=SIZES, told=st.booleans())
    def stored(self, number: int, tier: CacheTier, size_bytes: int, *, told: bool) -> None:
        above = parent_of(number)
        parent = name(above) if told and above is not None else None
        self.both(lambda p: p.stored(name(number), tier, parent=parent, size_bytes=size_bytes, now_ms=self.now_ms))

    @rule(numbers=st.lists(IDS, max_size=8), tier=TIERS, size_bytes=SIZES)
    def stored_many(self, numbers: list[int], tier: CacheTier, size_bytes: int) -> None:
        chunks = [(name(number), size_bytes) for number in numbers]
        self.both(lambda p: p.stored_many(chunks, tier, now_ms=self.now_ms))

    @rule(number=IDS, tier=TIERS, size_bytes=SIZES)
    def admits(self, number: int, tier: CacheTier, size_bytes: int) -> None:
        above = parent_of(number)
        parent = None if above is None else name(above)
        self.both(lambda p: p.admits(name(number), tier, size_bytes=size_bytes, now_ms=self.now_ms, parent=parent))

    @rule(number=IDS, tier=TIERS, first=st.integers(0, 3), size_bytes=SIZES)
    def offer(self, number: int, tier: CacheTier, first: int, size_bytes: int) -> None:
        chain = chain_to(number)
        start = min(first, len(chain) // 16 - 1)
        self.both(lambda p: p.offer(chain, start, tier, size_bytes=size_bytes, now_ms=self.now_ms))

    @rule(number=IDS, tier=TIERS)
    def dropped(self, number: int, tier: CacheTier) -> None:
        self.both(lambda p: p.dropped(name(number), tier))

    @rule(numbers=st.lists(IDS, max_size=8), tier=TIERS)
    def dropped_many(self, numbers: list[int], tier: CacheTier) -> None:
        self.both(lambda p: p.dropped_many([name(number) for number in numbers], tier))

    @rule(number=IDS, pins=st.booleans())
    def pin_or_unpin(self, number: int, *, pins: bool) -> None:
        self.both(lambda p: p.pin(name(number)) if pins else p.unpin(name(number)))

    @rule(tier=TIERS, bytes_needed=st.integers(0, 300), refused=st.sets(IDS))
    def victims(self, tier: CacheTier, bytes_needed: int, refused: set[int]) -> None:
        names = {name(number) for number in refused}
        self.both(lambda p: p.victims(tier, bytes_needed, now_ms=self.now_ms, eligible=lambda each: each not in names))

    @rule()
    def saved_and_loaded(self) -> None:
        state = self.both(lambda p: p.save())
        for policy in self.policies:
            policy.load(state)

    @invariant()
    def they_know_the_same(self) -> None:
        if not hasattr(self, "policies"):
            return
        everything = b"".join(name(number) for number in range(1, 41))
        self.both(lambda p: p.locate(everything))
        self.both(lambda p: [(p.size_bytes(tier), p.count(tier)) for tier in CacheTier])
        self.both(lambda p: (p.totals.known_chunks, p.totals.log_entries, p.totals.log_limit))


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=60)
TestTwins.pytestmark = [pytest.mark.skipif(library() is None, reason="no native library (make native)")]  # type: ignore[attr-defined]


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_the_twins_name_the_same_whatever_number_goes_at_once() -> None:
    policies = [GipePolicy({CacheTier.DRAM: 400}, use_native=use_native) for use_native in (True, False)]
    number, now_ms, numbers_gone = 1, 1_000_000, set()
    for length in (400, 1, 63, 64, 65, 128, 150, 399):
        chain = b"".join(name(each) for each in range(number, number + length))
        number += length
        now_ms += 60_000
        answers = []
        for policy in policies:
            for _ in range(
                8 if length == 1 else 1
            ):  # a chunk that is asked for again and again is worth more than others
                policy.request(chain, now_ms=now_ms)
            victims = policy.victims(CacheTier.DRAM, length, now_ms=now_ms, eligible=lambda _: True)
            for each in victims:
                policy.dropped(each, CacheTier.DRAM)
            answers.append((victims, policy.offer(chain, 0, CacheTier.DRAM, size_bytes=1, now_ms=now_ms)))
        assert answers[0] == answers[1]
        numbers_gone.add(len(answers[0][0]))
    assert {1, 63, 64, 65, 128, 150} <= numbers_gone


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_where_there_was_no_memory_for_names_c_is_told_of_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    core = GipePolicy({CacheTier.DRAM: 400}, use_native=True)._core
    assert isinstance(core, NativeCore)
    before = core._gone_room

    def refuse(_size: int) -> object:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "create_string_buffer", refuse)
        with pytest.raises(MemoryError):
            core._make_gone_room(10 * before)
    assert core._gone_room == before
    assert len(core._gone) == before * NAME_BYTES
