"""Figures of the benchmarks that are judged by a ratio with a goal on either side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from goals import Goal, compared, markdown, report, shown


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    figure = compared("GET", [10.0, 30.0, 24.0], [10.0, 20.0, 10.0], "directly", "ms", goal=Goal(1.5))
    assert (figure.judged, figure.least, figure.greatest) == (1.5, 1.0, 2.4)
    assert (figure.value, figure.beside) == (24.0, 10.0)
    assert figure.is_met


@pytest.mark.parametrize(("goal", "is_met"), [(Goal(2.0), True), (Goal(1.9), False), (Goal(2.0, at_most=False), True)])
def test_a_goal_bounds_from_above_or_from_below(goal: Goal, is_met: bool) -> None:  # noqa: FBT001
    assert shown("count", [1.0, 2.0, 5.0], "", goal=goal).is_met is is_met


def test_a_report_fails_where_a_goal_is_missed_and_says_so_in_every_form(tmp_path: Path) -> None:
    figures = [shown("requests", [3.0], "", goal=Goal(0.0)), compared("PUT", [1.0], [2.0], "it", "ms")]
    status = report("title", figures, json_path=tmp_path / "a.json", markdown_path=tmp_path / "a.md")
    assert status == 1
    assert "≤ 0 MISSED" in (tmp_path / "a.md").read_text()
    assert [row["is_met"] for row in json.loads((tmp_path / "a.json").read_text())["figures"]] == [False, True]
    assert "| PUT | 1.00 ms | 2.00 ms | it | 0.50 |" in markdown("title", figures)
