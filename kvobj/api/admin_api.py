"""The admin port: `/metrics` and `/health` for machines, `/api/v1` for `kvobj-admin`. JSON in, JSON out.

`/api/v1` answers only the root user, and only where the body's digest was signed; `/metrics` and `/health` ask for no
signature and tell no names. Secret keys leave only in the reply that made them. Errors have the shape
`{"error": {"code", "message", "resource", "request_id", "detail"}}`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from kvobj.api.admin_namespaces import AdminNamespaces
from kvobj.api.admin_verification import Verification
from kvobj.api.admin_view import AdminView, BlobStatus
from kvobj.api.errors import describe
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.api.request import parse_query
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, BucketUsage, Durability, ObjectRow, UserRow
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.clock import Clock
from kvobj.config.bucket_name import bucket_name_problem
from kvobj.config.credential_rules import (
    access_key_problem,
    display_name_problem,
    secret_key_problem,
    user_name_problem,
)
from kvobj.errors import (
    AccessDeniedError,
    BucketExistsError,
    DigestMismatchError,
    EntityTooLargeError,
    InvalidRequestError,
    KvobjError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUserError,
    NotFoundError,
    UnavailableError,
)
from kvobj.gc.recall import RecallQuery
from kvobj.ids import RandomBytes
from kvobj.metrics import Metrics

BODY_BYTES_MAX: Final = 64 * 1024
LIST_LIMIT_MAX: Final = 1000
FLUSH_SECONDS: Final = 600.0
"""What a flush has at most."""

Authenticate = Callable[[RequestHead], Awaitable[UserRow]]
"""Checks a request's SigV4 signature and returns who signed it; raises a typed error otherwise."""

_JSON: Final = (("content-type", "application/json"),)
_TEXT: Final = (("content-type", "text/plain; charset=utf-8"),)
_METRICS: Final = (("content-type", "text/plain; version=0.0.4; charset=utf-8"),)

RequestT = TypeVar("RequestT", bound=msgspec.Struct)


class _CreateBucket(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    kind: BucketKind = BucketKind.ORDINARY
    durability: Durability | None = None
    codec: str = "raw"
    owner: str = ""
    """A user's id; without, the root user."""
    remote: RemoteRule = RemoteRule.NEVER


class _UpdateBucket(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    remote: RemoteRule


class _AddUser(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    id: str
    display_name: str = ""
    access_key: str = ""
    secret_key: str = ""


class _Flush(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    local: bool = False
    timeout_seconds: float | None = None
    """None: as long as it takes, up to `FLUSH_SECONDS`, and an error where that is not enough."""


class _Verify(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    bucket: str | None = None


class _ImportNamespace(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    bucket: str
    name: str
    declaration: dict[str, object]
    key: str
    fingerprint: str = ""


class _Recall(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    bucket: str
    namespace: str | None = None
    writer: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """An authenticated request, ready to be answered."""

    query: dict[str, str]
    body: bytes

    def parameter(self, name: str) -> str:
        if not self.query.get(name):
            raise InvalidRequestError("a query parameter is missing", name=name)
        return self.query[name]

    def limit(self) -> int:
        limit = self.query.get("limit", str(LIST_LIMIT_MAX))
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= LIST_LIMIT_MAX):
            raise InvalidRequestError(f"limit must be from 1 to {LIST_LIMIT_MAX}", limit=limit)
        return int(limit)

    def request(self, kind: type[RequestT]) -> RequestT:
        try:
            return msgspec.json.decode(self.body or b"{}", type=kind)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(f"the body is not what is expected: {error}") from error


class AdminService:
    """Answers the admin port; `handle` is its `Handler`. Event-loop-only. `aclose()` stops a running verification."""

    def __init__(
        self,
        *,
        view: AdminView,
        catalog: Catalog,
        authenticate: Authenticate,
        metrics: Metrics,
        clock: Clock,
        region: str,
        logger: logging.Logger,
        random_bytes: RandomBytes = os.urandom,
        has_remote: bool = False,
        chunks: ChunkStore | None = None,
    ) -> None:
        """`chunks` is behind the calls about namespaces; without it there are none."""
        self._view = view
        self._catalog = catalog
        self._authenticate = authenticate
        self._metrics = metrics
        self._clock = clock
        self._region = region
        self._logger = logger
        self._random_bytes = random_bytes
        self._has_remote = has_remote
        self._verification = Verification(view.verify)
        self._calls: dict[tuple[str, str], Callable[[_Call], Awaitable[object]]] = {
            ("GET", "status"): self._status,
            ("GET", "inspect"): self._inspect,
            ("GET", "buckets"): self._list_buckets,
            ("POST", "buckets"): self._create_bucket,
            ("PUT", "buckets"): self._update_bucket,
            ("GET", "objects"): self._list_objects,
            ("POST", "verify"): self._start_verification,
            ("GET", "verify"): self._report_verification,
            ("DELETE", "verify"): self._cancel_verification,
            ("POST", "flush"): self._flush,
            ("GET", "gc"): self._plan_gc,
            ("POST", "gc"): self._run_gc,
            ("POST", "recall"): self._start_recall,
            ("GET", "recall"): self._report_recall,
            ("DELETE", "recall"): self._cancel_recall,
            ("GET", "users"): self._list_users,
            ("POST", "users"): self._add_user,
            ("DELETE", "users"): self._remove_user,
        }
        if chunks is not None:
            self._namespaces = AdminNamespaces(catalog, chunks)
            self._calls |= {
                ("GET", "namespaces"): self._list_namespaces,
                ("GET", "namespace"): self._show_namespace,
                ("GET", "namespace-export"): self._export_namespace,
                ("POST", "namespace-import"): self._import_namespace,
            }

    async def aclose(self) -> None:
        """Stop what runs in the background."""
        await self._verification.cancel()

    async def handle(self, head: RequestHead, body: RequestBody) -> Reply:
        """Answer one request. Raises nothing but cancellation."""
        path, _, raw_query = head.target.partition("?")
        has_unread_body = body.length != 0
        try:
            if path.startswith("/api/v1/"):
                answer = await self._answer(head, path.removeprefix("/api/v1/"), raw_query, body)
                return Reply(200, _JSON, msgspec.json.encode(answer))
            return self._open_to_all(head, path, close=has_unread_body)
        except KvobjError as error:
            return _error_reply(error, head, path, close=has_unread_body)
        except Exception:  # the outermost handler: a defect is a 500 with a traceback in the log, not a dead connection
            self._logger.exception("admin request failed", extra={"request_id": head.request_id})
            return _error_document(
                head, path, status=500, code="InternalError", message="internal error", detail={}, close=True
            )

    def _open_to_all(self, head: RequestHead, path: str, *, close: bool) -> Reply:
        method = head.method
        match path if method in ("GET", "HEAD") else "":
            case "/metrics":
                content = self._metrics.render()
                return Reply(200, _METRICS, *_body_of(content, method), close=close)
            case "/health/live":
                return Reply(200, _TEXT, *_body_of(b"live\n", method), close=close)
            case "/health/ready":
                is_ready = self._view.is_ready()
                content = b"ready\n" if is_ready else b"not ready\n"
                return Reply(200 if is_ready else 503, _TEXT, *_body_of(content, method), close=close)
            case _ if head.header("authorization") is None and "x-amz-signature=" not in head.target.lower():
                raise NotFoundError("no such page: this is the admin port, S3 is at another", path=path)
            case _:
                # A client that looks for a bucket here: a 404 would be a miss to it, and it would look on for ever.
                raise AccessDeniedError("this is the admin port: S3 is at another", path=path)

    async def _answer(self, head: RequestHead, name: str, raw_query: str, body: RequestBody) -> object:
        user = await self._authenticate(head)
        if not user.is_root:
            raise AccessDeniedError("only the root user may administer", user=user.id)
        call = self._calls.get((head.method, name))
        if call is None:
            raise NotFoundError("no such call", method=head.method, name=name)
        query = dict(parse_query(raw_query)) if raw_query else {}
        return await call(_Call(query, await _signed_body(head, body)))

    # -- the store -----------------------------------------------------------------------------------------------
    async def _status(self, _call: _Call) -> object:
        return await self._view.status()

    async def _flush(self, call: _Call) -> object:
        asked = call.request(_Flush)
        seconds = FLUSH_SECONDS if asked.timeout_seconds is None else asked.timeout_seconds
        if not 0 <= seconds <= FLUSH_SECONDS:
            raise InvalidRequestError(f"timeout_seconds is from 0 to {FLUSH_SECONDS:.0f}", given=asked.timeout_seconds)
        outcome = await self._view.flush(local=asked.local, timeout_seconds=seconds)
        if not outcome.is_done and asked.timeout_seconds is None:
            left = outcome.left_in_memory + outcome.left_to_upload
            raise UnavailableError("not everything could be written down in time", left=left)
        return outcome

    async def _start_verification(self, call: _Call) -> object:
        bucket = call.request(_Verify).bucket
        if bucket is not None:
            total_objects = (await self._catalog.bucket_usage(bucket)).objects
        else:
            total_objects = sum([usage.objects async for _, usage in self._bucket_usages()])
        return self._verification.start(bucket, total_objects=total_objects)

    async def _report_verification(self, _call: _Call) -> object:
        return self._verification.report()

    async def _cancel_verification(self, _call: _Call) -> object:
        return await self._verification.cancel()

    async def _plan_gc(self, call: _Call) -> object:
        return await self._view.gc_plan(call.limit())

    async def _run_gc(self, _call: _Call) -> object:
        return await self._view.collect()

    async def _start_recall(self, call: _Call) -> object:
        asked = call.request(_Recall)
        query = RecallQuery(asked.bucket, asked.namespace, asked.writer, asked.from_ms, asked.to_ms)
        return await self._view.start_recall(query, dry_run=asked.dry_run)

    async def _report_recall(self, _call: _Call) -> object:
        return self._view.recall_report()

    async def _cancel_recall(self, _call: _Call) -> object:
        return await self._view.cancel_recall()

    # -- buckets and objects -------------------------------------------------------------------------------------
    async def _list_buckets(self, _call: _Call) -> object:
        buckets = [
            {**_bucket_document(row), "objects": usage.objects, "size_bytes": usage.size_bytes}
            async for row, usage in self._bucket_usages()
        ]
        return {"buckets": buckets}

    async def _bucket_usages(self) -> AsyncIterator[tuple[BucketRow, BucketUsage]]:
        for row in await self._catalog.buckets():
            try:
                usage = await self._catalog.bucket_usage(row.name)
            except NoSuchBucketError:  # deleted since the listing
                continue
            yield row, usage

    async def _create_bucket(self, call: _Call) -> object:
        asked = call.request(_CreateBucket)
        if problem := bucket_name_problem(asked.name):
            raise InvalidRequestError(f"the bucket's name {problem}", name=asked.name)
        if asked.codec not in ("raw", "zp"):
            raise InvalidRequestError("the codec must be one of raw, zp", codec=asked.codec)
        if asked.durability is Durability.SHARED and not self._has_remote:
            raise InvalidRequestError("durability shared needs a remote tier, which this store has not")
        self._check_rule(asked.remote)
        default = Durability.MEMORY if asked.kind is BucketKind.KV else Durability.LOCAL
        users = await self._catalog.users()
        if asked.owner and all(user.id != asked.owner for user in users):
            raise NoSuchUserError("no such user", id=asked.owner)
        row = BucketRow(
            name=asked.name,
            kind=asked.kind,
            owner=asked.owner or next(user.id for user in users if user.is_root),
            created_ms=self._clock.now_ms(),
            durability=asked.durability or default,
            codec=asked.codec,
            region=self._region,
            remote=asked.remote,
        )
        try:
            await self._catalog.create_bucket(row)
        except BucketExistsError as error:
            standing = await self._catalog.bucket(row.name)
            if standing is None:
                raise
            told = {"bucket": row.name, "owner": standing.owner, "kind": standing.kind.value}
            raise BucketExistsError("the bucket exists", **told) from error
        made = await self._catalog.bucket(row.name)  # its time may have been raised
        return _bucket_document(made or row)

    async def _update_bucket(self, call: _Call) -> object:
        asked = call.request(_UpdateBucket)
        self._check_rule(asked.remote)
        return _bucket_document(await self._catalog.update_bucket(asked.name, BucketUpdate(remote=asked.remote)))

    def _check_rule(self, rule: RemoteRule) -> None:
        if rule is not RemoteRule.NEVER and not self._has_remote:
            raise InvalidRequestError("a rule for the remote tier needs one, which this store has not", remote=rule)

    async def _list_objects(self, call: _Call) -> object:
        page = await self._catalog.list_objects(
            call.parameter("bucket"),
            key_prefix=call.query.get("key_prefix", ""),
            after=call.query.get("after", ""),
            limit=call.limit(),
        )
        return {"objects": [_object_document(row) for row in page.rows], "next_after": page.next_after}

    async def _inspect(self, call: _Call) -> object:
        bucket, key = call.parameter("bucket"), call.parameter("key")
        (row,) = await self._catalog.lookup(bucket, [key])
        if row is None:
            if await self._catalog.bucket(bucket) is None:
                raise NoSuchBucketError("no such bucket", bucket=bucket)
            raise NoSuchKeyError("no such key", bucket=bucket, key=key)
        statuses = await self._view.inspect(row)
        return {
            **_object_document(row),
            "bucket": row.bucket,
            "owner": row.owner,
            "state": row.state,
            "sequence": row.sequence,
            "digest": _hex(row.digest),
            "headers": row.headers,
            "metadata": row.metadata,
            "checksums": {checksum.algorithm: checksum.value for checksum in row.checksums},
            "parts": len(row.parts),
            "blobs": [_blob_document(ref, status) for ref, status in zip(row.blobs, statuses, strict=True)],
        }

    # -- namespaces ----------------------------------------------------------------------------------------------
    async def _list_namespaces(self, call: _Call) -> object:
        return await self._namespaces.page(call.parameter("bucket"), after=call.query.get("after", ""))

    async def _show_namespace(self, call: _Call) -> object:
        return await self._namespaces.show(call.parameter("bucket"), call.parameter("name"))

    async def _export_namespace(self, call: _Call) -> object:
        return await self._namespaces.export(call.parameter("bucket"), call.parameter("name"))

    async def _import_namespace(self, call: _Call) -> object:
        asked = call.request(_ImportNamespace)
        return await self._namespaces.import_(
            asked.bucket, asked.name, asked.declaration, key=asked.key, fingerprint=asked.fingerprint
        )

    # -- users ---------------------------------------------------------------------------------------------------
    async def _list_users(self, _call: _Call) -> object:
        return {"users": [_user_document(user) for user in await self._catalog.users()]}

    async def _add_user(self, call: _Call) -> object:
        asked = call.request(_AddUser)
        if problem := user_name_problem(asked.id):
            raise InvalidRequestError(f"the user's id {problem}")
        if asked.display_name and (problem := display_name_problem(asked.display_name)):
            raise InvalidRequestError(f"the display name {problem}")
        access_key = asked.access_key or "KV" + self._random_bytes(10).hex().upper()
        secret_key = asked.secret_key or self._random_bytes(30).hex()
        if problem := access_key_problem(access_key):
            raise InvalidRequestError(f"the access key {problem}")
        if problem := secret_key_problem(secret_key):
            raise InvalidRequestError(f"the secret key {problem}")
        user = UserRow(
            id=asked.id, display_name=asked.display_name or asked.id, access_key=access_key, secret_key=secret_key
        )
        await self._catalog.add_user(user)
        return {**_user_document(user), "secret_key": secret_key}

    async def _remove_user(self, call: _Call) -> object:
        user_id = call.parameter("id")
        if any(user.id == user_id and user.is_root for user in await self._catalog.users()):
            raise InvalidRequestError("the root user cannot be removed", id=user_id)
        await self._catalog.remove_user(user_id)
        await self._view.user_removed()
        return {"id": user_id}


async def _signed_body(head: RequestHead, body: RequestBody) -> bytes:
    """The whole body, once its digest is the one that was signed: an unsigned body could be another's."""
    pieces: list[bytes] = []
    size_bytes = 0
    while body.length != 0 and (piece := await body.read_some(BODY_BYTES_MAX)):
        size_bytes += len(piece)
        if size_bytes > BODY_BYTES_MAX:
            raise EntityTooLargeError("the body is too large", limit_bytes=BODY_BYTES_MAX)
        pieces.append(piece)
    content = b"".join(pieces)
    announced = head.header("x-amz-content-sha256") or ""
    if not hmac.compare_digest(announced.encode("latin-1"), hashlib.sha256(content).hexdigest().encode()):
        raise DigestMismatchError("x-amz-content-sha256 must be the body's SHA-256 in hex")
    return content


def _body_of(content: bytes, method: str) -> tuple[bytes, int]:
    return (b"" if method == "HEAD" else content), len(content)


def _error_reply(error: KvobjError, head: RequestHead, resource: str, *, close: bool) -> Reply:
    code, status, message = describe(error)
    detail = {name: str(value) for name, value in error.data.items() if isinstance(value, str | int | float)}
    return _error_document(
        head, resource, status=status, code=code, message=error.message or message, detail=detail, close=close
    )


def _error_document(
    head: RequestHead, resource: str, *, status: int, code: str, message: str, detail: dict[str, str], close: bool
) -> Reply:
    error = {"code": code, "message": message, "resource": resource, "request_id": head.request_id, "detail": detail}
    content = b"" if head.method == "HEAD" else msgspec.json.encode({"error": error})
    return Reply(status, _JSON, content, close=close, log={"error": code})


def _bucket_document(row: BucketRow) -> dict[str, object]:
    return {
        "name": row.name,
        "kind": row.kind,
        "owner": row.owner,
        "created_ms": row.created_ms,
        "durability": row.durability,
        "codec": row.codec,
        "remote": row.remote,
    }


def _object_document(row: ObjectRow) -> dict[str, object]:
    return {
        "key": row.key,
        "size_bytes": row.size_bytes,
        "modified_ms": row.modified_ms,
        "etag": row.etag,
        "durability": row.durability,
    }


def _blob_document(ref: BlobRef, status: BlobStatus) -> dict[str, object]:
    return {
        "blob_id": ref.blob_id.hex(),
        "plain_bytes": ref.plain_bytes,
        "frame_bytes": ref.frame_bytes,
        "codec": ref.codec,
        "digest": _hex(ref.digest),
        "tiers": status.tiers,
        "frame": status.frame,
    }


def _user_document(user: UserRow) -> dict[str, object]:
    return {
        "id": user.id,
        "display_name": user.display_name,
        "access_key": user.access_key,
        "is_root": user.is_root,
    }


def _hex(digest: bytes | None) -> str | None:
    return None if digest is None else digest.hex()
