"""One request as the handlers see it: what was parsed and verified, the body, and how replies begin.

`Exchange` is made once a request, after its signature was checked; `body_is_read` says whether the connection may go on;
`overrides` is the query, of which GET takes response-* where the request is signed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.access.bucket_access import BucketAccess
from kvobj.api.access.source_address import Network, came_by_tls, source_address
from kvobj.api.aws_chunked import AwsChunkedSource
from kvobj.api.checksums import Announced, check_document, check_trailers
from kvobj.api.errors import S3Error
from kvobj.api.message import BodyStream, Reply, RequestBody, RequestHead
from kvobj.api.request import HostRules
from kvobj.api.sigv4 import Authentication, PayloadMode
from kvobj.api.users import UserDirectory
from kvobj.catalog.rows import BucketRow
from kvobj.clock import Clock
from kvobj.errors import AccessDeniedError, DocumentTooLargeError, IncompleteBodyError, NoSuchBucketError

DRAIN_BYTES: Final = 256 * 1024
_DECODED_LENGTH: Final = "x-amz-decoded-content-length"
_MAX_LENGTH_DIGITS: Final = 19
_HELD_BYTES: Final = 16 * 1024
"""Of a longer body the most is still to come, and is received to where it belongs."""
_OWNER: Final = "x-amz-expected-bucket-owner"
_SOURCE_OWNER: Final = "x-amz-source-expected-bucket-owner"

Header = tuple[str, str]


@dataclass(frozen=True, slots=True)
class S3Settings:
    """`region` is accepted in credential scopes beside us-east-1. `host_id` is x-amz-id-2 of every reply.

    `unsigned_payload_needs_tls`: a signed request whose signature does not cover its body comes by TLS or is refused.
    `explain_signatures`: see `SignatureVerifier`. `trusted_proxies`: whose X-Forwarded-For and X-Forwarded-Proto are believed.
    `bucket_uploads`: multipart uploads that a bucket may have in progress. `has_remote`: there is a remote tier to write to;
    `upstream_buckets`: those whose writes of class shared are handed on to another store. `bursts_bytes`: see
    `kv.mget.BurstBudget`.
    """

    region: str = "us-east-1"
    host_rules: HostRules = field(default_factory=HostRules)
    host_id: str = "kvobj"
    unsigned_payload_needs_tls: bool = False
    explain_signatures: bool = False
    trusted_proxies: tuple[Network, ...] = ()
    bucket_uploads: int = 10_000
    has_remote: bool = False
    upstream_buckets: frozenset[str] = frozenset()
    bursts_bytes: int = 256 * 1024 * 1024

    @property
    def regions(self) -> frozenset[str]:
        """The regions that a credential scope or a location constraint may name."""
        return frozenset({self.region, "us-east-1"})


class Exchange:
    """See the module's text. One task uses it."""

    __slots__ = (
        "_bucket",
        "_buckets",
        "authentication",
        "base",
        "body",
        "body_is_read",
        "clock",
        "executor",
        "fields",
        "head",
        "overrides",
        "settings",
        "users",
    )

    def __init__(
        self,
        head: RequestHead,
        body: RequestBody,
        *,
        fields: dict[str, str],
        overrides: dict[str, str],
        authentication: Authentication,
        settings: S3Settings,
        users: UserDirectory,
        buckets: Callable[[str], Awaitable[BucketRow | None]],
        clock: Clock,
        executor: Executor | None,
    ) -> None:
        """`buckets`: a bucket's row as it is now."""
        self.head = head
        self.body = body
        self.fields = fields
        self.overrides = overrides
        self.authentication = authentication
        self.settings = settings
        self.users = users
        self.clock = clock
        self.executor = executor
        self.base: tuple[Header, Header] = (("x-amz-request-id", head.request_id), ("x-amz-id-2", settings.host_id))
        self.body_is_read = body.length == 0
        self._buckets = buckets
        self._bucket: BucketRow | None = None

    @property
    def is_head(self) -> bool:
        """The method is HEAD: no reply has a body."""
        return self.head.method == "HEAD"

    @property
    def source_address(self) -> str:
        """The client's address: the socket's, or what a trusted proxy says."""
        return source_address(self.head.remote, self.fields, self.settings.trusted_proxies)

    @property
    def is_secure(self) -> bool:
        """The client spoke TLS, with us or with a trusted proxy."""
        head = self.head
        return head.is_tls or came_by_tls(head.remote, self.fields, self.settings.trusted_proxies)

    @property
    def url(self) -> str:
        """Where the request was sent, without its query, as its client names the server; "" where it does not."""
        host, path = self.fields.get("host", ""), self.head.target.partition("?")[0]
        if not host or not path.startswith("/"):
            return ""
        return f"{'https' if self.is_secure else 'http'}://{host}{path}"

    def access(self, bucket: BucketRow | None, name: str, *, is_source: bool = False) -> BucketAccess:
        """The caller's rights in the bucket of this name. Raises `NoSuchBucketError`, as S3 does: bucket names are no secret; and
        `AccessDeniedError` where the bucket, or a copy's source (`is_source`), is not owned by whom the caller expects."""
        if bucket is None:
            raise NoSuchBucketError("no such bucket", bucket=name)
        expected = self.fields.get(_SOURCE_OWNER if is_source else _OWNER)
        if expected is not None and expected != bucket.owner:
            raise AccessDeniedError("the bucket is another user's", bucket=name, expected=expected)
        if not is_source:
            self._bucket = bucket
        return BucketAccess(bucket, self)

    def authorise(self, bucket: BucketRow | None, name: str, action: Action) -> BucketRow:
        """The bucket, if there is one and the caller may do this with it. Raises `NoSuchBucketError` and `AccessDeniedError`.

        Others than its owner may use what they are granted of chunks in KV buckets by `chunk_access`.
        """
        access = self.access(bucket, name)
        access.require(action)
        return access.bucket

    def reply(
        self, status: int, headers: list[Header] | tuple[Header, ...] = (), body: bytes | BodyStream = b""
    ) -> Reply:
        """A reply that begins with the request's id."""
        return Reply(status, (*self.base, *headers), body)

    def xml(self, document: bytes) -> Reply:
        """A 200 with an XML document, or with its length alone to a HEAD."""
        headers = (*self.base, ("content-type", "application/xml"))
        return Reply(
            200, headers, b"" if self.is_head else document, content_length=len(document) if self.is_head else None
        )

    def must_close(self) -> bool:
        """Whether a reply now must end the connection: the body is unread and long, or may never come (Expect)."""
        if self.body_is_read:
            return False
        return body_blocks_connection(self.body, self.fields)

    def body_size_bytes(self) -> int:
        """The payload's length: of Content-Length, or of x-amz-decoded-content-length inside aws-chunked framing.

        Raises `S3Error` MissingContentLength (411) where there is none, and `IncompleteBodyError` where Content-Length leaves no
        room for what is said to be inside: nothing is reserved for it.
        """
        if not self.authentication.payload_mode.is_chunked:
            if self.body.length is None or (self.body.length == 0 and self.fields.get("content-length") in (None, "")):
                raise S3Error("MissingContentLength")
            return self.body.length
        value = self.fields.get(_DECODED_LENGTH)
        if value is None:
            raise S3Error("MissingContentLength", "You must provide the x-amz-decoded-content-length header.")
        if not value.isascii() or not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
            raise S3Error(
                "InvalidArgument", "x-amz-decoded-content-length must be a number.", ArgumentName=_DECODED_LENGTH
            )
        size_bytes = int(value)
        if self.body.length is not None and size_bytes > self.body.length:
            raise IncompleteBodyError("the body is shorter than its decoded length", size_bytes=size_bytes)
        return size_bytes

    def source(self, size_bytes: int) -> PayloadSource:
        """The payload to receive, without its framing."""
        mode = self.authentication.payload_mode
        if not mode.is_chunked:
            return PayloadSource(self, None)
        framed = AwsChunkedSource(
            self.body,
            size_bytes,
            signing=self.authentication.chunk_signing,
            with_trailer=mode is not PayloadMode.CHUNKS_SIGNED,
            executor=self.executor,
        )
        return PayloadSource(self, framed)

    async def read_document(self, announced: Announced, *, limit_bytes: int) -> bytes:
        """A small body, whole and verified as `announced` says. Raises `DocumentTooLargeError` past the limit, before
        reading, and `NoSuchBucketError` where the bucket of `access` is gone by the time that the body is there, or another has
        its name."""
        return bytes(await self.read_bytes(announced, limit_bytes=limit_bytes))

    async def read_bytes(self, announced: Announced, *, limit_bytes: int) -> bytes | bytearray:
        """`read_document` without its last copy."""
        body = self.body
        size_bytes = 0 if body.length == 0 else self.body_size_bytes()
        if size_bytes > limit_bytes:
            raise DocumentTooLargeError("the document is too large", size_bytes=size_bytes, limit_bytes=limit_bytes)
        source = self.source(size_bytes)
        document: bytes | bytearray = b""
        if 0 < size_bytes <= _HELD_BYTES and source.is_plain:
            document = await body.read_some(size_bytes)  # most often it came with its head, and is all there
        if len(document) < size_bytes:
            buffer = bytearray(size_bytes)
            buffer[: len(document)] = document
            await body.accept()
            with memoryview(buffer) as view:
                await source.receive_into(view[len(document) :], lambda _: None)
            document = buffer
        value = check_trailers(announced, await source.finish())
        check_document(announced, value, document)
        if body.length != 0:  # framing around no payload is waited for too
            await self._require_same_bucket()
        return document

    async def _require_same_bucket(self) -> None:
        """A body takes as long as its sender likes: what the rights were looked up on may be somebody else's by now."""
        bucket = self._bucket
        if bucket is not None and not bucket.is_still(await self._buckets(bucket.name)):
            raise NoSuchBucketError("the bucket is gone", bucket=bucket.name)


class PayloadSource:
    """The `ByteSource` of a request's payload, framed or not; `finish` reads what follows it."""

    __slots__ = ("_exchange", "_framed", "_whole")

    def __init__(self, exchange: Exchange, framed: AwsChunkedSource | None) -> None:
        self._exchange = exchange
        self._framed = framed
        self._whole = b""

    @property
    def is_plain(self) -> bool:
        """Whether the body is the payload, without framing."""
        return self._framed is None

    def take_whole(self) -> bytes | None:
        """See `WholeSource.take_whole`."""
        if self._framed is not None:
            return None
        whole = self._exchange.body.take_whole()
        if whole is not None:
            self._whole = whole
            self._exchange.body_is_read = True
        return whole

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        if self._whole:
            buffer[:], self._whole = self._whole[: len(buffer)], self._whole[len(buffer) :]
            on_bytes(len(buffer))
        elif self._framed is None:
            await self._exchange.body.receive_into(buffer, on_bytes)
        else:
            await self._framed.receive_into(buffer, on_bytes)

    async def finish(self) -> dict[str, str]:
        """The trailers; from here on the connection may be used again."""
        trailers: dict[str, str] = {}
        if self._framed is not None and self._exchange.body.length != 0:
            trailers = await self._framed.finish()
        elif self._framed is not None:
            raise IncompleteBodyError("the body has no aws-chunked framing")
        self._exchange.body_is_read = True
        return trailers


def body_blocks_connection(body: RequestBody, fields: dict[str, str]) -> bool:
    """Whether an unread body makes a connection useless: too long to drain, or announced but perhaps never sent."""
    return body.length is None or body.length > DRAIN_BYTES or (body.length > 0 and "expect" in fields)
