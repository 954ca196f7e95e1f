"""Servers that several modules here use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from federation_world import World, federation


@pytest.fixture(scope="session")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two kvobj processes, one the other's upstream."""
    with federation(tmp_path_factory.mktemp("federation")) as running:
        yield running
