"""An engine's S3 client in a process of its own, told what to do line by line: what the tests of LMCache and NIXL share."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest
from client_suite import ENVIRONMENTS, body_of
from server_process import ServerProcess, wait_until

PYTHON: Final = ENVIRONMENTS / "engines" / "bin" / "python"
SCRIPTS: Final = Path(__file__).resolve().parent / "engine_scripts"


def needs_engines() -> None:
    """Skip the calling module where the engines' environment is not there. CI makes it, so there it fails instead."""
    if not PYTHON.exists():
        reason = "the engines' clients are not installed: make engine-envs"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)


def digest_of(size_bytes: int, seed: int) -> str:
    """What a script answers for the body of that size and seed, once it has come back whole."""
    return hashlib.sha256(body_of(size_bytes, seed)).hexdigest()


class EngineProcess:
    """One script of `engine_scripts`, running. A context manager; one thread asks at a time."""

    def __init__(self, script: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = [str(PYTHON), str(SCRIPTS / script)]
        self._log = log
        # Byte code is kept beside what was installed without it, whatever the tests' own environment says.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environment = {**inherited, "AWS_EC2_METADATA_DISABLED": "true", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._received = bytearray()

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    @contextmanager
    def stopped_past_its_lease(self, server: ServerProcess) -> Iterator[None]:
        """The client stands still until its sessions at this server, which nobody else uses, have ended; it goes on afterwards."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            wait_until(
                lambda: server.status()["leases"]["sessions"] == 0, timeout_seconds=15, what="the sessions to end"
            )
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ask(self, command: str, *, timeout_seconds: float = 60.0, **fields: object) -> Any:  # noqa: ANN401 - JSON
        """What a command of the script returned. RuntimeError with what it raised, or when it is gone; TimeoutError."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **fields}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._line(timeout_seconds))
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}\n{self.log_tail()}")
        return answer["value"]

    def _line(self, timeout_seconds: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(timeout_seconds):
                    self._process.kill()  # its answer, if it came, would be taken for the next one's
                    raise TimeoutError(f"no answer from {self._command[-1]}\n{self.log_tail()}")
                if not (piece := self._process.stdout.read(65536)):
                    raise RuntimeError(f"{self._command[-1]} ended\n{self.log_tail()}")
                self._received += piece
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        return line

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the client wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])
