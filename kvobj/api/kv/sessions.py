"""?sessions and ?pins: holders open a session, pin what they read, renew it all at once, and close."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvobj.api.exchange import Exchange
from kvobj.api.kv.bodies import short_id
from kvobj.api.kv.calls import begin
from kvobj.api.kv.chunk_lists import chunk_list, namer
from kvobj.api.kv.matching import accepted_of, session_of
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import CloseSession, OpenSession, PinChunks, RenewSession
from kvobj.codec.checksums import blake3_digest
from kvobj.codec.frame import CODEC_RAW
from kvobj.errors import BatchTooLargeError, InvalidRequestError

RENEWALS_A_TTL: Final = 3
MAX_RELEASES: Final = 65_536
DIGEST_BYTES: Final = 32
_NO_PINS: Final = blake3_digest(memoryview(b""))

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class OpenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST ?sessions. `holder` is a name for people."""

    holder: Annotated[str, msgspec.Meta(max_length=256)] = ""
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class _Renewal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: _Count = 0
    pins: _Count = 0


class RenewalJson(_Renewal, frozen=True, forbid_unknown_fields=True):
    """PUT ?sessions=ID in JSON."""

    pins_digest: str = ""
    release: list[str] = []


class RenewalMsgpack(_Renewal, frozen=True, forbid_unknown_fields=True):
    """PUT ?sessions=ID in msgpack."""

    pins_digest: bytes = b""
    release: list[bytes] = []


class _Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: str | None = None
    accept: tuple[str, ...] = (CODEC_RAW,)


class PinsJson(_Pins, frozen=True, forbid_unknown_fields=True):
    """POST ?pins in JSON."""

    session: str | None = None
    tails: list[str] = []
    release: list[str] = []


class PinsMsgpack(_Pins, frozen=True, forbid_unknown_fields=True):
    """POST ?pins in msgpack: tails are one byte string of chunk ids, or a list of keys."""

    session: bytes | None = None
    tails: bytes | list[str] = b""
    release: list[bytes] = []


class Sessions:
    """Handlers of ?sessions and ?pins."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore) -> None:
        self._store = store
        self._chunks = chunks

    async def open(self, exchange: Exchange, operation: OpenSession) -> Reply:
        """Register a holder. The TTL is cut to the store's bounds, and the reply says what it is."""
        call = await begin(exchange, operation, self._store, self._chunks)
        if not call.caller.is_owner:
            await call.access.check_granted_any()
        request = await call.read(OpenRequest, OpenRequest)
        session = await self._chunks.open_session(
            call.bucket, holder=request.holder, ttl_ms=request.ttl_ms, caller=call.caller
        )
        return call.reply(
            {
                "session": session.id,
                "epoch": session.epoch,
                "ttl_ms": session.ttl_ms,
                "renew_ms": session.ttl_ms // RENEWALS_A_TTL,
            }
        )

    async def renew(self, exchange: Exchange, operation: RenewSession) -> Reply:
        """Extend a session, release pins, and compare the rest with what the holder counts."""
        call = await begin(exchange, operation, self._store, self._chunks)
        request: RenewalJson | RenewalMsgpack = await call.read(RenewalJson, RenewalMsgpack)
        renewal = await self._chunks.renew_session(
            call.bucket,
            operation.session_id,
            as_of=request.as_of,
            pins=request.pins,
            pins_digest=renewal_digest(request.pins_digest),
            release=_pin_ids(request.release),
            caller=call.caller,
            waited_ms=exchange.head.waited_ms,
        )
        return call.reply({"ttl_ms": renewal.ttl_ms, "reclaim": renewal.reclaim})

    async def close(self, exchange: Exchange, operation: CloseSession) -> Reply:
        """End a session and its pins."""
        call = await begin(exchange, operation, self._store, self._chunks)
        await self._chunks.close_session(call.bucket, operation.session_id, caller=call.caller)
        return exchange.reply(204)

    async def pin(self, exchange: Exchange, operation: PinChunks) -> Reply:
        """Pin tails, each with a pin of its own, and release others, in one step."""
        call = await begin(exchange, operation, self._store, self._chunks)
        request: PinsJson | PinsMsgpack = await call.read(PinsJson, PinsMsgpack)
        session_id = session_of(request.session)
        namespace = None if request.namespace is None else (await call.namespace(request.namespace)).row
        tails = chunk_list(namespace, request.tails)
        result = await self._chunks.pin_tails(
            call.bucket,
            session_id,
            tails,
            release=_pin_ids(request.release),
            caller=call.caller,
            namespace=namespace,
            accepts=accepted_of(request.accept),
        )
        name = namer(namespace, raw=call.is_msgpack_reply)
        pins = [{"tail": name(each.tail), "pin": each.pin, "live": each.pin is not None} for each in result.pins]
        return call.reply({"pins": pins, "grant": result.grant, "deadline_ms": result.deadline_ms})


def _pin_ids(values: list[str] | list[bytes]) -> list[bytes]:
    """Pins to release: unknown ones are fine, and what is no pin's id is unknown."""
    if len(values) > MAX_RELEASES:
        raise BatchTooLargeError(f"a call releases at most {MAX_RELEASES} pins", limit=MAX_RELEASES, given=len(values))
    found = [short_id(value) for value in values]
    return [pin_id for pin_id in found if pin_id is not None]


def renewal_digest(value: str | bytes) -> bytes:
    """The digest of the holder's pins; left out, it is that of no pins."""
    if not value:
        return _NO_PINS
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidRequestError("pins_digest is hex digits") from error
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequestError(f"pins_digest has {DIGEST_BYTES} bytes")
    return digest
