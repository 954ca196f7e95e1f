"""Policy's marks: taken in the order given, each mark once, however claims cut them up."""

from __future__ import annotations

from kvobj.catalog.marks import Marks
from kvobj.catalog.rows import ChunkName


def named(key: str, blob_id: bytes = b"1") -> ChunkName:
    return ChunkName("b", key, blob_id)


def taken(marks: Marks, *, now: int, limit: int) -> str:
    chunks = marks.begin_claim(now_boot_ms=now, limit=limit)
    marks.end_claim(chunks)
    return "".join(chunk.key for chunk in chunks)


def test_a_claim_takes_part_of_what_was_marked_together_and_the_next_one_goes_on() -> None:
    marks = Marks()
    assert marks.add(map(named, "abcd"), not_before_boot_ms=5) == [True] * 4
    marks.add([named("e")], not_before_boot_ms=5)
    assert taken(marks, now=4, limit=9) == ""
    assert [taken(marks, now=5, limit=3) for _ in range(3)] == ["abc", "de", ""]


def test_a_mark_that_was_taken_away_and_given_anew_waits_for_its_new_time() -> None:
    marks = Marks()
    marks.add(map(named, "ab"), not_before_boot_ms=5)
    marks.forget("b", ["a"])
    marks.add([named("a")], not_before_boot_ms=9)
    assert taken(marks, now=5, limit=9) == "b"
    assert taken(marks, now=9, limit=9) == "a"


def test_the_earlier_time_of_a_mark_stands_and_a_chunk_being_claimed_gets_none() -> None:
    marks = Marks()
    marks.add(map(named, "ab"), not_before_boot_ms=5)
    marks.add([named("a")], not_before_boot_ms=9)
    claimed = marks.begin_claim(now_boot_ms=5, limit=1)
    assert [chunk.key for chunk in claimed] == ["a"]
    assert marks.add([named("a"), named("b"), named("c")], not_before_boot_ms=5) == [False, True, True]
    marks.end_claim(claimed)
    assert taken(marks, now=5, limit=9) == "bc"
