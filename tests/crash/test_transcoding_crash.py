"""kill -9 while chunks are re-encoded in memory, while lossy copies of them are written down, and while these are made coarser.

A small arena presses from the start, so write-behind and the re-encoding never rest, and the kill comes at a random instant. What
was acknowledged is there after every start: byte for byte, or, where the namespace allows it, within what the copy certifies.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until
from tier_codecs import CHUNK_BYTES, LAYOUT, TOKENS, furthest, lossless, lossy, tensor, usable

from kvobj.client import Credentials, KvClient, Namespace
from kvobj.tensors.codecs import decode_frame, parse_tensor_frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CYCLES = int(os.environ.get("KVOBJ_TRANSCODING_CYCLES", "2"))
SEED = int(os.environ.get("KVOBJ_CRASH_SEED", "20240229"))
CHUNKS_A_CYCLE = 20
CONTENTS = 4
"""Chunks share so many contents: values for a tensor take longer to draw than to store."""


@dataclass(slots=True)
class Seen:
    """What the server acknowledged: the content of each chunk, by name."""

    content: dict[bytes, int] = field(default_factory=dict)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=48 * MIB,
        nvme_bytes=512 * MIB,
        buckets=(BucketSetting("cache", "kv", "memory"),),
        sections={"log": {"requests": "false"}},
    )
    with ServerProcess(tmp_path, settings) as running:
        yield running


def client_of(server: ServerProcess) -> KvClient:
    keys = server.credentials()
    return KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache", same_host=False)


def declare(server: ServerProcess, **settings: object) -> Namespace:
    declaration = {"model": "m", "chunk_tokens": TOKENS, "layout": LAYOUT, "ids": "kvobj", **settings}
    with client_of(server) as client:
        return client.declare_namespace("coded", declaration)


def put_until_killed(
    server: ServerProcess, namespace: Namespace, cycle: int, seen: Seen, chance: random.Random
) -> None:
    with client_of(server) as client:
        for number in range(CHUNKS_A_CYCLE):
            (name,) = namespace.chunk_ids([cycle * CHUNKS_A_CYCLE + number] * TOKENS)
            client.put_chunk(name, tensor(number % CONTENTS), namespace=namespace, parent="root")
            seen.content[name] = number % CONTENTS
    # Not a wait for anything: the kill comes at a random instant.
    threading.Event().wait(chance.uniform(0.0, 3.0))
    server.kill()


def codecs_of(server: ServerProcess, tier: str) -> dict[str, int]:
    found = next(each for each in server.status()["tiers"] if each["name"] == tier)
    return {each["codec"]: each["blobs"] for each in found["codecs"]}


def test_no_byte_is_lost_where_memory_and_home_lie_coded(server: ServerProcess) -> None:
    codec, chance, seen = lossless(), random.Random(SEED), Seen()
    namespace = declare(server, codecs={"dram": codec, "nvme": codec})
    for cycle in range(CYCLES):
        put_until_killed(server, namespace, cycle, seen, chance)
        server.start()
        with client_of(server) as client:
            for name, content in seen.content.items():
                assert bytes(client.get_chunk(name, namespace=namespace) or b"") == tensor(content)
    wait_until(
        lambda: codecs_of(server, "dram").get(codec, 0) > 0 and codecs_of(server, "nvme").get(codec, 0) > 0,
        timeout_seconds=30,
        what="chunks that lie coded",
    )


def test_what_has_a_lossy_copy_is_there_as_it_was_put_or_within_its_certificate(server: ServerProcess) -> None:
    codec, chance, seen = lossy(), random.Random(SEED), Seen()
    namespace = declare(server, codecs={"nvme": codec}, lossy=True)
    decoded: dict[int, bytes] = {}  # by content: a codec gives the same bytes for the same

    def check() -> None:
        with client_of(server) as client:
            for name, content in seen.content.items():
                read = client.get_stored(name, namespace=namespace, accept=["raw"], max_error=1.0)
                assert read is not None
                assert read.codec == "raw"
                if read.lossy is None:
                    assert bytes(read.data) == tensor(content)
                    continue
                bound = float(read.lossy.partition("max-error=")[2])
                if content not in decoded:
                    decoded[content] = bytes(read.data)
                    assert furthest(decoded[content], tensor(content)) <= bound
                assert bytes(read.data) == decoded[content]

    for cycle in range(CYCLES):
        put_until_killed(server, namespace, cycle, seen, chance)
        server.start()
        check()
    assert server.terminate() == 0  # writes down what is only in memory, and leaves none of it
    server.start()
    check()
    assert len(decoded) == CONTENTS
    # What the killed writes had left at home under ids that no row names is swept.
    wait_until(
        lambda: sum(codecs_of(server, "nvme").values()) == len(seen.content), timeout_seconds=60, what="the sweep"
    )


@pytest.mark.skipif(not usable("eq4"), reason="the kernels are not built")
def test_every_chunk_has_one_lossy_copy_while_copies_are_made_coarser(server: ServerProcess) -> None:
    chance, frames, decoded = random.Random(SEED), dict[bytes, int](), dict[bytes, bytes]()
    namespace = declare(server, codecs={"nvme": "eq57"}, lossy=True)

    def check() -> None:
        with client_of(server) as client:
            for name, content in frames.items():
                read = client.get_stored(name, namespace=namespace, accept=["eq57", "eq4"])
                assert read is not None
                frame = bytes(read.data)
                if frame not in decoded:  # a codec gives the same frame for the same content
                    plain, head = bytearray(CHUNK_BYTES), parse_tensor_frame(memoryview(frame), len(frame))
                    decode_frame(memoryview(frame), head, memoryview(plain))
                    decoded[frame] = bytes(plain)
                    assert furthest(decoded[frame], tensor(content)) <= head.certificate.max_error

    with client_of(server) as client:
        for number in range(CHUNKS_A_CYCLE):
            (name,) = namespace.chunk_ids([number] * TOKENS)
            client.put_chunk(name, tensor(number % CONTENTS), namespace=namespace, parent="root")
            frames[name] = number % CONTENTS
    wait_until(  # a copy is at home before its row names it
        lambda: codecs_of(server, "nvme").get("eq57") == len(frames) and not server.status()["queues"]["write_behind"],
        timeout_seconds=30,
        what="lossy copies",
    )
    declare(server, codecs={"nvme": "eq4"}, lossy=True)
    for _ in range(CYCLES):
        # Not a wait for anything: the kill comes at a random instant of the work.
        threading.Event().wait(chance.uniform(0.0, 0.2))
        server.kill()
        server.start()
        check()
    wait_until(
        lambda: codecs_of(server, "nvme") == {"eq4": len(frames)},
        timeout_seconds=60,
        what="every copy to be coarser, and the others swept",
    )
    assert server.status()["queues"]["demotion"] == 0
    check()
    assert len(decoded) <= 2 * CONTENTS
