"""One server for a module of conformance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_worlds import World, running_world


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_world(tmp_path_factory.mktemp("conformance")) as running:
        yield running


@pytest.fixture
def bucket(world: World) -> str:
    return world.bucket()
