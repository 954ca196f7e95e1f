"""Patterns of policies: against a slow and obvious reference, and in time that does not explode."""

import time
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvobj.api.access.wildcards import Pattern, wildcard_matcher
from kvobj.errors import InvalidRequestError

TEXTS = st.text(alphabet="ab/\n", max_size=12)
PATTERNS = st.text(alphabet="ab/?*", max_size=10)


def reference(pattern: str, text: str) -> bool:
    """What a pattern means, said as plainly as it can be."""

    @cache
    def fits(i: int, j: int) -> bool:
        if i == len(pattern):
            return j == len(text)
        if pattern[i] == "*":
            return fits(i + 1, j) or (j < len(text) and fits(i, j + 1))
        return j < len(text) and pattern[i] in ("?", text[j]) and fits(i + 1, j + 1)

    return fits(0, 0)


def unset(_name: str) -> None:
    return None


@settings(max_examples=1500, deadline=None)
@given(PATTERNS, TEXTS)
@example("*ab*b", "aab")
@example("a*a", "a")
@example("*?b*", "ab")
@example("?*?", "a")
def test_a_pattern_fits_what_the_reference_says(pattern: str, text: str) -> None:
    assert wildcard_matcher(pattern)(text) is reference(pattern, text)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab*?", max_size=6), st.text(alphabet="ab*?", max_size=4), PATTERNS)
def test_a_variables_value_is_no_pattern(text: str, value: str, pattern: str) -> None:
    in_front = Pattern("${aws:username}" + pattern).matches(text, lambda _: value)
    assert in_front is (text.startswith(value) and reference(pattern, text[len(value) :]))


@pytest.mark.parametrize(
    "pattern", ["*a" * 200 + "*b", "?a*" * 200, "a*" * 400, "*" * 1000 + "b", "?" * 900 + "*?" * 50, "*?a" * 300 + "b"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    matches = wildcard_matcher(pattern)
    started = time.thread_time()
    for text in ("a" * 1024, "ab" * 512, "b" + "a" * 1023):
        matches(text)
    assert time.thread_time() - started < 0.5


def test_variables_stand_for_what_the_request_has() -> None:
    values = {"aws:username": "bob", "s3:prefix": "x*"}.get
    assert Pattern("home/${aws:username}/*").matches("home/bob/file", values)
    assert not Pattern("home/${aws:username}/*").matches("home/alice/file", values)
    assert Pattern("${s3:prefix}").matches("x*", values)
    assert not Pattern("${s3:prefix}").matches("xy", values)
    assert Pattern("a${*}b${?}c${$}d").matches("a*b?c$d", values)
    assert Pattern("${aws:userid, 'nobody'}").matches("nobody", values)
    assert Pattern("${ aws:username , 'nobody' }").text(values) == "bob"


def test_a_variable_without_a_value_fits_nothing() -> None:
    pattern = Pattern("*${aws:username}*")
    assert pattern.needed == {"aws:username"}
    assert not pattern.matches("", unset)
    assert not pattern.matches("anything", unset)
    assert pattern.text(unset) is None
    assert Pattern("${aws:username,'x'}").needed == frozenset()


def test_text_is_text_where_neither_wildcards_nor_variables_count() -> None:
    assert Pattern("a*", has_wildcards=False).matches("a*", unset)
    assert not Pattern("a*", has_wildcards=False).matches("ab", unset)
    assert Pattern("${x}*", has_variables=False).matches("${x}y", unset)


@pytest.mark.parametrize("pattern", ["${}", "${a b}", "${aws:username,nobody}", "${aws:username 'x'}"])
def test_what_is_no_variable_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError):
        Pattern(pattern)
