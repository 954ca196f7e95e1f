"""What the engines' benchmark makes of its figures: medians, reasons in the place of values, targets, the harness's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines_figures import (
    Figures,
    Line,
    harness_figures,
    installed_versions,
    is_passed,
    line_of,
    markdown_table,
    percentile,
)
from engines_lmcache import SHAPES, SUBJECTS, lmcache_lines
from hypothesis import given
from hypothesis import strategies as st


def entry(operation: str, *, milliseconds: float, keys: int = 96, came: int = 96, timed_out: int = 0) -> dict[str, Any]:
    return {
        "operation": operation,
        "keys_per_round": 32,
        "total_keys": keys,
        "total_success": came,
        "rounds_timed_out": timed_out,
        "duration_p50_ms": milliseconds,
    }


def report(*entries: dict[str, Any]) -> dict[str, Any]:
    """As `lmcache bench l2 --format json` writes it, less what is not read."""
    operations = {f"op_{number}": each for number, each in enumerate(entries)}
    return {"title": "L2 Adapter Benchmark Result", "metrics": {"config": {"data_size_kb": 1024}, **operations}}


class TestHarness:
    def test_speeds_are_bytes_a_second_of_the_median_round(self) -> None:
        found = harness_figures(
            report(
                entry("Store", milliseconds=16.0),
                entry("Lookup", milliseconds=0.5),
                entry("Load", milliseconds=4.0),
            )
        )
        assert found.store == pytest.approx(32 * 2**20 / 0.016)
        assert found.load == pytest.approx(32 * 2**20 / 0.004)
        assert found.lookup == pytest.approx(0.0005)

    def test_what_was_not_run_has_no_value(self) -> None:
        found = harness_figures(report(entry("Lookup", milliseconds=0.5)))
        assert (found.store, found.load) == (None, None)

    @pytest.mark.parametrize(
        "wrong",
        [
            entry("Load", milliseconds=1.0, came=95),
            entry("Load", milliseconds=1.0, timed_out=1),
            entry("Load", milliseconds=0.0, keys=0, came=0),
        ],
    )
    def test_a_run_that_lost_a_key_says_nothing_of_speed(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="Load"):
            harness_figures(report(entry("Store", milliseconds=1.0), wrong))

    def test_an_empty_report_is_none(self) -> None:
        with pytest.raises(ValueError, match="no operation"):
            harness_figures({"metrics": {}})

    def test_a_duration_below_the_harness_resolution_is_no_infinite_speed(self) -> None:
        load = harness_figures(report(entry("Load", milliseconds=0.0))).load
        assert load is not None
        assert load <= 32 * 2**20 / 5e-6


class TestLines:
    def test_a_ratio_is_that_of_the_medians(self) -> None:
        figures = Figures()
        for value, limit in ((1.0, 10.0), (4.0, 10.0), (9.0, 2.0)):
            figures.note("own", value)
            figures.note("peer", limit)
        line = line_of(figures, "part", "name", "own", "GB/s", limit="peer", limit_name="peer", least_ratio=0.4)
        assert (line.value, line.limit, line.ratio) == (4.0, 10.0, 0.4)
        assert line.is_met
        assert line.verdict == "≥ 0.4: met"

    def test_a_bound_is_kept_from_above(self) -> None:
        figures = Figures()
        figures.note("own", 151e-6)
        line = line_of(figures, "part", "name", "own", "µs", scale=1e-6, most=150.0)
        assert line.is_met is False
        assert line.verdict == "≤ 150 µs: MISSED"
        assert not is_passed([line])

    def test_what_was_not_measured_is_shown_with_its_reason_and_is_not_passed(self) -> None:
        figures = Figures()
        figures.miss("part/peer", "peer is not installed")
        figures.note("part/own/load", 1.0)
        line = line_of(
            figures, "part", "name", "part/own/load", "", limit="part/peer/load", limit_name="peer", least_ratio=1.0
        )
        assert line.note == "peer: peer is not installed"
        assert line.is_met is None
        assert line.verdict.endswith("not judged")
        assert not is_passed([line])

    def test_a_round_that_failed_is_told_beside_the_median_of_the_others(self) -> None:
        figures = Figures()
        figures.note("part/own", 1.0)
        figures.miss("part/own", "timed out")
        assert line_of(figures, "part", "name", "part/own", "").note == "a round failed: timed out"

    def test_lines_without_a_target_do_not_fail_a_run(self) -> None:
        assert is_passed([Line("part", "name", "", None)])

    def test_the_first_reason_stands(self) -> None:
        figures = Figures()
        figures.miss("part/own", "first")
        figures.miss("part/own", "second")
        assert figures.reason("part/own/load") == "first"
        assert figures.reason("part/other") is None

    def test_every_adapter_has_its_lines_even_where_nothing_ran(self) -> None:
        lines = lmcache_lines(Figures(), SHAPES)
        for subject in SUBJECTS:
            assert any(subject in (*line.name.split(","), line.limit_name) for line in lines)
        assert all(line.note for line in lines)
        judged = [line for line in lines if line.has_target]
        # load and store against three peers, and S3's load, for each shape
        assert len(judged) == 7 * len(SHAPES)


def test_a_table_for_documents_has_a_row_a_line_whatever_stands_in_it() -> None:
    lines = [
        Line("part", "own", "GB/s", 2.0, 4.0, "peer", least_ratio=0.6),
        Line("part", "gone", "µs", None, most=150.0, note="a | b"),
    ]
    assert markdown_table(lines).splitlines()[2:] == [
        "| own | 2.00 GB/s | peer 4.00 GB/s | 0.50 | ≥ 0.6: MISSED |  |",
        "| gone | - |  |  | ≤ 150 µs: not judged | a / b |",
    ]


class TestPercentile:
    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 1))
    def test_it_is_a_value_with_at_least_that_share_at_or_below_it(self, values: list[float], share: float) -> None:
        found = percentile(values, share)
        assert found in values
        assert sum(value <= found for value in values) >= share * len(values) - 1e-6

    def test_known_ones(self) -> None:
        values = [float(value) for value in range(100, 0, -1)]
        assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]

    def test_no_values_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="no values"):
            percentile([], 0.5)


def test_versions_are_those_of_the_installed_packages(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for folder in ("lmcache-0.5.6.dist-info", "lmcache_extra-9.dist-info", "torch-2.13.0+cpu.dist-info"):
        (packages / folder).mkdir(parents=True)
    assert installed_versions(tmp_path, ("lmcache", "torch", "absent")) == {"lmcache": "0.5.6", "torch": "2.13.0+cpu"}
