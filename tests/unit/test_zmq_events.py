"""The ZMQ stream: what a subscriber that was written after vLLM's wire format, and not after our code, makes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from fakes import ManualClock
from history_contract import BUCKET, OTHER, chain, chunk
from hypothesis import given
from hypothesis import strategies as st
from memory_teller import MemoryTeller, memory_teller

from kvobj.app.vllm_events import Topics, batches, block_hash
from kvobj.app.zmq_events import Replay, ZmqEvents
from kvobj.catalog.history_protocol import EventRow, EventType
from kvobj.config.settings import EventSettings
from kvobj.errors import ConfigurationError

ID_A, ID_B = "0a" * 32, "0b" * 32
END = (1 << 64) - 1


# vLLM's wire format, written down from its description alone: a batch is an array, an event a map tagged by `type`.
class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class WireBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


CLEARED = AllBlocksCleared()
Message = tuple[str, int, WireBatch]


def message(frames: list[bytes]) -> Message:
    topic, sequence, payload = frames
    assert len(sequence) == 8
    return topic.decode(), int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload, type=WireBatch)


class Wire:
    """A running publisher and what listens to it."""

    def __init__(self, teller: MemoryTeller, events: ZmqEvents, context: zmq.asyncio.Context) -> None:
        self.teller = teller
        self.events = events
        self._context = context

    def subscriber(self, topic: str = "") -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.connect(self.events.endpoints[0])
        socket.subscribe(topic)
        return socket

    async def heard(self, socket: zmq.asyncio.Socket) -> Message:
        async with asyncio.timeout(10):
            return message(await socket.recv_multipart())

    async def join(self, socket: zmq.asyncio.Socket, *, bucket: str = BUCKET) -> int:
        """Tell probes until the subscriber, which joins when it likes, hears one; the sequence it heard last."""
        heard = -1
        while heard < 0:
            await self.teller.stored([chunk("probe", bucket=bucket)])
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    heard = message(await socket.recv_multipart())[1]
        while heard + 1 < self.events.sequence:
            heard = (await self.heard(socket))[1]
        return heard

    async def replay(self, start: int) -> list[Message]:
        """What a replay gives, without its end."""
        endpoint = self.events.endpoints[1]
        assert endpoint is not None
        socket = self._context.socket(zmq.DEALER)
        socket.connect(endpoint)
        messages: list[Message] = []
        async with asyncio.timeout(10):
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                empty, *frames = await socket.recv_multipart()
                assert empty == b""
                if frames[1:] == [END.to_bytes(8, "big"), b""]:
                    return messages
                messages.append(message(frames))

    async def published(self, count: int) -> list[Message]:
        """All messages from the beginning, once there are so many."""
        messages: list[Message] = []
        async with asyncio.timeout(10):
            while len(messages) < count:
                messages = await self.replay(0)
        assert [sequence for _, sequence, _ in messages] == list(range(len(messages)))
        return messages


@asynccontextmanager
async def running(settings: EventSettings, *, teller: MemoryTeller | None = None) -> AsyncIterator[Wire]:
    teller = teller or await memory_teller()
    events = ZmqEvents.open(teller.history, settings, clock=ManualClock(), log=logging.getLogger("test"))
    context = zmq.asyncio.Context()
    try:
        events.start()
        yield Wire(teller, events, context)
    finally:
        context.destroy(linger=0)
        await events.aclose()


def local(topic: str = "") -> EventSettings:
    return EventSettings(zmq="tcp://127.0.0.1:*", zmq_replay="tcp://127.0.0.1:*", zmq_topic=topic)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with running(local()) as wire:
        yield wire


async def test_a_subscriber_hears_what_is_stored_and_removed(wire: Wire) -> None:
    socket = wire.subscriber()
    sequence = await wire.join(socket)
    rows = [chunk(ID_A, parent="", tokens=256), chunk(ID_B, parent=ID_A, tokens=256)]
    await wire.teller.stored(rows, now_ms=12_500)
    assert await wire.heard(socket) == (
        "",
        sequence + 1,
        WireBatch(
            12.5,
            [BlockStored([bytes.fromhex(ID_A), bytes.fromhex(ID_B)], None, [], 256, None, "STORAGE", None)],
        ),
    )
    await wire.teller.removed(rows[1:], now_ms=13_000)
    removed = BlockRemoved([bytes.fromhex(ID_B)], "STORAGE")
    assert await wire.heard(socket) == ("", sequence + 2, WireBatch(13.0, [removed]))


async def test_a_parent_is_told_by_its_hash(wire: Wire) -> None:
    await wire.teller.stored([chunk(ID_B, parent=ID_A)])
    *_, (_, _, batch) = await wire.published(2)
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash == bytes.fromhex(ID_A)


async def test_a_start_clears_and_tells_again_what_the_history_knows() -> None:
    teller = await memory_teller()
    await teller.stored([chunk(ID_A)])
    await teller.removed([chunk(ID_A)])
    async with running(local(), teller=teller) as wire:
        messages = await wire.published(2)
        events = [event for _, _, batch in messages for event in batch.events]
        assert events[0] == CLEARED
        assert [type(event) for event in events[1:]] == [BlockStored, BlockRemoved]


async def test_a_gap_in_the_history_clears_everything(wire: Wire) -> None:
    await wire.teller.stored([chunk(ID_A)])
    await wire.published(2)
    before = wire.events.sequence
    # Both are told while the publisher does not run: it finds the hole and what comes after it.
    await wire.teller.stored([chunk(ID_B)])
    wire.teller.history.lose_power()
    await wire.teller.stored([chunk(ID_A)])
    messages = await wire.published(before + 2)
    assert next(batch.events for _, _, batch in messages[before:]) == [CLEARED]
    assert isinstance(messages[-1][2].events[-1], BlockStored)


async def test_a_replay_starts_where_it_is_asked_to(wire: Wire) -> None:
    for number in range(5):
        await wire.teller.stored([chunk(f"k{number}")])
        await wire.published(number + 2)
    assert [sequence for _, sequence, _ in await wire.replay(3)] == [3, 4, 5]
    assert await wire.replay(6) == []


async def test_what_is_no_replay_request_does_no_harm(wire: Wire) -> None:
    endpoint = wire.events.endpoints[1]
    assert endpoint is not None
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    for frames in ([b""], [b"", b"short"], [b"", b"12345678", b"more"], [b"12345678"]):
        await socket.send_multipart(frames)
    await wire.published(1)
    context.destroy(linger=0)


async def test_topics_follow_bucket_and_namespace_and_each_begins_cleared() -> None:
    async with running(local("kv@{bucket}@{namespace}")) as wire:
        await wire.teller.stored([chunk(ID_A), chunk(ID_B, namespace="")])
        await wire.teller.stored([chunk(ID_A, bucket=OTHER)])
        await wire.teller.stored([chunk("more")])
        topics: dict[str, list[type]] = {}
        for topic, _, batch in await wire.published(4):
            topics.setdefault(topic, []).extend(type(event) for event in batch.events)
        assert topics == {
            "kv@chunks@llama": [AllBlocksCleared, BlockStored, BlockStored],
            "kv@chunks@default": [AllBlocksCleared, BlockStored],
            "kv@others@llama": [AllBlocksCleared, BlockStored],
        }


async def test_a_cleared_namespace_clears_its_own_topic() -> None:
    async with running(local("{bucket}/{namespace}")) as wire:
        await wire.teller.stored([chunk(ID_A)])
        await wire.published(1)
        await wire.teller.history.tell_cleared(BUCKET, "llama", now_ms=5)
        assert (await wire.published(2))[-1][2].events == [CLEARED]


async def test_a_cleared_namespace_does_not_clear_a_topic_that_it_shares(wire: Wire) -> None:
    await wire.teller.history.tell_cleared(BUCKET, "llama", now_ms=5)
    await wire.teller.stored([chunk(ID_A)])
    messages = await wire.published(2)
    assert [type(event) for _, _, batch in messages for event in batch.events] == [AllBlocksCleared, BlockStored]


async def test_it_connects_to_a_subscriber_that_binds(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.bind(endpoint)
    socket.subscribe("")
    async with running(EventSettings(zmq=endpoint, zmq_connect=True)) as wire:
        await wire.join(socket)
    context.destroy(linger=0)


async def test_an_address_in_use_is_a_configuration_error(wire: Wire) -> None:
    settings = EventSettings(zmq=wire.events.endpoints[0])
    with pytest.raises(ConfigurationError) as caught:
        ZmqEvents.open(wire.teller.history, settings, clock=ManualClock(), log=logging.getLogger("test"))
    assert caught.value.problems[0].startswith("events.zmq: ")


async def test_a_long_history_is_told_in_bounded_messages() -> None:
    teller = await memory_teller()
    for number in range(1200):
        await teller.stored([chunk(f"{number:064x}")])
    await teller.removed([chunk(f"{number:064x}") for number in range(1000)])
    async with running(local(), teller=teller) as wire:
        messages = await wire.published(4)
        hashes = [
            len(event.block_hashes)
            for _, _, batch in messages
            for event in batch.events
            if not isinstance(event, AllBlocksCleared)
        ]
        assert sum(hashes) == 2200
        for _, _, batch in messages:
            assert (
                sum(len(event.block_hashes) for event in batch.events if not isinstance(event, AllBlocksCleared))
                <= 1000
            )


@pytest.mark.parametrize(
    ("namespace", "key", "expected"),
    [
        ("llama", ID_A, bytes.fromhex(ID_A)),
        ("vllm", f"vllm/{ID_A}", bytes.fromhex(ID_A)),
        ("lmcache", "lmcache/model@1@0@abcd", b"model@1@0@abcd"),
        ("", f"x/{ID_A}", f"x/{ID_A}".encode()),
        ("default", "abcd", b"abcd"),
        ("default", "clé", "clé".encode()),
        ("sglang", "sglang/" + "AB" * 32, b"AB" * 32),
    ],
)
def test_a_block_hash_is_the_engines_own_bytes_where_the_key_is_a_digest(
    namespace: str, key: str, expected: bytes
) -> None:
    assert block_hash(namespace, key) == expected


def test_the_replay_is_bounded_in_bytes_and_keeps_the_newest() -> None:
    replay = Replay(batches_max=100, bytes_max=1000)
    for sequence in range(50):
        replay.keep(sequence, b"", b"x" * 300)
    assert [kept[0] for kept in replay.since(0)] == [47, 48, 49]
    replay.keep(50, b"", b"x" * 5000)
    assert [kept[0] for kept in replay.since(0)] == [50]


def test_the_replay_is_bounded_in_messages() -> None:
    replay = Replay(batches_max=3, bytes_max=1000)
    for sequence in range(10):
        replay.keep(sequence, b"t", b"")
    assert [kept[0] for kept in replay.since(8)] == [8, 9]
    assert len(replay.since(0)) == 3


@given(
    st.lists(st.tuples(st.sampled_from(["b1", "b2"]), st.sampled_from(["", "n1"]), st.integers(0, 700)), max_size=30)
)
def test_batches_keep_order_and_bounds(told: list[tuple[str, str, int]]) -> None:
    events = [
        EventRow(number, 1, EventType.STORED, bucket, namespace, tuple(f"k{key}" for key in range(keys)))
        for number, (bucket, namespace, keys) in enumerate(told)
    ]
    topics = Topics("{bucket}-{namespace}")
    made = list(batches(events, topics))
    assert [event for _, batch in made for event in batch] == events
    for topic, batch in made:
        assert {topics.of(event) for event in batch} == {topic}
        assert len(batch) == 1 or sum(len(event.keys) for event in batch) <= 1000


async def test_chains_keep_their_block_size(wire: Wire) -> None:
    await wire.teller.stored(chain("a", "b", "c", tokens=32))
    *_, (_, _, batch) = await wire.published(2)
    (stored,) = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.block_size) == ([b"a", b"b", b"c"], 32)
