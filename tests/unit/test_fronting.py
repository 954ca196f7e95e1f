"""What a node's configuration and its machine make of the HTTP front."""

from __future__ import annotations

import pytest

from kvobj.app.fronting import receiver_threads


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(1, 1, 0), (2, 1, 0), (4, 1, 2), (16, 1, 8), (64, 1, 8), (16, 8, 0)]
)
def test_bodies_are_received_by_threads_only_on_cores_that_nobody_else_needs(
    cores: int, workers: int, threads: int
) -> None:
    assert receiver_threads(cores, workers=workers) == threads
