"""The native core and its pure twin decide alike, whatever they are told in whatever order."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
import sys
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
from kvobj.policy.gipe_rank import BUCKETS, CLASSES, COUNT_MAX, HINTS, class_of

T = TypeVar("T")
IDS = st.integers(1, 40)
TIERS = st.sampled_from(list(CacheTier))
SIZES = st.integers(8, 12)
LOOKS = 64
"""So many chunks at most make room for one."""
ROOMS = st.one_of(SIZES, st.sampled_from([1, LOOKS - 1, LOOKS, LOOKS + 1]))
SMALL = range(1000, 1130)
FANOUT = 3

needs_native = pytest.mark.skipif(library() is None, reason="the native library is not built")


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
        dram=st.sampled_from([30, 100, 200]),
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

    @rule(tier=TIERS, count=st.integers(1, len(SMALL)))
    def many_small_ones_stored(self, tier: CacheTier, count: int) -> None:
        chunks = [(name(number), 1) for number in SMALL[:count]]
        self.both(lambda p: p.stored_many(chunks, tier, now_ms=self.now_ms))

    @rule(number=IDS, tier=TIERS, size_bytes=ROOMS)
    def admits(self, number: int, tier: CacheTier, size_bytes: int) -> None:
        above = parent_of(number)
        parent = None if above is None else name(above)
        self.both(lambda p: p.admits(name(number), tier, size_bytes=size_bytes, now_ms=self.now_ms, parent=parent))

    @rule(number=IDS, tier=TIERS, first=st.integers(0, 3), size_bytes=ROOMS)
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
        everything = b"".join(name(number) for number in (*range(1, 41), *SMALL))
        self.both(lambda p: p.locate(everything))
        self.both(lambda p: [(p.size_bytes(tier), p.count(tier)) for tier in CacheTier])
        self.both(lambda p: (p.totals.known_chunks, p.totals.log_entries, p.totals.log_limit))


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=60)
TestTwins.pytestmark = [pytest.mark.skipif(library() is None, reason="no native library (make native)")]  # type: ignore[attr-defined]


@needs_native
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


def requests_of(source: random.Random, count: int) -> list[tuple[bytes, int]]:
    """New chains, and such as are asked for again, with the milliseconds before each: mostly few, now and then an hour."""
    chains: list[bytes] = []
    made: list[tuple[bytes, int]] = []
    for _ in range(count):
        if chains and source.random() < 0.5:
            chain = source.choice(chains[-40:]) + source.randbytes(NAME_BYTES)
        else:
            chain = source.randbytes(NAME_BYTES * source.randint(1, 30))
        chains.append(chain)
        made.append((chain, source.choice((0, 0, 5, 40, 700, 2500, 20_000, 3_600_000))))
    return made


@needs_native
def test_the_twins_count_alike_while_the_log_goes_round_and_when_it_grows_after_that() -> None:
    sizes = {CacheTier.DRAM: 200, CacheTier.NVME: 500}
    native, pure = (
        GipePolicy(sizes, log_factor=5, log_least=100, log_most=20_000, use_native=use_native)
        for use_native in (True, False)
    )
    now_ms, source = 1_000_000, random.Random(7)
    for number, (chain, milliseconds) in enumerate(requests_of(source, 1200)):
        now_ms += milliseconds
        if number == 700:  # the log of 3,500 has gone round its first room of 4,096; one of 10,000 takes more
            assert native.totals.log_entries == 3500
            for policy in (native, pure):
                policy.set_capacity(CacheTier.NVME, 1800)
        answers = [
            (
                policy.request(chain, now_ms=now_ms),
                policy.offer(chain, 0, CacheTier(number % 2), size_bytes=1, now_ms=now_ms),
            )
            for policy in (native, pure)
        ]
        assert answers[0] == answers[1], number
        if number % 20 == 0:
            assert native.save() == pure.save(), number
    assert native.totals.log_entries > 8192
    assert native.save() == pure.save()


@needs_native
def test_the_twins_halve_the_same_counts_where_one_can_grow_no_more() -> None:
    cores = [GipePolicy({CacheTier.DRAM: 1000}, use_native=use_native)._core for use_native in (True, False)]
    entered = [0] * (CLASSES * BUCKETS)
    entered[0] = COUNT_MAX - 8
    entered[1] = 1001
    raw = struct.pack(f"<{len(entered)}I", *entered) + bytes(4 * len(entered))
    counts: list[bytes] = []
    for core in cores:
        core.set_counts(raw)
        core.request(b"".join(name(each) for each in range(1, 6)), 1_000_000, partial_last=False, hint=0)
        core.request(name(6), 1_002_000, partial_last=False, hint=0)  # five have reached the second bucket by now
        core.request(b"".join(name(each) for each in range(7, 10)), 1_003_000, partial_last=False, hint=0)
        counts.append(core.counts())
    assert counts[0] == counts[1]
    assert struct.unpack_from("<2I", counts[0]) == (COUNT_MAX // 2 + 1, (1001 + 5) // 2)


@needs_native
def test_counts_that_are_loaded_are_not_joined_by_what_was_passed_before() -> None:
    cores = [GipePolicy({CacheTier.DRAM: 1000}, use_native=use_native)._core for use_native in (True, False)]
    raw = bytes(2 * 4 * CLASSES * BUCKETS)
    for core in cores:
        core.request(b"".join(name(each) for each in range(1, 6)), 1_000_000, partial_last=False, hint=0)
        core.request(name(6), 1_002_000, partial_last=False, hint=0)  # five have reached the second bucket by now
        core.set_counts(raw)
        assert core.counts() == raw


TICK = 16
"""Milliseconds; the log has 29 bits for ticks, a chunk 32."""


def both_ask(policies: list[GipePolicy], chain: bytes, now_ms: int) -> None:
    answers = [
        (
            policy.request(chain, now_ms=now_ms),
            policy.offer(chain, 0, CacheTier.DRAM, size_bytes=1, now_ms=now_ms),
            policy.count(CacheTier.DRAM),
        )
        for policy in policies
    ]
    assert answers[0] == answers[1]


def twins_that_know(source: random.Random, log_entries: int) -> tuple[list[GipePolicy], list[bytes], int]:
    """A hundred chunks told to both, forty of them held; the chains, and when the last one was asked for."""
    policies = [
        GipePolicy({CacheTier.DRAM: 40}, log_least=log_entries, log_most=log_entries, use_native=use_native)
        for use_native in (True, False)
    ]
    now_ms, chains = 1_000_000, [source.randbytes(5 * NAME_BYTES) for _ in range(20)]
    for chain in chains:
        now_ms += source.choice((0, 16, 3000))
        both_ask(policies, chain, now_ms)
    return policies, chains, now_ms


def both_go_on(policies: list[GipePolicy], known: list[bytes], source: random.Random, now_ms: int) -> None:
    for number in range(200):
        now_ms += source.choice((0, 100, 3000))
        both_ask(policies, known[-number] if 0 < number < 10 else source.randbytes(5 * NAME_BYTES), now_ms)
        if number % 20 == 0:
            assert policies[0].save() == policies[1].save()


@needs_native
@pytest.mark.parametrize("log_entries", [20, 60, 400])
@pytest.mark.parametrize("ticks", [2**29, 2**29 + 30, 2**31 - 5, 2**32, 2**32 + 70, 3 * 2**35])
def test_the_twins_agree_after_a_gap_that_their_ticks_have_no_bits_for(ticks: int, log_entries: int) -> None:
    for seed in range(4):
        source = random.Random(seed)
        policies, chains, now_ms = twins_that_know(source, log_entries)
        both_go_on(policies, chains, source, now_ms + ticks * TICK + source.choice((0, 300, 5000, 100_000)))


@needs_native
@pytest.mark.parametrize("log_entries", [20, 400])
@pytest.mark.parametrize("steps", [9, 34, 64, 130])
def test_the_twins_agree_where_nothing_is_asked_for_over_years(steps: int, log_entries: int) -> None:
    source = random.Random(steps)
    policies, chains, now_ms = twins_that_know(source, log_entries)
    for _ in range(steps):
        now_ms += 2**26 * TICK  # twelve days; somebody looks for room
        answers = [policy.victims(CacheTier.DRAM, 3, now_ms=now_ms, eligible=lambda _: True) for policy in policies]
        assert answers[0] == answers[1]
    both_go_on(policies, chains, source, now_ms + source.choice((0, 300, 5000)))


@needs_native
def test_a_chain_of_which_each_chunk_takes_the_room_of_many_is_offered_to_its_end() -> None:
    policies = [GipePolicy({CacheTier.DRAM: 4000}, use_native=use_native) for use_native in (True, False)]
    source = random.Random(3)
    small, large = source.randbytes(4000 * NAME_BYTES), source.randbytes(66 * NAME_BYTES)
    answers = []
    for policy in policies:
        policy.request(small, now_ms=1_000_000)
        policy.offer(small, 0, CacheTier.DRAM, size_bytes=1, now_ms=1_000_000)
        for _ in range(8):
            policy.request(large, now_ms=1_060_000)
        answers.append(policy.offer(large, 2, CacheTier.DRAM, size_bytes=60, now_ms=1_060_000))
    assert answers[0] == answers[1]
    assert (answers[0][0], len(answers[0][1])) == (64, 64 * 60)
    assert policies[0].save() == policies[1].save()


def counts_of(rates: dict[int, float]) -> bytes:
    """A thousand intervals of each class, of which such a share ended in the first bucket: more of them, worth more."""
    entered, ended = [0] * (CLASSES * BUCKETS), [0] * (CLASSES * BUCKETS)
    for class_, rate in rates.items():
        entered[class_ * BUCKETS] = 1000
        ended[class_ * BUCKETS] = int(1000 * rate)
    return struct.pack(f"<{2 * CLASSES * BUCKETS}I", *entered, *ended)


@needs_native
@pytest.mark.parametrize("tier", list(CacheTier))
@pytest.mark.parametrize("victims", [1, 2, LOOKS - 1, LOOKS, LOOKS + 1])
def test_a_parent_that_would_go_first_is_none_of_those_that_may_make_room(victims: int, tier: CacheTier) -> None:
    """Neither where an offer has just stored it nor where it was held before."""
    parent, child = name(1), name(2)
    small = [name(number) for number in range(10, 10 + 2 * LOOKS)]
    answers = []
    for use_native in (True, False):
        policy = GipePolicy({tier: len(small) + victims}, use_native=use_native)
        policy._core.set_counts(counts_of({class_of(1, 0, 2): 0.0, class_of(1, 0, 1): 0.3, class_of(6, 0, 0): 0.99}))
        policy.request(b"".join(small), now_ms=1_000_000, hint=1)
        policy.stored_many([(each, 1) for each in small], tier, now_ms=1_000_000)
        policy.request(parent, now_ms=1_000_000, hint=2)
        for _ in range(6):
            policy.request(child, now_ms=1_000_000)
        taken, gone = policy.offer(parent + child, 0, tier, size_bytes=victims, now_ms=1_000_000)
        assert parent not in gone
        policy.dropped(child, tier)
        first = policy.victims(tier, 1, now_ms=1_000_000, eligible=lambda _: True)
        assert first == [parent]
        policy.set_capacity(tier, policy.size_bytes(tier))
        admitted = policy.admits(child, tier, size_bytes=victims, now_ms=1_000_000, parent=parent)
        answers.append((taken, len(gone), admitted))
    fits = victims <= LOOKS
    assert answers == [(2, victims, fits) if fits else (1, 0, fits)] * 2


@needs_native
@pytest.mark.parametrize("seed", range(20))
def test_the_twins_agree_where_a_chunk_takes_the_room_of_as_many_as_may_go(seed: int) -> None:
    source = random.Random(seed)
    rates = {class_of(uses, 0, hint): source.choice((0.0, 0.2, 0.9)) for uses in range(1, 4) for hint in range(HINTS)}
    policies = [GipePolicy({CacheTier.DRAM: 700}, use_native=use_native) for use_native in (True, False)]
    for policy in policies:
        policy._core.set_counts(counts_of(rates))
    for number in range(40):
        small, large = source.randbytes(200 * NAME_BYTES), source.randbytes(3 * NAME_BYTES)
        hints, times = [source.randrange(HINTS) for _ in range(4)], source.randint(1, 3)
        size_bytes, is_head_free = source.randint(LOOKS - 1, LOOKS + 1), source.random() < 0.5
        answers = []
        for policy in policies:
            policy.request(small, now_ms=1_000_000, hint=hints[3])
            told = [policy.offer(small, 0, CacheTier.DRAM, size_bytes=1, now_ms=1_000_000)]
            for at in (2, 1, 0):  # each of a class of its own
                for _ in range(times):
                    policy.request(large[at * NAME_BYTES :][:NAME_BYTES], now_ms=1_000_000, hint=hints[at])
            if is_head_free:
                policy.set_capacity(CacheTier.DRAM, policy.size_bytes(CacheTier.DRAM) + size_bytes)
            told.append(policy.offer(large, 0, CacheTier.DRAM, size_bytes=size_bytes, now_ms=1_000_000))
            policy.set_capacity(CacheTier.DRAM, 700)
            for each in policy.victims(CacheTier.DRAM, size_bytes, now_ms=1_000_000, eligible=lambda _: True):
                policy.dropped(each, CacheTier.DRAM)
            answers.append(told)
        assert answers[0] == answers[1], number
    assert policies[0].save() == policies[1].save()


@needs_native
@pytest.mark.parametrize(("first", "size_bytes"), [(-1, 1), (2, 1), (3, 1), (2**30, 1), (0, 2**32 + 1), (0, 2**33)])
def test_an_offer_from_outside_of_the_chain_or_of_too_much_is_answered_alike(first: int, size_bytes: int) -> None:
    chain = name(1) + name(2)
    answers = [
        GipePolicy({CacheTier.DRAM: 40}, use_native=use_native).offer(
            chain, first, CacheTier.DRAM, size_bytes=size_bytes, now_ms=1_000_000
        )
        for use_native in (True, False)
    ]
    assert answers[0] == answers[1]


WITHOUT_MEMORY = """
import resource
from kvobj.policy import CacheTier, GipePolicy

policy = GipePolicy({CacheTier.DRAM: 2**40})
numbers = iter(range(10**7))

def store():
    policy.stored(next(numbers).to_bytes(16, "little"), CacheTier.DRAM, parent=None, size_bytes=1, now_ms=1)

for _ in range(300_000):
    store()
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (2 << 20), resource.RLIM_INFINITY))
held = 0
try:
    while True:
        store()
except MemoryError as error:
    held = policy.count(CacheTier.DRAM)
    print(error)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for _ in range(100_000):
    store()
print(policy.count(CacheTier.DRAM) - held)
"""


@needs_native
def test_chunks_are_stored_again_when_there_is_memory_again() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["no memory for the eviction policy's tables", "100000"]


@needs_native
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
