"""POST ?same-host: a client asks for the same-host path, or renews what it has of it."""

from __future__ import annotations

from kvobj.api.chunk_access import NAMESPACE_PAGE
from kvobj.api.exchange import Exchange
from kvobj.api.kv.calls import Call, begin
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import OpenSameHost, RenewSameHost
from kvobj.api.same_host.rights import Granting, Levels, Rights


class SameHostCalls:
    """Handlers of ?same-host. `granting` may be in another process; what may be granted is decided here."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore, granting: Granting, levels: Levels) -> None:
        self._store = store
        self._chunks = chunks
        self._granting = granting
        self._levels = levels

    async def open(self, exchange: Exchange, operation: OpenSameHost) -> Reply:
        """A grant, with the socket to use it on. 403 to who may not, also where he may read over HTTP."""
        call = await begin(exchange, operation, self._store, self._chunks)
        granted = await self._granting.grant(await self._rights(call))
        return call.reply(
            {
                "socket": granted.socket,
                "id": granted.id,
                "token": granted.token,
                "lease_ms": granted.lease_ms,
                "may_write": granted.may_write,
                "is_trusted": granted.is_trusted,
            }
        )

    async def renew(self, exchange: Exchange, operation: RenewSameHost) -> Reply:
        """Decide again, and let the connection go on."""
        call = await begin(exchange, operation, self._store, self._chunks)
        lease_ms = await self._granting.renew(operation.grant_id, await self._rights(call))
        return call.reply({"lease_ms": lease_ms})

    async def _rights(self, call: Call) -> Rights:
        user = call.exchange.authentication.user
        is_owner = call.caller.is_owner
        if not is_owner:
            await call.access.check_granted_any()
        return self._levels.rights(
            call.bucket,
            user_id=user.id,
            is_root=user.is_root,
            is_owner=is_owner,
            may_write=is_owner or await self._writes_any(call),
        )

    async def _writes_any(self, call: Call) -> bool:
        after, user_id = "", call.caller.user_id
        pages = self._store.catalog.namespaces
        while rows := await pages.page(call.bucket.name, after=after, limit=NAMESPACE_PAGE):
            if any(row.access.get(user_id) == "write" for row in rows):
                return True
            after = rows[-1].name
        return False
