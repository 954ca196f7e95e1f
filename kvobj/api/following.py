"""GET ?follow of a chunk that is not stored yet: its bytes as they come, to who may read what is written there.

The reply has no length, and its end says that the bytes are a chunk's; where they are none the connection is reset
(`store.following`). How many may follow is bounded: each may keep a chunk's memory for as long as its upload takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from kvobj.api.accepting import parse_accept
from kvobj.api.chunk_access import ChunkAccess
from kvobj.api.chunk_headers import ACCEPT_HEADER, SIZE_HEADER, place_headers
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange, Header
from kvobj.api.message import Reply
from kvobj.api.object_headers import DEFAULT_CONTENT_TYPE
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetObject
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.errors import BusyError, KvobjError
from kvobj.store.following import Followed, Span
from kvobj.store.places import ChunkPlace, expected_bytes, layer_span_of, name_of_parent, part_sizes
from kvobj.store.representation import plain_only

CHUNK_FOLLOWERS_MAX: Final = 64
USER_FOLLOWERS_MAX: Final = 256
"""A quarter of the connections that one server has: the others are left to who reads and writes."""
FOLLOW_HEADER: Final = "x-kvobj-follow"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FollowedSpan:
    """What is asked of a chunk on its way, as far as its layout tells: None where it does not."""

    size_bytes: int | None
    span: Span | None
    part_sizes: list[int] | None


class FollowedReads:
    """Answers reads of what is being uploaded. Event-loop-only; one for all requests, since it counts them."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        chunk_followers_max: int = CHUNK_FOLLOWERS_MAX,
        user_followers_max: int = USER_FOLLOWERS_MAX,
    ) -> None:
        self._store = store
        self._chunk_followers_max = chunk_followers_max
        self._user_followers_max = user_followers_max
        self._of_chunk: Counter[tuple[str, str]] = Counter()
        self._of_user: Counter[str] = Counter()

    @property
    def followers(self) -> int:
        """How many replies follow an upload now."""
        return self._of_user.total()

    async def get(self, exchange: Exchange, operation: GetObject, access: ChunkAccess) -> Reply | None:
        """The reply; None where nobody uploads the chunk, or the user may not read what is written there.

        `BusyError` where too many follow already; `InvalidRequestError` for layers that the chunk will not have. What is on its way
        is sent raw: to who does not take that it is not there, and layers are refused, as of a stored chunk.
        """
        followed = await self._store.following.find(access.bucket, operation.key)
        if followed is None or not await access.may_read(followed.namespace):
            return None
        namespace = await access.namespace(followed.namespace)
        if namespace is None:  # it was removed since the upload began, which will fail
            return None
        accepts = parse_accept(exchange.fields)
        if accepts is not None and not plain_only(accepts):
            if operation.layers is None:
                return None
            raise S3Error("InvalidRequest", "Layers and parts are sent raw.", ArgumentName=ACCEPT_HEADER)
        asked = asked_of(followed, namespace, operation.layers)
        headers: list[Header] = [
            ("content-type", DEFAULT_CONTENT_TYPE),
            (FOLLOW_HEADER, "uploading"),
            *place_headers(followed.namespace, name_of_parent(followed.parent, followed.namespace), followed.tokens),
        ]
        if asked.size_bytes is not None:
            headers.append((SIZE_HEADER, str(asked.size_bytes)))
        status = 200
        if asked.span is not None:
            start, stop = asked.span
            status = 206
            headers.append(("content-range", f"bytes {start}-{stop - 1}/{asked.size_bytes}"))
        leave = self._enter((operation.bucket, operation.key), exchange.authentication.user.id)
        return exchange.reply(status, headers, FollowedStream(followed, asked, leave))

    def _enter(self, chunk: tuple[str, str], user_id: str) -> Callable[[], None]:
        if self._of_chunk[chunk] >= self._chunk_followers_max:
            raise BusyError("too many follow this chunk", limit=self._chunk_followers_max)
        if self._of_user[user_id] >= self._user_followers_max:
            raise BusyError("the user follows too many chunks", limit=self._user_followers_max)
        self._of_chunk[chunk] += 1
        self._of_user[user_id] += 1

        def leave() -> None:
            _count_down(self._of_chunk, chunk)
            _count_down(self._of_user, user_id)

        return leave


class FollowedStream:
    """Implements `message.BodyStream`, and `reply_writer.LiveStream`."""

    length = None
    is_live = True

    def __init__(self, followed: Followed, asked: FollowedSpan, leave: Callable[[], None]) -> None:
        self._followed = followed
        self._asked = asked
        self._leave = leave

    def views(self) -> AsyncIterator[memoryview]:
        """See `BodyStream.views`. ConnectionError, which resets the connection and nothing else, where the bytes are no chunk's."""
        return self._views()

    async def _views(self) -> AsyncGenerator[memoryview, None]:
        views = self._followed.views(self._asked.span, part_sizes=self._asked.part_sizes)
        async with aclosing(views):
            try:
                async for view in views:
                    yield view
            except KvobjError as error:
                # An upload that fails is its writer's affair, and told to the writer: here it is no defect.
                raise ConnectionAbortedError(str(error)) from error

    async def aclose(self) -> None:
        """See `BodyStream.aclose`."""
        self._leave()


def asked_of(followed: Followed, namespace: NamespaceRow, layers: tuple[int, int] | None) -> FollowedSpan:
    """What of the chunk a request names. Pure. `InvalidRequestError` for layers that it will not have."""
    place = ChunkPlace(namespace, followed.parent, followed.tokens)
    size_bytes = expected_bytes(place) if followed.size_bytes is None else followed.size_bytes
    sizes = part_sizes(place, followed.group_parts) if followed.group_parts else None
    if layers is None:
        return FollowedSpan(size_bytes, None, sizes)
    span = layer_span_of(namespace, size_bytes or 0, *layers, in_parts=followed.in_parts)
    return FollowedSpan(size_bytes, span, sizes)


def _count_down(counter: Counter[T], name: T) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
