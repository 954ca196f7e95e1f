"""`kvobj serve --hold-sockets`: a parent that keeps the listening sockets while servers come and go (ADR 7).

It binds both ports, starts `kvobj serve` as its child with the sockets passed in systemd's way, and starts it again whenever it
ends. While there is no server, connections wait in the sockets' backlog. It touches no data and no byte of any request, imports
nothing of the server, and has one thread that waits for signals:

- SIGTERM, SIGINT: passed on; ends with the child, and with its exit status.
- SIGUSR2: passed on, and the child ends leaving memory to the next one: a new process, so of the version that is installed by then.
  Before that `kvobj serve --check` looks at the configuration: with one that cannot be used the child goes on. A version that
  knows no `--check` is started without.
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
from contextlib import suppress
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
_CHECK_SECONDS: Final = 10.0
_CHECK_TEXT_MAX_BYTES: Final = 65536
_UNUSABLE: Final = 2
"""The exit status of a configuration that cannot be used, and of arguments that are not known."""
_CANNOT_CHECK: Final = b"unrecognized arguments: --check"


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
        self._check = 0
        self._check_text = -1
        self._check_deadline = 0.0
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
        _live_and_die_with(parent)
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
            received = self._next_signal()
            if received is None:
                self._drop_check()
                self._log.error("no restart, the server goes on: the check of the configuration did not end")
            elif received == signal.SIGCHLD:
                ended = self._reaped()
                if self._child in ended:
                    if self._check in ended:
                        self._forget_check()
                    self._drop_check()  # the next server reads the configuration anyway
                    return ended[self._child]
                if self._check in ended and self._would_start(ended[self._check]):
                    self._is_restarting = True
                    os.kill(self._child, signal.SIGUSR2)
            elif received == signal.SIGUSR2:
                if not self._is_stopping:
                    self._begin_check()
            else:
                if received in _STOPS:
                    self._is_stopping = True
                    self._drop_check()
                os.kill(self._child, received)

    def _next_signal(self) -> int | None:
        """The next signal; None where the check that runs has taken too long."""
        if not self._check:
            return signal.sigwait(_WAITED_FOR)
        received = signal.sigtimedwait(_WAITED_FOR, max(0.0, self._check_deadline - time.monotonic()))
        return None if received is None else received.si_signo

    # -- the check before a restart ------------------------------------------------------------------------------
    def _begin_check(self) -> None:
        """Begin to look at the configuration as it is by now, in place of a check that has begun before."""
        self._drop_check()
        parent = os.getpid()
        ends: tuple[int, ...] = ()
        try:
            ends = text, written = os.pipe2(os.O_CLOEXEC)
            self._check = os.fork()
        except OSError as error:
            for end in ends:
                os.close(end)
            self._log.error("no restart, the server goes on: the configuration was not checked: %s", error)
            return
        if self._check == 0:
            try:
                self._become_check(parent, written)
            except OSError as error:
                os.write(written, f"kvobj: cannot start {self._command[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(written)
        os.set_blocking(text, False)
        self._check_text = text
        self._check_deadline = time.monotonic() + _CHECK_SECONDS

    def _become_check(self, parent: int, written: int) -> NoReturn:
        _live_and_die_with(parent)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, 1)
        os.dup2(written, 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
        os.execve(self._command[0], [*self._command, "--check"], dict(self._environment))  # noqa: S606 - as above

    def _would_start(self, status: int) -> bool:
        """Whether the check that has ended so speaks for a restart; what it found wrong is passed on to standard error."""
        try:
            text = os.read(self._check_text, _CHECK_TEXT_MAX_BYTES)  # all: a pipe holds no more, who writes more waits
        except BlockingIOError:
            text = b""
        self._forget_check()
        if status == _UNUSABLE and _CANNOT_CHECK in text:
            self._log.warning("the version that is installed now cannot check its configuration: restarting as it is")
            return True
        with suppress(OSError):
            os.write(2, text)
        if status == _UNUSABLE:
            self._log.error("no restart, the server goes on: the configuration cannot be used as it is now")
        elif status:
            self._log.error(
                "no restart, the server goes on: the check of the configuration ended with status %d", status
            )
        return status == 0

    def _drop_check(self) -> None:
        """End the check that runs, if one does."""
        if self._check:
            os.kill(self._check, signal.SIGKILL)  # reaped with the others
            self._forget_check()

    def _forget_check(self) -> None:
        os.close(self._check_text)
        self._check, self._check_text = 0, -1

    def _reaped(self) -> dict[int, int]:
        """Server and check, as far as they have ended, with their exit statuses in the way of a shell."""
        statuses: dict[int, int] = {}
        while True:
            try:
                process, outcome = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return statuses
            if process == 0:
                return statuses
            if process in (self._child, self._check):  # others are orphans that came to us as process 1 of a container
                code = os.waitstatus_to_exitcode(outcome)
                statuses[process] = code if code >= 0 else 128 - code

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
            if received is not None and received.si_signo == signal.SIGCHLD:
                self._reaped()  # a check that was ended with the server
        return False


def _live_and_die_with(parent: int) -> None:
    """In a child: a group of its own, since an interrupt from the keyboard comes to the parent alone, which passes it on once; and
    SIGTERM when the parent ends."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(127)
