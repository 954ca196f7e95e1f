"""Requests are told to the policy after the caller went on, whole, in order, and never without bound."""

from __future__ import annotations

import asyncio

from fakes import ManualClock

from kvobj.catalog.chunk_list import IdList, KeyList
from kvobj.ids.chain_sums import key_lanes
from kvobj.policy.chunk_policy import chunk_name, chunk_names
from kvobj.store.load_estimate import expected_load_ms
from kvobj.store.request_feed import QUEUED_CHUNKS_MAX, SLICE_CHUNKS, TOLD_CHUNKS, RequestFeed, RequestTrace


class Told:
    """A policy that remembers what it was told."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, bool, int]] = []

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        del now_ms
        self.requests.append((chain, partial_last, hint))
        return 0


def feed_of(told: Told) -> RequestFeed:
    return RequestFeed(told, names_of=lambda bucket, lanes: bucket.encode() + lanes, clock=ManualClock())


async def drained(feed: RequestFeed) -> None:
    assert feed._task is not None
    await feed._task


async def test_a_request_is_told_whole_and_not_before_its_caller_goes_on() -> None:
    told = Told()
    feed = feed_of(told)
    keys = [f"k{index}" for index in range(SLICE_CHUNKS + 1)]
    feed.tell(RequestTrace("b", KeyList(keys), partial_last=True, hint=3))
    feed.tell(RequestTrace("b", KeyList(["x"])))
    assert told.requests == []
    await drained(feed)
    lanes = [key_lanes(key) for key in keys]
    whole = b"b" + b"".join(lanes[:SLICE_CHUNKS]) + b"b" + lanes[-1]
    assert told.requests == [(whole, True, 3), (b"b" + key_lanes("x"), False, 0)]


async def test_an_empty_request_is_nothing() -> None:
    told = Told()
    feed = feed_of(told)
    feed.tell(RequestTrace("b", KeyList([])))
    assert feed._task is None
    await feed.aclose()


async def test_when_requests_come_too_fast_the_oldest_are_forgotten_and_counted() -> None:
    told = Told()
    feed = feed_of(told)
    chunks = KeyList(["k"] * (QUEUED_CHUNKS_MAX // 4))
    for hint in range(6):
        feed.tell(RequestTrace("b", chunks, hint=hint))
    assert feed.forgotten == 2
    feed.tell(RequestTrace("b", KeyList(["last"])))
    await asyncio.wait_for(drained(feed), 30)
    assert list(dict.fromkeys(hint for _, _, hint in told.requests)) == [3, 4, 5, 0]


async def test_a_very_long_request_is_told_in_pieces_the_end_first() -> None:
    told = Told()
    feed = RequestFeed(told, names_of=lambda _, lanes: lanes, clock=ManualClock())
    ids = IdList(b"".join(index.to_bytes(16) + bytes(16) for index in range(2 * TOLD_CHUNKS + 3)))
    feed.tell(RequestTrace("b", ids, partial_last=True, hint=2))
    await drained(feed)
    assert [len(piece) // 16 for piece, _, _ in told.requests] == [3, TOLD_CHUNKS, TOLD_CHUNKS]
    assert b"".join(piece for piece, _, _ in reversed(told.requests)) == ids.lanes(0, len(ids))
    assert [(is_partial, hint) for _, is_partial, hint in told.requests] == [(True, 2), (False, 2), (False, 2)]


async def test_closing_forgets_what_is_queued_and_ends() -> None:
    told = Told()
    feed = feed_of(told)
    feed.tell(RequestTrace("b", KeyList(["k"])))
    await feed.aclose()
    assert told.requests == []


def test_loading_is_thought_to_take_what_the_tiers_give_and_an_unknown_one_is_slow() -> None:
    assert expected_load_ms({}) == 0
    assert expected_load_ms({"dram": 2_500_000_000}) == 1000
    assert expected_load_ms({"dram": 2_500_000_000, "nvme": 1_000_000_000}) == 2000
    assert expected_load_ms({"tape": 1_000_000_000}) == 1000
    assert expected_load_ms({"dram": 1}) == 1


def test_a_chunk_has_one_name_a_bucket_however_it_is_asked_for() -> None:
    chunk_id = bytes(range(32))
    ids, keys = IdList(chunk_id * 2), KeyList([chunk_id.hex(), "llm/x"])
    names = chunk_names("a", keys.lanes(0, 2))
    assert names == chunk_name("a", chunk_id.hex()) + chunk_name("a", "llm/x")
    assert chunk_names("a", ids.lanes(0, 2)) == chunk_name("a", chunk_id.hex()) * 2
    assert chunk_name("b", "llm/x") not in {chunk_name("a", "llm/x"), chunk_name("b", "llm/y")}
