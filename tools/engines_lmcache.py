"""LMCache's own harness, `lmcache bench l2`, through kvobj and beside it: one run of it is one process of the engines' environment.

Each run starts on an empty store: the harness's keys are the same every time, and storing a chunk again costs a KV bucket
nothing. What LMCache has found or stored its S3 adapter remembers, so look-ups through it are asked by a new process.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench_support import MIB, ServerProcess, delete_keys, settle
from engines_figures import GB, Figures, HarnessFigures, Line, harness_figures, line_of
from engines_s3_limit import bare_s3_server

REPOSITORY: Final = Path(__file__).resolve().parent.parent
ENVIRONMENT: Final = REPOSITORY / ".envs" / "engines"
PLUGIN_BUCKET: Final = "engine-plugin"
S3_BUCKET: Final = "engine-s3"
S3_HOST: Final = "localhost"
"""The S3 adapter speaks virtual-hosted style alone; `[server.hosts]` gives this name to its bucket."""

OPERATIONS: Final = ("store", "load", "lookup")
PART: Final = "lmcache"
PLUGIN: Final = "kvobj plugin"
DICT: Final = "dict plugin"
KVOBJ_S3: Final = "kvobj by S3"
REDIS: Final = "redis"
NATIVE_FILES: Final = "fs_native"
FILES: Final = "fs"
SUBJECTS: Final = (PLUGIN, DICT, REDIS, NATIVE_FILES, FILES, KVOBJ_S3)
BARE_S3: Final = "a bare server by S3"
"""What the S3 adapter loads where the server costs nothing: its own limit. No store, so it is no subject."""

_HARNESS_ROUNDS: Final = 3
_WARM_UP_ROUNDS: Final = 1
_RUN_SECONDS: Final = 300.0
_REDIS_SECONDS: Final = 60.0
_METRICS_SECONDS: Final = 10.0
_LIST_PAGE: Final = 1000
_WORKERS: Final = 4

# The kvobj plugin's ratio to each peer, by operation.
TARGETS: Final = {
    (DICT, "load"): 0.8,
    (DICT, "store"): 0.6,
    (REDIS, "load"): 3.0,
    (REDIS, "store"): 3.0,
    (NATIVE_FILES, "load"): 1.0,
    (NATIVE_FILES, "store"): 1.0,
}
S3_TARGET: Final = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How many chunks of what size one submit has."""

    keys: int
    size_kib: int

    @property
    def name(self) -> str:
        """For people."""
        size = f"{self.size_kib // 1024} MiB" if self.size_kib >= 1024 else f"{self.size_kib} KiB"  # noqa: PLR2004
        return f"{self.keys} x {size}"

    @property
    def stored_bytes(self) -> int:
        """What one run of the harness stores in all."""
        return self.keys * self.size_kib * 1024 * (_HARNESS_ROUNDS + _WARM_UP_ROUNDS)


SHAPES: Final = (Shape(32, 1024), Shape(16, 32 * 1024))
QUICK_SHAPES: Final = (Shape(8, 256), Shape(4, 2048))


@dataclass(frozen=True, slots=True)
class Subject:
    """One adapter: its `--l2-adapter` for a shape and an empty directory, and what empties its store before the next run."""

    name: str
    settings: Callable[[Shape, Path], dict[str, object]]
    empty: Callable[[], None]
    asks_again: bool = False


class Harness:
    """Runs all subjects against servers that run already. RuntimeError where the engines' environment is missing."""

    def __init__(self, server: ServerProcess, redis_port: int | None, directory: Path, figures: Figures) -> None:
        if not (ENVIRONMENT / "bin" / "lmcache").exists():
            raise RuntimeError("LMCache is not installed: make engine-envs")
        self._server = server
        self._redis_port = redis_port
        self._directory = directory
        self._figures = figures
        self._subjects = {subject.name: subject for subject in self._all_subjects()}

    def run(self, shape: Shape, name: str) -> None:
        """One run of one subject: its figures, or the reason why there are none."""
        place = f"{PART} {shape.name}/{name}"
        subject = self._subjects.get(name)
        if subject is None:
            self._figures.miss(place, _absence(name))
            return
        directory = self._directory / "run"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            settings = subject.settings(shape, directory)
            before = http_bytes(self._server)
            figures = self._measured(shape, settings, only=None)
            if name == PLUGIN:
                share = (http_bytes(self._server) - before) / (2 * shape.stored_bytes)
                self._figures.note(f"{place}/share over HTTP", share)
            if subject.asks_again:
                lookup = self._measured(shape, settings, only="lookup").lookup
                figures = HarnessFigures(figures.store, figures.load, lookup)
        except (RuntimeError, ValueError) as error:
            self._figures.miss(place, str(error))
        else:
            for operation in OPERATIONS:
                value = getattr(figures, operation)
                if value is not None:
                    self._figures.note(f"{place}/{operation}", value)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            subject.empty()

    def run_bare(self, shape: Shape) -> None:
        """Loads of the S3 adapter from a bare server, not verified: the bytes mean nothing."""
        place = f"{PART} {shape.name}/{BARE_S3}"
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with bare_s3_server(shape.size_kib * 1024) as port:
                load = self._measured(shape, self._s3_settings(port), only="load").load
        except (RuntimeError, ValueError) as error:
            self._figures.miss(place, str(error))
        else:
            if load is not None:
                self._figures.note(f"{place}/load", load)

    def _measured(self, shape: Shape, settings: dict[str, object], *, only: str | None) -> HarnessFigures:
        output = self._directory / "harness.json"
        output.unlink(missing_ok=True)
        command = [str(ENVIRONMENT / "bin" / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(settings)]
        command += ["--num-keys", str(shape.keys), "--data-size-kb", str(shape.size_kib), "--in-flight", "1"]
        command += ["--rounds", str(_HARNESS_ROUNDS), "--warmup-rounds", str(_WARM_UP_ROUNDS)]
        command += ["--lookup-max-hit-rate", "1.0", "--format", "json", "--output", str(output)]
        command += ["--only", only] if only else ["--no-skip-verify"]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {
            **inherited,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tools'}",
            "PYTHONHASHSEED": "0",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the harness did not end in {_RUN_SECONDS:.0f} s") from error
        if done.returncode or not output.exists():
            lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(f"the harness ended with {done.returncode}: {' / '.join(lines[-2:])[:300]}")
        return harness_figures(json.loads(output.read_text()))

    def _all_subjects(self) -> list[Subject]:
        found = [
            Subject(FILES, lambda _, place: {"type": "fs", "base_path": str(place)}, lambda: None),
            Subject(
                NATIVE_FILES,
                lambda _, place: {"type": "fs_native", "base_path": str(place), "num_workers": _WORKERS},
                lambda: None,
            ),
            Subject(
                KVOBJ_S3,
                lambda *_: self._s3_settings(self._server.port),
                lambda: self._empty(S3_BUCKET),
                asks_again=True,
            ),
        ]
        if self._redis_port is not None:
            found.append(Subject(REDIS, lambda *_: self._redis_settings(), self._flush_redis))
        if (REPOSITORY / "tools" / "dict_l2_plugin.py").exists():
            found.append(Subject(DICT, dict_settings, lambda: None))
        if (REPOSITORY / "kvobj" / "connectors" / "lmcache").is_dir():
            found.append(Subject(PLUGIN, lambda *_: self._plugin_settings(), lambda: self._empty(PLUGIN_BUCKET)))
        return found

    def _plugin_settings(self) -> dict[str, object]:
        credentials = self._server.credentials()
        parameters = {
            "endpoint": self._server.endpoint,
            "bucket": PLUGIN_BUCKET,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
        }
        return {
            "type": "plugin",
            "module_path": "kvobj.connectors.lmcache",
            "class_name": "KvobjL2Adapter",
            "adapter_params": parameters,
        }

    def _s3_settings(self, port: int) -> dict[str, object]:
        credentials = self._server.credentials()
        return {
            "type": "s3",
            "s3_endpoint": f"s3://{S3_HOST}:{port}",
            "s3_region": credentials.region,
            "disable_tls": True,
            "s3_prefer_http2": False,
            "s3_num_io_threads": 2,
            "aws_access_key_id": credentials.access_key,
            "aws_secret_access_key": credentials.secret_key,
        }

    def _redis_settings(self) -> dict[str, object]:
        return {"type": "resp", "host": "127.0.0.1", "port": self._redis_port}

    def _flush_redis(self) -> None:
        assert self._redis_port is not None
        flush_redis(self._redis_port)

    def _empty(self, bucket: str) -> None:
        """Remove all chunks and wait until the server is idle, so that no run pays for the one before it."""
        with self._server.raw(timeout_seconds=60.0) as raw:
            while True:
                query = {"bucket": bucket, "limit": str(_LIST_PAGE)}
                page = self._server.admin("GET", "/api/v1/objects", query=query)
                keys = [str(each["key"]) for each in page["objects"]]
                if not keys:
                    break
                delete_keys(raw, bucket, keys)
        settle(self._server)


def dict_settings(shape: Shape, _: Path) -> dict[str, object]:
    """The yardstick: a plug-in over a dictionary in LMCache's own process, with room for one run."""
    return {
        "type": "plugin",
        "module_path": "dict_l2_plugin",
        "class_name": "DictL2Adapter",
        "adapter_params": {"bytes": shape.stored_bytes + 64 * MIB},
    }


def lmcache_lines(figures: Figures, shapes: Sequence[Shape]) -> list[Line]:
    """The plug-in against each peer, kvobj's S3 side against Redis, and look-ups of all of them."""
    lines: list[Line] = []
    for shape in shapes:
        place = f"{PART} {shape.name}"
        share = figures.median(f"{place}/{PLUGIN}/share over HTTP")
        way = "" if share is None else f"{share:.0%} of its bytes over HTTP"
        for operation in ("load", "store"):
            lines += [
                line_of(
                    figures,
                    PART,
                    f"{PLUGIN}, {operation}, {shape.name}",
                    f"{place}/{PLUGIN}/{operation}",
                    "GB/s",
                    scale=GB,
                    limit=f"{place}/{peer}/{operation}",
                    limit_name=peer,
                    least_ratio=TARGETS.get((peer, operation)),
                    note=way if peer == DICT else "",
                )
                for peer in (DICT, REDIS, NATIVE_FILES, FILES)
            ]
            lines.append(
                line_of(
                    figures,
                    PART,
                    f"{KVOBJ_S3}, {operation}, {shape.name}",
                    f"{place}/{KVOBJ_S3}/{operation}",
                    "GB/s",
                    scale=GB,
                    limit=f"{place}/{REDIS}/{operation}",
                    limit_name=REDIS,
                    least_ratio=S3_TARGET if operation == "load" else None,
                )
            )
        lines += [
            line_of(
                figures,
                PART,
                f"{name}, load, {shape.name}",
                f"{place}/{name}/load",
                "GB/s",
                scale=GB,
                limit=f"{place}/{limit}/load",
                limit_name=limit,
            )
            for name, limit in ((BARE_S3, REDIS), (KVOBJ_S3, BARE_S3))
        ]
        for name in SUBJECTS:
            note = "asked by a new process" if name == KVOBJ_S3 else ""
            figure = f"{place}/{name}/lookup"
            lines.append(
                line_of(figures, PART, f"{name}, look-up of {shape.keys}", figure, "ms", scale=1e-3, note=note)
            )
    return lines


def http_bytes(server: ServerProcess) -> float:
    """Bytes that the S3 port has received and sent so far, bodies and heads: what shared memory took is not among them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.admin_port}/metrics", timeout=_METRICS_SECONDS) as answer:
        text = answer.read().decode()
    names = ("kvobj_s3_received_bytes_total", "kvobj_s3_sent_bytes_total")
    values = (line.split() for line in text.splitlines())
    return sum(float(words[1]) for words in values if words and words[0] in names)


def flush_redis(port: int) -> None:
    """Empty the database that LMCache uses, at once. RuntimeError if Redis refuses."""
    with socket.create_connection(("127.0.0.1", port), timeout=_REDIS_SECONDS) as connection:
        connection.sendall(b"*2\r\n$7\r\nFLUSHDB\r\n$4\r\nSYNC\r\n")
        if (reply := connection.recv(64)) != b"+OK\r\n":
            raise RuntimeError(f"Redis refused: {reply!r}")


def _absence(name: str) -> str:
    return {
        REDIS: "redis-server is not installed",
        DICT: "tools/dict_l2_plugin.py is not there",
        PLUGIN: "kvobj.connectors.lmcache is not there",
    }.get(name, "not known")
