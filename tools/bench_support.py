"""What the benchmarks share: a server of their own, prepared signed requests, tables and plots of ratios.

Importing this makes the test suite's server process and raw S3 client importable, so that both start kvobj in one way.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from load_client import hardware
from raw_http import Credentials, RawS3, canonical_query, sign_head, signing_key
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MIB", "BucketSetting", "Credentials", "RawS3", "ServerProcess", "ServerSettings", "sign_head", "wait_until"]

DELETE_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a benchmark: kvobj's median against its limit's, their ratio against its target (None: shown only)."""

    name: str
    value: float
    limit: float
    limit_name: str
    unit: str
    target: float | None = None
    client_cpu_share: float | None = None
    server_cpu_seconds_per_gib: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """What is judged."""
        return self.value / self.limit if self.limit else 0.0

    @property
    def is_met(self) -> bool:
        """Whether the target is reached, true where there is none."""
        return self.target is None or self.ratio >= self.target


def report(title: str, rows: Sequence[Row], *, json_path: Path | None, plot_path: Path | None) -> int:
    """Print the rows, write the files asked for; 0 if every target is met, else 1."""
    table = Table(
        "what", "kvobj", "limit", "limit server", "ratio", "target", "client CPU", "server CPU s/GiB", title=title
    )
    for row in rows:
        target = "" if row.target is None else f"{row.target:.2f} {'met' if row.is_met else 'MISSED'}"
        share = "" if row.client_cpu_share is None else f"{row.client_cpu_share:.0%}"
        cpu = "" if row.server_cpu_seconds_per_gib is None else f"{row.server_cpu_seconds_per_gib:.3f}"
        name = f"{row.name} ({row.note})" if row.note else row.name
        values = (f"{row.value:.2f} {row.unit}", f"{row.limit:.2f} {row.unit}")
        table.add_row(name, *values, row.limit_name, f"{row.ratio:.2f}", target, share, cpu)
    Console(width=160).print(table)
    if json_path is not None:
        record = {"title": title, "hardware": hardware(), "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    if plot_path is not None:
        _plot(plot_path, title, rows)
    return 0 if all(row.is_met for row in rows) else 1


def _plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - only who plots needs it

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(9, 1 + 0.35 * len(rows)))
    positions = range(len(rows))
    axes.barh(positions, [row.ratio for row in rows])
    marks = [(row.target, position) for position, row in zip(positions, rows, strict=True) if row.target is not None]
    axes.plot([target for target, _ in marks], [position for _, position in marks], "k|", markersize=14, label="target")
    axes.set_yticks(positions, [f"{row.name} / {row.limit_name}" for row in rows])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="ratio to the limit")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each named figure over the rounds that have it."""
    names = {name for figures in rounds for name in figures}
    return {name: median(figures[name] for figures in rounds if name in figures) for name in sorted(names)}


def signed(server: ServerProcess | RemoteTarget, method: str, path: str, **headers: str) -> bytes:
    """A signed request head with an unsigned payload; header names with `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    authority = f"{server.host}:{server.port}"
    return sign_head(server.credentials(), method, authority, path, headers=named).head


def presigned(server: ServerProcess | RemoteTarget, method: str, path: str, **headers: str) -> bytes:
    """A request head whose target is a presigned URL of one day, the payload unsigned; only Host is signed. Headers as `signed`."""
    credentials, authority = server.credentials(), f"{server.host}:{server.port}"
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{stamp[:8]}/{credentials.region}/s3/aws4_request"
    query = canonical_query(
        {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{credentials.access_key}/{scope}",
            "X-Amz-Date": stamp,
            "X-Amz-Expires": "86400",
            "X-Amz-SignedHeaders": "host",
        }
    )
    canonical = f"{method}\n{path}\n{query}\nhost:{authority}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(signing_key(credentials, stamp[:8]), text.encode(), "sha256").hex()
    lines = [f"{method} {path}?{query}&X-Amz-Signature={signature} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """An S3 server that somebody else runs (radosgw)."""

    host: str
    port: int
    key_pair: Credentials

    def credentials(self) -> Credentials:
        """Its key pair."""
        return self.key_pair


def delete_keys(raw: RawS3, bucket: str, keys: Sequence[str]) -> None:
    """Delete many keys; RuntimeError if the server refuses."""
    for first in range(0, len(keys), DELETE_BATCH):
        objects = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys[first : first + DELETE_BATCH])
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        reply = raw.request("POST", f"/{bucket}", body, query={"delete": ""}, payload=body)
        if reply.status != 200:  # noqa: PLR2004 - HTTP
            raise RuntimeError(f"delete refused status={reply.status} body={reply.body[:300]!r}")


def settle(server: ServerProcess, *, timeout_seconds: float = 120.0) -> None:
    """Wait until deleted blobs are reaped and the process is idle, so that no round pays for the one before it."""
    last: float | None = None  # the first look compares with nothing: two right after each other always say idle

    def is_idle() -> bool:
        nonlocal last
        now = server.cpu_seconds()
        idle, last = last is not None and now - last <= 0.01, now  # noqa: PLR2004 - one tick of /proc/PID/stat
        return idle and server.occupancy()["arena reserved_bytes"] <= server.settings.dram_bytes // 2

    wait_until(is_idle, timeout_seconds=timeout_seconds, what="the server to become idle", pause_seconds=0.25)


@contextmanager
def own_server(directory: Path, settings: ServerSettings) -> Iterator[ServerProcess]:
    """A server of the benchmark's own, its arena populated."""
    with ServerProcess(directory, settings) as server:
        wait_until(lambda: _is_populated(server), timeout_seconds=120, what="the arena to be populated")
        yield server


def _is_populated(server: ServerProcess) -> bool:
    arena: dict[str, Any] = server.status()["arena"]
    return bool(arena["populated_bytes"] >= arena["capacity_bytes"])
