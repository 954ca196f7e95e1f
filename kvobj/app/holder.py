"""`kvobj serve --hold-sockets`: a parent that keeps the listening sockets while servers come and go (ADR 7).

It binds both ports, starts `kvobj serve` as its child with the sockets passed in systemd's way, and starts it again whenever it
ends. While there is no server, connections wait in the sockets' backlog. It touches no data and no byte of any request, imports
nothing of the server, and has one thread that waits for signals:

- SIGTERM, SIGINT: passed on; ends with the child, and with its exit status.
- SIGUSR2: passed on, and the child ends leaving memory to the next one: a new process, so of the version that is installed by then.
- SIGHUP: passed on: the child reads its certificate again.

A first start that fails ends it, as without a holder. Later ones are tried again after a pause, for ever: an operator who mends a
configuration need not be quick. Should the parent be killed, the kernel sends the child SIGTERM.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from kvobj.app.listening import FIRST_PASSED, Listeners, address_of, passed_on
from kvobj.app.log import start_logging
from kvobj.app.readiness import READY, VARIABLE
from kvobj.config.settings import Settings

_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_PASSED_ON: Final = frozenset({signal.SIGHUP, signal.SIGUSR2})
_WAITED_FOR: Final = _STOPS | _PASSED_ON | {signal.SIGCHLD}
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_CALM_SECONDS: Final = 10.0
"""A server that became ready and lived for so long is started again at once, whatever it died of."""
_OUT_OF_THE_WAY: Final = 64
_SET_PARENT_DEATH_SIGNAL: Final = 1


def hold(settings: Settings, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` (an absolute path and its arguments) over and over until told to stop; the exit status.

    Takes over the process's signal handling. Raises `ConfigurationError` where an address cannot be bound.
    """
    log = start_logging(settings.log).getChild("holder")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    listeners = Listeners.open(settings, environment)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as readiness:
            readiness.bind(b"")  # an abstract name of the kernel's choice
            readiness.setblocking(False)  # noqa: FBT003 - the standard library's own signature
            addresses = ", ".join(str(address_of(each)) for each in (*listeners.s3, listeners.admin))
            log.info("holding %s", addresses)
            return _Holder(listeners, readiness, command, environment, log).run()
    finally:
        listeners.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Holder:
    def __init__(
        self,
        listeners: Listeners,
        readiness: socket.socket,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: logging.Logger,
    ) -> None:
        self._listeners = listeners
        self._readiness = readiness
        self._command = command
        self._environment = environment
        self._log = log
        self._child = 0
        self._was_ever_ready = False
        self._is_stopping = False
        self._is_restarting = False

    def run(self) -> int:
        pause_seconds = 0.0
        while True:
            began = time.monotonic()
            self._start()
            status = self._wait_for_child()
            was_ready = self._was_ready()
            if self._is_stopping or not self._was_ever_ready:
                return status
            if self._is_restarting or (was_ready and time.monotonic() - began >= _CALM_SECONDS):
                pause_seconds = 0.0
            self._log.log(
                logging.INFO if self._is_restarting else logging.ERROR,
                "the server ended with status %d; the next starts in %.1f s",
                status,
                pause_seconds,
            )
            if self._pause(pause_seconds):
                return status
            pause_seconds = min(max(2 * pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)

    def _start(self) -> None:
        self._is_restarting = False
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            try:
                self._become_server(parent)
            except OSError as error:
                os.write(2, f"kvobj: cannot start {self._command[0]}: {error}\n".encode())
            finally:
                os._exit(127)

    def _become_server(self, parent: int) -> NoReturn:
        # A group of its own: an interrupt from the keyboard comes to the parent alone, which passes it on once.
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(127)
        held = [each.fileno() for each in (*self._listeners.s3, self._listeners.admin)]
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for each in held]
        for number, each in enumerate(moved, FIRST_PASSED):
            os.dup2(each, number, inheritable=True)
        name = self._readiness.getsockname()
        environment = {
            **self._environment,
            **passed_on(self._listeners, os.getpid()),
            VARIABLE: "@" + name[1:].decode("ascii"),
        }
        for early in _PASSED_ON:  # until the server listens to them, they would end it
            signal.signal(early, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
        os.execve(self._command[0], list(self._command), environment)  # noqa: S606 - this program again, no shell

    def _wait_for_child(self) -> int:
        """The child's exit status in the way of a shell: 128 and the signal's number where one ended it."""
        while True:
            received = signal.sigwait(_WAITED_FOR)
            if received == signal.SIGCHLD:
                status = self._reaped()
                if status is not None:
                    return status
                continue
            if received in _STOPS:
                self._is_stopping = True
            elif received == signal.SIGUSR2:
                self._is_restarting = True
            os.kill(self._child, received)

    def _reaped(self) -> int | None:
        status = None
        while True:
            try:
                process, outcome = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if process == 0:
                return status
            if process == self._child:  # others are orphans that came to us as process 1 of a container
                code = os.waitstatus_to_exitcode(outcome)
                status = code if code >= 0 else 128 - code

    def _was_ready(self) -> bool:
        """Whether the child that ended had said that it was ready."""
        was_ready = False
        while True:
            try:
                said = self._readiness.recv(4096)
            except BlockingIOError:
                self._was_ever_ready |= was_ready
                return was_ready
            was_ready |= READY.encode() in said.splitlines()

    def _pause(self, seconds: float) -> bool:
        """Wait; True if told to stop meanwhile. Restarts asked for in the pause are what is about to happen anyway."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) >= 0:
            received = signal.sigtimedwait(_WAITED_FOR, remaining)
            if received is not None and received.si_signo in _STOPS:
                return True
        return False
