"""The dram tier's view of a chunk policy: blob ids, ordinary blobs, and chunks whose names come before or after their bytes."""

from __future__ import annotations

import pytest
from policy_contract import DRAM, NVME, SIZE, chain, name

from kvobj.ids import BlobId, make_blob_id
from kvobj.policy import ChunkPolicy, DramView, GipePolicy, LruChunks


@pytest.fixture(params=["gipe", "lru"])
def policy(request: pytest.FixtureRequest) -> ChunkPolicy:
    capacities = {DRAM: 100 * SIZE, NVME: 0}
    return GipePolicy(capacities) if request.param == "gipe" else LruChunks(capacities)


class Times:
    def __init__(self) -> None:
        self.now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def view(policy: ChunkPolicy, times: Times) -> DramView:
    return DramView(policy, now_ms=times)


def blob(number: int) -> BlobId:
    return make_blob_id(1, number)


def victims(view: DramView) -> list[BlobId]:
    return view.victims(10**9, lambda _: True)


def test_a_blob_that_nobody_named_goes_by_its_use(view: DramView, times: Times) -> None:
    for number in (1, 2, 3):
        times.now_ms += 10_000
        view.insert(blob(number), SIZE)
    times.now_ms += 10_000
    view.touch(blob(1))
    assert blob(1) in view
    assert (len(view), view.size_bytes) == (3, 3 * SIZE)
    assert set(victims(view)) == {blob(1), blob(2), blob(3)}
    assert view.victims(1, lambda each: each != blob(2)) in ([blob(1)], [blob(3)])


def test_chunks_go_children_first_however_they_came(view: DramView) -> None:
    view.note(blob(2), name(2), name(1))
    view.insert(blob(2), SIZE)
    view.insert(blob(1), SIZE)
    view.note(blob(1), name(1), None)
    assert victims(view) == [blob(2), blob(1)]


def test_a_request_tells_of_the_chunks_by_their_names(view: DramView, policy: ChunkPolicy) -> None:
    for number in (1, 2):
        view.note(blob(number), name(number), None)
        view.insert(blob(number), SIZE)
    assert policy.request(chain(1, 2, 3), now_ms=5000) == 2


def test_a_note_outlives_marks_on_a_blob_that_is_not_clean_yet(view: DramView, policy: ChunkPolicy) -> None:
    view.note(blob(1), name(1), None)
    view.discard(blob(1))
    view.insert(blob(1), SIZE)
    assert policy.holds(name(1), DRAM)


def test_a_chunk_stored_anew_takes_its_name_from_its_last_life(view: DramView, policy: ChunkPolicy) -> None:
    view.note(blob(1), name(1), None)
    view.insert(blob(1), SIZE)
    view.note(blob(2), name(1), None)
    view.insert(blob(2), 2 * SIZE)
    assert view.size_bytes == 3 * SIZE
    view.discard(blob(1))
    assert view.size_bytes == 2 * SIZE
    assert policy.holds(name(1), DRAM)
    assert victims(view) == [blob(2)]


def test_many_inserted_at_once_are_known_as_one_by_one(view: DramView, policy: ChunkPolicy, times: Times) -> None:
    capacities = {DRAM: 100 * SIZE, NVME: 0}
    other: ChunkPolicy = GipePolicy(capacities) if isinstance(policy, GipePolicy) else LruChunks(capacities)
    one_by_one = DramView(other, now_ms=times)
    blobs = [(blob(number), number * SIZE) for number in (5, 1, 7, 2, 1, 6)]
    for each in (view, one_by_one):
        each.insert(blob(7), SIZE)  # known already
        each.note(blob(2), name(2), name(1))  # a chunk
        each.note(blob(1), name(1), None)  # its parent, which is inserted twice
    view.insert_many(blobs)
    for blob_id, size_bytes in blobs:
        one_by_one.insert(blob_id, size_bytes)
    assert (len(view), view.size_bytes) == (len(one_by_one), one_by_one.size_bytes)
    assert victims(view) == victims(one_by_one)
    assert policy.holds(name(2), DRAM)
    view.discard_many([blob_id for blob_id, _ in blobs])
    assert (len(view), view.size_bytes) == (0, 0)


def test_inserted_again_takes_the_new_size_and_discarded_twice_is_fine(view: DramView) -> None:
    view.insert(blob(1), SIZE)
    view.insert(blob(1), 2 * SIZE)
    assert view.size_bytes == 2 * SIZE
    view.discard(blob(1))
    view.discard(blob(1))
    view.touch(blob(1))
    assert (len(view), view.size_bytes, victims(view)) == (0, 0, [])
