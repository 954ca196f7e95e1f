"""The search of a match: exact for any list, and short for a chain."""

from __future__ import annotations

from array import array
from itertools import chain as all_of

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lease_contract import as_ids, chain, chunk, keys_of, name, plain_reading

from kvobj.catalog.chunk_heads import ChunkHead, decode_head
from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.encoding import encode_row
from kvobj.catalog.matching import Run, begins_chain, match_chain, walk
from kvobj.catalog.rows import ObjectRow
from kvobj.ids.chain_sums import key_lanes, running_sums


class Rows:
    """Live rows by key, and how often they were asked for."""

    def __init__(self, rows: list[ObjectRow]) -> None:
        self.rows = {row.key: row for row in rows}
        self.probes = 0

    def probe(self, key: str) -> ChunkHead | None:
        self.probes += 1
        row = self.rows.get(key)
        return None if row is None else decode_head(encode_row(row))

    def search(self, chunks: ChunkList) -> Run:
        """As the LMDB driver does it, in one go."""
        run = Run()
        if begins_chain(chunks, self.probe):
            run = match_chain(chunks, self.probe, running_sums(chunks.lanes(0, len(chunks))))
        while not walk(run, chunks, self.probe, limit=3):
            pass
        return run


TRUNK = chain("t", 12)
BRANCH = chain("b", 7, below=TRUNK[5])
TWIN = chain("u", 12)
ROOT = chunk(name("root"), None)
HANGING = [ROOT, *chain("h", 6, below=ROOT)]
LOOSE = [chunk(name(f"l{index}"), None) for index in range(4)]
STORED = [*TRUNK, *BRANCH, *TWIN[:6], *HANGING, *LOOSE]
WHOLE = [keys_of(rows) for rows in (TRUNK, [*TRUNK[:6], *BRANCH], TWIN, HANGING, LOOSE)]
PIECES = st.builds(
    lambda keys, start, stop: keys[start:stop],
    st.sampled_from(WHOLE),
    st.integers(0, 3) | st.just(0),
    st.none() | st.integers(-3, 12),
)
SINGLES = st.sampled_from([[key] for key in [*keys_of(STORED), *keys_of(TWIN), name("absent")]])
LISTS = st.lists(PIECES | SINGLES, max_size=6).map(lambda parts: list(all_of.from_iterable(parts)))


@given(LISTS, st.booleans(), st.sets(st.sampled_from(keys_of([*LOOSE, *BRANCH])), max_size=2))
def test_a_search_finds_what_a_plain_reading_does(keys: list[str], ids: bool, gone: set[str]) -> None:  # noqa: FBT001
    """Also where chunks are gone; a chain loses its tail first."""
    depth = min([row.depth for row in BRANCH if row.key in gone], default=99)
    stored = [row for row in STORED if row.key not in gone and (row not in BRANCH or row.depth < depth)]
    rows = Rows(stored)
    run = rows.search(as_ids(keys) if ids else KeyList(keys))
    expected = plain_reading(keys, rows.rows)
    assert run.matched == len(expected)
    assert run.tokens == sum(row.tokens for row in expected)
    assert run.size_bytes == sum(row.size_bytes for row in expected)
    tails = [row for row, after in zip(expected, [*expected[1:], None], strict=False) if not after or not after.parent]
    assert [target.key for target in run.targets] == keys_of(tails)


@pytest.mark.parametrize("stored", [1, 2, 2047, 2048, 4095, 4096])
def test_a_long_chain_takes_a_dozen_probes(stored: int) -> None:
    long = chain("long", 4096)
    rows = Rows(long[:stored])
    run = rows.search(as_ids(keys_of(long)))
    assert run.matched == stored
    assert run.targets[0].key == long[stored - 1].key
    assert rows.probes <= 17


def test_a_chain_in_another_order_ends_where_the_order_does() -> None:
    rows = Rows(TRUNK)
    keys = keys_of(TRUNK)
    keys[7], keys[8] = keys[8], keys[7]
    assert rows.search(as_ids(keys)).matched == 7
    assert rows.search(as_ids([*keys_of(TRUNK), *keys_of(TRUNK)])).matched == 12
    assert rows.search(as_ids([TRUNK[0].key, *keys_of(TRUNK)])).matched == 1


def test_rows_without_sums_are_still_matched() -> None:
    bare = [msgspec.structs.replace(row, depth=0, chain_sum=b"") for row in TRUNK]
    assert Rows(bare).search(as_ids(keys_of(TRUNK))).matched == 12


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20), st.integers(0, 20), st.integers(0, 20))
def test_ids_and_their_keys_are_one_list(ids: list[bytes], start: int, stop: int) -> None:
    by_id, by_key = IdList(b"".join(ids)), KeyList([each.hex() for each in ids])
    assert len(by_id) == len(by_key) == len(ids)
    assert [by_id.key(index) for index in range(len(ids))] == [by_key.key(index) for index in range(len(ids))]
    assert by_id.joined_keys(start, stop) == by_key.joined_keys(start, stop)
    assert by_id.lanes(start, stop) == by_key.lanes(start, stop)
    assert by_id.lanes(0, len(ids)) == b"".join(each[:16] for each in ids)


def test_other_keys_have_the_lanes_of_their_hashes() -> None:
    keys = ["a", name("x").upper(), name("x")[:-1], "é/" + name("x")]
    assert KeyList(keys).lanes(0, 4) == b"".join(key_lanes(key) for key in keys)
    assert KeyList(keys).joined_keys(2, 4) == ((keys[2] + keys[3]).encode(), array("I", [63, 63 + 67]))


def test_half_an_id_is_no_list() -> None:
    with pytest.raises(ValueError):
        IdList(b"x" * 33)
