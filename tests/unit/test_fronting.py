"""What a node's configuration and its machine make of the HTTP front."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobj.app.fronting import http_settings, receiver_threads, s3_settings
from kvobj.config.settings import LimitSettings, ServerSettings, Settings


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(1, 1, 0), (2, 1, 0), (4, 1, 2), (16, 1, 8), (64, 1, 8), (16, 8, 0)]
)
def test_bodies_are_received_by_threads_only_on_cores_that_nobody_else_needs(
    cores: int, workers: int, threads: int
) -> None:
    assert receiver_threads(cores, workers=workers) == threads


def settings_of(**limits: int) -> Settings:
    return Settings(server=ServerSettings(data=Path("data")), limits=LimitSettings(**limits))


@pytest.mark.parametrize(
    ("limit", "workers", "share"),
    [(1024, 1, 1024), (1024, 4, 392), (30, 3, 23), (12, 2, 12), (1, 8, 1), (10**6, 7, 214294)],
)
def test_a_worker_has_half_of_its_share_of_connections_more_and_never_more_than_all(
    limit: int, workers: int, share: int
) -> None:
    front = http_settings(settings_of(connections=limit, address_connections=limit), "s3", workers=workers)
    assert (front.connections, front.address_connections) == (share, share)


def test_bursts_of_all_workers_together_keep_what_those_of_one_process_may() -> None:
    alone, divided = (s3_settings(settings_of(), host_id="", dram_bytes=1 << 30, workers=workers) for workers in (1, 4))
    assert alone.bursts_bytes == 4 * divided.bursts_bytes == 1 << 26
