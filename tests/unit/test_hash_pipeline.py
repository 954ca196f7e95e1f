"""Digests computed while the bytes arrive equal those of the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec.block_crcs import crcs_one_by_one, native_crcs
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import BLOCK_PLAIN_BYTES, block_crcs
from kvobj.store.hashing import STEP_BYTES, BlobHash, HashPipeline


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@given(st.lists(st.integers(0, 3 * BLOCK_PLAIN_BYTES + 7), max_size=5), st.integers(0, 3 * BLOCK_PLAIN_BYTES + 7))
def test_any_arrival_gives_the_digest_and_block_checksums_of_the_whole(stops: list[int], size_bytes: int) -> None:
    payload = memoryview(hashlib.shake_128(b"kv").digest(size_bytes))
    blob = BlobHash(payload)
    for stop in sorted(min(stop, size_bytes) for stop in stops):
        blob.advance(stop, None)
    blob.advance(size_bytes, None)
    assert blob.digest == blake3(payload).digest()
    assert blob.block_crcs == block_crcs(payload)


@given(st.integers(1, 3 * BLOCK_PLAIN_BYTES), st.integers(0, BLOCK_PLAIN_BYTES - 1), st.integers(0, 2**32 - 1))
def test_block_checksums_made_at_once_are_those_made_one_by_one(size_bytes: int, before: int, previous: int) -> None:
    native = native_crcs()
    if native is None:
        pytest.skip("no native library, or no instruction for it")
    piece = memoryview(hashlib.shake_128(b"crc").digest(size_bytes))
    assert native(piece, before, previous) == crcs_one_by_one(piece, before, previous)


@pytest.mark.parametrize("step_bytes", [1000, BLOCK_PLAIN_BYTES, STEP_BYTES + 1, 10_000_000])
async def test_body_digests_run_through_all_blobs_in_order(pool: ThreadPoolExecutor, step_bytes: int) -> None:
    blobs = [hashlib.shake_128(bytes([i])).digest(size) for i, size in enumerate((3_000_000, 0, 70_000, 1))]
    pipeline = HashPipeline(pool, body=Digester(frozenset({"md5", "crc32c"})))
    states = [pipeline.begin(memoryview(blob)) for blob in blobs]
    # The second is fed before the first is through: order is the pipeline's business.
    for state, blob in reversed(list(zip(states, blobs, strict=True))):
        for available in range(step_bytes, len(blob), step_bytes):
            pipeline.feed(state, available)
        pipeline.feed(state, len(blob))
    for state, blob in zip(states, blobs, strict=True):
        assert await state.wait() == blake3(blob).digest()
    assert pipeline.body is not None
    assert pipeline.body.hexdigest("md5") == hashlib.md5(b"".join(blobs), usedforsecurity=False).hexdigest()


async def test_hashing_trails_by_less_than_a_step_and_ends_with_the_last_byte(pool: ThreadPoolExecutor) -> None:
    payload = memoryview(bytes(2 * STEP_BYTES + 5))
    pipeline = HashPipeline(pool, body=None)
    blob = pipeline.begin(payload)
    pipeline.feed(blob, STEP_BYTES - 1)
    assert blob.hashed_bytes == 0
    pipeline.feed(blob, len(payload))
    assert await blob.wait() == blake3(payload).digest()
    assert blob.hashed_bytes == blob.available_bytes
