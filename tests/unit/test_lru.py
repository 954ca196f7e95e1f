"""The LRU policy against a list that does the same slowly, and its bounds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvobj.ids import BlobId, make_blob_id
from kvobj.policy import LruPolicy

IDS = st.integers(1, 12).map(lambda sequence: make_blob_id(1, sequence))


def blob(sequence: int) -> BlobId:
    return make_blob_id(1, sequence)


def filled(count: int, *, size_bytes: int = 10, scan_max: int = 10_000) -> LruPolicy:
    policy = LruPolicy(scan_max=scan_max)
    for sequence in range(1, count + 1):
        policy.insert(blob(sequence), size_bytes)
    return policy


class LruAgainstAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy()
        self.model: list[tuple[BlobId, int]] = []

    def _take(self, blob_id: BlobId) -> list[tuple[BlobId, int]]:
        taken = [entry for entry in self.model if entry[0] == blob_id]
        self.model = [entry for entry in self.model if entry[0] != blob_id]
        return taken

    @rule(blob_id=IDS, size_bytes=st.integers(0, 100))
    def insert(self, blob_id: BlobId, size_bytes: int) -> None:
        self.policy.insert(blob_id, size_bytes)
        self._take(blob_id)
        self.model.append((blob_id, size_bytes))

    @rule(blob_id=IDS)
    def touch(self, blob_id: BlobId) -> None:
        self.policy.touch(blob_id)
        taken = self._take(blob_id)
        self.model += taken

    @rule(blob_id=IDS)
    def discard(self, blob_id: BlobId) -> None:
        self.policy.discard(blob_id)
        self._take(blob_id)

    @rule(bytes_needed=st.integers(0, 600), refused=st.sets(IDS))
    def victims(self, bytes_needed: int, refused: set[BlobId]) -> None:
        expected, found_bytes = [], 0
        for blob_id, size_bytes in self.model:
            if found_bytes >= bytes_needed:
                break
            if blob_id not in refused:
                expected.append(blob_id)
                found_bytes += size_bytes
        assert self.policy.victims(bytes_needed, lambda blob_id: blob_id not in refused) == expected

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.policy) == len(self.model)
        assert self.policy.size_bytes == sum(size for _, size in self.model)
        assert all(blob_id in self.policy for blob_id, _ in self.model)


TestLruAgainstAList = LruAgainstAList.TestCase
TestLruAgainstAList.settings = settings(max_examples=50, stateful_step_count=30)


def test_victims_are_repeatable_until_they_are_discarded() -> None:
    policy = filled(5)
    assert policy.victims(15, lambda _: True) == policy.victims(15, lambda _: True) == [blob(1), blob(2)]
    policy.discard(blob(1))
    assert policy.victims(15, lambda _: True) == [blob(2), blob(3)]


def test_a_call_looks_at_a_bounded_number_of_blobs() -> None:
    looked_at: list[BlobId] = []

    def refuse(blob_id: BlobId) -> bool:
        looked_at.append(blob_id)
        return False

    assert filled(100, scan_max=7).victims(1, refuse) == []
    assert looked_at == [blob(sequence) for sequence in range(1, 8)]


def test_too_few_blobs_are_named_all() -> None:
    assert filled(3).victims(1000, lambda _: True) == [blob(1), blob(2), blob(3)]
