"""Timeouts that the kernel keeps: neither too short nor for ever, however little is left."""

from __future__ import annotations

import socket
import time

import pytest

from kvobj.client.kernel_timeout import SHARE_LEFT, SHARE_SET, left_until, set_timeout


@pytest.mark.parametrize("seconds", [1e-9, 0.1])
def test_a_wait_ends_once_its_time_is_over_and_not_before(seconds: float) -> None:
    here, there = socket.socketpair()
    with here, there:
        timeout = set_timeout(here, seconds)
        began = time.monotonic()
        with pytest.raises(BlockingIOError):
            here.recv(1)
        took = time.monotonic() - began
    assert seconds <= took < 5
    assert timeout == seconds * SHARE_SET


def test_what_is_set_still_fits_when_a_little_has_passed() -> None:
    here, there = socket.socketpair()
    with here, there:
        timeout = set_timeout(here, 30.0)
    assert timeout * SHARE_LEFT <= 29.0 <= timeout


def test_a_deadline_that_has_passed_is_no_time_to_wait() -> None:
    assert 59 < left_until(time.monotonic() + 60) <= 60
    with pytest.raises(TimeoutError):
        left_until(time.monotonic())
