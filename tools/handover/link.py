"""What prefill and decode share beside the model: the job they are given, and a link that can be made slow."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from handover.model import Shape
from kvobj.client import Credentials, KvClient, Namespace

MIB = 1024 * 1024
WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One hand-over. `mode` is `push`, `whole`, `pull` or `shared`; `link_mib_s` 0 leaves the link as fast as it is."""

    mode: str
    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    namespace: str
    chunks: int
    tokens: int
    link_mib_s: float
    shape: Shape

    @classmethod
    def parse(cls, text: str) -> Self:
        """From a line of JSON."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "shape": Shape(**fields["shape"])})

    def client(self, connections: int) -> KvClient:
        """A client that reads and writes over HTTP: on one machine memory would be shared, and there would be no link to see."""
        return KvClient(
            self.endpoint,
            Credentials(self.access_key, self.secret_key),
            self.bucket,
            connections=connections,
            timeout_seconds=WAIT_SECONDS,
            same_host=False,
        )


class Link:
    """Lets bytes through at a rate, by sleeping. Thread-safe: all connections of a process share it. It stands for one process's
    network card; the real socket is the loopback's."""

    def __init__(self, mib_s: float) -> None:
        self._seconds_a_byte = 1 / (mib_s * MIB) if mib_s else 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, size_bytes: int) -> None:
        """Return when the link would have carried these bytes, after all that it was given before."""
        if not self._seconds_a_byte:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes * self._seconds_a_byte
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Way:
    """One process's end of a hand-over: the chunks, by their ids in order, and what they go over."""

    job: Job
    client: KvClient
    namespace: Namespace
    ids: list[bytes]
    link: Link


def say(**fields: object) -> None:
    """One line of JSON to who started this process."""
    print(json.dumps(fields), flush=True)
