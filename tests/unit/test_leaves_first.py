"""Orders in which chunks are given up: whatever hangs below a chunk goes before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.rows import BlobRef, ChunkName, Durability, ObjectRow
from kvobj.gc.home_chunks import HomeChunk, _leaves_first
from kvobj.policy.chunk_policy import chunk_name
from kvobj.store.write_behind import _leaves_first as rows_leaves_first
from kvobj.store.write_behind import _with_ancestors

BUCKET = "cache"

# Each chunk's parent is an earlier one, or none: any forest. Some are left out, and the rest comes in any order.
forests = st.integers(1, 25).flatmap(
    lambda count: st.tuples(
        st.tuples(
            *(st.one_of(st.none(), st.integers(0, number - 1)) if number else st.none() for number in range(count))
        ),
        st.permutations(range(count)),
        st.sets(st.integers(0, count - 1)),
    )
)
Forest = tuple[tuple[int | None, ...], list[int], set[int]]


def row(number: int, parent: int | None) -> ObjectRow:
    blob = BlobRef(number.to_bytes(16, "big"), 1, 1, None)
    return ObjectRow(
        BUCKET,
        str(number),
        (blob,),
        1,
        "e",
        0,
        "root",
        Durability.MEMORY,
        parent=None if parent is None else str(parent),
    )


def ancestors(parents: tuple[int | None, ...], number: int) -> set[int]:
    found: set[int] = set()
    at = parents[number]
    while at is not None:
        found.add(at)
        at = parents[at]
    return found


@given(forests)
def test_refused_rows_are_ordered_with_every_child_before_its_parent(forest: Forest) -> None:
    parents, order, left_out = forest
    rows = [row(number, parents[number]) for number in sorted(order) if number not in left_out]
    ordered = [int(each.key) for each in rows_leaves_first(rows)]
    assert sorted(ordered) == [int(each.key) for each in rows]
    for position, number in enumerate(ordered):
        assert parents[number] not in ordered[:position]


@given(forests)
def test_chunks_at_home_are_ordered_with_every_child_before_its_parent(forest: Forest) -> None:
    parents, order, left_out = forest
    chunks = []
    for number in order:
        parent = parents[number]
        name = chunk_name(BUCKET, str(number))
        above = None if parent is None else chunk_name(BUCKET, str(parent))
        if number not in left_out:
            chunks.append(HomeChunk(name, ChunkName(BUCKET, str(number), b""), "", above, 1, 0))
    ordered = [int(chunk.chunk.key) for chunk in _leaves_first(chunks)]
    assert sorted(ordered) == sorted(int(chunk.chunk.key) for chunk in chunks)
    for position, number in enumerate(ordered):
        assert parents[number] not in ordered[:position]


@given(forests)
def test_a_chunk_that_has_to_stay_keeps_its_whole_line_of_ancestors(forest: Forest) -> None:
    parents, order, _ = forest
    rows = {(BUCKET, str(number)): row(number, parents[number]) for number in order}
    for number in order:
        kept = {int.from_bytes(blob_id, "big") for blob_id in _with_ancestors(rows[BUCKET, str(number)], rows)}
        assert kept == {number} | ancestors(parents, number)
