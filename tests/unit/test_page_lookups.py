"""Values copied out of LMDB's pages are those that LMDB gives, in snapshots and in changes; what is left open it is asked for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from damaged_pages import damaged_copies, ended

from kvobj import native
from kvobj.database import Database, ReadView, Table, WriteView
from kvobj.database.page_lookups import MANY, find_values, find_values_under

pytestmark = pytest.mark.skipif(not native.status().is_loaded, reason="the native library is not built")

DOWN = Table("down", volatile=False)
UP = Table("up", volatile=True)
BESIDE = Table("beside", volatile=False)
PAGE_BYTES = 4096


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database.open(
        durable=tmp_path / "durable",
        volatile=tmp_path / "volatile",
        tables=(DOWN, UP, BESIDE),
        map_bytes=1 << 28,
        volatile_map_bytes=1 << 27,
        sync=False,
        boot_id="boot",
    )
    yield opened
    await opened.aclose()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(11)


def keys_below(chance: random.Random, prefixes: Sequence[bytes]) -> list[bytes]:
    """None to a few below each, once many."""
    numbers = [chance.choice([0, 1, 1, 1, 2, 5]) for _ in prefixes]
    numbers[0] = 300
    return [
        prefix + chance.randbytes(16) for prefix, number in zip(prefixes, numbers, strict=True) for _ in range(number)
    ]


def value_of(chance: random.Random) -> bytes:
    """Mostly as long as a row; also empty, and in pages of its own."""
    return chance.randbytes(chance.choice([0, 1, 90, 300, 300, 300, 1200, 5000]))


def assert_all_found(view: ReadView, table: Table, keys: Sequence[bytes], prefixes: Sequence[bytes]) -> None:
    assert len(keys) >= MANY
    assert len(prefixes) >= MANY
    assert view.get_many(table, keys) == [view.get(table, key) for key in keys]
    assert view.values_under(table, prefixes) == [[value for _, value in view.under(table, each)] for each in prefixes]


@pytest.mark.parametrize("table", [DOWN, UP])
async def test_values_found_are_those_that_lmdb_has_whatever_the_table_went_through(
    database: Database, chance: random.Random, table: Table
) -> None:
    prefixes = [chance.randbytes(12) for _ in range(400)]
    keys = keys_below(chance, prefixes)
    asked = [*chance.sample(keys, len(keys)), *(chance.randbytes(28) for _ in range(50)), b"k" * 511, keys[0], keys[0]]
    below = [*chance.sample(prefixes, len(prefixes)), prefixes[0], prefixes[0][:1], bytes(12), b"\xff" * 12]

    def change(some: Sequence[bytes], gone: Sequence[bytes]) -> Callable[[WriteView], None]:
        def write(view: WriteView) -> None:
            view.put_many(table, [(key, value_of(chance)) for key in some])
            view.delete_many(table, gone)

        return write

    with database.read() as view:
        assert_all_found(view, table, asked, below)
    for _ in range(6):
        some = chance.sample(keys, len(keys) // 3)
        await database.write(change(some, chance.sample(some, len(some) // 4)))
        with database.read() as view:
            assert_all_found(view, table, asked, below)


class Changes:
    """What one change of a group after another may do to the tables; `look` before and after each."""

    def __init__(self, chance: random.Random, look: Callable[[WriteView], None], prefixes: Sequence[bytes]) -> None:
        self.keys = keys_below(chance, prefixes)
        self.added = [prefix + b"added" for prefix in prefixes]
        self._chance = chance
        self._look = look

    def looking(self, change: Callable[[WriteView], None]) -> Callable[[WriteView], None]:
        def both(view: WriteView) -> None:
            self._look(view)
            change(view)
            self._look(view)

        return both

    def write(self, view: WriteView) -> None:
        for table in (DOWN, UP):
            view.put_many(table, [(key, value_of(self._chance)) for key in self.keys])

    def take_away(self, view: WriteView) -> None:
        view.delete_many(DOWN, self.keys[::3])

    def add(self, view: WriteView) -> None:
        for key in self.added:
            view.put(DOWN, key, b"new")

    def take_some(self, view: WriteView) -> None:
        for key in self.keys[::5]:
            view.delete(DOWN, key)

    def write_elsewhere(self, view: WriteView) -> None:
        view.put(BESIDE, b"k", b"v")


async def test_a_change_finds_what_its_group_wrote_before_it_and_nothing_of_what_it_took_away(
    database: Database, chance: random.Random
) -> None:
    prefixes = [chance.randbytes(12) for _ in range(200)]

    def look(view: WriteView) -> None:
        for table in (DOWN, UP):
            assert_all_found(view, table, [*changes.keys, *changes.added], prefixes)

    changes = Changes(chance, look, prefixes)
    each = (changes.write, changes.take_away, changes.write_elsewhere, changes.add, changes.take_some)
    for change in each:
        await database.write(changes.looking(change))
    # In one group, too, where each finds what those before it did.
    for future in [database.submit(changes.looking(change)) for change in (*each[2:], *each)]:
        await future


async def test_a_change_that_is_made_again_by_itself_finds_the_table_as_it_stands(
    database: Database, chance: random.Random
) -> None:
    """A neighbour's fault takes the group back: what it wrote before was never there."""
    prefixes = [chance.randbytes(12) for _ in range(100)]
    keys = keys_below(chance, prefixes)
    await database.write(lambda view: view.put_many(DOWN, [(key, b"old") for key in keys]))
    seen: list[list[bytes | None]] = []

    def replace(view: WriteView) -> None:
        view.put_many(DOWN, [(key, b"new") for key in keys])

    def fail(_: WriteView) -> None:
        raise RuntimeError("a fault")

    def look(view: WriteView) -> None:
        assert_all_found(view, DOWN, keys, prefixes)
        seen.append(view.get_many(DOWN, keys))

    failing = database.submit(fail)
    changes = [database.submit(replace), database.submit(look)]
    with pytest.raises(RuntimeError):
        await failing
    for each in changes:
        await each
    assert seen[-1] == [b"new"] * len(keys)


async def test_of_keys_that_are_longer_than_any_lmdb_is_asked(database: Database) -> None:
    keys = [b"k" * 512] * MANY
    await database.write(lambda view: view.put(DOWN, b"k" * 511, b"v"))
    with database.read() as view:
        assert view.get_many(DOWN, keys) == [view.get(DOWN, key) for key in keys]


async def test_damaged_pages_are_never_read_beyond_the_map(
    database: Database, chance: random.Random, tmp_path: Path
) -> None:
    prefixes = [chance.randbytes(12) for _ in range(300)]
    keys = keys_below(chance, prefixes)
    await database.write(lambda view: view.put_many(DOWN, [(key, value_of(chance)[:900]) for key in keys]))
    with database.read() as view:
        table = view.pages(DOWN)
    assert table is not None

    def read_all() -> None:
        known = 0
        for damaged in damaged_copies(tmp_path / "durable" / "data.mdb", chance, 300):
            values = find_values(damaged(table), keys, lambda _: None)
            below = find_values_under(damaged(table), prefixes, lambda _: [])
            assert values is None or len(values) == len(keys)
            assert below is None or len(below) == len(prefixes)
            known += values is not None
        assert 0 < known < 300

    assert ended(read_all) == 0
