"""The store's policies on public traces, whole requests at a time: the published columns are reproduced, the goals are reached.

Mooncake's conversation trace (FAST'25 release) and 180 coding sessions (kv-cache-tester), both Apache-2.0; blocks of 512
tokens. Figures of the LRU and optimum columns come from an independent simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from policy_replay import Trace, best_hit_percent, load_trace, make_policy, replay_one_tier, replay_two_tiers

from kvobj.native import library
from kvobj.policy.offline import best_prefix_hits

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return load_trace(HERE / "mooncake_conversation.jsonl.zst")


@pytest.fixture(scope="module")
def agentcode() -> Trace:
    return load_trace(HERE / "agentcode.jsonl.zst")


@pytest.fixture(autouse=True)
def native() -> None:
    assert library() is not None, "make native"


def is_chain_like(chains: Iterable[Sequence[int]]) -> bool:
    """Whether every block always has the same one before it, as prefix-closed optima need."""
    before: dict[int, int] = {}
    return all(
        before.setdefault(block, previous) == previous for chain in chains for previous, block in pairwise((-1, *chain))
    )


def hit_percent(trace: Trace, kind: str, percent: float, *, use_hints: bool = False) -> float:
    return replay_one_tier(trace, make_policy(kind, trace.capacity(percent)), use_hints=use_hints).hit_percent


def test_the_conversation_trace_is_read_whole_and_its_blocks_are_chains(conversation: Trace) -> None:
    assert len(conversation.requests) == 12_031
    assert conversation.unique_blocks == 182_790
    assert is_chain_like(request.block_ids for request in conversation.requests)


@pytest.mark.parametrize(("percent", "published"), [(1, 25.12), (5, 37.36)])
def test_the_optimum_of_conversation_is_reproduced(conversation: Trace, percent: float, published: float) -> None:
    assert best_hit_percent(conversation, conversation.capacity(percent)) == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(("percent", "published"), [(1, 5.35), (10, 28.44)])
def test_lru_on_conversation_is_reproduced(conversation: Trace, percent: float, published: float) -> None:
    assert hit_percent(conversation, "lru", percent) == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(("percent", "goal"), [(1, 10.5), (5, 22.5), (10, 29.9), (25, 36.0)])
def test_gipe_reaches_its_goals_on_conversation(conversation: Trace, percent: float, goal: float) -> None:
    assert hit_percent(conversation, "gipe", percent) >= goal


def test_gipe_told_output_lengths_reaches_its_goal(conversation: Trace) -> None:
    assert hit_percent(conversation, "gipe", 25, use_hints=True) >= 36.5


def test_two_tiers_reach_their_goals_on_conversation(conversation: Trace) -> None:
    sizes = (conversation.capacity(1), conversation.capacity(5))
    outcome = replay_two_tiers(conversation, make_policy("gipe", *sizes), sizes)
    assert outcome.hit_percent >= 23.5
    assert outcome.dram_percent >= 10.5
    assert outcome.nvme_writes <= 0.85


@pytest.mark.parametrize(("percent", "goal"), [(0.5, 26.0), (1, 44.0), (2, 67.0), (5, 90.1), (10, 94.8)])
def test_gipe_reaches_its_goals_on_coding_agents(agentcode: Trace, percent: float, goal: float) -> None:
    assert hit_percent(agentcode, "gipe", percent) >= goal


def test_the_pure_twin_gets_the_same_hits_on_a_real_trace() -> None:
    trace = load_trace(HERE / "mooncake_conversation_500.jsonl.zst")
    capacity = trace.capacity(5)
    native, pure = (
        replay_one_tier(trace, make_policy("gipe", capacity, use_native=use_native)) for use_native in (True, False)
    )
    assert native == pure
    assert native.hit_percent > replay_one_tier(trace, make_policy("lru", capacity)).hit_percent


def test_nothing_beats_the_optimum_and_it_needs_no_holes() -> None:
    chains = [(1, 2, 3), (4, 5), (1, 2, 3), (4, 6), (1, 2, 3), (7,), (4, 5)]
    assert list(best_prefix_hits(chains, 3)) == [0, 0, 3, 0, 3, 0, 0]
    assert list(best_prefix_hits(chains, 10)) == [0, 0, 3, 1, 3, 0, 2]
    assert list(best_prefix_hits(chains, 0)) == [0] * 7
