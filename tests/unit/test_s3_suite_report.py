"""What `make s3-tests` makes of the suite's outcomes (the suite itself is run by hand: docs/conformance.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_s3_tests import EXPECTED, Expected, core_of, judge, kind_of, read_expected, read_outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="pack.tests.test_a.TestA" name="test_good"/>
<testcase classname="pack.tests.test_a.TestA" name="test_bad"><failure message="no&#10; good"/></testcase>
<testcase classname="pack.tests.test_a.TestA" name="test_bad"><error message="teardown"/></testcase>
<testcase classname="pack.tests.test_b" name="test_left_out"><skipped message="why"/></testcase>
</testsuite></testsuites>"""
LISTED = {
    "test_a::test_bad": Expected("suite differs from AWS", "a reason"),
    "test_b::test_left_out": Expected("refused by design", "another"),
}


def test_outcomes_are_told_by_file_and_nothing_that_was_skipped_passed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcomes = read_outcomes(tmp_path / "report.xml")
    assert [(outcome.id, outcome.complaint) for outcome in outcomes] == [
        ("test_a::test_bad", "teardown"),
        ("test_a::test_good", ""),
        ("test_b::test_left_out", "why"),
    ]
    assert [kind_of(outcome, LISTED) for outcome in outcomes] == [
        "suite differs from AWS",
        "passed",
        "refused by design",
    ]
    assert core_of(outcomes, LISTED) == (1, 2)


def test_only_what_is_listed_may_fail_and_only_while_it_does(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    outcomes = read_outcomes(tmp_path / "report.xml")
    assert judge(outcomes, LISTED) == 0
    assert judge(outcomes, {name: LISTED[name] for name in ["test_a::test_bad"]}) == 1
    assert judge(outcomes, LISTED | {"test_a::test_good": Expected("refused by design", "no more")}) == 1


def test_each_listed_test_has_one_known_class_and_a_reason(tmp_path: Path) -> None:
    assert all(expected.reason for expected in read_expected(EXPECTED).values())
    entry = '[[not_expected]]\nclass = "{}"\nreason = "r"\ntests = ["a::b"]\n'
    for text, refusal in (
        (entry.format("not nice"), "no such class"),
        (entry.format("refused by design") * 2, "listed twice"),
    ):
        (tmp_path / "list.toml").write_text(text)
        with pytest.raises(ValueError, match=refusal):
            read_expected(tmp_path / "list.toml")
