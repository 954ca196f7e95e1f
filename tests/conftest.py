"""Fixtures that every folder may use, and one rule: in CI (`CI=true`) a skipped test is a failed one unless it is marked `gpu`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("module_paths", "remote_servers", "running_order")

IS_CI = os.environ.get("CI") == "true"

# No deadline and no judgement of slowness: two busy cores make every example slow now and then.
settings.register_profile("kvobj", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvobj")


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory in shared memory, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvobj-test-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_expected_failure = hasattr(report, "wasxfail")
    if IS_CI and report.skipped and not is_expected_failure and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which counts as failed in CI: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    is_gpu_folder = "gpu" in report.nodeid.split("/")  # a module has no marker yet when its import skips it
    if IS_CI and report.skipped and not is_gpu_folder:
        report.outcome = "failed"
        report.longrepr = f"module skipped, which counts as failed in CI: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
