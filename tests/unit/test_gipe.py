"""What GIPE remembers, forgets, prefers and refuses, beyond the contract of every policy."""

from __future__ import annotations

import pytest
from policy_contract import DRAM, NVME, SIZE, all_victims, chain, name, store_chain

from kvobj.native import library
from kvobj.policy import GipePolicy
from kvobj.policy.gipe_rank import BOUNDS, BUCKETS, Rank, _gittins

HOUR_MS = 3_600_000


@pytest.fixture(params=["native", "pure"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        assert library() is not None, "make native"
    return str(request.param)


def make(kind: str, chunks: int, **options: float) -> GipePolicy:
    return GipePolicy({DRAM: chunks * SIZE, NVME: chunks * SIZE}, use_native=kind == "native", **options)  # type: ignore[arg-type]


def teach(policy: GipePolicy, *, rounds: int = 1500) -> None:
    """Chunks asked for once never come back; those asked for twice do, half a minute later."""
    for at in range(rounds):
        now_ms = at * 20_000
        policy.request(chain(10**6 + at), now_ms=now_ms)
        policy.request(chain(500), now_ms=now_ms)


def test_what_comes_back_outlives_what_was_used_later_but_never_comes_back(kind: str) -> None:
    policy = make(kind, 10)
    teach(policy)
    now_ms = 1500 * 20_000
    store_chain(policy, [500], now_ms=now_ms)
    store_chain(policy, [7], now_ms=now_ms + 10_000)
    assert all_victims(policy, now_ms=now_ms + 10_000) == [7, 500]


def test_a_full_tier_refuses_what_is_worth_less_than_all_it_holds(kind: str) -> None:
    policy = make(kind, 1)
    teach(policy)
    now_ms = 1500 * 20_000
    store_chain(policy, [500], now_ms=now_ms)
    policy.request(chain(8), now_ms=now_ms)
    assert not policy.admits(name(8), DRAM, size_bytes=SIZE, now_ms=now_ms)
    policy.dropped(name(500), DRAM)
    store_chain(policy, [9], now_ms=now_ms)
    policy.request(chain(500), now_ms=now_ms + 20_000)
    assert policy.admits(name(500), DRAM, size_bytes=SIZE, now_ms=now_ms + 20_000)


def test_a_chunk_never_makes_room_for_its_own_child(kind: str) -> None:
    policy = make(kind, 1)
    store_chain(policy, [1])
    assert not policy.admits(name(2), DRAM, size_bytes=SIZE, now_ms=HOUR_MS, parent=name(1))
    assert policy.offer(chain(1, 2), 1, DRAM, size_bytes=SIZE, now_ms=HOUR_MS) == (0, [])
    assert policy.holds(name(1), DRAM)


def test_ghosts_are_remembered_for_as_long_as_the_log_and_no_longer(kind: str) -> None:
    policy = make(kind, 10, log_least=50, log_most=50)
    policy.request(chain(1), now_ms=0)
    for number in range(2, 51):
        policy.request(chain(number), now_ms=number)
    assert policy.request(chain(1), now_ms=100) == 1
    for number in range(100, 150):
        policy.request(chain(number), now_ms=number)
    assert policy.request(chain(1), now_ms=200) == 0
    assert policy.totals.known_chunks <= 50


def test_what_is_held_is_known_however_long_ago_it_was_used(kind: str) -> None:
    policy = make(kind, 10, log_least=20, log_most=20)
    store_chain(policy, [1, 2], now_ms=0)
    for number in range(100, 300):
        policy.request(chain(number), now_ms=number * 10_000)
    assert policy.request(chain(1, 2), now_ms=4 * HOUR_MS) == 2
    policy.dropped(name(2), DRAM)
    policy.dropped(name(1), DRAM)
    assert policy.totals.known_chunks <= 22


def test_memory_is_bounded_by_the_log_and_what_is_held(kind: str) -> None:
    policy = make(kind, 100, log_factor=4, log_least=10, log_most=10_000)
    for number in range(6000):
        policy.request(chain(number), now_ms=number * 100)
        policy.offer(chain(number), 0, DRAM, size_bytes=SIZE, now_ms=number * 100)
    # Both tiers have room for 100; the log is four times as long as what the one in use can hold.
    assert policy.totals.log_limit == 400
    assert policy.totals.log_entries == 400
    assert policy.totals.known_chunks <= 400 + 100


def test_native_tables_keep_within_their_bytes() -> None:
    assert library() is not None, "make native"
    count = 200_000
    policy = GipePolicy({DRAM: count * SIZE}, log_factor=4)
    for first in range(0, 5 * count, 100):
        names = chain(*range(first, first + 100))
        policy.request(names, now_ms=first)
        policy.offer(names, 0, DRAM, size_bytes=SIZE, now_ms=first)
    assert policy.count(DRAM) == count
    totals = policy.totals
    tables = 2_000_000  # lists of candidates by class and age, whatever is held
    # 64 bytes a chunk held, 40 a ghost, 8 a log entry; arrays grow by half, the log by doubling.
    bound = 1.5 * (64 * count + 40 * (totals.known_chunks - count)) + 2 * 8 * totals.log_entries
    assert totals.allocated_bytes - tables <= bound


def test_a_read_right_after_its_request_is_the_same_use(kind: str) -> None:
    one, two = make(kind, 10), make(kind, 10)
    for policy in (one, two):
        policy.request(chain(1, 2), now_ms=0)
    two.access(name(1), now_ms=1500)
    assert one.save() == two.save()
    two.access(name(1), now_ms=5000)
    assert one.save() != two.save()


def test_time_that_goes_back_is_ignored(kind: str) -> None:
    policy = make(kind, 10)
    store_chain(policy, [1, 2], now_ms=HOUR_MS)
    store_chain(policy, [3], now_ms=0)
    assert all_victims(policy, now_ms=0) == [2, 1, 3]


def test_a_copy_below_dram_goes_first_where_dram_keeps_its_own(kind: str) -> None:
    for factor, first in ((0.1, 2), (1.0, 1)):
        policy = make(kind, 10, duplicate_factor=factor)
        for number in (1, 2):
            store_chain(policy, [number], tier=NVME, now_ms=number * 30_000)
        policy.stored(name(2), DRAM, parent=None, size_bytes=SIZE, now_ms=60_000)
        assert all_victims(policy, tier=NVME, now_ms=60_000)[0] == first


def test_the_only_copy_under_a_chunk_in_dram_stays(kind: str) -> None:
    policy = make(kind, 10)
    store_chain(policy, [1], tier=NVME)
    policy.stored(name(2), DRAM, parent=name(1), size_bytes=SIZE, now_ms=0)
    assert all_victims(policy, tier=NVME) == []
    policy.dropped(name(2), DRAM)
    assert all_victims(policy, tier=NVME) == [1]


def test_what_was_learnt_survives_a_restart_and_moves_between_twins() -> None:
    taught = make("pure", 10)
    teach(taught)
    fresh = make("native", 10)
    fresh.load(taught.save())
    store_chain(fresh, [500], now_ms=0)
    fresh.request(chain(500), now_ms=20_000)
    store_chain(fresh, [7], now_ms=25_000)
    assert all_victims(fresh, now_ms=25_000) == [7, 500]


def test_counts_never_overflow() -> None:
    rank = Rank()
    rank.entered[3][0] = 2**31 - 1
    rank.ended[3][0] = 2**30
    rank.count_entered(3, 0)
    assert (rank.entered[3][0], rank.ended[3][0]) == (2**30, 2**29)


def test_the_index_is_the_best_rate_over_all_horizons() -> None:
    """Against the formula of eviction.md, written out."""
    entered = [max(0, 1000 - 37 * at) for at in range(BUCKETS)]
    ended = [count // (3 + at % 7) for at, count in enumerate(entered)]
    rates = [0.05 + 0.01 * (at % 5) for at in range(BUCKETS)]
    widths = [bound - before for before, bound in zip((0, *BOUNDS), BOUNDS, strict=False)] + [2 * BOUNDS[-1]]
    p = [min(0.999, (e + 300 * r) / (n + 300)) for n, e, r in zip(entered, ended, rates, strict=True)]
    worth = _gittins(entered, ended, rates)
    for first in range(BUCKETS):
        best, survival, cost = 0.0, 1.0, 0.0
        for last in range(first, BUCKETS):
            cost += survival * widths[last] * (1 - p[last] / 2)
            survival *= 1 - p[last]
            best = max(best, (1 - survival) / cost)
        assert worth[first] == pytest.approx(best, rel=1e-9)
