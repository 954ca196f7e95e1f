"""The S3 service: one request in, one reply out, and never an exception but cancellation.

Order, the same on every route: request target and headers, signature, operation, handler (which authorises before it looks at
anything). What goes wrong becomes a reply in `errors.py`. `Reply.log` carries what the request's line in the log adds; the HTTP
layer writes that line. A defect (an exception that is no `KvobjError`) is logged here with its traceback and the request's id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Final

from kvobj.api import operations as ops
from kvobj.api.buckets import Buckets
from kvobj.api.copies import ObjectCopies
from kvobj.api.credential import CredentialParser
from kvobj.api.cross_origin import CrossOrigin
from kvobj.api.deletes import ObjectDeletes
from kvobj.api.errors import S3Error, error_reply, internal_error_reply
from kvobj.api.exchange import Exchange, S3Settings, body_blocks_connection
from kvobj.api.hot_reads import HotReads
from kvobj.api.hot_requests import HotRequests
from kvobj.api.kv.errors import kv_error_reply
from kvobj.api.kv.hot_renewals import HotRenewals, RenewsAtOnce
from kvobj.api.kv.matching import Matching
from kvobj.api.kv.mget import BatchReads, BurstBudget
from kvobj.api.kv.mput import BatchWrites
from kvobj.api.kv.namespaces import Namespaces
from kvobj.api.kv.routing import is_kv_call
from kvobj.api.kv.sessions import Sessions
from kvobj.api.kv_store import ChunkStore
from kvobj.api.listing import Listings
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.api.multipart import MultipartUploads
from kvobj.api.object_store import ObjectStore
from kvobj.api.objects_read import ObjectReads
from kvobj.api.objects_write import ObjectWrites
from kvobj.api.query_headers import with_query_headers
from kvobj.api.request import Target, TargetParser, parse_fields
from kvobj.api.routing import parse_operation
from kvobj.api.same_host.calls import SameHostCalls
from kvobj.api.same_host.rights import Granting, Levels
from kvobj.api.settings.acls import Acls
from kvobj.api.settings.attributes import ObjectAttributes
from kvobj.api.settings.cors import CorsSettings
from kvobj.api.settings.lifecycle import LifecycleSettings
from kvobj.api.settings.policies import Policies
from kvobj.api.settings.tagging import Tagging
from kvobj.api.sigv4 import Authentication, SignatureVerifier, anonymous_authentication, check_payload_is_signed
from kvobj.api.users import UserDirectory
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.ids import new_upload_id

# Each handler takes the operation that its key names; the table cannot say so in types.
_Handle = Callable[[Exchange, Any], Awaitable[Reply]]

_KV_OPERATIONS: Final[tuple[type, ...]] = (
    ops.MatchChunks,
    ops.PinChunks,
    ops.OpenSession,
    ops.RenewSession,
    ops.CloseSession,
    ops.DeclareNamespace,
    ops.GetNamespace,
    ops.RemoveNamespace,
    ops.ListNamespaces,
    ops.ReadEvents,
    ops.GetChunks,
    ops.PutChunks,
    ops.OpenSameHost,
    ops.RenewSameHost,
)


class S3Service:
    """`handle` is the entry (`message.Handler`). Event-loop-only; requests run concurrently.

    `chunks` is behind the KV API, `read_events` behind its ?events, `same_host` behind its ?same-host (where grants come from, and
    who gets them); without them their calls are not implemented. `renews`: who has the sessions, where that is this process:
    then `repeated` answers renewals at once. `hot` answers small objects at once. `executor` runs hashes of large signed chunks.
    `upload_ids` draws the ids of multipart uploads, which begin now (in milliseconds).
    """

    def __init__(
        self,
        store: ObjectStore,
        settings: S3Settings,
        *,
        clock: Clock,
        log: logging.Logger,
        chunks: ChunkStore | None = None,
        read_events: Callable[[Exchange, ops.ReadEvents], Awaitable[Reply]] | None = None,
        same_host: tuple[Granting, Levels] | None = None,
        renews: RenewsAtOnce | None = None,
        executor: Executor | None = None,
        upload_ids: Callable[[int], str] = new_upload_id,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._log = log
        self._executor = executor
        self._users = UserDirectory(store.catalog, clock)
        self._buckets = store.catalog.bucket
        self._targets = TargetParser(settings.host_rules)
        self._credentials = CredentialParser(settings.regions)
        self._verifier = SignatureVerifier(clock, explain=settings.explain_signatures)
        self._cross_origin = CrossOrigin(store.catalog)
        self._hot_reads = HotReads(store, host_id=settings.host_id)
        self.hot = HotRequests(
            store,
            self._hot_reads,
            users=self._users,
            targets=self._targets,
            credentials=self._credentials,
            verifier=self._verifier,
            host_id=settings.host_id,
        )
        self._writes = ObjectWrites(store, chunks, self.hot.learn_write)
        self._handlers = _handlers(store, self._writes, upload_ids) | _kv_handlers(store, chunks, settings)
        self.repeated: HotRenewals | None = None
        if renews is not None:
            self.repeated = HotRenewals(
                store,
                renews,
                users=self._users,
                targets=self._targets,
                credentials=self._credentials,
                verifier=self._verifier,
                clock=clock,
                host_id=settings.host_id,
                log=log,
            )
            self._handlers[ops.RenewSession] = self.repeated.learning(self._handlers[ops.RenewSession])
        self._handlers[ops.Preflight] = self._cross_origin.preflight
        if read_events is not None:
            self._handlers[ops.ReadEvents] = read_events
        if same_host is not None and chunks is not None:
            calls = SameHostCalls(store, chunks, *same_host)
            self._handlers |= {ops.OpenSameHost: calls.open, ops.RenewSameHost: calls.renew}

    async def handle(self, head: RequestHead, body: RequestBody) -> Reply:
        """Answer one request. Raises nothing but CancelledError."""
        exchange: Exchange | None = None
        target: Target | None = None
        fields: dict[str, str] = {}
        log: dict[str, object] = {}
        try:
            known = self.hot.write_of(head)
            if known is not None:
                target, fields, user = known.target, known.fields, known.authentication.user
                log |= {"bucket": target.bucket, "key": target.key, "user": user.id, "operation": "PutObject"}
                exchange = self._exchange_of(head, body, target, fields, known.authentication)
                reply = await self._writes.put_known(exchange, known)
            else:
                fields = parse_fields(head)
                target = self._targets.parse(head.target, fields.get("host", ""))
                if target.bucket:
                    log["bucket"], log["key"] = target.bucket, target.key
                authentication = await self._authenticate(head.method, target, fields)
                log["user"] = authentication.user.id
                hot = self._read_hot(head, body, target, fields, authentication, log)
                if hot is not None:
                    return hot
                exchange = self._exchange(head, body, target, fields, authentication)
                fields = exchange.fields
                operation = parse_operation(head.method, target, fields)
                log["operation"] = type(operation).__name__
                reply = await self._handlers[type(operation)](exchange, operation)
        except KvobjError as error:
            must_close = body_blocks_connection(body, fields) if exchange is None else exchange.must_close()
            reply = self._refusal(error, head, target, fields, close=must_close)
            if reply.status >= 500:  # noqa: PLR2004 - server errors
                log["cause"] = str(error)
        except asyncio.CancelledError:
            raise
        except ConnectionError as error:
            # The client went away inside its body: nobody reads this reply, and it is no defect.
            log["cause"] = f"connection lost: {error}"
            reply = internal_error_reply(
                request_id=head.request_id, host_id=self._settings.host_id, resource="", is_head=head.method == "HEAD"
            )
        except Exception:  # noqa: BLE001 - the outermost line: a defect in one request must not end the server
            self._log.exception("a request met a defect request_id=%s method=%s", head.request_id, head.method)
            reply = internal_error_reply(
                request_id=head.request_id,
                host_id=self._settings.host_id,
                resource=head.target.partition("?")[0],
                is_head=head.method == "HEAD",
            )
        if "origin" in fields and target is not None:
            reply = await self._cross_origin.let_read(reply, head, target, fields)
        reply.log.update(log)
        return reply

    def _read_hot(  # noqa: PLR0917 - what a request is
        self,
        head: RequestHead,
        body: RequestBody,
        target: Target,
        fields: dict[str, str],
        authentication: Authentication,
        log: dict[str, object],
    ) -> Reply | None:
        """The reply to a GET or HEAD of what lies in memory; None: it is no such request, or it does not."""
        if body.length != 0:
            return None
        hot = self._hot_reads.reply(head, target, fields, authentication.user, log)
        if hot is not None:
            self.hot.learn_read(head, target, fields, hot, is_presigned=authentication.is_presigned)
        return hot

    def _exchange(
        self,
        head: RequestHead,
        body: RequestBody,
        target: Target,
        fields: dict[str, str],
        authentication: Authentication,
    ) -> Exchange:
        """What the handler is given. Raises `S3Error`."""
        if authentication.is_presigned:
            fields = with_query_headers(fields, target)
        exchange = self._exchange_of(head, body, target, fields, authentication)
        if self._settings.unsigned_payload_needs_tls and body.length != 0 and not exchange.is_secure:
            check_payload_is_signed(authentication)
        return exchange

    def _exchange_of(
        self,
        head: RequestHead,
        body: RequestBody,
        target: Target,
        fields: dict[str, str],
        authentication: Authentication,
    ) -> Exchange:
        return Exchange(
            head,
            body,
            fields=fields,
            overrides=target.parameters,
            authentication=authentication,
            settings=self._settings,
            users=self._users,
            buckets=self._buckets,
            clock=self._clock,
            executor=self._executor,
        )

    def _refusal(
        self, error: KvobjError, head: RequestHead, target: Target | None, fields: dict[str, str], *, close: bool
    ) -> Reply:
        resource, host_id = head.target.partition("?")[0], self._settings.host_id
        if target is not None and head.method != "HEAD" and is_kv_call(target):
            return kv_error_reply(
                error, fields=fields, request_id=head.request_id, host_id=host_id, resource=resource, close=close
            )
        return error_reply(
            error,
            request_id=head.request_id,
            host_id=host_id,
            resource=resource,
            is_head=head.method == "HEAD",
            close=close,
        )

    async def _authenticate(self, method: str, target: Target, fields: dict[str, str]) -> Authentication:
        # A browser signs no preflight, and what it is about may be a URL that is signed for another method.
        credential = None if method == "OPTIONS" else self._credentials.parse(fields, target)
        if credential is None:
            await self._users.freshen()
            return anonymous_authentication(fields)
        if "host" not in fields:
            raise S3Error("InvalidRequest", "A Host header is required.")
        access_key = credential.signer.access_key
        user = self._users.fresh(access_key) or await self._users.with_access_key(access_key)
        return self._verifier.verify(credential, user, method=method, target=target, fields=fields)


def _handlers(store: ObjectStore, writes: ObjectWrites, upload_ids: Callable[[int], str]) -> dict[type, _Handle]:
    """Which handler answers which operation: complete, or a request of that operation is a defect."""
    buckets, reads = Buckets(store), ObjectReads(store)
    copies, listings, deletes = ObjectCopies(store), Listings(store), ObjectDeletes(store)
    uploads, tagging = MultipartUploads(store, new_upload_id=upload_ids), Tagging(store)
    acls, policies, cors, lifecycle = Acls(store), Policies(store), CorsSettings(store), LifecycleSettings(store)
    return {
        ops.ListBuckets: buckets.list,
        ops.CreateBucket: buckets.create,
        ops.HeadBucket: buckets.head,
        ops.DeleteBucket: buckets.delete,
        ops.GetBucketLocation: buckets.location,
        ops.GetBucketVersioning: buckets.versioning,
        ops.GetBucketAcl: acls.get_bucket,
        ops.PutBucketAcl: acls.put_bucket,
        ops.GetObjectAcl: acls.get_object,
        ops.PutObjectAcl: acls.put_object,
        ops.GetBucketPolicy: policies.get,
        ops.PutBucketPolicy: policies.put,
        ops.DeleteBucketPolicy: policies.delete,
        ops.GetBucketPolicyStatus: policies.status,
        ops.ListObjectsV1: listings.objects,
        ops.ListObjectsV2: listings.objects_v2,
        ops.ListObjectVersions: listings.versions,
        ops.ListMultipartUploads: listings.uploads,
        ops.DeleteObjects: deletes.delete,
        ops.GetObject: reads.get,
        ops.PutObject: writes.put,
        ops.DeleteObject: writes.delete,
        ops.CopyObject: copies.copy,
        ops.CreateMultipartUpload: uploads.create,
        ops.ListParts: uploads.list_parts,
        ops.CompleteMultipartUpload: uploads.complete,
        ops.AbortMultipartUpload: uploads.abort,
        ops.UploadPart: writes.upload_part,
        ops.UploadPartCopy: copies.copy_part,
        ops.GetBucketCors: cors.get,
        ops.PutBucketCors: cors.put,
        ops.DeleteBucketCors: cors.delete,
        ops.GetBucketLifecycle: lifecycle.get,
        ops.PutBucketLifecycle: lifecycle.put,
        ops.DeleteBucketLifecycle: lifecycle.delete,
        ops.GetObjectAttributes: ObjectAttributes(store).get,
        ops.GetBucketTagging: tagging.get_bucket,
        ops.PutBucketTagging: tagging.put_bucket,
        ops.DeleteBucketTagging: tagging.delete_bucket,
        ops.GetObjectTagging: tagging.get_object,
        ops.PutObjectTagging: tagging.put_object,
        ops.DeleteObjectTagging: tagging.delete_object,
    }


def _kv_handlers(store: ObjectStore, chunks: ChunkStore | None, settings: S3Settings) -> dict[type, _Handle]:
    """Which handler answers which call of the KV API."""
    if chunks is None:
        return dict.fromkeys(_KV_OPERATIONS, _not_built)
    matching, sessions, namespaces = Matching(store, chunks), Sessions(store, chunks), Namespaces(store, chunks)
    return dict.fromkeys(_KV_OPERATIONS, _not_built) | {
        ops.MatchChunks: matching.match,
        ops.PinChunks: sessions.pin,
        ops.OpenSession: sessions.open,
        ops.RenewSession: sessions.renew,
        ops.CloseSession: sessions.close,
        ops.DeclareNamespace: namespaces.declare,
        ops.GetNamespace: namespaces.get,
        ops.RemoveNamespace: namespaces.remove,
        ops.ListNamespaces: namespaces.list,
        ops.GetChunks: BatchReads(store, chunks, bursts=BurstBudget(settings.bursts_bytes)).get,
        ops.PutChunks: BatchWrites(store, chunks).put,
    }


async def _not_built(_exchange: Exchange, operation: ops.KvOperation) -> Reply:
    raise S3Error("NotImplemented", "The KV API is not served here.", Feature=type(operation).__name__)
