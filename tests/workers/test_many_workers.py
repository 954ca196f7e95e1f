"""The start of more workers than the machine has cores: they take their time together, and none of them too much."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import node_settings, running_node

from kvobj.app import worker_pool
from kvobj.app.front import worker_processes
from kvobj.app.upstreams import make_upstreams
from kvobj.app.worker_pool import START_SECONDS, WorkerPool
from kvobj.clock import SystemClock
from kvobj.metrics import Metrics
from kvobj.workers.shared_words import SharedWords

WORKERS = 4


@asynccontextmanager
async def pool_of(directory: Path, memory: Path, workers: int) -> AsyncIterator[WorkerPool]:
    """A pool over a node, not started."""
    log, clock = logging.getLogger("test"), SystemClock()
    settings = node_settings(directory, memory, dram_mib=16, nvme_mib=64)
    settings = replace(settings, server=replace(settings.server, workers=workers))
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))]
        words = SharedWords.make()
        stack.callback(words.close)
        async with running_node(settings) as node:
            upstreams = make_upstreams(
                (), node.store, node.kv.chunks, store_id="", has_remote=False, clock=clock, metrics=Metrics(), log=log
            )
            pool = worker_processes(
                node,
                listeners,
                words,
                upstreams=upstreams,
                same_host=None,
                tls=None,
                clock=clock,
                metrics=Metrics(),
                log=log,
            )
            try:
                yield pool
            finally:
                await pool.aclose()


async def test_each_has_as_long_as_one_may_take_whatever_the_others_took(tmp_path: Path, shm_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with pool_of(tmp_path / "data", shm_path, WORKERS) as pool:
        began, left_seconds, took_seconds = loop.time(), 0.0, 0.0

        def all_can() -> None:
            nonlocal left_seconds, took_seconds
            took_seconds = loop.time() - began
            limit = pool._start_limit
            left_seconds = ((limit and limit.when()) or 0.0) - loop.time()

        await pool.start(all_can)
        assert left_seconds > START_SECONDS - took_seconds / 2
        assert [(each.is_ready, each.restarts) for each in pool.status()] == [(True, 0)] * WORKERS


async def test_no_more_of_them_start_at_once_than_get_on(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started all at once none would be there before the last."""
    at_most = 2
    monkeypatch.setattr(worker_pool, "STARTING_MAX", at_most)
    starting: list[int] = []
    async with pool_of(tmp_path / "data", shm_path, WORKERS) as pool:

        class CountedStarts(subprocess.Popen[bytes]):
            def __init__(self, command: list[str], *, pass_fds: list[int], stdin: int) -> None:
                able = sum(process.can_accept.done() for process in pool._processes())
                starting.append(len(starting) + 1 - able)
                super().__init__(command, pass_fds=pass_fds, stdin=stdin)

        monkeypatch.setattr(subprocess, "Popen", CountedStarts)
        await pool.start(lambda: None)
    assert max(starting[:WORKERS]) == at_most
