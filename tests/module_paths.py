"""Directories that last as long as a module's tests.

pytest keeps what ``tmp_path_factory`` makes until its whole session ends. A store's segments are preallocated, a gigabyte by
default, and some sixty modules start one each: a run would need forty gigabytes of disk at its end, and every test fails on
the full disk of a machine that has less.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


class ModulePaths:
    """Makes directories, and removes all of them together."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: list[Path] = []

    def mktemp(self, name: str) -> Path:
        """A new, empty directory, of which ``name`` is the beginning of its own name."""
        path = self._factory.mktemp(name)
        self._made.append(path)
        return path

    def remove(self) -> None:
        """Remove what was made, as far as it is still there."""
        for path in self._made:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def module_paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModulePaths]:
    """Directories for the fixtures of one module; they stay where one of its tests failed, as a ``tmp_path`` does."""
    paths = ModulePaths(tmp_path_factory)
    failed_before = request.session.testsfailed
    yield paths
    if request.session.testsfailed == failed_before:
        paths.remove()
