import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.ranges import parse_copy_range, parse_range
from kvobj.errors import InvalidRangeError


@pytest.mark.parametrize(
    ("value", "size_bytes", "expected"),
    [
        ("bytes=0-4", 10, (0, 5)),
        ("bytes=5-", 10, (5, 10)),
        ("bytes=-3", 10, (7, 10)),
        ("bytes=-30", 10, (0, 10)),
        ("bytes=0-99", 10, (0, 10)),
        ("bytes=9-9", 10, (9, 10)),
        ("bytes=5-4", 10, None),
        ("bytes=0-1,3-4", 10, None),
        ("bytes=-", 10, None),
        ("items=0-1", 10, None),
        ("bytes=a-b", 10, None),
        ("bytes=5-18446744073709551615", 10, (5, 10)),
        ("bytes=-18446744073709551615", 10, (0, 10)),
        ("bytes=0-" + "9" * 100, 10, None),
    ],
)
def test_a_range_is_one_span_or_the_whole(value: str, size_bytes: int, expected: tuple[int, int] | None) -> None:
    assert parse_range(value, size_bytes) == expected


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        ("bytes=10-", 10),
        ("bytes=18446744073709551615-", 10),
        ("bytes=10-12", 10),
        ("bytes=-0", 10),
        ("bytes=0-0", 0),
        ("bytes=-1", 0),
    ],
)
def test_a_range_past_the_end_is_refused_with_the_size(value: str, size_bytes: int) -> None:
    with pytest.raises(InvalidRangeError) as caught:
        parse_range(value, size_bytes)
    assert caught.value.data["size_bytes"] == size_bytes


@given(st.text(max_size=60), st.integers(0, 2**40))
def test_any_text_gives_a_span_inside_the_object_or_the_whole(value: str, size_bytes: int) -> None:
    for text in (value, f"bytes={value}"):
        try:
            span = parse_range(text, size_bytes)
        except InvalidRangeError:
            continue
        if span is not None:
            assert 0 <= span[0] < span[1] <= size_bytes


@pytest.mark.parametrize("value", ["bytes=5-", "bytes=-5", "0-5", "bytes=5-4", ""])
def test_a_copy_range_has_both_ends(value: str) -> None:
    with pytest.raises(ValueError, match="first-last"):
        parse_copy_range(value, 100)


def test_a_copy_range_past_the_end_is_refused() -> None:
    assert parse_copy_range("bytes=0-99", 100) == (0, 100)
    with pytest.raises(InvalidRangeError):
        parse_copy_range("bytes=0-100", 100)
