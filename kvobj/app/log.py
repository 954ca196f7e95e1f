"""Logging of a server process: one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Final

from kvobj.config.settings import LogSettings

LOGGER_NAME: Final = "kvobj"


class JsonLines(logging.Formatter):
    """Renders a record as JSON. A message that is JSON already (a request's line) is merged in, not quoted."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        message = record.getMessage()
        if message.startswith("{"):
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
    """Send kvobj's log lines to standard error; the root logger of the process is left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    log = logging.getLogger(LOGGER_NAME)
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(settings.level.upper())
    if not settings.requests:
        for name in ("s3", "admin"):
            log.getChild(name).setLevel(logging.WARNING)
    return log


def line_writer() -> Callable[[bytes], None]:
    """Writes whole lines to standard error, among those of `start_logging`. Event loop only."""
    stream = sys.stderr.buffer

    def write(line: bytes) -> None:
        stream.write(line)
        stream.flush()

    return write
