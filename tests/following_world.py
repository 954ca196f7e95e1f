"""A node whose chunks arrive when a test says so, and the followers that read them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from kv_driver import CHUNK_BYTES, LAYERS, KvDriver, Namespace, payload
from s3_driver import ALICE, Answer, FakeBody, sign

from kvobj.api.message import BodyStream, Reply, RequestHead
from kvobj.catalog.rows import UserRow
from kvobj.errors import IncompleteBodyError

LAYER_BYTES = CHUNK_BYTES // LAYERS
KEY = b"\1".hex() * 32
SECONDS = 20.0


class OpenBody(FakeBody):
    """A request body that comes when the test says so."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(length=size_bytes)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.may_begin = asyncio.Event()
        self.may_begin.set()

    async def accept(self) -> None:
        await self.may_begin.wait()

    def send(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    def vanish(self) -> None:
        """The client goes in the middle of it."""
        self._pieces.put_nowait(None)

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        filled = 0
        while filled < len(buffer):
            piece = await self._pieces.get()
            if piece is None:
                raise IncompleteBodyError("the body ended early")
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            on_bytes(filled)


@dataclass
class Follower:
    """One reply that is being read. `read` takes what is there; `ended` is True or False once the stream has ended or failed."""

    reply: Reply
    data: bytearray = field(default_factory=bytearray)
    ended: bool | None = None
    _task: asyncio.Task[None] | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        body = cast("BodyStream", self.reply.body)
        try:
            async with aclosing(body.views()) as views:  # type: ignore[type-var]
                async for view in views:
                    self.data += view
                    self._more.set()
            self.ended = True
        except ConnectionError:
            self.ended = False
        finally:
            await body.aclose()
            self._more.set()

    async def has(self, size_bytes: int) -> bytes:
        """What came, once so many bytes are there."""
        async with asyncio.timeout(SECONDS):
            while len(self.data) < size_bytes:
                assert self.ended is None, (self.ended, len(self.data))
                self._more.clear()
                await self._more.wait()
        return bytes(self.data)

    async def end(self) -> tuple[bool | None, bytes]:
        """How the stream ended, and all that came."""
        assert self._task is not None
        await asyncio.wait_for(self._task, SECONDS)
        return self.ended, bytes(self.data)

    async def leave(self) -> None:
        """Go away in the middle."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])


@dataclass
class World:
    """A node with the namespaces of these tests."""

    kv: KvDriver
    plain: Namespace
    parted: Namespace

    async def ask(self, target: str, *, user: UserRow = ALICE) -> Reply:
        head = RequestHead("GET", target, tuple(sign("GET", target, user=user)), "F" * 16, "127.0.0.1")
        return await self.kv.driver.service.handle(head, FakeBody())

    async def follow(self, key: str = KEY, query: str = "follow", *, user: UserRow = ALICE) -> Follower:
        reply = await self.ask(f"/cache/{key}?{query}", user=user)
        assert reply.status in (200, 206), reply.body
        follower = Follower(reply)
        follower.start()
        return follower

    @asynccontextmanager
    async def putting(
        self,
        size_bytes: int = CHUNK_BYTES,
        *,
        key: str = KEY,
        headers: dict[str, str] | None = None,
        is_held: bool = False,
    ) -> AsyncIterator[tuple[OpenBody, asyncio.Task[Answer]]]:
        """A PUT that has room and waits for its body; `is_held`: and is not received until it `may_begin`."""
        body = OpenBody(size_bytes)
        if is_held:
            body.may_begin.clear()
        named = {"x-kvobj-namespace": "plain", "x-kvobj-parent": "root", **(headers or {})}
        request = self.kv.driver.request("PUT", f"/cache/{key}", body=body, payload="UNSIGNED-PAYLOAD", headers=named)
        task = asyncio.create_task(request)
        arriving = self.kv.node.store.arriving
        before = len(arriving.of("cache", key))
        await turns_until(lambda: len(arriving.of("cache", key)) > before)
        try:
            yield body, task
        finally:
            body.may_begin.set()
            body.vanish()
            await asyncio.wait([task])

    async def part(self, index: int, count: int, data: bytes, *, key: str = KEY) -> Answer:
        headers = {"x-kvobj-namespace": "parted", "x-kvobj-parent": "root", "x-kvobj-part": f"{index}/{count}"}
        return await self.kv.driver.request("PUT", f"/cache/{key}", body=data, headers=headers)

    def is_idle(self) -> bool:
        """Whether nobody writes and nobody follows."""
        arriving = self.kv.node.store.arriving
        return not arriving.is_watched and not len(arriving)

    async def holds_nothing(self) -> bool:
        """The same, and no blob is in use once what is written behind has been."""
        await turns_until(lambda: not len(self.kv.node.in_use))
        return self.is_idle()


DATA = payload(b"chunk")


async def turns(count: int) -> None:
    """Let others run so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def turns_until(is_so: Callable[[], object]) -> None:
    """Let others run until it is so."""
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)


def layer(index: int, data: bytes = DATA) -> bytes:
    return data[index * LAYER_BYTES : (index + 1) * LAYER_BYTES]
