"""Writes an object from memory: one PUT, or the parts of a multipart upload at the same time.

A byte that changes on its way up is found: by the server where it knows CRC-32C in a header; else by its ETag, where that is the
MD5 sum of what it received, held against ours, which is made beside the upload (radosgw 16: writes of 8 MiB take 40 % more time
when the server verifies a signed SHA-256 before it answers); else by that signed SHA-256. Until it is found an object may
be wrong that nobody has been told of. Writing is idempotent: who repeats a Complete whose answer was lost, and is told
that there is no such upload, finds the object there with the ETag that it must have.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvobj.codec.checksums import crc32c
from kvobj.codec.md5_lanes import md5_digest
from kvobj.task_endings import ended, to_their_end
from kvobj.tiers.remote.body_sums import BodySums
from kvobj.tiers.remote.capabilities import UploadCheck
from kvobj.tiers.remote.documents import (
    RemoteObject,
    RemotePart,
    RemoteUpload,
    complete_document,
    http_date_ms,
    parse_completed,
    parse_upload_id,
    quoted,
)
from kvobj.tiers.remote.faults import RemoteFault, error_of, fault_of_answer
from kvobj.tiers.remote.parts import part_spans
from kvobj.tiers.remote.reading import all_done
from kvobj.tiers.remote.requests import UNSIGNED_PAYLOAD, RemoteRequest, Requests
from kvobj.tiers.verified import INLINE_BYTES, RunOnPool
from kvobj.wire.response_head import BrokenAnswerError

PARTS_AT_ONCE: Final = 8

_ABORT_SECONDS: Final = 10.0
_CRC_HEADER: Final = "x-amz-checksum-crc32c"
_CRC_ELEMENT: Final = "ChecksumCRC32C"
_MD5_DIGITS: Final = 32


class BodyCheck:
    """How one body is checked: what its request says. `crc`: base64, where that is how."""

    __slots__ = ("crc", "headers", "payload_sha256")

    def __init__(self, check: UploadCheck, body: memoryview) -> None:
        """Reads all of the body: on a pool where it is long."""
        self.crc: str | None = None
        self.headers: dict[str, str] = {}
        self.payload_sha256 = UNSIGNED_PAYLOAD
        if check == "crc32c":
            self.crc = base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()
            self.headers = {_CRC_HEADER: self.crc, "x-amz-sdk-checksum-algorithm": "CRC32C"}
        elif check == "sha256":
            self.payload_sha256 = hashlib.sha256(body).hexdigest()


@dataclass(frozen=True, slots=True)
class _Body:
    """What one request sends. `md5`: its sum in the making, where it is checked by that."""

    view: memoryview
    check: UploadCheck
    md5: asyncio.Future[bytes] | None


class ObjectWriter:
    """Writes of one bucket. `check()` says how bodies are checked at the time."""

    def __init__(
        self,
        requests: Requests,
        *,
        part_bytes: int,
        check: Callable[[], UploadCheck],
        run: RunOnPool,
        log: logging.Logger,
    ) -> None:
        self._requests = requests
        self._part_bytes = part_bytes
        self._check = check
        self._run = run
        self._sums = BodySums(run)
        self._log = log

    async def write(self, key: str, body: memoryview, *, until: float) -> str:
        """Write the object, and its ETag. When it returns or raises nothing reads `body` any more, and what is unfinished of it on
        the server was aborted, where that could be done. Raises `RemoteFault`."""
        check = self._check()
        views = [body[span.start : span.stop] for span in part_spans(len(body), self._part_bytes)]
        # At once, though they are needed last: nobody has anything else to do until the server has begun an upload.
        sums = [asyncio.ensure_future(self._sums.md5(view)) if check == "md5" else None for view in views]
        bodies = [_Body(view, check, md5) for view, md5 in zip(views, sums, strict=True)]
        try:
            if len(bodies) > 1:
                return await self._write_parts(key, bodies, until=until)
            return (await self._sent("PutObject", key, (), bodies[0], until=until))[0]
        finally:
            await ended([md5 for md5 in sums if md5 is not None])

    async def abort(self, upload: RemoteUpload, *, until: float) -> None:
        """Give up a multipart upload; absent is fine."""
        query = (("uploadId", upload.upload_id),)
        try:
            await self._requests.ask(RemoteRequest("AbortMultipartUpload", "DELETE", upload.key, query), until=until)
        except RemoteFault as fault:
            if fault.code != "NoSuchUpload":
                raise

    async def find(self, key: str, *, until: float) -> RemoteObject | None:
        """HEAD."""
        try:
            answer = await self._requests.ask(RemoteRequest("HeadObject", "HEAD", key), until=until)
        except RemoteFault as fault:
            if fault.status == 404:  # noqa: PLR2004 - HTTP's; an answer to HEAD has no code
                return None
            raise
        return object_of(key, answer.headers)

    # -- inside --------------------------------------------------------------------------------------------------
    async def _sent(
        self, operation: str, key: str, query: tuple[tuple[str, str], ...], body: _Body, *, until: float
    ) -> tuple[str, str | None]:
        """PUT a body; its ETag, and its CRC-32C in base64 where that is how it was checked."""
        view, check = body.view, body.check
        if body.md5 is not None:
            request = RemoteRequest(operation, "PUT", key, query, {}, view, UNSIGNED_PAYLOAD)
            return await self._verified(request, body.md5, until=until), None
        if len(view) > INLINE_BYTES and check != "none":
            checking = asyncio.ensure_future(self._run(BodyCheck, check, view))
            await to_their_end([checking])
            checked = checking.result()
        else:
            checked = BodyCheck(check, view)
        request = RemoteRequest(operation, "PUT", key, query, checked.headers, view, checked.payload_sha256)
        answer = await self._requests.ask(request, until=until)
        return quoted(answer.headers.get("etag", "")), checked.crc

    async def _verified(self, request: RemoteRequest, md5: asyncio.Future[bytes], *, until: float) -> str:
        """PUT a body until the ETag that the server answers is its MD5 sum."""

        async def attempt() -> str:
            answer = await self._requests.whole(await self._requests.begin(request))
            etag = quoted(answer.headers.get("etag", ""))
            if etag != etag_of_md5(await asyncio.shield(md5)):
                raise RemoteFault("client", "the remote received other bytes than were sent", code="BadDigest")
            return etag

        return await self._requests.repeated(request.operation, attempt, until=until)

    async def _write_parts(self, key: str, bodies: Sequence[_Body], *, until: float) -> str:
        headers = {"x-amz-checksum-algorithm": "CRC32C"} if bodies[0].check == "crc32c" else {}
        begun = await self._requests.ask(
            RemoteRequest("CreateMultipartUpload", "POST", key, (("uploads", ""),), headers), until=until
        )
        try:
            upload_id = parse_upload_id(begun.body)
        except BrokenAnswerError as error:
            raise RemoteFault("server", str(error)) from error
        try:
            works = [
                self._write_part(key, upload_id, number, body, until=until) for number, body in enumerate(bodies, 1)
            ]
            parts = await all_done(works, at_once=PARTS_AT_ONCE)
            return await self._complete(key, upload_id, parts, sum(len(body.view) for body in bodies), until=until)
        except BaseException:
            await self._abort_after_failure(RemoteUpload(key, upload_id, 0))
            raise

    async def _write_part(self, key: str, upload_id: str, number: int, body: _Body, *, until: float) -> RemotePart:
        query = (("partNumber", str(number)), ("uploadId", upload_id))
        etag, crc = await self._sent("UploadPart", key, query, body, until=until)
        return RemotePart(number, etag, None if crc is None else (_CRC_ELEMENT, crc))

    async def _complete(
        self, key: str, upload_id: str, parts: Sequence[RemotePart], size_bytes: int, *, until: float
    ) -> str:
        document = complete_document(parts)
        request = RemoteRequest(
            "CompleteMultipartUpload",
            "POST",
            key,
            (("uploadId", upload_id),),
            {"content-type": "application/xml"},
            memoryview(document),
            hashlib.sha256(document).hexdigest(),
            is_repeatable_unseen=False,
        )
        is_ambiguous = False

        def lost(fault: RemoteFault) -> None:
            nonlocal is_ambiguous
            is_ambiguous = is_ambiguous or fault.is_ambiguous

        async def attempt() -> str:
            exchange = await self._requests.begin(request)
            answer = await self._requests.whole(exchange)
            if error_of(answer.body)[0]:  # the status was sent before the outcome was known
                raise fault_of_answer(500, answer.headers, answer.body)
            try:
                return parse_completed(answer.body)
            except BrokenAnswerError as error:
                raise RemoteFault("server", str(error)) from error

        expected = multipart_etag(parts)
        try:
            etag = await self._requests.repeated("CompleteMultipartUpload", attempt, until=until, on_fault=lost)
        except RemoteFault as fault:
            if not (is_ambiguous and fault.code == "NoSuchUpload"):
                raise
            found = await self.find(key, until=until)
            if found is None or found.size_bytes != size_bytes or (expected and found.etag != expected):
                raise
            etag = found.etag
        return etag or expected

    async def _abort_after_failure(self, upload: RemoteUpload) -> None:
        """Also where the caller was cancelled, or its time is up: the abort has a time of its own."""
        loop = asyncio.get_running_loop()
        aborting = asyncio.ensure_future(self.abort(upload, until=loop.time() + _ABORT_SECONDS))
        while not aborting.done():
            try:
                await asyncio.wait([aborting])
            except asyncio.CancelledError:
                continue  # whoever cancelled is told by the failure that is being raised, or once this is done
        if not aborting.cancelled() and (error := aborting.exception()) is not None:
            self._log.warning(
                "an unfinished upload stays on the remote until the next sweep: %s, key %s", error, upload.key
            )


def object_of(key: str, headers: Mapping[str, str]) -> RemoteObject:
    """What HEAD tells. `RemoteFault` where it is no object's head."""
    length = headers.get("content-length", "")
    if not length.isdigit():
        raise RemoteFault("server", "an object without a length")
    modified_ms = http_date_ms(headers.get("last-modified", ""))
    return RemoteObject(key, int(length), quoted(headers.get("etag", "")), modified_ms or 0)


def md5_etag(body: memoryview) -> str:
    """The ETag of a body where ETags are MD5 sums."""
    return etag_of_md5(md5_digest(body))


def etag_of_md5(digest: bytes) -> str:
    """The ETag that says this MD5 sum."""
    return f'"{digest.hex()}"'


def multipart_etag(parts: Sequence[RemotePart]) -> str:
    """The ETag that S3 servers give to an object of these parts, where theirs are MD5 sums; else empty."""
    sums = [part.etag.strip('"') for part in parts]
    try:
        if any(len(each) != _MD5_DIGITS for each in sums):
            return ""
        joined = b"".join([bytes.fromhex(each) for each in sums])
    except ValueError:
        return ""
    return f'"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"'
