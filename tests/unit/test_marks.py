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


def test_a_claim_is_filled_past_marks_that_were_taken_away_in_front_of_others() -> None:
    marks = Marks()
    marks.add(map(named, "abcdef"), not_before_boot_ms=5)
    marks.forget("b", ["a", "c"])
    assert [taken(marks, now=5, limit=3) for _ in range(3)] == ["bde", "f", ""]


def test_of_what_is_marked_together_each_chunk_is_found_as_marked_or_as_being_claimed() -> None:
    marks = Marks()
    marks.add(map(named, "abcd"), not_before_boot_ms=5)
    claimed = marks.begin_claim(now_boot_ms=5, limit=2)
    assert [marks.is_marked("b", key) for key in "abcde"] == [True] * 4 + [False]
    assert [marks.is_claiming("b", key) for key in "abcd"] == [True, True, False, False]
    assert marks.absent("b", "abcd") == {"a", "b"}
    marks.end_claim(claimed)
    assert [marks.is_marked("b", key) for key in "abcd"] == [False, False, True, True]
    assert len(marks) == 2


def test_a_chunk_that_is_given_twice_is_claimed_once_and_of_its_later_blob() -> None:
    for before in ("", "a", "x"):  # alone, and beside marks that stand
        marks = Marks()
        marks.add(map(named, before), not_before_boot_ms=9)
        twice = [named("x", b"2"), named("a", b"2"), named("a", b"3")]
        assert marks.add(twice, not_before_boot_ms=5) == [True] * 3
        claimed = marks.begin_claim(now_boot_ms=5, limit=9)
        assert [(chunk.key, chunk.blob_id) for chunk in claimed] == [("x", b"2"), ("a", b"3")]
        assert marks.absent("b", "ax") == {"a", "x"}
        marks.end_claim(claimed)
        assert (marks.absent("b", "ax"), len(marks)) == (set(), 0)
        assert taken(marks, now=9, limit=9) == ""
