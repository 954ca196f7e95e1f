"""Logging of a server process: one JSON object a line on standard error."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import sys
from typing import Final

from kvobj.config.settings import LogSettings

LOGGER_NAME: Final = "kvobj"
_MOMENT_SECONDS: Final = 0.1
_TOGETHER_BYTES: Final = 32 * 1024
_WHOLE_BYTES: Final = select.PIPE_BUF
"""Up to so many bytes a pipe takes at once or not at all: of what is longer, a pipe that is full takes a part, and then lines of
others before the rest."""


class JsonLines(logging.Formatter):
    """Renders a record as JSON. A message of kvobj's that is JSON already (a request's line) is the line, not quoted in one."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        message = record.getMessage()
        if message.startswith("{") and record.name.partition(".")[0] == LOGGER_NAME:
            return message
        line: dict[str, object] = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_logging(settings: LogSettings) -> logging.Logger:
    """Send kvobj's log lines to standard error, and warnings of the libraries that it uses, through the root logger. For processes
    that are kvobj's own: who embeds a store gives it a logger, and keeps the root logger as it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[settings.level.upper()]))
    log = logging.getLogger(LOGGER_NAME)
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(settings.level.upper())
    if not settings.requests:
        for name in ("s3", "admin"):
            log.getChild(name).setLevel(logging.WARNING)
    return log


class LineWriter:
    """Writes whole lines to standard error, among those of `start_logging`. Event loop only.

    What comes within a moment is written together: a call of the system for each line costs as much as the rest of it. A process
    that is killed takes the lines of that moment with it. `is_shared`: other processes write to the same standard error. Then no
    more is written together than stays together in a pipe; a single line that is longer may still be torn where a pipe is full.
    """

    __slots__ = ("_flushing", "_lines", "_size_bytes", "_together_bytes")

    def __init__(self, *, is_shared: bool = False) -> None:
        self._together_bytes = _WHOLE_BYTES if is_shared else _TOGETHER_BYTES
        self._lines: list[bytes] = []
        self._size_bytes = 0
        self._flushing: asyncio.TimerHandle | None = None

    def __call__(self, line: bytes) -> None:
        """Write it, with its line break, within the moment."""
        if self._size_bytes + len(line) > self._together_bytes:
            self.flush()
        self._lines.append(line)
        self._size_bytes += len(line)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_MOMENT_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what was left."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._lines:
            lines, self._lines, self._size_bytes = self._lines, [], 0
            sys.stderr.buffer.write(b"".join(lines))
            sys.stderr.buffer.flush()
