"""Transfer-Encoding: chunked, without the I/O: which of the bytes that arrive are data and which are framing.

Strict where RFC 9112 §7.1 leaves room: no chunk extensions, no white space, no bare line feed, at most 16 hex digits, and
trailers bounded (16 fields, 16 KiB), checked for shape and dropped.
The data never passes through here, so it may be received in place.
"""

from __future__ import annotations

import re
from enum import Enum

from kvobj.errors import InvalidRequestError

_SIZE_LINE = re.compile(rb"[0-9A-Fa-f]{1,16}\r\n")
_BETWEEN_CHUNKS = re.compile(rb"\r\n([0-9A-Fa-f]{1,16})\r\n")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n")
_SIZE_LINE_BYTES = 18
_TRAILER_BYTES = 16 * 1024
_TRAILER_FIELDS = 16


class _Expect(Enum):
    SIZE = "a chunk size"
    DATA = "chunk data"
    DATA_END = "the end of a chunk"
    TRAILER = "a trailer or the end"
    NOTHING = "nothing"


class ChunkedFraming:
    """Follows one chunked body. Feed framing with `consume`, report taken data with `took`, in the order of arrival."""

    __slots__ = ("_expect", "_line", "_trailer_bytes", "_trailer_fields", "data_left")

    def __init__(self) -> None:
        self._expect = _Expect.SIZE
        self._line = b""
        self._trailer_bytes = 0
        self._trailer_fields = 0
        self.data_left = 0
        """Bytes of the present chunk that are still to come; while positive, what comes next is data."""

    @property
    def is_ended(self) -> bool:
        """Whether the last chunk and the trailers are through."""
        return self._expect is _Expect.NOTHING

    @property
    def is_within_chunks(self) -> bool:
        """Whether data is next, or the whole of what stands between two chunks."""
        return self._expect is _Expect.DATA or (self._expect is _Expect.DATA_END and not self._line)

    def took(self, count: int) -> None:
        """Note that `count` bytes of data, at most `data_left`, have been taken."""
        self.data_left -= count
        if not self.data_left:
            self._expect = _Expect.DATA_END

    def skipped(self, data_left: int) -> None:
        """Note that it was within chunks, and that somebody else has read on from there: into a chunk of which `data_left` bytes
        are still to come, 0 for its end."""
        self.data_left = data_left
        self._expect = _Expect.DATA if data_left else _Expect.DATA_END

    def consume(self, segment: bytes, start: int = 0) -> int:
        """Read framing from `start`; return where data begins, the body has ended or the segment is used up.

        Raises `InvalidRequestError` when it is malformed: the connection cannot be used any further.
        """
        if self._expect is _Expect.DATA_END and not self._line:
            # What most chunks have before them, at a third of the cost of going line by line.
            between = _BETWEEN_CHUNKS.match(segment, start)
            if between and (size := int(between[1], 16)):
                self.data_left = size
                self._expect = _Expect.DATA
                return between.end()
        at = start
        while at < len(segment) and self._expect not in (_Expect.DATA, _Expect.NOTHING):
            newline = segment.find(b"\n", at)
            stop = len(segment) if newline < 0 else newline + 1
            self._line += segment[at:stop]
            at = stop
            if self._expect is _Expect.TRAILER:
                if self._trailer_bytes + len(self._line) > _TRAILER_BYTES:
                    raise InvalidRequestError("the trailers are too long")
            elif len(self._line) > _SIZE_LINE_BYTES:
                raise InvalidRequestError("malformed chunked body", expected=self._expect.value)
            if newline >= 0:
                line, self._line = self._line, b""
                self._end_line(line)
        return at

    def _end_line(self, line: bytes) -> None:
        if self._expect is _Expect.SIZE and _SIZE_LINE.fullmatch(line):
            self.data_left = int(line, 16)
            self._expect = _Expect.DATA if self.data_left else _Expect.TRAILER
        elif self._expect is _Expect.DATA_END and line == b"\r\n":
            self._expect = _Expect.SIZE
        elif self._expect is _Expect.TRAILER and line == b"\r\n":
            self._expect = _Expect.NOTHING
        elif self._expect is _Expect.TRAILER and _TRAILER_LINE.fullmatch(line):
            self._trailer_bytes += len(line)
            self._trailer_fields += 1
            if self._trailer_fields > _TRAILER_FIELDS:
                raise InvalidRequestError("too many trailers")
        else:
            raise InvalidRequestError("malformed chunked body", expected=self._expect.value)
