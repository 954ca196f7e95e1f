"""POST ?match: the longest stored run at the head of a list of chunks, or of tokens; pinned in the same step where asked."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvobj.api.accepting import parse_accepted
from kvobj.api.exchange import Exchange
from kvobj.api.kv.bodies import short_id, tokens_of
from kvobj.api.kv.calls import begin
from kvobj.api.kv.chunk_lists import chunk_list, namer
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import MatchChunks
from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.chunk_records import EncodedChunks
from kvobj.codec.frame import CODEC_RAW
from kvobj.errors import InvalidRequestError, NoSuchSessionError
from kvobj.ids.chunk_ids import TOKEN_BYTES
from kvobj.store.chunk_values import MatchReply, OpenNamespace
from kvobj.store.given_chunks import PLAIN
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.representation import Accepted

_HINT_MAX: Final = 5


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the asker knows of the request: how long its output will be, and that its last chunk is not full."""

    output_tokens: int = 0
    partial_last: bool = False


class _Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: str = DEFAULT_NAMESPACE
    pin: bool = False
    detail: Literal["none", "chunks"] = "none"
    explain: bool = False
    hint: Hint = Hint()
    accept: tuple[str, ...] = (CODEC_RAW,)


class MatchJson(_Match, frozen=True, forbid_unknown_fields=True):
    """The request in JSON."""

    ids: list[str] | None = None
    tokens: list[int] | None = None
    session: str | None = None


class MatchMsgpack(_Match, frozen=True, forbid_unknown_fields=True):
    """The request in msgpack: ids and tokens are one byte string each, foreign keys strings."""

    ids: bytes | list[str] | None = None
    tokens: bytes | None = None
    session: bytes | None = None


class Matching:
    """Handler of ?match."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore) -> None:
        self._store = store
        self._chunks = chunks

    async def match(self, exchange: Exchange, operation: MatchChunks) -> Reply:
        """Answer with a length, and what was asked for beside it."""
        call = await begin(exchange, operation, self._store, self._chunks)
        request: MatchJson | MatchMsgpack = await call.read(MatchJson, MatchMsgpack)
        session = session_of(request.session) if request.pin else None
        namespace = await call.namespace(request.namespace)
        chunks, tokens = await self._chunks_of(request, namespace)
        partial_last = request.hint.partial_last
        if tokens is not None:
            partial_last = len(tokens) % (namespace.row.chunk_tokens * TOKEN_BYTES) != 0
        found = await self._chunks.match(
            call.bucket,
            namespace,
            chunks,
            caller=call.caller,
            tokens=tokens,
            session=session,
            detail=request.detail == "chunks",
            name=namer(namespace.row, raw=call.is_msgpack_reply),
            may_encode=call.is_msgpack_reply and namespace.row.ids == "kvobj",
            explain=request.explain,
            partial_last=partial_last,
            hint=hint_level(request.hint.output_tokens),
            accepts=accepted_of(request.accept),
        )
        return call.reply(_reply(found))

    async def _chunks_of(
        self, request: MatchJson | MatchMsgpack, namespace: OpenNamespace
    ) -> tuple[ChunkList, bytes | None]:
        if (request.ids is None) == (request.tokens is None):
            raise InvalidRequestError("a match has either ids or tokens")
        if request.ids is not None:
            return chunk_list(namespace.row, request.ids), None
        assert request.tokens is not None
        tokens = tokens_of(request.tokens)
        return await self._chunks.chunks_of_tokens(namespace, tokens), tokens


def session_of(value: str | bytes | None) -> bytes:
    """The session that a request names. `InvalidRequestError` where it names none, `NoSuchSessionError` for what is no id."""
    if value is None:
        raise InvalidRequestError("a pin needs a session")
    session_id = short_id(value)
    if session_id is None:
        raise NoSuchSessionError("no such session")
    return session_id


def accepted_of(items: tuple[str, ...]) -> tuple[Accepted, ...]:
    """What a document's `accept` takes. `InvalidRequestError` where it is none."""
    try:
        accepted = parse_accepted(items)
    except ValueError as error:
        raise InvalidRequestError(f"accept is {error}", field="accept") from error
    return PLAIN if accepted is None else accepted


def hint_level(output_tokens: int) -> int:
    """The policy's classes of expected output: floor(log2(tokens) / 2), 0 to 5."""
    return 0 if output_tokens < 1 else min(_HINT_MAX, (output_tokens.bit_length() - 1) // 2)


def _reply(found: MatchReply) -> dict[str, object]:
    value: dict[str, object] = {
        "matched": found.matched,
        "tokens": found.tokens,
        "size_bytes": found.size_bytes,
        "expected_load_ms": found.expected_load_ms,
        "pin": found.pin,
    }
    if found.pin is not None:
        value["grant"] = found.grant
        value["deadline_ms"] = found.deadline_ms
    if found.chunks is not None:
        chunks = found.chunks
        value["chunks"] = msgspec.Raw(chunks.msgpack) if isinstance(chunks, EncodedChunks) else chunks
    if found.explain is not None:
        explanation = found.explain
        value["explain"] = {
            "at": explanation.at,
            "reason": explanation.reason,
            "when_ms": explanation.when_ms,
            "namespace_differs": list(explanation.namespace_differs),
        }
    return value
