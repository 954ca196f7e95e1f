"""What a server says of its workers' health: who stands still does not serve, and who was replaced once does not fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, wait_until
from worker_server import is_ready, kill_all_workers, lives, pids_of, wait_for_workers, worker_server, workers_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with worker_server(tmp_path) as running:
        yield running


def test_a_server_whose_workers_all_stand_still_is_not_ready(server: ServerProcess) -> None:
    workers = pids_of(server)
    assert is_ready(server)
    os.kill(workers[0], signal.SIGSTOP)
    wait_until(lambda: not workers_of(server)[0]["is_ready"], timeout_seconds=20, what="the first to be missed")
    assert is_ready(server)  # the other serves
    os.kill(workers[0], signal.SIGCONT)
    wait_for_workers(server)
    workers = pids_of(server)  # at once, since each is replaced after twice the time that it takes to be missed
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: not is_ready(server), timeout_seconds=20, what="nobody to count as serving")
    assert all(map(lives, workers))
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: is_ready(server), timeout_seconds=20, what="the workers to be heard of again")


def test_a_store_process_that_stood_still_does_not_take_its_workers_for_silent(server: ServerProcess) -> None:
    with server.hanging():
        waiting = server.raw(timeout_seconds=7)
        with pytest.raises(TimeoutError):  # longer than workers may be silent
            waiting.request("PUT", "/plain/a", b"x")
        waiting.close()
    assert is_ready(server)
    assert all(worker["is_ready"] for worker in workers_of(server))


def test_a_worker_that_is_replaced_once_is_no_failing_one(server: ServerProcess) -> None:
    victims = kill_all_workers(server)  # the idle one too, so that the next takes a while
    notes: list[str] = []

    def are_replaced() -> bool:
        status = server.status()
        notes.extend(status["notes"])
        return all(worker["is_ready"] and worker["pid"] not in victims for worker in status["workers"])

    wait_until(are_replaced, timeout_seconds=30, what="other workers", pause_seconds=0.01)
    wait_for_workers(server)
    assert not [note for note in notes if "again and again" in note]
