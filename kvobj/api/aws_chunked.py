"""Takes the aws-chunked framing off a body: a `ByteSource` of the payload, and the trailers after its end.

Guarantees: payload goes straight into the receiver's buffer, and so does the framing between chunks, which is taken out of it in
place: of unsigned chunks whenever more has come, of signed ones when they are whole; each byte is moved at most once; every line,
chunk and trailer is bounded; signed chunks are announced to the receiver only after their signature was checked; exactly the
declared length arrives, with nothing after the end. Strict: what the grammar does not have is refused.
Source: S3 API reference, "Signature calculations: transferring payload in multiple chunks" and "including trailing headers".
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from hashlib import sha256
from typing import Final, cast

from kvobj.api.errors import S3Error
from kvobj.api.message import RequestBody, SiftedBody
from kvobj.api.sigv4 import ChunkSigning
from kvobj.errors import IncompleteBodyError
from kvobj.wire.joined_chunks import JoinChunks, JoinedChunks, is_cut_off, native_joiner

MAX_LINE_BYTES: Final = 8192 + 64
MAX_TRAILER_BYTES: Final = 16 * 1024
MAX_TRAILERS: Final = 16
MINIMUM_CHUNK_BYTES: Final = 8192
# Only a signed chunk must be held back until it is whole. Unsigned ones pass through, and real clients (awscrt, the Go SDK)
# send a whole part as one chunk.
MAX_SIGNED_CHUNK_BYTES: Final = 16 * 1024 * 1024
_INLINE_HASH_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 512
_WINDOW_BYTES: Final = 1024 * 1024
"""How much of many short chunks is received at once."""
_FRAMING_BYTES: Final = 128
"""More than can stand between two chunks: two line ends, 16 hex digits, a signature."""
_SMALL_BODY_BYTES: Final = 64 * 1024

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})\Z").match
_SIGNED_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16});chunk-signature=([0-9a-f]{64})\Z").match
_TRAILER: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}):[ \t]*([\x20-\x7e]*?)[ \t]*\Z").match
_SIGNATURE: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII).match
_EMPTY_SHA256: Final = sha256(b"").hexdigest()
_TRAILER_SIGNATURE: Final = "x-amz-trailer-signature"


def _malformed(what: str) -> S3Error:
    return S3Error("InvalidRequest", f"The aws-chunked body is malformed: {what}.")


class AwsChunkedSource:
    """The payload of one aws-chunked body. Call `receive_into` until `size_bytes` have come, then `finish`.

    `signing`: chunks are signed from this seed on; None: they are unsigned. `with_trailer`: trailers may follow the last chunk (and
    are signed where chunks are). Hashes of pieces over 64 KiB run on `executor`. One call at a time; cancel-safe as `body` is.
    """

    def __init__(
        self,
        body: RequestBody,
        size_bytes: int,
        *,
        signing: ChunkSigning | None,
        with_trailer: bool,
        executor: Executor | None = None,
    ) -> None:
        self._body = body
        self._left_bytes = size_bytes
        self._signing = signing
        self._with_trailer = with_trailer
        self._executor = executor
        self._is_small = (size_bytes if body.length is None else body.length) <= _SMALL_BODY_BYTES
        self._sifted: tuple[SiftedBody, JoinChunks] | None = None
        join = native_joiner() if signing is None and not self._is_small else None
        # Not isinstance: to look at a protocol's members costs 15 µs where nothing is in the cache.
        if join is not None and hasattr(body, "receive_sifted"):
            self._sifted = cast("SiftedBody", body), join
        self._pending = b""
        self._position = 0
        self._chunk_left_bytes = 0
        self._chunk_bytes: int | None = None
        self._chunk_count = 0
        self._chunk_signature = ""
        self._previous_signature = "" if signing is None else signing.seed_signature
        self._hash = sha256()

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`. Of signed chunks `on_bytes` tells once their signature has been checked; the piece of a
        chunk that ends in another buffer is told at this one's end (nothing is visible before the commit).

        Raises `IncompleteBodyError` and `S3Error` (InvalidRequest, InvalidChunkSizeError, SignatureDoesNotMatch).
        """
        filled = 0
        while filled < len(buffer):
            before = filled
            if self._is_small or self._position < len(self._pending):
                filled = await self._take_pending(buffer, filled, on_bytes)
            elif self._sifted is not None and self._chunk_bytes is not None:
                filled = await self._receive_sifted(*self._sifted, buffer, filled, on_bytes)
            else:
                filled = await self._receive_in_place(buffer, filled, on_bytes)
            if self._signing is None and filled > before:
                on_bytes(filled)

    async def finish(self) -> dict[str, str]:
        """Read the last chunk and the trailers, and check that nothing follows. Returns the trailers by lower-case name.

        Raises as `receive_into` does, and `S3Error` MalformedTrailerError.
        """
        if self._chunk_left_bytes or await self._next_chunk():
            raise IncompleteBodyError("the body is longer than its decoded length")
        if self._left_bytes:
            raise self._ended_early()
        if self._signing is not None:
            self._check_chunk_signature(self._signing)
        trailers = await self._read_trailers()
        if self._position < len(self._pending) or await self._body.read_some(1):
            raise IncompleteBodyError("bytes follow the end of the aws-chunked body")
        return trailers

    async def _take_pending(self, buffer: memoryview, filled: int, on_bytes: Callable[[int], None]) -> int:
        """Copy payload from what was read ahead, reading more where that is nothing; returns how far the buffer is filled then."""
        if not self._chunk_left_bytes and not await self._next_chunk():
            raise self._ended_early()
        if self._position == len(self._pending):
            if not self._is_small:
                return filled
            await self._read_more()
        end = min(len(buffer), filled + self._chunk_left_bytes, filled + len(self._pending) - self._position)
        taken = self._position + end - filled
        buffer[filled:end] = self._pending[self._position : taken]
        self._position = taken
        await self._took(buffer, filled, end, on_bytes)
        return end

    async def _receive_sifted(
        self,
        body: SiftedBody,
        join: JoinChunks,
        buffer: memoryview,
        filled: int,
        on_bytes: Callable[[int], None],
    ) -> int:
        """As `_receive_in_place`, of unsigned chunks behind the first one's header: their framing goes as soon as it arrives, while
        it is in the cache, and nobody is woken before the buffer is full."""
        window = buffer[filled:]
        done = 0

        def sift(end: int) -> tuple[int, bool]:
            nonlocal done
            assert self._chunk_bytes is not None
            before = JoinedChunks(0, 0, self._chunk_left_bytes, self._chunk_bytes, self._chunk_count)
            joined = join(window[done:end], before, self._left_bytes, MINIMUM_CHUNK_BYTES)
            self._chunk_left_bytes, self._chunk_bytes = joined.chunk_left, joined.chunk_bytes
            self._chunk_count = joined.chunks
            self._left_bytes -= joined.filled
            rest = bytes(window[done + joined.at : end])
            done += joined.filled
            end = done + len(rest)
            window[done:end] = rest
            on_bytes(filled + done)
            return end, is_cut_off(rest, _FRAMING_BYTES)

        end = await body.receive_sifted(window, join, sift)
        self._pending = bytes(window[done:end])
        self._position = 0
        return filled + done

    async def _receive_in_place(self, buffer: memoryview, filled: int, on_bytes: Callable[[int], None]) -> int:
        """Receive what comes next, framing and payload, to where the payload belongs, and close the gaps that the framing leaves;
        returns how far the buffer is filled then. A chunk's header that is not whole stays pending.

        It asks for no more bytes than payload is still to come, so a body that keeps its word is never waited for in vain.
        """
        left = self._chunk_left_bytes
        room = 0 if self._chunk_bytes is None else max(left, _WINDOW_BYTES)
        window = buffer[filled : filled + room + _FRAMING_BYTES]
        is_told = left and self._signing is None
        await self._body.receive_into(window, partial(_report, on_bytes, filled, left) if is_told else _tell_nobody)
        start, at = filled, 0
        while at < len(window):
            if not self._chunk_left_bytes:
                self._pending = bytes(window[at : at + _FRAMING_BYTES])
                self._position = 0
                found = self._parse_chunk_header()
                if found is None:
                    if len(self._pending) == _FRAMING_BYTES:
                        raise _malformed("a line is too long")
                    break
                if not found:
                    raise self._ended_early()
                at += self._position
                self._position = len(self._pending)
            end = filled + min(self._chunk_left_bytes, len(window) - at)
            if start + at > filled:
                buffer[filled:end] = window[at : at + end - filled]
            at += end - filled
            await self._took(buffer, filled, end, on_bytes)
            filled = end
        return filled

    async def _took(self, buffer: memoryview, start: int, end: int, on_bytes: Callable[[int], None]) -> None:
        """Note that payload lies in the buffer from `start` to `end`. A signed chunk's end is told once its signature is right."""
        self._chunk_left_bytes -= end - start
        self._left_bytes -= end - start
        if self._signing is None or start == end:
            return
        await self._add_to_hash(buffer[start:end])
        if not self._chunk_left_bytes:
            self._check_chunk_signature(self._signing)
        if not self._chunk_left_bytes or end == len(buffer):
            on_bytes(end)

    async def _next_chunk(self) -> bool:
        """Read a chunk's header; False for the last one, of no bytes."""
        while (is_chunk := self._parse_chunk_header()) is None:
            await self._read_more()
        return is_chunk

    def _parse_chunk_header(self) -> bool | None:
        """Take the line end of the chunk before and a chunk's header from what is pending; False for the last chunk, of no bytes,
        None where the header is not whole."""
        start = self._position
        if self._chunk_bytes is not None:
            line_end = self._pending[start : start + 2]
            if line_end != b"\r\n":
                if len(line_end) == 2:  # noqa: PLR2004 - CR and LF
                    raise _malformed("no line end after a chunk")
                return None
            if self._chunk_bytes == 0:
                raise self._ended_early()
            start += 2
        line = self._line_from(start)
        return None if line is None else self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> bool:
        """Go on to the chunk whose header this is; False for the last one, of no bytes."""
        found = _SIZE_LINE(line) if self._signing is None else _SIGNED_LINE(line)
        if found is None:
            raise _malformed("a chunk's header is not as its mode has it")
        size_bytes = int(found[1], 16)
        if size_bytes > self._left_bytes:
            raise IncompleteBodyError("the body is longer than its decoded length")
        if self._signing is not None:
            self._chunk_signature = found[2].decode()
            self._hash = sha256()
            if size_bytes > MAX_SIGNED_CHUNK_BYTES:
                raise _malformed("a signed chunk is too large")
        if size_bytes and self._chunk_bytes is not None and self._chunk_bytes < MINIMUM_CHUNK_BYTES:
            raise S3Error("InvalidChunkSizeError", Chunk=self._chunk_count, BadChunkSize=self._chunk_bytes)
        self._chunk_count += 1
        self._chunk_bytes = self._chunk_left_bytes = size_bytes
        return size_bytes > 0

    async def _add_to_hash(self, piece: memoryview) -> None:
        if self._executor is None or len(piece) <= _INLINE_HASH_BYTES:
            self._hash.update(piece)
        else:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._hash.update, piece)

    def _check_chunk_signature(self, signing: ChunkSigning) -> None:
        text = (
            f"AWS4-HMAC-SHA256-PAYLOAD\n{signing.stamp}\n{signing.scope}\n{self._previous_signature}\n"
            f"{_EMPTY_SHA256}\n{self._hash.hexdigest()}"
        )
        self._previous_signature = _require_signature(signing, text, self._chunk_signature)

    async def _read_trailers(self) -> dict[str, str]:
        trailers: dict[str, str] = {}
        canonical = ""
        total_bytes = 0
        while line := await self._read_line():
            total_bytes += len(line)
            found = _TRAILER(line)
            if not self._with_trailer or found is None or total_bytes > MAX_TRAILER_BYTES:
                raise S3Error("MalformedTrailerError")
            name, value = found[1].decode().lower(), found[2].decode()
            if name in trailers or len(trailers) >= MAX_TRAILERS or _TRAILER_SIGNATURE in trailers:
                raise S3Error("MalformedTrailerError")
            trailers[name] = value
            if name != _TRAILER_SIGNATURE:
                canonical += f"{name}:{value}\n"
        signature = trailers.pop(_TRAILER_SIGNATURE, None)
        if self._signing is None:
            if signature is not None:
                raise S3Error("MalformedTrailerError")
        elif self._with_trailer:
            if signature is None or not _SIGNATURE(signature):
                raise S3Error("SignatureDoesNotMatch")
            text = (
                f"AWS4-HMAC-SHA256-TRAILER\n{self._signing.stamp}\n{self._signing.scope}\n{self._previous_signature}\n"
                f"{sha256(canonical.encode()).hexdigest()}"
            )
            _require_signature(self._signing, text, signature)
        return trailers

    async def _read_line(self) -> bytes:
        """The next line without its CRLF."""
        while (line := self._line_from(self._position)) is None:
            await self._read_more()
        return line

    def _line_from(self, start: int) -> bytes | None:
        """Take the pending line that begins at `start`; it comes without its CRLF, and None where its end is not there."""
        end = self._pending.find(b"\r\n", start)
        if (len(self._pending) if end < 0 else end) - start > MAX_LINE_BYTES:  # however the line was cut into reads
            raise _malformed("a line is too long")
        if end < 0:
            return None
        line = self._pending[start:end]
        self._position = end + 2
        if b"\n" in line or b"\r" in line:
            raise _malformed("a bare line end")
        return line

    async def _read_more(self) -> None:
        more = await self._body.read_some(_SMALL_BODY_BYTES if self._is_small else _READ_BYTES)
        if not more:
            raise IncompleteBodyError("the body ended inside its aws-chunked framing")
        self._pending = self._pending[self._position :] + more
        self._position = 0

    def _ended_early(self) -> IncompleteBodyError:
        return IncompleteBodyError("the body ended before its decoded length", missing_bytes=self._left_bytes)


def _report(on_bytes: Callable[[int], None], before: int, limit: int, count: int) -> None:
    """Tell the receiver of a whole buffer about a window that starts at `before` and begins with `limit` bytes of payload."""
    on_bytes(before + min(count, limit))


def _tell_nobody(_count: int) -> None:
    """What came is not known to be payload, or is signed: that is told by the chunk, not as it arrives."""


def _require_signature(signing: ChunkSigning, text: str, signature: str) -> str:
    expected = hmac.digest(signing.signing_key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(expected, signature):
        raise S3Error("SignatureDoesNotMatch", SignatureProvided=signature)
    return expected
