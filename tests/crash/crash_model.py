"""What an independent checker knows of the crash loop: the bytes that a key and version make, and what each key may hold.

Plain Python over a journal of lines; knows nothing of kvobj but S3's and KV buckets' promises. An operation whose reply
never came may have happened or not; everything else happened exactly as it was acknowledged.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

STAMP_BYTES: Final = 64
_POOL: Final = random.Random(20_240_229).randbytes(8 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Version:
    """Bytes that were once sent: their number, never used twice, and their size."""

    number: int
    size_bytes: int

    def content(self, key: str) -> bytes:
        """The bytes that this version of the key consists of."""
        stamp = hashlib.blake2b(f"{key} {self.number} {self.size_bytes}".encode()).digest()
        start = int.from_bytes(stamp[:4], "big") % (len(_POOL) // 4)
        return (stamp + _POOL[start : start + max(0, self.size_bytes - STAMP_BYTES)])[: self.size_bytes]


ABSENT: Final = None
State = Version | None


@dataclass(slots=True)
class KeyHistory:
    """What one key may hold at present: one state if every reply came, more while a reply is outstanding."""

    is_kv: bool
    possible: set[State] = field(default_factory=lambda: {ABSENT})
    sent: Version | None = None
    is_delete_open: bool = False

    def begin_put(self, version: Version) -> None:
        """A PUT or Complete is about to be sent."""
        self.sent = version

    def begin_delete(self) -> None:
        """A DELETE is about to be sent."""
        self.is_delete_open = True

    def end(self, *, status: int, existed: bool) -> None:
        """The reply of the open operation came."""
        if self.is_delete_open:
            if status in {200, 204}:
                self.possible = {ABSENT}
        elif status == 200 and not existed and self.sent is not None:
            self.possible = {self.sent}
        elif (status == 200 and existed) or status == 409:
            self.possible.discard(ABSENT)
        # Any other reply is a refusal: nothing changed.
        self.sent, self.is_delete_open = None, False

    def settle_after_crash(self) -> bool:
        """The server died: what was open may have happened. True if something was open."""
        was_open = self.sent is not None or self.is_delete_open
        if self.is_delete_open:
            self.possible.add(ABSENT)
        elif self.sent is not None and (not self.is_kv or ABSENT in self.possible):
            self.possible.add(self.sent)
        self.sent, self.is_delete_open = None, False
        return was_open

    def observe(self, state: State) -> None:
        """What the restarted server answered; from now on nothing else is possible. AssertionError if it never was."""
        assert state in self.possible, f"found {state}, possible were {self.possible}"
        self.possible = {state}

    def identify(self, key: str, body: bytes) -> Version:
        """The version whose bytes these are. AssertionError if no possible version has them: a wrong byte."""
        for state in self.possible:
            if state is not None and state.size_bytes == len(body) and state.content(key) == body:
                return state
        raise AssertionError(f"wrong bytes: key={key} size={len(body)} possible={self.possible}")


@dataclass(slots=True)
class Model:
    """The histories of all keys, by (bucket, key), and how many operations were acknowledged and in flight."""

    kv_buckets: frozenset[str]
    histories: dict[tuple[str, str], KeyHistory] = field(default_factory=dict)
    acknowledged: int = 0
    refused: int = 0
    in_flight: int = 0

    def history(self, bucket: str, key: str) -> KeyHistory:
        """The history of a key, a new one if it has none."""
        return self.histories.setdefault((bucket, key), KeyHistory(bucket in self.kv_buckets))

    def absorb(self, journal: Path) -> None:
        """Take in one writer's journal, which ended with the server's death. A torn last line was never sent."""
        for line in journal.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                break
            history = self.history(entry["bucket"], entry["key"])
            if entry["what"] == "put":
                history.begin_put(Version(entry["version"], entry["size"]))
            elif entry["what"] == "delete":
                history.begin_delete()
            else:
                history.end(status=entry["status"], existed=entry["existed"])
                self.acknowledged += entry["status"] < 300
                self.refused += entry["status"] >= 300
        for history in self.histories.values():
            self.in_flight += history.settle_after_crash()
