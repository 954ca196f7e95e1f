"""Finds out what the remote server can do, by doing it with tiny objects under `{prefix}probe/`, and takes them away again.

Nothing is assumed from a server's name: a header that is not known is ignored by most servers, so each probe is one whose outcome
differs: a wrong checksum, a condition that does not hold. What a probe leaves behind when it dies is the next one's to remove.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Final, Literal

from kvobj.clock import Clock
from kvobj.codec.checksums import crc32c
from kvobj.config.settings import RemoteChecksumsName
from kvobj.tiers.remote.capabilities import Capabilities, UploadCheck
from kvobj.tiers.remote.documents import (
    RemotePart,
    RemoteUpload,
    complete_document,
    delete_document,
    parse_not_deleted,
    parse_objects,
    parse_upload_id,
    quoted,
)
from kvobj.tiers.remote.faults import RemoteFault, error_of
from kvobj.tiers.remote.requests import UNSIGNED_PAYLOAD, Answer, RemoteRequest, Requests
from kvobj.tiers.remote.writing import md5_etag
from kvobj.wire.response_head import BrokenAnswerError

S3_PART_BYTES_MIN: Final = 5 * 2**20

_BODY: Final = b"kvobj probes what this server can do\n"
_OTHER: Final = b"another body\n"
_WRONG_ETAG: Final = f'"{"0" * 32}"'
_BAD_REQUEST: Final = 400
_PRECONDITION_FAILED: Final = 412
_PARTIAL: Final = 206
_LEFT_MAX: Final = 100


class Prober:
    """One probe of one bucket."""

    def __init__(
        self,
        requests: Requests,
        *,
        prefix: str,
        checksums: RemoteChecksumsName,
        until: float,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._checksums = checksums
        self._until = until
        self._log = log
        self._folder = f"{prefix}probe/"
        self._key = f"{self._folder}{secrets.token_hex(8)}"
        self.date = ""
        """The Date of the server's first answer."""
        self.date_taken_ms = 0
        """When it came, by this machine's clock."""

    async def find_out(self) -> Capabilities:
        """All of it. `RemoteFault` where the server does not answer, or refuses what cannot be done without."""
        left = await self._left_behind()
        first = await self._put(self._key, _BODY)
        upload_check = await self._upload_check(first)
        etag_form = await self._etag_form(quoted(first.headers.get("etag", "")))
        capabilities = Capabilities(
            server=first.headers.get("server", "")[:80],
            upload_check=upload_check,
            if_absent=await self._is_refused(self._key, {"if-none-match": "*"}),
            if_match=etag_form is not None,
            quotes_etags=etag_form != "bare",
            ranges=await self._has_ranges(),
            delete_if_match=await self._delete_is_conditional(),
            min_part_bytes=await self._min_part_bytes(),
            delete_many=await self._delete_many([self._key, *left]),
        )
        if capabilities.upload_check == "none" and self._checksums != "none":
            self._log.warning("the remote checks no body on its way up: what changes there is found when it is read")
        return capabilities

    async def _left_behind(self) -> list[str]:
        """Also the question whether there is such a bucket, and whether it may be listed."""
        query = (("list-type", "2"), ("max-keys", str(_LEFT_MAX)), ("prefix", self._folder))
        answer = await self._ask(RemoteRequest("ListObjectsV2", "GET", query=query))
        self.date, self.date_taken_ms = answer.headers.get("date", ""), self._clock.now_ms()
        try:
            return [each.key for each in parse_objects(answer.body).objects]
        except BrokenAnswerError as error:
            raise RemoteFault("server", f"this is no S3 server: {error}", is_repeatable=False) from error

    async def _upload_check(self, first: Answer) -> UploadCheck:
        match self._checksums:
            case "crc32c" | "sha256" | "none" as chosen:
                return chosen
            case "auto":
                pass
        body = memoryview(_BODY)
        wrong = base64.b64encode(crc32c(memoryview(_OTHER)).to_bytes(4, "big")).decode()
        right = base64.b64encode(crc32c(body).to_bytes(4, "big")).decode()
        if await self._refuses_body("x-amz-checksum-crc32c", wrong, UNSIGNED_PAYLOAD) and not await self._refuses_body(
            "x-amz-checksum-crc32c", right, UNSIGNED_PAYLOAD
        ):
            return "crc32c"
        if quoted(first.headers.get("etag", "")) == md5_etag(body):
            return "md5"
        if await self._refuses_body("", "", hashlib.sha256(_OTHER).hexdigest()):
            return "sha256"
        return "none"

    async def _refuses_body(self, header: str, value: str, payload_sha256: str) -> bool:
        headers = {header: value, "x-amz-sdk-checksum-algorithm": "CRC32C"} if header else {}
        request = RemoteRequest("PutObject", "PUT", self._key, (), headers, memoryview(_BODY), payload_sha256)
        try:
            await self._requests.ask(request, until=self._until, on_fault=_give_up_if_refused)
        except RemoteFault as fault:
            if fault.kind in ("client", "refused") or fault.status == _BAD_REQUEST:
                return True
            raise
        return False

    async def _put(self, key: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        payload = hashlib.sha256(body).hexdigest()
        return await self._ask(RemoteRequest("PutObject", "PUT", key, (), headers or {}, memoryview(body), payload))

    async def _is_refused(self, key: str, condition: dict[str, str]) -> bool:
        try:
            await self._put(key, _BODY, condition)
        except RemoteFault as fault:
            if fault.status == _PRECONDITION_FAILED:
                return True
            if fault.is_ambiguous and fault.status != 501:  # noqa: PLR2004 - NotImplemented is an answer
                raise
        return False

    async def _etag_form(self, etag: str) -> Literal["quoted", "bare"] | None:
        """In which form an ETag must stand in a PUT's If-Match, that a wrong one is refused and the right one is not."""
        if not etag or not await self._is_refused(self._key, {"if-match": _WRONG_ETAG}):
            return None
        if not await self._is_refused(self._key, {"if-match": etag}):
            return "quoted"
        return None if await self._is_refused(self._key, {"if-match": etag.strip('"')}) else "bare"

    async def _has_ranges(self) -> bool:
        answer = await self._ask(RemoteRequest("GetObject", "GET", self._key, headers={"range": "bytes=6-11"}))
        return answer.status == _PARTIAL and answer.body == _BODY[6:12]

    async def _delete_is_conditional(self) -> bool:
        key = f"{self._key}-conditional"
        await self._put(key, _BODY)
        is_conditional = False
        try:
            await self._ask(RemoteRequest("DeleteObject", "DELETE", key, headers={"if-match": _WRONG_ETAG}))
        except RemoteFault as fault:
            if fault.kind == "network":
                raise
            is_conditional = fault.status == _PRECONDITION_FAILED
        await self._delete(key)
        if await self._is_there(key):
            raise RemoteFault(
                "refused", "an object that was deleted is still there", code="DeletesNothing", is_repeatable=False
            )
        return is_conditional

    async def _delete_many(self, keys: Sequence[str]) -> bool:
        document = delete_document(keys)
        digest = base64.b64encode(hashlib.md5(document, usedforsecurity=False).digest()).decode()
        request = RemoteRequest(
            "DeleteObjects",
            "POST",
            "",
            (("delete", ""),),
            {"content-md5": digest, "content-type": "application/xml"},
            memoryview(document),
            hashlib.sha256(document).hexdigest(),
        )
        try:
            answer = await self._ask(request)
            is_done = not parse_not_deleted(answer.body) and not await self._is_there(self._key)
        except BrokenAnswerError:
            is_done = False
        except RemoteFault as fault:
            if fault.kind in ("network", "timeout", "busy", "down"):
                raise
            is_done = False
        if not is_done:
            for key in keys:
                await self._delete(key)
        return is_done

    async def _min_part_bytes(self) -> int:
        """How small parts may be: all servers take 5 MiB."""
        key = f"{self._key}-parts"
        begun = await self._ask(RemoteRequest("CreateMultipartUpload", "POST", key, (("uploads", ""),)))
        try:
            upload_id = parse_upload_id(begun.body)
        except BrokenAnswerError as error:
            raise RemoteFault("server", str(error)) from error
        try:
            etags = [await self._put_part(key, upload_id, number) for number in (1, 2)]
            document = complete_document([RemotePart(number, etag, None) for number, etag in enumerate(etags, 1)])
            request = RemoteRequest(
                "CompleteMultipartUpload",
                "POST",
                key,
                (("uploadId", upload_id),),
                {"content-type": "application/xml"},
                memoryview(document),
                hashlib.sha256(document).hexdigest(),
            )
            is_small_fine = not error_of((await self._ask(request)).body)[0]
        except RemoteFault as fault:
            if fault.code != "EntityTooSmall":
                await self._abort(RemoteUpload(key, upload_id, 0))
                raise
            is_small_fine = False
        if is_small_fine:
            await self._delete(key)
            return 1
        await self._abort(RemoteUpload(key, upload_id, 0))
        return S3_PART_BYTES_MIN

    async def _put_part(self, key: str, upload_id: str, number: int) -> str:
        query = (("partNumber", str(number)), ("uploadId", upload_id))
        payload = hashlib.sha256(_BODY).hexdigest()
        answer = await self._ask(RemoteRequest("UploadPart", "PUT", key, query, {}, memoryview(_BODY), payload))
        return quoted(answer.headers.get("etag", ""))

    async def _abort(self, upload: RemoteUpload) -> None:
        query = (("uploadId", upload.upload_id),)
        try:
            await self._ask(RemoteRequest("AbortMultipartUpload", "DELETE", upload.key, query))
        except RemoteFault as fault:
            if fault.code != "NoSuchUpload":
                raise

    async def _delete(self, key: str) -> None:
        await self._ask(RemoteRequest("DeleteObject", "DELETE", key))

    async def _is_there(self, key: str) -> bool:
        try:
            await self._ask(RemoteRequest("GetObject", "GET", key))
        except RemoteFault as fault:
            if fault.code == "NoSuchKey":
                return False
            raise
        return True

    async def _ask(self, request: RemoteRequest) -> Answer:
        return await self._requests.ask(request, until=self._until)


def _give_up_if_refused(fault: RemoteFault) -> None:
    """A repeat would be refused, too: it is meant to be."""
    if fault.kind == "client" or fault.status == _BAD_REQUEST:
        raise fault
