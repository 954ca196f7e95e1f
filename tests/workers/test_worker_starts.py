"""A worker process that cannot begin: one line of the log, and a status that says what it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_process import REPOSITORY

from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpSettings
from kvobj.app import worker_orders
from kvobj.app.worker_orders import CANNOT_SERVE, OTHER_VERSION, S3Orders, TlsPair, WorkerOrders, send_orders
from kvobj.config.settings import LogSettings
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.shared_words import SharedWords


def orders_of(directory: Path) -> WorkerOrders:
    """Orders that name places in a directory, in which nothing is."""
    return WorkerOrders(
        listeners=(0,),
        s3=S3Orders.of(S3Settings()),
        http=HttpSettings(),
        log=LogSettings(),
        tls=None,
        arena=directory,
        huge_pages=False,
        durable=directory / "durable",
        volatile=directory / "volatile",
        map_bytes=1 << 20,
        volatile_map_bytes=1 << 20,
        wrapping_key=bytes(32),
        levels=None,
        keeping=Keeping(0, 0.0),
    )


def end_of(orders: WorkerOrders) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of a worker with these orders, and what it wrote on standard error: a line of JSON each, or this fails."""
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(SharedWords.make()) as words, socket.create_server(("127.0.0.1", 0)) as listener:
        send_orders(ours, orders)
        passed = [theirs.fileno(), words.descriptor, listener.fileno()]
        command = [sys.executable, "-m", "kvobj.app.worker", *(str(each) for each in (os.getpid(), *passed))]
        ended = subprocess.run(
            command, cwd=REPOSITORY, pass_fds=passed, capture_output=True, text=True, timeout=60, check=False
        )
    return ended.returncode, [json.loads(line) for line in ended.stderr.splitlines()]


def test_a_worker_that_cannot_open_the_catalog_says_why_in_a_line(tmp_path: Path) -> None:
    status, lines = end_of(orders_of(tmp_path))
    assert status == CANNOT_SERVE
    (line,) = lines
    assert line["level"] == "error"
    assert str(tmp_path / "durable") in line["message"]


def test_a_worker_whose_pair_does_not_fit_says_so_in_a_line(tmp_path: Path) -> None:
    status, lines = end_of(msgspec.structs.replace(orders_of(tmp_path), tls=TlsPair(b"no certificate", b"no key")))
    assert status == CANNOT_SERVE
    (line,) = lines
    assert "holds no certificate" in line["message"]


def test_a_worker_of_another_version_says_so_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_orders, "_agreement", lambda: bytes(32))
    status, lines = end_of(orders_of(tmp_path))
    assert status == OTHER_VERSION
    (line,) = lines
    assert "another version of kvobj" in line["message"]
