"""One bucket of an S3 server: objects by whole keys, and nothing of what they mean.

This is all that the rest knows of the remote server. What is behind it: `requests.py` attempts, repeats and hedges, `reading.py`
and `writing.py` bodies straight into and from memory, `connection.py` sockets, `breaker.py` and `pacing.py` restraint,
`probing.py` what the server can do, `faults.py` what goes wrong and what it is called here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, Self

from kvobj.clock import Clock
from kvobj.config import RemoteSettings
from kvobj.errors import ConfigurationError, TierUnavailableError
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.breaker import CircuitBreaker
from kvobj.tiers.remote.capabilities import Capabilities, UploadCheck
from kvobj.tiers.remote.connection import ConnectionPool
from kvobj.tiers.remote.documents import (
    ObjectPage,
    RemoteObject,
    RemoteUpload,
    delete_document,
    parse_not_deleted,
    parse_objects,
    parse_uploads,
    quoted,
)
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.health import HealthRecord, RemoteHealth
from kvobj.tiers.remote.instruments import RemoteInstruments
from kvobj.tiers.remote.probing import Prober
from kvobj.tiers.remote.reading import RangedReader, all_done, is_missing
from kvobj.tiers.remote.requests import TOO_LONG, Answer, RemoteRequest, Requests
from kvobj.tiers.remote.writing import ObjectWriter
from kvobj.tiers.verified import RunOnPool
from kvobj.wire.receive_check import choose_receive_mode
from kvobj.wire.response_head import BrokenAnswerError

if TYPE_CHECKING:
    from kvobj.tiers.remote.signing import RequestSigner

__all__ = ["RemoteBucket", "RemoteObject", "RemoteUpload"]

DELETE_BATCH: Final = 1000

_PRECONDITION_FAILED: Final = 412
_DELETES_AT_ONCE: Final = 8
_WATCH_SECONDS: Final = 0.5
_WATCH_SECONDS_MAX: Final = 5.0
_SKEW_WORTH_A_WORD_SECONDS: Final = 60.0
_LAST_PROBE_SECONDS: Final = 1.0


class RemoteBucket:
    """The bucket that the settings name. Event loop only; any number of calls at once, bounded inside.

    Each call ends within the operation timeout. What fails raises `TierUnavailableError`, as `RemoteRefusedError` where no repeat
    will cure it, `StoreFullError` where the remote has no room; a miss is a value. After a cancelled or failed call nothing refers
    to the memory that it was given.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        requests: Requests,
        record: HealthRecord,
        *,
        clock: Clock,
        run: RunOnPool,
        log: logging.Logger,
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._record = record
        self._clock = clock
        self._log = log
        self._probing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._reader = RangedReader(requests, part_bytes=settings.part_bytes)
        self._writer = ObjectWriter(
            requests, part_bytes=settings.part_bytes, check=self._upload_check, run=run, log=log
        )
        self.capabilities: Capabilities | None = None
        """What the server can do; None until it was asked."""

    @classmethod
    async def open(
        cls, settings: RemoteSettings, *, clock: Clock, metrics: Metrics, run: RunOnPool, log: logging.Logger
    ) -> Self:
        """Get ready, and begin to probe in the background. Does not fail when the server is down. `ConfigurationError` where the
        extra or the CA bundle is missing. `run`: the pool that hashing of more than 64 KiB runs on."""
        signer, tls = access_to(settings)
        pool = ConnectionPool(
            signer.host,
            signer.port,
            tls=tls,
            mode=await choose_receive_mode(log),
            connect_seconds=settings.connect_timeout_seconds,
            clock=clock,
        )
        breaker = CircuitBreaker(clock)
        record = HealthRecord(breaker, clock=clock, log=log)
        requests = Requests(
            settings,
            signer,
            pool,
            breaker=breaker,
            instruments=RemoteInstruments(metrics),
            clock=clock,
            chance=random.Random(),  # noqa: S311 - jitter
            on_outcome=record.note,
        )
        metrics.gauge_of("kvobj_remote_connections", "Open connections to the remote.", lambda: pool.open)
        metrics.gauge_of(
            "kvobj_remote_breaker_open",
            "Whether requests to the remote are not even tried (1), or one at a time (0.5).",
            lambda: {"closed": 0.0, "half-open": 0.5, "open": 1.0}[breaker.state],
        )
        made = cls(settings, requests, record, clock=clock, run=run, log=log)
        made._watching = asyncio.create_task(made._watch(), name="remote-watch")
        return made

    @property
    def health(self) -> RemoteHealth:
        """How the server has been answering."""
        return self._record.present()

    async def probe(self) -> Capabilities:
        """Ask the server what it can do, by doing it. Raises what any call raises."""
        async with self._probing:
            return await self._probe()

    async def head(self, key: str) -> RemoteObject | None:
        """The object without its bytes; None where there is none."""
        async with self._operation("HeadObject", key) as until:
            found, fault = None, None
            try:
                found = await self._writer.find(key, until=until)
            except RemoteFault as error:
                if error.code or error.kind != "refused":
                    raise
                fault = error
            if found is None:
                # An answer to HEAD tells no reason, and a bucket that is gone must not look like an object that is.
                await self._list_page(key, "", 1, until=until)
            if fault is not None:
                raise fault
            return found

    async def get(self, key: str, byte_range: ByteRange, into: memoryview, on_filled: Callable[[int], None]) -> bool:
        """Fill `into`, exactly as long as the range, with bytes of the object; False where there is no such object.

        `on_filled(n)` is called on the event loop: the first n bytes are there, without a gap, n ascending. They are what the
        server sent, not yet checked. When the call returns or raises nothing writes to `into` any more.
        """
        if len(into) != byte_range.stop - byte_range.start:
            raise ValueError(f"{len(into)} bytes of memory for the range {byte_range}")
        if not len(into):
            return await self.head(key) is not None
        async with self._operation("GetObject", key) as until:
            return await self._reader.read(key, byte_range, into, on_filled, until=until)

    async def put(self, key: str, body: memoryview) -> str:
        """Write an object, whole or not at all, over what was there; its ETag. Idempotent. When the call returns or raises nothing
        reads `body` any more."""
        async with self._operation("PutObject", key) as until:
            return await self._writer.write(key, body, until=until)

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        """Write an object in one request; its ETag. None where the condition does not hold: `if_absent`, that there is none,
        `if_match`, that there is one with this ETag. Conditions mean something only where `capabilities` has them.

        Where an answer was lost, and the repeat is told that the condition does not hold, what is there decides: the same bytes are
        taken for ours.
        """
        conditions = {"if-none-match": "*"} if if_absent else {}
        if if_match is not None:
            is_quoted = self.capabilities is None or self.capabilities.quotes_etags
            conditions["if-match"] = if_match if is_quoted else if_match.strip('"')
        request = RemoteRequest(
            "PutObject",
            "PUT",
            key,
            (),
            conditions,
            memoryview(body),
            hashlib.sha256(body).hexdigest(),
            is_repeatable_unseen=not conditions,
        )
        is_ambiguous = False

        def lost(fault: RemoteFault) -> None:
            nonlocal is_ambiguous
            is_ambiguous = is_ambiguous or fault.is_ambiguous

        async with self._operation("PutObject", key) as until:
            try:
                answer = await self._requests.ask(request, until=until, on_fault=lost)
            except RemoteFault as fault:
                if not conditions or not (fault.status == _PRECONDITION_FAILED or is_missing(fault)):
                    raise
                return await self._own_etag(key, body, until=until) if is_ambiguous else None
            return quoted(answer.headers.get("etag", ""))

    async def get_small(self, key: str, *, max_bytes: int) -> tuple[bytes, str] | None:
        """An object's bytes and ETag; None where there is none. `TierUnavailableError` where it is longer."""
        async with self._operation("GetObject", key) as until:
            return await self._get_whole(key, max_bytes, until=until)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent is fine. Raises where one of them was not deleted."""
        if not keys:
            return
        capabilities = self.capabilities
        async with self._operation("DeleteObjects", keys[0]) as until:
            if capabilities is None or capabilities.delete_many:
                for start in range(0, len(keys), DELETE_BATCH):
                    await self._delete_batch(keys[start : start + DELETE_BATCH], until=until)
            else:
                works = [self._delete_one(key, until=until) for key in keys]
                await all_done(works, at_once=_DELETES_AT_ONCE)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[RemoteObject]:
        """The objects whose keys begin with `prefix` and lie behind `after`, ascending, a page at a time; each page has the
        operation timeout. Objects that come or go meanwhile may or may not be among them."""
        while True:
            async with self._operation("ListObjectsV2", prefix) as until:
                page = await self._list_page(prefix, after, DELETE_BATCH, until=until)
            for each in page.objects:
                if each.key > after:
                    yield each
            if not page.is_truncated:
                return
            last = page.objects[-1].key if page.objects else ""
            if last <= after:
                raise TierUnavailableError("the remote's listing does not go on", prefix=prefix, after=after)
            after = last

    async def list_uploads(self, prefix: str) -> AsyncIterator[RemoteUpload]:
        """The unfinished multipart uploads whose keys begin with `prefix`."""
        markers: tuple[tuple[str, str], ...] = ()
        while True:
            query = (("uploads", ""), ("prefix", prefix), *markers)
            request = RemoteRequest("ListMultipartUploads", "GET", query=query)
            async with self._operation("ListMultipartUploads", prefix) as until:
                page = parse_uploads((await self._requests.ask(request, until=until)).body)
            for upload in page.uploads:
                yield upload
            if not page.is_truncated:
                return
            following = (("key-marker", page.next_key), ("upload-id-marker", page.next_upload_id))
            if following == markers or not page.next_key:
                raise TierUnavailableError("the remote's listing of uploads does not go on", prefix=prefix)
            markers = following

    async def abort(self, upload: RemoteUpload) -> None:
        """Give up a multipart upload; absent is fine."""
        async with self._operation("AbortMultipartUpload", upload.key) as until:
            await self._writer.abort(upload, until=until)

    async def aclose(self) -> None:
        """Close the connections. Idempotent; calls in flight are the caller's to end before."""
        if self._watching is not None:
            with suppress(TimeoutError):  # a probe that ends by itself takes its objects away
                async with asyncio.timeout(_LAST_PROBE_SECONDS), self._probing:
                    pass
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        await self._requests.aclose()

    # -- inside --------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _operation(self, name: str, key: str) -> AsyncIterator[float]:
        """An operation with its deadline, the event loop's time that is yielded; faults leave it as errors."""
        until = asyncio.get_running_loop().time() + self._settings.operation_timeout_seconds
        try:
            async with asyncio.timeout_at(until):
                yield until
        except RemoteFault as fault:
            raise fault.error(name, key) from fault
        except BrokenAnswerError as error:
            raise TierUnavailableError(
                "the remote's answer makes no sense", operation=name, key=key, detail=str(error)
            ) from error
        except TimeoutError as error:
            raise TierUnavailableError("the remote did not answer in time", operation=name, key=key) from error

    async def _probe(self) -> Capabilities:
        async with self._operation("probe", self._settings.prefix) as until:
            prober = Prober(
                self._requests,
                prefix=self._settings.prefix,
                checksums=self._settings.checksums,
                until=until,
                clock=self._clock,
                log=self._log,
            )
            found = await prober.find_out()
        self._note_skew(prober.date, prober.date_taken_ms)
        if found != self.capabilities:
            self._log.info("the remote %s can: %s", self._settings.endpoint, found)
        self.capabilities = found
        self._record.is_probed = True
        return found

    async def _get_whole(self, key: str, max_bytes: int, *, until: float) -> tuple[bytes, str] | None:
        try:
            answer: Answer = await self._requests.ask(
                RemoteRequest("GetObject", "GET", key), until=until, limit=max_bytes
            )
        except RemoteFault as fault:
            if is_missing(fault):
                return None
            raise
        return answer.body, quoted(answer.headers.get("etag", ""))

    async def _own_etag(self, key: str, body: bytes, *, until: float) -> str | None:
        """The ETag of an object if it has these bytes."""
        try:
            found = await self._get_whole(key, len(body), until=until)
        except RemoteFault as fault:
            if fault.code == TOO_LONG:
                return None
            raise
        return found[1] if found is not None and found[0] == body else None

    async def _delete_batch(self, keys: Sequence[str], *, until: float) -> None:
        document = delete_document(keys)
        request = RemoteRequest(
            "DeleteObjects",
            "POST",
            "",
            (("delete", ""),),
            {
                "content-md5": base64.b64encode(hashlib.md5(document, usedforsecurity=False).digest()).decode(),
                "content-type": "application/xml",
            },
            memoryview(document),
            hashlib.sha256(document).hexdigest(),
        )
        left = parse_not_deleted((await self._requests.ask(request, until=until)).body)
        if left:
            key, code = left[0]
            raise TierUnavailableError(
                "the remote did not delete all", left=len(left), of=len(keys), key=key, code=code
            )

    async def _delete_one(self, key: str, *, until: float) -> None:
        await self._requests.ask(RemoteRequest("DeleteObject", "DELETE", key), until=until)

    async def _list_page(self, prefix: str, after: str, count: int, *, until: float) -> ObjectPage:
        query = [("encoding-type", "url"), ("list-type", "2"), ("max-keys", str(count)), ("prefix", prefix)]
        if after:
            query.append(("start-after", after))
        answer = await self._requests.ask(RemoteRequest("ListObjectsV2", "GET", query=tuple(query)), until=until)
        return parse_objects(answer.body)

    def _upload_check(self) -> UploadCheck:
        if self.capabilities is not None:
            return self.capabilities.upload_check
        return "sha256" if self._settings.checksums == "auto" else self._settings.checksums

    def _note_skew(self, date: str, taken_ms: int) -> None:
        self._record.note_date(date, taken_ms)
        skew_seconds = self._record.clock_skew_seconds
        if skew_seconds is not None and abs(skew_seconds) > _SKEW_WORTH_A_WORD_SECONDS:
            self._log.warning(
                "the remote's clock is %.0f s ahead of this machine's: past 900 s it refuses", skew_seconds
            )

    async def _watch(self) -> None:
        """Probe until it has succeeded once; ask again while the server is refusing or left alone, so that its return is seen."""
        pause = _WATCH_SECONDS
        while True:
            try:
                async with self._probing:
                    if self.capabilities is None:
                        await self._probe()
                if not self.health.is_usable:
                    async with self._operation("ListObjectsV2", self._settings.prefix) as until:
                        await self._list_page(self._settings.prefix, "", 1, until=until)
                pause = _WATCH_SECONDS
            except Exception as error:  # noqa: BLE001 - whatever it is, it goes on
                self._log.debug("the remote is not there yet: %s", error)
                pause = min(pause * 2, _WATCH_SECONDS_MAX)
            await asyncio.sleep(pause)


def access_to(settings: RemoteSettings) -> tuple[RequestSigner, ssl.SSLContext | None]:
    """What signs requests to the remote, and whom it trusts where that speaks https; nothing is asked of it. `ConfigurationError`
    where the extra or the CA bundle is missing."""
    try:
        from kvobj.tiers.remote.signing import RequestSigner  # noqa: PLC0415 - the extra is looked for where it is needed
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            [
                f'tiers: kind "remote" needs the extra "remote" ({error.name} is missing): pip install \'kvobj[server,remote]\''
            ]
        ) from error
    signer = RequestSigner(settings)
    try:
        return signer, ssl.create_default_context(cafile=settings.ca_bundle) if signer.is_tls else None
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError([f"tiers: ca_bundle of the remote tier cannot be read: {error}"]) from error
