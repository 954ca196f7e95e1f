"""What a process wrote to its files, in order, with its barriers; and what may be on the disk after a loss of power.

Recorded by strace. After a power loss a file has everything that was written before its last finished flush began, and of what was
written since any page or none, whatever the order: 4 KiB of one write, or less where the write is smaller, are there or not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
META_BYTES = 2 * PAGE_BYTES
SYSCALLS = "write,writev,pwrite64,pwritev,lseek,fsync,fdatasync,ftruncate,msync,close"

_LINE = re.compile(r"^(\d+) +(\w+)\((\d+)<((?:\\x[0-9a-f]{2})*)[^>]*>(.*)$")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(slots=True)
class Write:
    """Bytes at a place of a file."""

    path: str
    offset: int
    data: bytes

    def pages(self) -> list[tuple[int, bytes]]:
        """Offset and bytes of what can be there or not on its own."""
        cuts = range(self.offset - self.offset % PAGE_BYTES, self.offset + len(self.data), PAGE_BYTES)
        bounds = [(max(at, self.offset), min(at + PAGE_BYTES, self.offset + len(self.data))) for at in cuts]
        return [(start, self.data[start - self.offset : stop - self.offset]) for start, stop in bounds]


@dataclass(slots=True)
class Flush:
    """A flush of a file that came back. `begun`: the number of the first event that it need not cover."""

    path: str
    begun: int


@dataclass(slots=True)
class Said:
    """A line that the process printed."""

    line: str


@dataclass(slots=True)
class Recording:
    """Events in order; `base` are the files as they were before the first."""

    base: Mapping[str, bytes]
    events: list[Write | Flush | Said] = field(default_factory=list)

    def read(self, trace: Path, *, since: str) -> None:
        """Take the events of strace's output from the line `since` on, which the process printed."""
        lines = iter(trace.read_text().splitlines())
        for text in lines:
            line = _LINE.match(text)
            if line is not None and line[3] == "1" and _data(line).decode().strip() == since:
                break
        positions: dict[str, int] = {}
        flushes: dict[str, Flush] = {}
        for text in lines:
            resumed = _RESUMED.match(text)
            if resumed is not None and resumed[1] in flushes:
                self.events.append(flushes.pop(resumed[1]))
            line = _LINE.match(text)
            if line is not None and line[3] == "1":
                self.events.append(Said(_data(line).decode().strip()))
            elif line is not None and (path := _bytes(line[4]).decode()) in self.base:
                self._take(line, path, positions, flushes)

    def _take(self, line: re.Match[str], path: str, positions: dict[str, int], flushes: dict[str, Flush]) -> None:
        """One call that concerns a file."""
        thread, call, descriptor, rest = line[1], line[2], line[3], line[5]
        if call == "lseek":
            positions[descriptor] = int(rest.split(",")[1])
        elif call in {"fsync", "fdatasync"} and "unfinished" in rest:
            flushes[thread] = Flush(path, len(self.events))
        elif call in {"fsync", "fdatasync"}:
            self.events.append(Flush(path, len(self.events)))
        elif call in {"pwrite64", "pwritev"}:
            numbers = re.split(r"[)<]", re.sub(r'\[.*\]|".*"', "", rest))[0]
            self.events.append(Write(path, int(numbers.rsplit(",", 1)[1]), _data(line)))
        elif call in {"write", "writev"}:
            self.events.append(Write(path, positions[descriptor], _data(line)))
            positions[descriptor] += len(_data(line))
        elif call != "close":
            raise AssertionError(f"{call} of {path} is not understood")

    def said(self, upto: int) -> list[str]:
        """What was printed before event number `upto`."""
        return [event.line for event in self.events[:upto] if isinstance(event, Said)]

    def states(self, chance: random.Random, count: int) -> Iterator[tuple[int, str, dict[str, bytes]]]:
        """Some of the legal states: (how many events went before, how it was chosen, the files). Everything written, nothing,
        only or all but the first two pages (LMDB's meta pages), and any pages; at places drawn by lot."""
        writes = [number for number, event in enumerate(self.events, 1) if not isinstance(event, Said)]
        for _ in range(count):
            upto = chance.choice(writes)
            how = chance.choice(["all", "none", "meta", "no meta", "some", "some", "few", "most"])
            yield upto, how, self.state(upto, how, chance)

    def state(self, upto: int, how: str, chance: random.Random) -> dict[str, bytes]:
        """One state: see `states`."""
        flushed = dict.fromkeys(self.base, 0)
        for event in self.events[:upto]:
            if isinstance(event, Flush):
                flushed[event.path] = max(flushed[event.path], event.begun)
        share = {"all": 1.0, "none": 0.0, "some": 0.5, "few": 0.1, "most": 0.9}.get(how)
        files = {path: bytearray(data) for path, data in self.base.items()}
        for number, event in enumerate(self.events[:upto]):
            if not isinstance(event, Write):
                continue
            for offset, data in event.pages():
                is_meta = event.path.endswith(".mdb") and offset < META_BYTES
                is_there = is_meta == (how == "meta") if share is None else chance.random() < share
                if number < flushed[event.path] or is_there:
                    _put(files[event.path], offset, data)
        return {path: bytes(data) for path, data in files.items()}


def _put(file: bytearray, offset: int, data: bytes) -> None:
    if len(file) < offset + len(data):
        file.extend(bytes(offset + len(data) - len(file)))
    file[offset : offset + len(data)] = data


def _data(line: re.Match[str]) -> bytes:
    return b"".join(_bytes(each) for each in _STRING.findall(line[5]))


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def strace_command(trace: Path, command: Sequence[str]) -> list[str]:
    """The command under strace, which records what `Recording.read` takes."""
    return ["strace", "-f", "-qq", "-y", "-xx", "-s", "4000000", "-o", str(trace), "-e", f"trace={SYSCALLS}", *command]
