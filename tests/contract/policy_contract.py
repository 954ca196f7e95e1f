"""The contract of `kvobj.policy.ChunkPolicy`: run by every policy, which subclasses it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvobj.policy import CacheTier, ChunkPolicy

DRAM, NVME = CacheTier.DRAM, CacheTier.NVME
SIZE = 10
NOW = 1_000_000


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(*numbers: int) -> bytes:
    return b"".join(name(number) for number in numbers)


def store_chain(policy: ChunkPolicy, numbers: Sequence[int], *, tier: CacheTier = DRAM, now_ms: int = NOW) -> None:
    """Ask for a chain, then store all of it, head first."""
    policy.request(chain(*numbers), now_ms=now_ms)
    for at, number in enumerate(numbers):
        parent = name(numbers[at - 1]) if at else None
        policy.stored(name(number), tier, parent=parent, size_bytes=SIZE, now_ms=now_ms)


def all_victims(policy: ChunkPolicy, *, tier: CacheTier = DRAM, now_ms: int = NOW) -> list[int]:
    names = policy.victims(tier, 10**9, now_ms=now_ms, eligible=lambda _: True, limit=10**6)
    return [int.from_bytes(each, "big") for each in names]


class ChunkPolicyContract:
    """Subclass and give `policy`, a fixture with room for 100 chunks of `SIZE` in each tier."""

    @pytest.fixture
    def policy(self) -> ChunkPolicy:
        raise NotImplementedError

    def test_what_is_stored_is_held_by_its_tier_alone(self, policy: ChunkPolicy) -> None:
        policy.stored(name(1), DRAM, parent=None, size_bytes=SIZE, now_ms=NOW)
        assert policy.holds(name(1), DRAM)
        assert not policy.holds(name(1), NVME)
        assert (policy.size_bytes(DRAM), policy.size_bytes(NVME)) == (SIZE, 0)

    def test_stored_again_takes_only_the_new_size(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2])
        policy.stored(name(1), DRAM, parent=None, size_bytes=3 * SIZE, now_ms=NOW)
        assert policy.size_bytes(DRAM) == 4 * SIZE
        assert all_victims(policy) == [2, 1]

    def test_dropped_is_not_held_and_frees_its_size(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2])
        policy.dropped(name(2), DRAM)
        policy.dropped(name(2), DRAM)
        policy.dropped(name(99), NVME)
        assert not policy.holds(name(2), DRAM)
        assert policy.size_bytes(DRAM) == SIZE
        assert all_victims(policy) == [1]

    def test_many_dropped_at_once_are_gone_from_that_tier_alone(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3, 4])
        policy.stored(name(3), NVME, parent=None, size_bytes=SIZE, now_ms=NOW)
        policy.dropped_many([name(4), name(3), name(99)], DRAM)
        policy.dropped_many([], DRAM)
        assert all_victims(policy) == [2, 1]
        assert policy.holds(name(3), NVME)
        assert (policy.size_bytes(DRAM), policy.size_bytes(NVME)) == (2 * SIZE, SIZE)

    def test_many_stored_at_once_are_held_in_that_tier_alone(self, policy: ChunkPolicy) -> None:
        policy.stored_many(
            [(name(1), SIZE), (name(2), 2 * SIZE), (name(3), SIZE), (name(1), 3 * SIZE)], DRAM, now_ms=NOW
        )
        policy.stored_many([], DRAM, now_ms=NOW)
        assert [policy.holds(name(number), DRAM) for number in (1, 2, 3)] == [True, True, True]
        assert (policy.size_bytes(DRAM), policy.size_bytes(NVME)) == (6 * SIZE, 0)
        assert set(all_victims(policy)) == {1, 2, 3}

    def test_many_victims_are_named_as_few_are(self, policy: ChunkPolicy) -> None:
        store_chain(policy, range(1, 601))
        assert all_victims(policy) == list(range(600, 0, -1))
        spared = policy.victims(DRAM, 10**9, now_ms=NOW, eligible=lambda each: each != name(2), limit=10**6)
        assert spared == [name(number) for number in range(600, 2, -1)]

    def test_what_else_lies_in_a_tier_leaves_less_room(self, policy: ChunkPolicy) -> None:
        policy.request(chain(1, 2), now_ms=NOW)
        policy.set_capacity(NVME, SIZE)
        assert policy.admits(name(1), NVME, size_bytes=SIZE, now_ms=NOW)
        assert not policy.admits(name(1), NVME, size_bytes=SIZE + 1, now_ms=NOW)
        assert policy.admits(name(1), DRAM, size_bytes=SIZE + 1, now_ms=NOW)
        policy.stored(name(2), NVME, parent=None, size_bytes=SIZE, now_ms=NOW)
        policy.set_capacity(NVME, 0)
        assert not policy.admits(name(1), NVME, size_bytes=SIZE, now_ms=NOW)
        assert policy.holds(name(2), NVME)
        policy.set_capacity(NVME, 100 * SIZE)
        assert policy.admits(name(1), NVME, size_bytes=SIZE, now_ms=NOW)

    def test_a_chain_goes_from_its_end(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3, 4])
        assert all_victims(policy) == [4, 3, 2, 1]

    def test_victims_stop_at_the_bytes_needed_and_at_the_limit(self, policy: ChunkPolicy) -> None:
        store_chain(policy, range(1, 9))
        assert len(policy.victims(DRAM, 2 * SIZE + 1, now_ms=NOW, eligible=lambda _: True)) == 3
        assert len(policy.victims(DRAM, 8 * SIZE, now_ms=NOW, eligible=lambda _: True, limit=5)) == 5
        assert policy.victims(DRAM, 0, now_ms=NOW, eligible=lambda _: True) == []

    def test_asking_for_victims_changes_nothing(self, policy: ChunkPolicy) -> None:
        for first in (1, 11, 21):
            store_chain(policy, range(first, first + 5), now_ms=NOW + first * 1000)
        once = all_victims(policy, now_ms=NOW + 60_000)
        policy.victims(DRAM, 3 * SIZE, now_ms=NOW + 60_000, eligible=lambda each: each[-1] % 2 == 0)
        assert all_victims(policy, now_ms=NOW + 60_000) == once
        assert len(once) == 15

    def test_an_exception_of_the_caller_changes_nothing_either(self, policy: ChunkPolicy) -> None:
        store_chain(policy, range(1, 6))

        def fail(_: bytes) -> bool:
            raise RuntimeError("the caller's")

        with pytest.raises(RuntimeError, match="the caller's"):
            policy.victims(DRAM, SIZE, now_ms=NOW, eligible=fail)
        assert all_victims(policy) == [5, 4, 3, 2, 1]

    def test_what_is_not_eligible_protects_all_before_it(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3, 4])
        victims = policy.victims(DRAM, 10**9, now_ms=NOW, eligible=lambda each: each != name(3))
        assert victims == [name(4)]

    def test_a_branch_goes_before_what_it_branches_from(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3])
        store_chain(policy, [1, 2, 4, 5], now_ms=NOW + 1000)
        order = all_victims(policy, now_ms=NOW + 1000)
        assert sorted(order) == [1, 2, 3, 4, 5]
        assert order[-2:] == [2, 1]
        assert order.index(5) < order.index(4)

    def test_there_is_room_until_there_is_none(self, policy: ChunkPolicy) -> None:
        assert policy.admits(name(1), DRAM, size_bytes=SIZE, now_ms=NOW)
        assert not policy.admits(name(1), DRAM, size_bytes=101 * SIZE, now_ms=NOW)

    def test_tiers_rank_what_they_hold_by_itself(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3], tier=NVME)
        policy.stored(name(1), DRAM, parent=None, size_bytes=SIZE, now_ms=NOW)
        assert all_victims(policy, tier=DRAM) == [1]
        assert all_victims(policy, tier=NVME) == [3, 2, 1]

    def test_an_unknown_chain_is_not_known_and_a_stored_one_is(self, policy: ChunkPolicy) -> None:
        assert policy.request(chain(1, 2, 3), now_ms=NOW) == 0
        store_chain(policy, [1, 2])
        assert policy.request(chain(1, 2), now_ms=NOW) == 2
        assert policy.request(b"", now_ms=NOW) == 0

    def test_a_chain_that_names_a_chunk_twice_does_no_harm(self, policy: ChunkPolicy) -> None:
        policy.request(chain(1, 2, 1, 2), now_ms=NOW)
        policy.stored(name(1), DRAM, parent=name(1), size_bytes=SIZE, now_ms=NOW)
        assert all_victims(policy) == [1]

    @pytest.mark.parametrize("seed", range(5))
    def test_no_hole_ever_opens_when_victims_go_in_order(self, policy: ChunkPolicy, seed: int) -> None:
        source = random.Random(seed)
        parents: dict[int, int | None] = {}
        now_ms = NOW
        for _ in range(60):
            now_ms += source.randrange(60_000)
            start = source.choice([None, *parents])
            numbers = [] if start is None else [start]
            while numbers and (above := parents[numbers[0]]) is not None:
                numbers.insert(0, above)
            for _ in range(source.randrange(1, 5)):
                new = len(parents) + 1
                parents[new] = numbers[-1] if numbers else None
                numbers.append(new)
            store_chain(policy, numbers, now_ms=now_ms)
            for victim in policy.victims(DRAM, source.randrange(60), now_ms=now_ms, eligible=lambda _: True):
                policy.dropped(victim, DRAM)
                held = {number for number in parents if policy.holds(name(number), DRAM)}
                assert all(parents[number] is None or parents[number] in held for number in held)

    def test_a_saved_state_is_bounded_and_taken_up_and_another_ones_is_ignored(self, policy: ChunkPolicy) -> None:
        store_chain(policy, [1, 2, 3])
        state = policy.save()
        assert len(state) <= 2**20
        policy.load(state)
        assert policy.save() == state
        for bad in (b"", b"something else", state[:-1] + b"\0", state + b"\0", b"x" * len(state)):
            policy.load(bad)
            assert policy.save() == state
        assert all_victims(policy) == [3, 2, 1], "contents are no part of it"
