"""Bucket policies: put, got as they were put, deleted, and asked whether they let the public in.

Source: S3 API reference, the operations' pages. KV buckets share by namespaces (docs/kv-api.md) and have none.
"""

from __future__ import annotations

from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.access.policy import policy_of
from kvobj.api.access.policy_document import parse_policy
from kvobj.api.checksums import parse_announced
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import (
    BucketOperation,
    DeleteBucketPolicy,
    GetBucketPolicy,
    GetBucketPolicyStatus,
    PutBucketPolicy,
)
from kvobj.catalog.rows import BucketKind, BucketRow
from kvobj.catalog.setting_rows import BucketUpdate

MAX_DOCUMENT_BYTES: Final = 128 * 1024
"""Read so far, to say that a policy is too large rather than a request."""


class Policies:
    """Handlers of ?policy and ?policyStatus."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get(self, exchange: Exchange, operation: GetBucketPolicy) -> Reply:
        """The document as it was put."""
        row = await self._bucket(exchange, operation, Action.GET_BUCKET_POLICY)
        if not row.policy:
            raise S3Error("NoSuchBucketPolicy", BucketName=row.name)
        return exchange.reply(200, [("content-type", "application/json")], row.policy)

    async def put(self, exchange: Exchange, operation: PutBucketPolicy) -> Reply:
        """Replace the policy. Users that it names must exist."""
        row = await self._bucket(exchange, operation, Action.PUT_BUCKET_POLICY)
        if row.kind is BucketKind.KV:
            raise S3Error("InvalidRequest", "A bucket of kind kv is shared by its namespaces, not by a policy.")
        announced = parse_announced(exchange.fields, exchange.authentication)
        document = await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES)
        policy = parse_policy(document, row.name)
        for user_id in sorted(policy.named_users):
            if await exchange.users.with_id(user_id) is None:
                raise S3Error("MalformedPolicy", "Invalid principal in policy", Principal=user_id)
        await self._store.catalog.update_bucket(row.name, BucketUpdate(policy=document), made_ms=row.created_ms)
        return exchange.reply(204)

    async def delete(self, exchange: Exchange, operation: DeleteBucketPolicy) -> Reply:
        """Take the policy away; there need be none."""
        row = await self._bucket(exchange, operation, Action.DELETE_BUCKET_POLICY)
        if row.policy:
            await self._store.catalog.update_bucket(row.name, BucketUpdate(policy=b""), made_ms=row.created_ms)
        return exchange.reply(204)

    async def status(self, exchange: Exchange, operation: GetBucketPolicyStatus) -> Reply:
        """Whether the policy, or the bucket's ACL, lets the public in."""
        row = await self._bucket(exchange, operation, Action.GET_BUCKET_POLICY_STATUS)
        policy = policy_of(row) if row.policy else None
        is_public = any(grant.group is not None for grant in row.acl or ()) or (policy is not None and policy.is_public)
        return exchange.xml(xml.document("PolicyStatus", [("IsPublic", "true" if is_public else "false")]))

    async def _bucket(self, exchange: Exchange, operation: BucketOperation, action: Action) -> BucketRow:
        return exchange.authorise(await self._store.catalog.bucket(operation.bucket), operation.bucket, action)
