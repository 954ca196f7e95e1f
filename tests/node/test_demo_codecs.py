"""The demo of codecs with tiny tiers: what it shows is so, and is what codecs are for."""

from __future__ import annotations

import io

import pytest
from demo_codecs import Plan, Shown, compare, show
from module_paths import ModulePaths
from rich.console import Console
from tier_codecs import usable

PLAN = Plan(dram_mib=16, chunk_tokens=32, layers=8, reads=2)


@pytest.fixture(scope="module")
def shown(module_paths: ModulePaths) -> Shown:
    if not (usable(PLAN.dram) and usable(PLAN.nvme)):
        pytest.skip("the CPU kernels are not built on this machine")
    return compare(PLAN, module_paths.mktemp("demo"), lambda _: None)


def test_memory_and_home_hold_more_chunks_in_the_same_bytes(shown: Shown) -> None:
    assert set(shown.coded["dram"].codecs) == {PLAN.dram}
    assert set(shown.coded["nvme"].codecs) == {PLAN.nvme}
    assert set(shown.plain["dram"].codecs) == set(shown.plain["nvme"].codecs) == {"raw"}
    assert shown.coded["dram"].codecs["x3"] > 1.35
    assert shown.coded["nvme"].codecs["xa"] > 1.4
    assert shown.coded["dram"].chunks >= 1.2 * shown.plain["dram"].chunks


def test_a_reader_that_decodes_gets_fewer_bytes_from_either_tier(shown: Shown) -> None:
    kinds = [(tier, kind) for tier in ("dram", "nvme") for kind in ("plain", "decoded", "frame")]
    assert sorted(shown.reads) == sorted(kinds)
    for tier, kind in kinds:
        sent = max(shown.reads[tier, kind].wire_bytes)
        assert sent < PLAN.form.plain_bytes / 1.3 if kind == "frame" else sent == PLAN.form.plain_bytes


def test_the_tables_name_tiers_codecs_and_kernels(shown: Shown) -> None:
    out = io.StringIO()
    show(PLAN, shown, Console(file=out, width=200))
    text = out.getvalue()
    assert "CPU kernels" in text
    assert all(word in text for word in ("dram", "nvme", "x3", "xa", "the reader", "the server"))
