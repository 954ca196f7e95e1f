"""The store's events on ZeroMQ, as vLLM publishes its own: a PUB socket, and a ROUTER that repeats what a subscriber missed.

The history is the queue: a slow subscriber costs at most its high-water mark, is dropped from beyond it, sees the hole in the
sequence and asks for a replay. The sequence begins at 0 with each start. So does what it tells: first that all is cleared, then
what the history still knows; a subscriber that hears it from the beginning, or replays it, knows what the history does. The same
follows a gap in the history. This module owns pyzmq, which is an extra. ZeroMQ authenticates nobody: whoever can reach the
sockets reads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from kvobj.app.vllm_events import AllBlocksCleared, Batch, Topics, WireEvent, batches, encode_batch, wire_event
from kvobj.catalog.history_protocol import EventPage, History
from kvobj.clock import Clock
from kvobj.config.settings import EventSettings
from kvobj.errors import ConfigurationError, KvobjError

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

REPLAY_BATCHES: Final = 10_000
REPLAY_BYTES: Final = 64 * 1024 * 1024
HIGH_WATER_MESSAGES: Final = 2000
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
_PAGE_EVENTS: Final = 500
_WAIT_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.002
"""Between two pages where there is more: the log of a day is told in seconds, not at once."""
_RETRY_SECONDS: Final = 1.0
_SEQUENCE_BYTES: Final = 8
_REQUEST_FRAMES: Final = 3


class Replay:
    """The last messages, bounded in number and in bytes."""

    def __init__(self, *, batches_max: int = REPLAY_BATCHES, bytes_max: int = REPLAY_BYTES) -> None:
        self._kept: deque[tuple[int, bytes, bytes]] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def keep(self, sequence: int, topic: bytes, payload: bytes) -> None:
        """Keep a message, and let go of the oldest where it is too many."""
        self._kept.append((sequence, topic, payload))
        self._bytes += len(payload)
        while len(self._kept) > self._batches_max or (self._bytes > self._bytes_max and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft()[2])

    def since(self, sequence: int) -> list[tuple[int, bytes, bytes]]:
        """Sequence, topic and payload of the messages kept from this one on."""
        return [message for message in self._kept if message[0] >= sequence]


def require_zmq() -> None:
    """`ConfigurationError` where pyzmq is missing."""
    try:
        import zmq.asyncio  # noqa: F401, PLC0415 - an extra: imported only where it is asked for, here to see that it is there
    except ImportError as error:
        raise ConfigurationError(["events.zmq: needs pyzmq, which is not installed: kvobj[zmq]"]) from error


class ZmqEvents:
    """See the module's text. Event loop only."""

    def __init__(
        self,
        history: History,
        *,
        publisher: Socket,
        replayer: Socket | None,
        context: Context,
        topics: Topics,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._history = history
        self._publisher = publisher
        self._replayer = replayer
        self._context = context
        self._topics = topics
        self._clock = clock
        self._log = log
        self._replay = Replay()
        self._begun: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.sequence = 0
        """Of the next message; so many were published."""

    @classmethod
    def open(cls, history: History, settings: EventSettings, *, clock: Clock, log: logging.Logger) -> Self:
        """Bind the sockets that the settings name (`zmq` is set). `ConfigurationError` where pyzmq is missing or an address cannot
        be had."""
        require_zmq()
        import zmq  # noqa: PLC0415 - an extra: imported only where it is asked for
        from zmq.asyncio import Context  # noqa: PLC0415 - the same

        if settings.zmq is None:
            raise ConfigurationError(["events.zmq: is missing"])
        context = Context()
        key = "zmq"
        try:
            publisher = context.socket(zmq.PUB)
            publisher.set(zmq.SNDHWM, HIGH_WATER_MESSAGES)
            if settings.zmq_connect:
                publisher.connect(settings.zmq)
            else:
                publisher.bind(settings.zmq)
            replayer = None
            if settings.zmq_replay is not None:
                key = "zmq_replay"
                replayer = context.socket(zmq.ROUTER)
                # vLLM's rule: a whole replay with its end fits, though reads are acknowledged by halves of the mark only.
                replayer.set(zmq.SNDHWM, 2 * (REPLAY_BATCHES + 1))
                replayer.bind(settings.zmq_replay)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigurationError([f"events.{key}: {error.strerror}"]) from error
        return cls(
            history,
            publisher=publisher,
            replayer=replayer,
            context=context,
            topics=Topics(settings.zmq_topic),
            clock=clock,
            log=log,
        )

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """Where the sockets are bound (the publisher where it binds), with the ports that were chosen."""
        replay = None if self._replayer is None else _last_endpoint(self._replayer)
        return _last_endpoint(self._publisher), replay

    def start(self) -> None:
        """Begin to publish, and to answer replays."""
        self._tasks.append(asyncio.create_task(self._publish(), name="zmq-events"))
        if self._replayer is not None:
            self._tasks.append(asyncio.create_task(self._answer(self._replayer), name="zmq-replay"))

    async def aclose(self) -> None:
        """Stop; what no subscriber has taken is dropped. Idempotent."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        self._context.destroy(linger=0)

    async def _publish(self) -> None:
        after, known = 0, 0
        await self._begin()
        while True:
            try:
                page = await self._history.read(None, after=after, limit=_PAGE_EVENTS)
                if after > 0 and after + 1 < page.first_kept and page.first_kept > known:
                    await self._begin()
                known = max(known, page.first_kept)
                await self._send(page)
                after = page.last
                if page.more:
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    await self._history.wait(after, timeout_seconds=_WAIT_SECONDS)
            except KvobjError:
                self._log.exception("events could not be published")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _begin(self) -> None:
        """What subscribers know is void. Where topics follow the events, each hears it with its first one."""
        self._begun.clear()
        if self._topics.is_one:
            await self._send_batch(self._topics.of_all, [], self._clock.now_ms())

    async def _send(self, page: EventPage) -> None:
        for topic, events in batches(page.events, self._topics):
            await self._send_batch(topic, [wire_event(event) for event in events], events[-1].time_ms)

    async def _send_batch(self, topic: str, events: list[WireEvent], time_ms: int) -> None:
        if topic not in self._begun:
            self._begun.add(topic)
            events.insert(0, AllBlocksCleared())
        payload = encode_batch(Batch(time_ms / 1000, events))
        frame = topic.encode()
        await self._publisher.send_multipart([frame, self.sequence.to_bytes(_SEQUENCE_BYTES, "big"), payload])
        self._replay.keep(self.sequence, frame, payload)
        self.sequence += 1

    async def _answer(self, replayer: Socket) -> None:
        while True:
            frames = await replayer.recv_multipart()
            if len(frames) != _REQUEST_FRAMES or len(frames[2]) != _SEQUENCE_BYTES:
                self._log.info("a replay request that is none was dropped, frames %d", len(frames))
                continue
            peer = frames[0]
            for sequence, topic, payload in self._replay.since(int.from_bytes(frames[2], "big")):
                number = sequence.to_bytes(_SEQUENCE_BYTES, "big")
                await replayer.send_multipart([peer, b"", topic, number, payload])
            await replayer.send_multipart([peer, b"", b"", END_OF_REPLAY, b""])


def _last_endpoint(socket: Socket) -> str:
    import zmq  # noqa: PLC0415 - as in `open`

    endpoint = socket.get(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode() if isinstance(endpoint, bytes) else ""
