"""Mooncake Store over TCP beside kvobj: its master, a process that holds the objects, another that reads them over TCP.

The released wheel without CUDA in an environment of its own: `make mooncake-env`, which names its version. Importing this takes
the standard library alone, since the two clients are this file, run by that environment's interpreter; they are told what to do
by JSON, a line each. The master listens on loopback; what ports its clients open for transfers Mooncake decides.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import selectors
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from free_ports import free_port, wait_for_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ENVIRONMENT: Final = Path(__file__).resolve().parent.parent / ".envs" / "mooncake"
MIB: Final = 1024 * 1024
_LOCAL_BUFFER_BYTES: Final = 128 * MIB
_ANSWER_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 10.0


def absence() -> str | None:
    """Why it cannot run here, and what to install; None: it can."""
    master = ENVIRONMENT / "bin" / "mooncake_master"
    if not master.exists():
        return "Mooncake is not installed: make mooncake-env"
    asked = subprocess.run(
        [str(master), "--version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
    )
    if asked.returncode:  # its wheel has RDMA in it, whose library is the system's
        return f"Mooncake does not start (its wheel needs libibverbs1): {asked.stderr.strip()[-200:]}"
    return None


class MooncakeClient:
    """One client of the store in a process of its own; a context manager. RuntimeError with its log's tail where it fails."""

    def __init__(self, directory: Path, name: str, master_port: int, segment_bytes: int) -> None:
        self._log = directory / f"{name}.log"
        arguments = [str(master_port), str(free_port()), str(segment_bytes)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).resolve()), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def put(self, key: str, size_bytes: int) -> None:
        """Store an object of a pattern."""
        self._ask(command="put", key=key, size_bytes=size_bytes)

    def get(self, key: str, size_bytes: int, *, count: int, seconds: float) -> list[float]:
        """Seconds that each of so many GETs into registered memory took; fewer where the time is over."""
        times: list[float] = self._ask(command="get", key=key, size_bytes=size_bytes, count=count, seconds=seconds)
        return times

    def _ask(self, **fields: object) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                piece = self._process.stdout.read(65536) if selector.select(_ANSWER_SECONDS) else b""
                if not piece:
                    raise RuntimeError(
                        f"no answer from Mooncake's client: {self._log.read_text(errors='replace')[-600:]}"
                    )
                line += piece
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"Mooncake: {answer['error']}")
        return answer["value"]


@contextmanager
def mooncake_store(directory: Path, sizes: Sequence[int]) -> Iterator[tuple[MooncakeClient, MooncakeClient]]:
    """Run a master and two clients: who holds an object `get-SIZE` of each size, and who has none and reads over TCP."""
    directory.mkdir(parents=True, exist_ok=True)
    rpc_port, metrics_port = free_port(), free_port()
    command = [
        str(ENVIRONMENT / "bin" / "mooncake_master"),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={rpc_port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
    ]
    with ExitStack() as stack:
        stack.enter_context(_master(command, rpc_port, directory))
        room = 2 * sum(sizes) + 64 * MIB
        holder = stack.enter_context(MooncakeClient(directory, "holder", rpc_port, room))
        for size in sizes:
            holder.put(f"get-{size}", size)
        reader = stack.enter_context(MooncakeClient(directory, "reader", rpc_port, 0))
        yield holder, reader


@contextmanager
def _master(command: list[str], port: int, directory: Path) -> Iterator[None]:
    with (directory / "master.log").open("wb") as log:
        master = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_port(port, master)
        yield
    finally:
        master.terminate()
        try:
            master.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()


class _Client:
    """Inside Mooncake's environment: one store client and a registered buffer to read into."""

    def __init__(self, master_port: int, port: int, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - of the other environment

        self._store = MooncakeDistributedStore()
        self._check(
            self._store.setup(
                f"127.0.0.1:{port}",
                "P2PHANDSHAKE",
                segment_bytes,
                _LOCAL_BUFFER_BYTES,
                "tcp",
                "",
                f"127.0.0.1:{master_port}",
            )
        )
        self._room = mmap.mmap(-1, _LOCAL_BUFFER_BYTES)
        self._room.write(bytes(_LOCAL_BUFFER_BYTES))  # its pages are there
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._check(self._store.register_buffer(self._address, _LOCAL_BUFFER_BYTES))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"code {code}")

    def put(self, key: str, size_bytes: int) -> None:
        self._check(self._store.put(key, bytes(range(256)) * (size_bytes // 256)))

    def get(self, key: str, size_bytes: int, count: int, seconds: float) -> list[float]:
        times: list[float] = []
        self._once(key, size_bytes)
        ends = time.monotonic() + seconds
        while len(times) < count and time.monotonic() < ends:
            began = time.perf_counter()
            self._once(key, size_bytes)
            times.append(time.perf_counter() - began)
        return times

    def _once(self, key: str, size_bytes: int) -> None:
        self._room[1] = 0
        came = self._store.get_into(key, self._address, size_bytes)
        if came != size_bytes or self._room[1] != 1:
            raise RuntimeError(f"get of {size_bytes} bytes: {came}")


def _serve(master_port: int, port: int, segment_bytes: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Mooncake prints is no answer
    client = _Client(master_port, port, segment_bytes)
    answers.write('{"value": null}\n')
    for line in sys.stdin:
        asked = json.loads(line)
        commands: dict[str, Callable[..., object]] = {"put": client.put, "get": client.get}
        command = commands[asked.pop("command")]
        try:
            answers.write(json.dumps({"value": command(**asked)}) + "\n")
        except RuntimeError as error:
            answers.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    _serve(*(int(each) for each in sys.argv[1:4]))
    os._exit(0)  # its native threads would abort
