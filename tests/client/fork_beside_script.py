"""A program that forks while another of its threads is in the middle of a step that one thread at a time may do: argument 1 says
which. Run by `test_forking.py`.

Ends with status 0 where the child did the step, too, or has nothing of it, and the parent's thread came to its end.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.same_host.descriptors import staging_memory
from kvobj.same_host.framing import framed
from kvobj.same_host.mapping import Mapping, mapped
from kvobj.same_host.messages import TOKEN_BYTES, VERSION, Hello, Region, Regions, Welcome, encode
from kvobj.tensors.kernels.host_launcher import HostLauncher, host_launcher
from kvobj.tensors.kernels.rans_tables import prepare

SIZE_BYTES = 8192
WAIT_SECONDS = 20


def map_memory() -> None:
    """As a client that connects does."""
    descriptor = staging_memory(SIZE_BYTES)
    assert mapped(descriptor, SIZE_BYTES, is_writable=True).size_bytes == SIZE_BYTES
    os.close(descriptor)


def prepare_tables() -> None:
    """As a codec does before its first kernel."""
    prepare(host_launcher())


def take_region() -> None:
    """As a client that a server shows a region."""
    mine, theirs = socket.socketpair()
    descriptor = staging_memory(SIZE_BYTES)
    said = framed(encode(Regions([Region(1, SIZE_BYTES)]))) + framed(encode(Welcome(VERSION)))
    socket.send_fds(theirs, [said], [descriptor])
    os.close(descriptor)
    lane = Lane(mine, GrantAnswer("", b"", b"", 1000))
    lane.call(Hello(VERSION, bytes(TOKEN_BYTES)), Welcome, deadline=time.monotonic() + 4 * WAIT_SECONDS)
    lane.close()
    theirs.close()


def have_no_region() -> None:
    """No descriptor of one is open."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            assert "kvobj-staging" not in str(descriptor.readlink())


STEPS: dict[str, tuple[Callable[[], None], CodeType, Callable[[], None]]] = {
    "mapping": (map_memory, Mapping.__init__.__code__, map_memory),
    "tables": (prepare_tables, HostLauncher.launch.__code__, prepare_tables),
    "region": (take_region, mapped.__code__, have_no_region),
}
"""What is done, the function that it is in the middle of when it calls it, and what the child does."""


def main() -> str | None:
    """Fork once the other thread is in the middle; what went wrong."""
    step, middle, in_child = STEPS[sys.argv[1]]
    is_there, may_go_on = threading.Event(), threading.Event()

    def stay(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is middle:
            is_there.set()
            assert may_go_on.wait(3 * WAIT_SECONDS)

    def other() -> None:
        sys.settrace(stay)
        step()
        sys.settrace(None)

    thread = threading.Thread(target=other)
    thread.start()
    assert is_there.wait(WAIT_SECONDS)
    child = os.fork()
    if child == 0:
        signal.alarm(WAIT_SECONDS)  # its end, where it waits for the parent's thread
        status = 1
        try:
            in_child()
            status = 0
        except BaseException:  # noqa: BLE001 - the child must not go on as the parent
            traceback.print_exc()
        os._exit(status)
    told = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    may_go_on.set()
    thread.join(WAIT_SECONDS)
    return None if told == 0 and not thread.is_alive() else f"the child has ended with {told}"


if __name__ == "__main__":
    sys.exit(main())
