"""Requests to one upstream: the KV API of another kvobj, over the remote tier's HTTP exchange and signatures.

Whatever fails is `RemoteFault` here; who calls decides what that means, mostly: as if there were no upstream. A breaker keeps an
upstream that is away from being asked at all. Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvobj.clock import Clock
from kvobj.config.settings import RemoteSettings, UpstreamSettings
from kvobj.errors import ConfigurationError
from kvobj.store.upstream.health import HealthRecord
from kvobj.store.upstream.instruments import UpstreamInstruments
from kvobj.store.upstream.object_fields import parse_object_fields
from kvobj.store.upstream.via import Via
from kvobj.tiers.remote.breaker import CircuitBreaker
from kvobj.tiers.remote.connection import ConnectionPool
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.requests import Answer, Exchange, RemoteRequest, Requests
from kvobj.wire.receive_check import choose_receive_mode

if TYPE_CHECKING:
    from kvobj.tiers.remote.signing import RequestSigner

NAMESPACE_HEADER: Final = "x-kvobj-namespace"
PARENT_HEADER: Final = "x-kvobj-parent"
TOKENS_HEADER: Final = "x-kvobj-tokens"
DIGEST_HEADER: Final = "x-kvobj-digest"
STREAM_TYPE: Final = "application/vnd.kvobj.stream"
_MSGPACK: Final = "application/msgpack"
_NOT_FOUND: Final = 404
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z").match
_NUMBER: Final = re.compile(r"[0-9]{1,18}\Z").match
_HASHED_INLINE_BYTES: Final = 64 * 1024
_TOKENS_MAX: Final = 2**32

T = TypeVar("T")


class ChunkHead(msgspec.Struct, frozen=True):
    """What an upstream tells of a chunk beside its bytes. `namespace` "" is `default`; `parent` is as clients name it, None: it has
    none; `tokens` 0: it does not say; `digest` None: it does not know it yet, or never; `headers`, `metadata` as in `ObjectRow`."""

    size_bytes: int
    namespace: str
    parent: str | None
    tokens: int
    digest: bytes | None
    headers: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}


class NamespaceAnswer(msgspec.Struct, frozen=True):
    """As much of `GET ?namespace` as is compared."""

    fingerprint: bytes
    root: bytes


class ChunkAnswer(msgspec.Struct, frozen=True):
    """One chunk of a detailed match."""

    size_bytes: int
    digest: bytes | None = None


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Where a chain breaks there."""

    at: int
    reason: str
    when_ms: int | None = None
    namespace_differs: tuple[str, ...] = ()


class MatchAnswer(msgspec.Struct, frozen=True):
    """What `?match` answers there."""

    matched: int
    tokens: int
    size_bytes: int
    expected_load_ms: int = 0
    chunks: tuple[ChunkAnswer, ...] | None = None
    explain: ExplainAnswer | None = None


class ItemError(msgspec.Struct, frozen=True):
    """Why a chunk of a batch was not stored there."""

    code: str
    message: str = ""


class ItemAnswer(msgspec.Struct, frozen=True):
    """What became of one chunk of a batch there: it stands, or `error` says why not."""

    status: int
    existed: bool = False
    digest: bytes | None = None
    durability: str = ""
    error: ItemError | None = None


class BatchAnswer(msgspec.Struct, frozen=True):
    """What `?mput` answers there, in the order of the batch."""

    items: tuple[ItemAnswer, ...]


class UpstreamClient:
    """One bucket of another kvobj. `ConfigurationError` where the extra `remote` or the CA bundle is missing. Connections are made
    when they are needed."""

    def __init__(
        self,
        settings: UpstreamSettings,
        *,
        via: Via,
        instruments: UpstreamInstruments,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self.settings = settings
        self.via = via
        self._signer, self._tls = access_to(settings.server)
        self._where = (self._signer.host, self._signer.port)
        self._instruments = instruments
        self._clock = clock
        self._log = log
        self._breaker = CircuitBreaker(clock)
        server = settings.server
        self.health = HealthRecord(
            settings.bucket, f"{server.endpoint}/{server.bucket}", self._breaker, clock=clock, log=log
        )
        instruments.watch(lambda: self.health.is_failing)
        self._opening = asyncio.Lock()
        self._requests: Requests | None = None

    @property
    def is_down(self) -> bool:
        """Whether it is known not to answer, so that a question would not even be sent."""
        return self._breaker.state == "open"

    @property
    def trouble(self) -> str:
        """What is wrong with it, as the latest request found; empty: nothing."""
        return self.health.trouble

    def deadline(self) -> float:
        """When a question that is asked now has to be answered, in the event loop's time."""
        return asyncio.get_running_loop().time() + self.settings.timeout_seconds

    async def aclose(self) -> None:
        """Close the connections."""
        if self._requests is not None:
            await self._requests.aclose()

    async def head(self, key: str, *, until: float) -> ChunkHead | None:
        """What a chunk is, its digest waited for; None where there is none."""
        requests = await self._opened()

        async def attempt() -> ChunkHead:
            exchange = await requests.begin(RemoteRequest("HeadChunk", "HEAD", key, headers=self.via.headers()))
            await requests.whole(exchange)
            return _head_of(exchange)

        return await self._unless_missing(requests.repeated("HeadChunk", attempt, until=until))

    async def read(self, key: str, take: Callable[[ChunkHead, Exchange], Awaitable[T]], *, until: float) -> T | None:
        """Ask for a chunk's bytes: `take` is given what it is and the exchange, and has to read the body to its end or raise; of an
        attempt that fails it is called again. None where there is no such chunk."""
        requests = await self._opened()

        async def attempt() -> T:
            exchange = await requests.begin(RemoteRequest("GetChunk", "GET", key, headers=self.via.headers()))
            try:
                result = await take(_head_of(exchange), exchange)
            except BaseException:
                await exchange.end()
                raise
            exchange.finish()
            return result

        return await self._unless_missing(requests.repeated("GetChunk", attempt, until=until))

    async def match(self, document: Mapping[str, object], *, until: float) -> MatchAnswer | None:
        """`?match` with this document, in msgpack; None where the namespace is not there."""
        body = msgspec.msgpack.encode(document)
        payload_sha256 = await _sha256(memoryview(body))
        headers = {"content-type": _MSGPACK, "accept": _MSGPACK, **self.via.headers()}
        request = RemoteRequest(
            "Match", "POST", "", (("match", ""),), headers, memoryview(body), payload_sha256=payload_sha256
        )
        answer = await self._unless_missing(self._ask(request, until=until))
        return None if answer is None else _decoded(answer, MatchAnswer)

    async def namespace(self, name: str, *, until: float) -> NamespaceAnswer | None:
        """A namespace as it is there; None where it is not, or not for these credentials."""
        request = RemoteRequest("GetNamespace", "GET", "", (("namespace", name),), {"accept": _MSGPACK})
        answer = await self._unless_missing(self._ask(request, until=until))
        return None if answer is None else _decoded(answer, NamespaceAnswer)

    async def put(self, key: str, body: memoryview, headers: Mapping[str, str], *, until: float) -> Mapping[str, str]:
        """Store a chunk there; the headers of the reply. Idempotent. `RemoteFault` with the status and code of a refusal."""
        payload_sha256 = await _sha256(body)
        request = RemoteRequest("PutChunk", "PUT", key, (), {**headers, **self.via.headers()}, body, payload_sha256)
        return (await self._ask(request, until=until)).headers

    async def put_many(
        self, stream: memoryview, headers: Mapping[str, str], *, count: int, until: float
    ) -> tuple[ItemAnswer, ...]:
        """`?mput` with this stream of so many chunks. Idempotent: what a repeat brings again stands. `RemoteFault`, of kind
        `client` where the request as a whole is refused."""
        fields = {"content-type": STREAM_TYPE, "accept": _MSGPACK, **headers, **self.via.headers()}
        request = RemoteRequest("PutChunks", "POST", "", (("mput", ""),), fields, stream, await _sha256(stream))
        items = _decoded(await self._ask(request, until=until), BatchAnswer).items
        if len(items) != count:
            raise RemoteFault("server", "an answer of another batch", is_repeatable=False)
        return items

    # -- inside --------------------------------------------------------------------------------------------------
    async def _opened(self) -> Requests:
        if self._requests is not None:
            return self._requests
        async with self._opening:
            if self._requests is None:
                server = self.settings.server
                host, port = self._where
                pool = ConnectionPool(
                    host,
                    port,
                    tls=self._tls,
                    mode=await choose_receive_mode(self._log),
                    connect_seconds=server.connect_timeout_seconds,
                    clock=self._clock,
                )
                self._requests = Requests(
                    server,
                    self._signer,
                    pool,
                    breaker=self._breaker,
                    instruments=self._instruments,
                    clock=self._clock,
                    chance=random.Random(),  # noqa: S311 - jitter
                    on_outcome=self.health.note,
                )
        return self._requests

    async def _ask(self, request: RemoteRequest, *, until: float) -> Answer:
        return await (await self._opened()).ask(request, until=until)

    async def _unless_missing(self, asking: Awaitable[T]) -> T | None:
        try:
            return await asking
        except RemoteFault as fault:
            if fault.status == _NOT_FOUND and fault.kind == "client":
                return None
            raise


def _head_of(exchange: Exchange) -> ChunkHead:
    """`RemoteFault` for what is no reply to a read of a chunk."""
    fields, length = exchange.head.headers, exchange.head.length
    if exchange.request.method == "HEAD":
        length = _number(fields.get("content-length", ""))
    tokens = _number(fields.get(TOKENS_HEADER, "0"))
    digest, parent = fields.get(DIGEST_HEADER), fields.get(PARENT_HEADER)
    if length is None or tokens is None or tokens >= _TOKENS_MAX or (digest and not _DIGEST(digest)):
        raise RemoteFault("server", "headers that no chunk has", is_repeatable=False)
    try:
        # Names are UTF-8, which header fields hold as if it were latin-1.
        parent = None if parent is None else parent.encode("latin-1").decode()
    except ValueError as error:
        raise RemoteFault("server", "a parent that is no name", is_repeatable=False) from error
    headers, metadata = parse_object_fields(fields)
    return ChunkHead(
        size_bytes=length,
        namespace=fields.get(NAMESPACE_HEADER, ""),
        parent=parent,
        tokens=tokens,
        digest=bytes.fromhex(digest) if digest else None,
        headers=headers,
        metadata=metadata,
    )


def _number(written: str) -> int | None:
    return int(written) if _NUMBER(written) else None


def _decoded(answer: Answer, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(answer.body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise RemoteFault("server", f"an answer that is none: {error}", is_repeatable=False) from error


async def _sha256(body: memoryview) -> str:
    if len(body) <= _HASHED_INLINE_BYTES:
        return hashlib.sha256(body).hexdigest()
    return (await asyncio.to_thread(hashlib.sha256, body)).hexdigest()


def access_to(server: RemoteSettings) -> tuple[RequestSigner, ssl.SSLContext | None]:
    """What signs requests to an upstream, and whom it trusts where that speaks https; nothing is asked of it. `ConfigurationError`
    where the extra or the CA bundle is missing."""
    try:
        from kvobj.tiers.remote.signing import RequestSigner  # noqa: PLC0415 - the extra is looked for where it is needed
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            [f"upstreams: need the extra \"remote\" ({error.name} is missing): pip install 'kvobj[server,remote]'"]
        ) from error
    signer = RequestSigner(server)
    try:
        return signer, ssl.create_default_context(cafile=server.ca_bundle) if signer.is_tls else None
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError([f"upstreams: ca_bundle cannot be read: {error}"]) from error
