"""Chunks by plain S3: PUT with a place in a chain, parts of several writers, reads of layers and of what a pin holds, rights."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from real_store import node_settings, running_node
from s3_driver import ALICE, BOB, Answer, Driver, FakeBody, MeanwhileBody, sign

from kvobj.app.node import Node, flush
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import NamespaceQuota, UserRow
from kvobj.clock import SystemClock, boot_ms
from kvobj.errors import IncompleteBodyError
from kvobj.store.ingest import PutTransfer
from kvobj.store.places import DEFAULT_HINT
from kvobj.store.requests import PutRequest

MIB = 1 << 20
ORDER = ("layer", "kv", "head", "token", "dim")
TOKENS, LAYERS = 16, 4
CHUNK = LAYERS * TOKENS * 16


def chunk_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def body(name: str, size_bytes: int = CHUNK) -> bytes:
    return (hashlib.sha512(name.encode()).digest() * (size_bytes // 64 + 1))[:size_bytes]


A, B, C, D = (chunk_id(name) for name in "abcd")


class Chunks:
    """A node with the KV bucket `chunks` of Alice, and its namespaces."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.driver = Driver(store=node.store)

    async def declare(
        self,
        name: str,
        *,
        ids: str = "kvobj",
        chunk_bytes: int | None = CHUNK,
        order: tuple[str, ...] = ORDER,
        axis: str | None = None,
        access: dict[str, str] | None = None,
        quota: NamespaceQuota | None = None,
    ) -> None:
        kind = "opaque" if chunk_bytes is None else "kv"
        layout = {"kind": kind} if chunk_bytes is None else {"kind": kind, "layers": LAYERS, "order": order}
        declaration = msgspec.json.encode({"model": name, "chunk_tokens": TOKENS, "layout": layout, "ids": ids})
        await self.node.catalog.namespaces.declare(
            NamespaceRow(
                bucket="chunks",
                name=name,
                declaration=declaration,
                fingerprint=blake3(declaration).digest(),
                wrapped_key=b"",
                root=bytes(32),
                ids=ids,
                chunk_tokens=TOKENS,
                chunk_bytes=chunk_bytes,
                part_axis=axis,
                created_ms=1,
                owner="alice",
                access=access or {},
                quota=quota or NamespaceQuota(),
            )
        )

    async def put(
        self,
        key: str,
        data: bytes | FakeBody,
        *,
        namespace: str | None = "ns",
        parent: str | None = None,
        user: UserRow = ALICE,
        **more: str,
    ) -> Answer:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        if namespace is not None:
            headers["x-kvobj-namespace"] = namespace
        if parent is not None:
            headers["x-kvobj-parent"] = parent
        payload = "UNSIGNED-PAYLOAD" if isinstance(data, FakeBody) else None
        return await self.driver.request(
            "PUT", f"/chunks/{key}", body=data, headers=headers, user=user, payload=payload
        )

    async def get(self, target: str, *, method: str = "GET", user: UserRow = ALICE, **headers: str) -> Answer:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.driver.request(method, f"/chunks/{target}", headers=fields, user=user)

    async def delete(self, key: str, *, user: UserRow = ALICE) -> Answer:
        return await self.driver.request("DELETE", f"/chunks/{key}", user=user)

    async def chain(self, *keys: str) -> None:
        parent = "root"
        for key in keys:
            answer = await self.put(key, body(key), parent=parent)
            assert answer.status == 200, answer.body
            parent = key


@asynccontextmanager
async def chunks_in(data: Path, memory: Path, *, dram_mib: int) -> AsyncIterator[Chunks]:
    async with running_node(node_settings(data, memory, dram_mib=dram_mib, nvme_mib=64)) as node:
        found = Chunks(node)
        await found.driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        await found.declare("ns")
        yield found


@pytest.fixture
async def chunks(tmp_path: Path, shm_path: Path) -> AsyncIterator[Chunks]:
    async with chunks_in(tmp_path / "data", shm_path, dram_mib=16) as found:
        yield found


@pytest.fixture
async def roomy_chunks(tmp_path: Path, shm_path: Path) -> AsyncIterator[Chunks]:
    """With an arena where a blob may have 6 MiB."""
    async with chunks_in(tmp_path / "data", shm_path, dram_mib=64) as found:
        yield found


def detail(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.code


# -- a chain ---------------------------------------------------------------------------------------------------------
async def test_a_chunk_is_put_under_its_parent_and_tells_its_place(chunks: Chunks) -> None:
    await chunks.chain(A, B)
    last = await chunks.put(C, body("c", CHUNK // 4), parent=B, x_kvobj_tokens="4")
    assert (last.status, last.headers["x-kvobj-existed"]) == (200, "false")
    got = await chunks.get(C)
    assert (got.status, got.body) == (200, body("c", CHUNK // 4))
    told = {name: value for name, value in got.headers.items() if name.startswith("x-kvobj-")}
    assert told["x-kvobj-namespace"] == "ns"
    assert told["x-kvobj-parent"] == B
    assert told["x-kvobj-tokens"] == "4"
    head = await chunks.get(A, method="HEAD")
    assert (head.headers["x-kvobj-parent"], head.headers["x-kvobj-tokens"]) == ("root", "16")
    row = await chunks.node.store.look_up("chunks", C)
    assert row is not None
    assert (row.depth, row.chain_tokens, row.chain_bytes) == (2, 36, 2 * CHUNK + CHUNK // 4)


async def test_the_first_writer_wins_and_the_body_need_not_be_sent(chunks: Chunks) -> None:
    await chunks.chain(A)
    unsent = FakeBody(b"", length=CHUNK)
    again = await chunks.put(A, unsent, parent="root", expect="100-continue", x_kvobj_want="digest")
    assert (again.status, again.headers["x-kvobj-existed"]) == (200, "true")
    assert again.headers["x-kvobj-digest"] == blake3(body(A)).hexdigest()
    assert not unsent.accepted
    assert again.reply.close


async def test_an_unknown_parent_is_named_before_the_body(chunks: Chunks) -> None:
    unsent = FakeBody(b"", length=CHUNK)
    refused = await chunks.put(B, unsent, parent=A)
    assert detail(refused) == (409, "ParentNotFound")
    assert refused.xml.findtext("Parent") == A
    assert not unsent.accepted
    assert detail(await chunks.put(B, body("b"), parent=B)) == (409, "ParentNotFound"), "a chunk is not its own parent"
    assert (await chunks.get(B)).status == 404


async def test_a_parent_that_goes_while_the_body_arrives_refuses_the_commit(chunks: Chunks) -> None:
    await chunks.chain(A)
    arriving = MeanwhileBody(body("b"), lambda: chunks.delete(A))
    assert detail(await chunks.put(B, arriving, parent=A)) == (409, "ParentNotFound")
    assert (await chunks.get(B)).status == 404


async def test_a_parent_of_another_namespace_is_no_parent(chunks: Chunks) -> None:
    await chunks.declare("other")
    await chunks.chain(A)
    assert detail(await chunks.put(B, body("b"), namespace="other", parent=A)) == (409, "ParentNotFound")


async def test_delete_takes_what_follows_on_the_chunk_with_it(chunks: Chunks) -> None:
    await chunks.chain(A, B, C)
    await chunks.put(D, body("d"), parent=A)
    assert (await chunks.delete(B)).status == 204
    assert [(await chunks.get(key)).status for key in (A, B, C, D)] == [200, 404, 404, 200]
    document = f"<Delete><Object><Key>{A}</Key></Object></Delete>".encode()
    deleted = await chunks.driver.request("POST", "/chunks?delete", body=document)
    assert deleted.texts("Deleted/Key") == [A]
    assert [(await chunks.get(key)).status for key in (A, D)] == [404, 404]


# -- namespaces and layouts --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "headers", "expected"),
    [
        (A, {"x-kvobj-namespace": "ns"}, (400, "InvalidRequest")),
        (A, {"x-kvobj-namespace": "ns", "x-kvobj-parent": "none"}, (400, "InvalidChunkId")),
        ("key", {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root"}, (400, "InvalidChunkId")),
        (f"ns/{A}", {"x-kvobj-parent": "root"}, (400, "InvalidChunkId")),
        (A, {"x-kvobj-namespace": "nowhere", "x-kvobj-parent": "root"}, (404, "NoSuchNamespace")),
        (A, {"x-kvobj-namespace": "n" * 600, "x-kvobj-parent": "root"}, (404, "NoSuchNamespace")),
        ("vllm/k", {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root"}, (400, "InvalidChunkId")),
        ("vllm/k", {"x-kvobj-namespace": "default"}, (400, "InvalidChunkId")),
        (A, {"x-kvobj-namespace": "vllm"}, (400, "InvalidChunkId")),
        (A, {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root", "x-kvobj-tokens": "17"}, (400, "InvalidTokens")),
        (A, {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root", "x-kvobj-tokens": "8"}, (409, "LayoutMismatch")),
        (A, {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root", "x-kvobj-part": "0/2"}, (409, "LayoutMismatch")),
        (A, {"x-kvobj-namespace": "ns", "x-kvobj-parent": "root", "x-kvobj-part": "2/2"}, (400, "InvalidArgument")),
    ],
)
async def test_what_disagrees_with_the_namespace_is_refused(
    chunks: Chunks, key: str, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    await chunks.declare("vllm", ids="foreign", chunk_bytes=None)
    unsent = FakeBody(b"", length=CHUNK)
    answer = await chunks.driver.request(
        "PUT", f"/chunks/{key}", body=unsent, headers=headers, payload="UNSIGNED-PAYLOAD"
    )
    assert detail(answer) == expected
    assert not unsent.accepted
    if expected[1] == "LayoutMismatch":
        assert answer.xml.findtext("Differs") in ("size_bytes", "part_axis")


async def test_keys_of_engines_live_under_their_namespace(chunks: Chunks) -> None:
    await chunks.declare("vllm", ids="foreign", chunk_bytes=None)
    assert (await chunks.put("vllm/first", b"1", namespace="vllm", parent="root")).status == 200
    assert (await chunks.put("vllm/second", b"22", namespace=None, parent="first")).status == 200
    assert (await chunks.put("vllm/loose", b"333", namespace=None)).status == 200
    second = await chunks.get("vllm/second", method="HEAD")
    assert (second.headers["x-kvobj-namespace"], second.headers["x-kvobj-parent"]) == ("vllm", "first")
    assert "x-kvobj-parent" not in (await chunks.get("vllm/loose", method="HEAD")).headers
    await chunks.delete("vllm/first")
    assert [(await chunks.get(f"vllm/{key}")).status for key in ("second", "loose")] == [404, 200]


async def test_plain_clients_need_no_namespace(chunks: Chunks) -> None:
    for key in (A, "lmcache/some/key", "default/x"):
        assert (await chunks.put(key, b"any bytes", namespace=None)).status == 200
        got = await chunks.get(key)
        assert (got.body, "x-kvobj-namespace" in got.headers, "x-kvobj-tokens" in got.headers) == (
            b"any bytes", False, False,
        )  # fmt: skip


async def test_only_the_default_namespace_replaces(chunks: Chunks) -> None:
    first = await chunks.put("loose", b"one", namespace=None)
    replaced = await chunks.put("loose", b"other", namespace=None, if_match=first.headers["etag"])
    assert (replaced.status, replaced.headers["x-kvobj-existed"]) == (200, "false")
    assert (await chunks.get("loose")).body == b"other"
    stale = await chunks.put("loose", b"third", namespace=None, if_match=first.headers["etag"])
    assert detail(stale) == (412, "PreconditionFailed")
    put = await chunks.put(A, body("a"), parent="root")
    refused = await chunks.put(A, body("b"), parent="root", if_match=put.headers["etag"])
    assert detail(refused) == (409, "ImmutableChunk")
    assert (await chunks.get(A)).body == body("a")


async def test_ordinary_buckets_take_no_place(chunks: Chunks) -> None:
    await chunks.driver.put("/plain", b"")
    for name in ("namespace", "parent", "tokens", "part"):
        answer = await chunks.driver.request("PUT", "/plain/key", body=b"x", headers={f"x-kvobj-{name}": "1"})
        assert detail(answer) == (400, "InvalidRequest")
    assert (await chunks.driver.get("/plain/key")).status == 404
    await chunks.driver.put("/plain/key", b"x")
    assert detail(await chunks.driver.get("/plain/key?layers=0-1")) == (400, "InvalidRequest")


async def test_a_header_that_carries_identity_has_to_be_signed(chunks: Chunks) -> None:
    fields = sign("PUT", f"/chunks/{A}", body("a"), headers={"x-kvobj-namespace": "ns"})
    answer = await chunks.driver.send("PUT", f"/chunks/{A}", [*fields, ("x-kvobj-parent", "root")], body("a"))
    assert detail(answer) == (403, "AccessDenied")
    assert answer.xml.findtext("HeadersNotSigned") == "x-kvobj-parent"


async def test_a_full_namespace_takes_no_more(chunks: Chunks) -> None:
    await chunks.declare("small", quota=NamespaceQuota(chunks=1))
    assert (await chunks.put(A, body("a"), namespace="small", parent="root")).status == 200
    refused = await chunks.put(B, body("b"), namespace="small", parent=A)
    assert detail(refused) == (403, "QuotaExceeded")
    assert (await chunks.get(B)).status == 404


# -- reads -------------------------------------------------------------------------------------------------------------
async def test_layers_are_read_as_a_range(chunks: Chunks) -> None:
    await chunks.chain(A)
    layer = CHUNK // LAYERS
    got = await chunks.get(f"{A}?layers=1-2")
    assert (got.status, got.body) == (206, body(A)[layer : 3 * layer])
    assert got.headers["content-range"] == f"bytes {layer}-{3 * layer - 1}/{CHUNK}"
    for query in ("layers=0-4", "layers=2-1"):
        assert (await chunks.get(f"{A}?{query}")).status == 400
    await chunks.put("loose", b"x" * 64, namespace=None)
    assert detail(await chunks.get("loose?layers=0-0")) == (400, "InvalidRequest")
    await chunks.declare("tokens-first", order=("token", "layer", "kv", "head", "dim"))
    await chunks.put(B, body("b"), namespace="tokens-first", parent="root")
    assert detail(await chunks.get(f"{B}?layers=0-0")) == (400, "InvalidRequest")


async def test_a_reader_that_takes_nothing_that_there_is_misses(chunks: Chunks) -> None:
    await chunks.chain(A)
    taken = await chunks.get(A, x_kvobj_accept="x3, raw")
    assert (taken.status, taken.headers["x-kvobj-codec"]) == (200, "raw")
    assert "x-kvobj-codec" not in (await chunks.get(A)).headers
    assert detail(await chunks.get(A, x_kvobj_accept="x3")) == (404, "NoSuchKey")
    assert detail(await chunks.get(A, x_kvobj_accept="x3;level=9")) == (400, "InvalidArgument")
    assert detail(await chunks.get(f"{A}?layers=0-0", x_kvobj_accept="x3")) == (400, "InvalidRequest")


async def test_a_pin_reads_what_a_delete_has_hidden(chunks: Chunks) -> None:
    await chunks.chain(A, B)
    leases, now = chunks.node.catalog.leases, boot_ms(SystemClock())
    session = await leases.open_session(user="alice", bucket="chunks", holder="t", ttl_ms=30_000, now_boot_ms=now)
    pinned = await leases.pin_tails(session.id, [B], user="alice", bucket="chunks", now_boot_ms=now)
    pin = (pinned.pins[0].pin or b"").hex()
    assert (await chunks.delete(A)).status == 204
    assert [(await chunks.get(key)).status for key in (A, B)] == [404, 404]
    for key in (A, B):
        got = await chunks.get(key, x_kvobj_pin=pin)
        assert (got.status, got.body) == (200, body(key))
    assert (await chunks.get(A, x_kvobj_pin="00" * 16)).status == 404
    assert (await chunks.get(A, x_kvobj_pin="nonsense")).status == 400
    assert (await chunks.get(A, x_kvobj_pin=pin, user=BOB)).status == 403
    assert (await chunks.put(A, body("other"), parent="root")).headers["x-kvobj-existed"] == "false"


# -- rights ------------------------------------------------------------------------------------------------------------
async def test_who_is_granted_a_namespace_reads_or_writes_its_chunks(chunks: Chunks) -> None:
    await chunks.declare("open", access={"bob": "write"})
    await chunks.declare("shown", access={"bob": "read"})
    await chunks.put(A, body("a"), namespace="shown", parent="root")
    await chunks.put(B, body("b"), parent="root")
    assert (await chunks.get(A, user=BOB)).body == body("a")
    assert (await chunks.get(A, method="HEAD", user=BOB)).status == 200
    assert (await chunks.put(C, body("c"), namespace="open", parent="root", user=BOB)).status == 200
    assert (await chunks.get(C, user=BOB)).body == body("c")
    assert detail(await chunks.put(D, body("d"), namespace="shown", parent=A, user=BOB)) == (403, "AccessDenied")
    # Forbidden and absent answer alike.
    for key in (B, D):
        assert detail(await chunks.get(key, user=BOB)) == (404, "NoSuchKey")
    for namespace in ("ns", "nowhere"):
        answer = await chunks.put(D, body("d"), namespace=namespace, parent="root", user=BOB)
        assert detail(answer) == (404, "NoSuchNamespace")
    for refused in (
        await chunks.put("loose", b"x", namespace=None, user=BOB),
        await chunks.delete(C, user=BOB),
        await chunks.get("?list-type=2", user=BOB),
    ):
        assert detail(refused) == (403, "AccessDenied")


async def test_a_write_onto_a_strangers_key_is_told_nothing_of_it(chunks: Chunks) -> None:
    await chunks.declare("open", access={"bob": "write"}, axis="layer")
    await chunks.chain(A)
    for more in ({}, {"x_kvobj_part": "0/1"}):
        refused = await chunks.put(A, body("x"), namespace="open", parent="root", user=BOB, **more)
        assert detail(refused) == (409, "ImmutableChunk")
        assert "x-kvobj-digest" not in refused.headers
        assert "etag" not in refused.headers
    assert (await chunks.put(A, body("x"), namespace="open", parent="root")).headers["x-kvobj-existed"] == "true"


async def test_who_is_granted_nothing_is_denied_whatever_is_there(chunks: Chunks) -> None:
    await chunks.chain(A)
    for key in (A, B):
        assert detail(await chunks.get(key, user=BOB)) == (403, "AccessDenied")
    for namespace in ("ns", "nowhere", None):
        answer = await chunks.put(B, body("b"), namespace=namespace, parent=A, user=BOB)
        assert detail(answer) == (403, "AccessDenied")


async def test_who_may_not_use_the_namespace_default_is_told_what_to_do_in_xml_too(chunks: Chunks) -> None:
    hint = f"<Hint>{DEFAULT_HINT}</Hint>".encode()
    for answer in (await chunks.put("loose", b"x", namespace=None, user=BOB), await chunks.get("loose", user=BOB)):
        assert detail(answer) == (403, "AccessDenied")
        assert hint in answer.body
        assert ALICE.id.encode() not in answer.body
    await chunks.declare("open", access={"bob": "write"})
    denied = await chunks.put("loose", b"x", namespace=None, user=BOB)
    assert detail(denied) == (403, "AccessDenied")
    assert hint in denied.body
    anonymous = await chunks.driver.send("GET", "/chunks/loose", [("host", "127.0.0.1:9000")], b"")
    assert anonymous.status == 403
    assert b"Hint" not in anonymous.body


# -- parts of several writers ------------------------------------------------------------------------------------------
async def put_part(
    chunks: Chunks,
    key: str,
    index: int,
    count: int,
    data: bytes | FakeBody,
    *,
    durability: str = "memory",
    tokens: int = TOKENS,
    user: UserRow = ALICE,
    is_wrong: bool = False,
) -> Answer:
    """`is_wrong`: with a checksum that is another body's."""
    return await chunks.put(
        key,
        data,
        namespace="parted",
        parent="root",
        user=user,
        x_kvobj_part=f"{index}/{count}",
        x_kvobj_durability=durability,
        x_kvobj_tokens=str(tokens),
        **({"x_amz_checksum_crc32": "AAAAAA=="} if is_wrong else {}),
    )


def cut(data: bytes, count: int) -> list[bytes]:
    step = len(data) // count
    return [data[index * step : (index + 1) * step] for index in range(count)]


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_a_chunk_of_parts_is_visible_once_all_are_there(chunks: Chunks, durability: str) -> None:
    await chunks.declare("parted", axis="layer")
    pieces = cut(body("a"), 4)
    for have, index in enumerate((2, 0, 3)):
        answer = await put_part(chunks, A, index, 4, pieces[index], durability=durability)
        assert (answer.status, answer.headers["x-kvobj-parts"]) == (200, f"{have + 1}/4")
        assert answer.headers["x-kvobj-existed"] == "false"
        assert (await chunks.get(A)).status == 404
    assert (await chunks.driver.get("/chunks?uploads")).texts("Upload") == []
    again = await put_part(chunks, A, 2, 4, bytes(CHUNK // 4))
    assert (again.headers["x-kvobj-parts"], again.headers["x-kvobj-existed"]) == ("3/4", "true")
    last = await put_part(chunks, A, 1, 4, pieces[1], durability=durability)
    assert (last.headers["x-kvobj-parts"], last.headers["x-kvobj-existed"]) == ("4/4", "false")
    got = await chunks.get(A)
    assert (got.status, got.body, got.headers["etag"]) == (200, body("a"), last.headers["etag"])
    head = await chunks.get(A, method="HEAD")
    assert head.headers["x-kvobj-digest"] == blake3(body("a")).hexdigest(), "one blob was made of the parts"
    for index in range(4):
        part = await chunks.get(f"{A}?part={index}")
        assert (part.status, part.body, part.headers["x-amz-mp-parts-count"]) == (206, pieces[index], "4")
    assert (await chunks.get(f"{A}?part=4")).status == 416
    assert (await chunks.get(f"{A}?layers=3-3")).body == pieces[3]
    late = await put_part(chunks, A, 0, 4, pieces[0])
    assert (late.headers["x-kvobj-parts"], late.headers["x-kvobj-existed"]) == ("4/4", "true")
    assert (await chunks.put(B, body("b"), namespace="parted", parent=A)).status == 200


async def test_writers_of_parts_have_to_agree(chunks: Chunks) -> None:
    await chunks.declare("parted", axis="layer")
    pieces = cut(body("a"), 4)
    await put_part(chunks, A, 0, 4, pieces[0])
    other = await put_part(chunks, A, 0, 2, body("a")[: CHUNK // 2])
    assert (other.status, other.xml.findtext("Differs")) == (409, "part")
    shorter = await put_part(chunks, A, 1, 4, body("x", CHUNK // 8), tokens=8)
    assert (shorter.status, shorter.xml.findtext("Differs")) == (409, "tokens")
    assert detail(await put_part(chunks, A, 1, 4, b"short")) == (409, "LayoutMismatch")
    for index in (1, 2, 3):
        await put_part(chunks, A, index, 4, pieces[index])
    assert detail(await put_part(chunks, A, 0, 2, body("a")[: CHUNK // 2])) == (409, "LayoutMismatch")
    assert (await chunks.get(A)).body == body("a")


async def test_parts_that_race_make_one_chunk(chunks: Chunks) -> None:
    await chunks.declare("parted", axis="layer")
    pieces = cut(body("a"), 2)
    answers = await asyncio.gather(
        *(put_part(chunks, A, index, 2, pieces[index]) for index in (0, 1, 0, 1)),
    )
    assert {answer.status for answer in answers} == {200}
    assert "2/2" in {answer.headers["x-kvobj-parts"] for answer in answers}
    assert (await chunks.get(A)).body == body("a")
    row = await chunks.node.store.look_up("chunks", A)
    assert row is not None
    assert [part.size_bytes for part in row.parts] == [CHUNK // 2, CHUNK // 2]
    assert (await chunks.driver.get("/chunks?uploads")).texts("Upload") == []


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_a_part_that_was_on_its_way_to_a_bucket_is_none_of_the_next_owners_chunk(
    chunks: Chunks, durability: str
) -> None:
    await chunks.declare("parted", axis="layer")
    own = cut(body("b"), 2)

    async def handed_on() -> None:
        assert (await chunks.driver.request("DELETE", "/chunks")).status == 204
        chunks.driver.clock.offset_ms -= 5000
        made = await chunks.driver.request("PUT", "/chunks", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
        assert made.status == 200
        await chunks.declare("parted", axis="layer")
        first = await put_part(chunks, A, 1, 2, own[1], durability=durability, user=BOB)
        assert first.headers["x-kvobj-parts"] == "1/2"

    late = await put_part(chunks, A, 0, 2, MeanwhileBody(cut(body("a"), 2)[0], handed_on), durability=durability)
    assert detail(late) == (404, "NoSuchBucket")
    while await chunks.node.reaper.reap_batch():
        pass
    last = await put_part(chunks, A, 0, 2, own[0], durability=durability, user=BOB)
    assert (last.headers["x-kvobj-parts"], last.headers["x-kvobj-existed"]) == ("2/2", "false")
    assert (await chunks.get(A, user=BOB)).body == body("b")


async def test_of_two_first_parts_that_race_one_says_how_many_there_are(chunks: Chunks) -> None:
    await chunks.declare("parted", axis="layer")
    halves, quarters = cut(body("a"), 2), cut(body("a"), 4)
    answers = await asyncio.gather(
        put_part(chunks, A, 0, 2, halves[0], durability="local"),
        put_part(chunks, A, 3, 4, quarters[3], durability="memory"),
    )
    assert sorted(answer.status for answer in answers) == [200, 409]
    assert [answer.xml.findtext("Differs") for answer in answers if answer.status == 409] == ["part"]


async def begun(chunks: Chunks) -> int:
    """How many uploads of chunks in parts there are."""
    return len((await chunks.node.catalog.list_uploads("chunks", groups=True)).rows)


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_a_first_part_that_is_refused_leaves_no_upload_that_speaks_for_it(
    chunks: Chunks, durability: str
) -> None:
    await chunks.declare("parted", axis="layer")
    refused = await put_part(chunks, A, 0, 4, cut(body("a"), 4)[0], durability=durability, is_wrong=True)
    assert detail(refused) == (400, "BadDigest")
    assert await begun(chunks) == 0
    for index, half in enumerate(cut(body("a"), 2)):
        assert (await put_part(chunks, A, index, 2, half, durability="local")).status == 200
    assert (await chunks.get(A)).body == body("a")


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_a_first_part_whose_body_breaks_off_leaves_no_upload(chunks: Chunks, durability: str) -> None:
    await chunks.declare("parted", axis="layer")

    async def broken() -> None:
        assert await begun(chunks) == 1
        raise IncompleteBodyError("the body ends early")

    refused = await put_part(chunks, A, 0, 2, MeanwhileBody(cut(body("a"), 2)[0], broken), durability=durability)
    assert refused.status == 400
    assert await begun(chunks) == 0


@pytest.mark.parametrize("durability", ["memory", "local"])
@pytest.mark.parametrize("is_first", [False, True])
async def test_a_part_that_is_refused_takes_nothing_from_one_that_is_on_its_way(
    chunks: Chunks, durability: str, *, is_first: bool
) -> None:
    await chunks.declare("parted", axis="layer")
    halves = cut(body("a"), 2)
    good: list[Answer] = []

    async def send_refused() -> None:
        refused = await put_part(chunks, A, 1, 2, halves[1], durability=durability, is_wrong=True)
        assert detail(refused) == (400, "BadDigest")

    async def send_good() -> None:
        good.append(await put_part(chunks, A, 0, 2, halves[0], durability=durability))

    if is_first:
        await put_part(chunks, A, 1, 2, MeanwhileBody(halves[1], send_good), durability=durability, is_wrong=True)
    else:
        late = MeanwhileBody(halves[0], send_refused)
        good.append(await put_part(chunks, A, 0, 2, late, durability=durability))
    assert good[0].headers["x-kvobj-parts"] == "1/2"
    assert (await put_part(chunks, A, 1, 2, halves[1])).headers["x-kvobj-parts"] == "2/2"
    assert (await chunks.get(A)).body == body("a")


async def test_a_part_that_nobody_expected_any_more_begins_the_upload_anew_that_was_taken_away(
    chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chunks.declare("parted", axis="layer")
    halves, store = cut(body("a"), 2), chunks.node.store
    start_put = store.start_put

    async def start_late(request: PutRequest) -> PutTransfer:
        monkeypatch.undo()
        async with asyncio.timeout(20):
            while await begun(chunks):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0)
        return await start_put(request)

    monkeypatch.setattr(store, "start_put", start_late)
    monkeypatch.setattr(store._uploads.writers, "_expected_seconds", 0.01)
    first = await put_part(chunks, A, 0, 2, halves[0], durability="local")
    assert first.headers["x-kvobj-parts"] == "1/2"
    assert (await put_part(chunks, A, 1, 2, halves[1])).headers["x-kvobj-parts"] == "2/2"
    assert (await chunks.get(A)).body == body("a")


async def test_a_part_that_is_refused_leaves_the_upload_to_one_between_its_look_and_its_body(
    chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    await chunks.declare("parted", axis="layer")
    halves, store = cut(body("a"), 2), chunks.node.store
    start_put = store.start_put

    async def start_late(request: PutRequest) -> PutTransfer:
        monkeypatch.undo()
        refused = await put_part(chunks, A, 1, 2, halves[1], durability="memory", is_wrong=True)
        assert detail(refused) == (400, "BadDigest")
        assert await begun(chunks) == 1
        return await start_put(request)

    monkeypatch.setattr(store, "start_put", start_late)
    first = await put_part(chunks, A, 0, 2, halves[0], durability="local")
    assert first.headers["x-kvobj-parts"] == "1/2"
    assert (await put_part(chunks, A, 1, 2, halves[1])).headers["x-kvobj-parts"] == "2/2"


@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_of_parts_that_come_and_are_refused_at_once_the_good_ones_stay(chunks: Chunks, durability: str) -> None:
    await chunks.declare("parted", axis="layer")
    quarters = cut(body("a"), 4)
    for number in range(12):
        key = chunk_id(f"race-{number}")

        async def send(index: int, key: str, turns: int, *, is_wrong: bool) -> Answer:
            for _ in range(turns):
                await asyncio.sleep(0)
            data = quarters[index]
            return await put_part(chunks, key, index, 4, data, durability=durability, is_wrong=is_wrong)

        answers = await asyncio.gather(
            *(send(index, key, (number * (index + 1)) % 7, is_wrong=True) for index in (0, 1, 2, 3)),
            *(send(index, key, (number + 3 * index) % 5, is_wrong=False) for index in (0, 1)),
        )
        assert [answer.status for answer in answers[4:]] == [200, 200]
        later = [await put_part(chunks, key, index, 4, quarters[index]) for index in (2, 3)]
        assert later[1].headers["x-kvobj-parts"] == "4/4"
        assert (await chunks.get(key)).body == body("a")
    assert await begun(chunks) == 0
    assert not chunks.node.store._uploads.writers._inside


async def test_parts_without_a_layout_stay_as_they_are(chunks: Chunks) -> None:
    await chunks.declare("parted", chunk_bytes=None, axis="rank")
    await put_part(chunks, A, 1, 2, b"bb")
    done = await put_part(chunks, A, 0, 2, b"a")
    assert done.headers["x-kvobj-parts"] == "2/2"
    assert (await chunks.get(A)).body == b"abb"
    assert (await chunks.get(f"{A}?part=1")).body == b"bb"
    row = await chunks.node.store.look_up("chunks", A)
    assert row is not None
    assert len(row.blobs) == 2


async def test_a_chunk_of_parts_waits_for_its_parent_without_losing_them(chunks: Chunks) -> None:
    await chunks.declare("parted", axis="layer")
    assert (await chunks.put(A, body("a"), namespace="parted", parent="root")).status == 200
    pieces = cut(body("b"), 2)

    async def part(index: int, data: bytes | FakeBody) -> Answer:
        return await chunks.put(B, data, namespace="parted", parent=A, x_kvobj_part=f"{index}/2")

    await part(0, pieces[0])
    arriving = MeanwhileBody(pieces[1], lambda: chunks.delete(A))
    assert detail(await part(1, arriving)) == (409, "ParentNotFound")
    assert (await chunks.put(A, body("a"), namespace="parted", parent="root")).status == 200
    again = await part(1, pieces[1])
    assert again.headers["x-kvobj-parts"] == "2/2"
    assert (await chunks.get(B)).body == body("b")


# -- uploads and copies ------------------------------------------------------------------------------------------------
async def upload(chunks: Chunks, key: str, pieces: list[bytes], **headers: str) -> Answer:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    begun = await chunks.driver.request("POST", f"/chunks/{key}?uploads", headers=fields)
    if begun.status != 200:
        return begun
    upload_id = begun.xml.findtext("UploadId") or ""
    listed = ""
    for number, piece in enumerate(pieces, start=1):
        put = await chunks.driver.put(f"/chunks/{key}?partNumber={number}&uploadId={upload_id}", piece)
        listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{put.headers['etag']}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    return await chunks.driver.request("POST", f"/chunks/{key}?uploadId={upload_id}", body=document)


async def test_a_chunk_that_is_uploaded_in_parts_becomes_one_blob(roomy_chunks: Chunks) -> None:
    chunks = roomy_chunks
    size_bytes = 6 * MIB
    await chunks.declare("large", chunk_bytes=size_bytes)
    data = body("large", size_bytes)
    pieces = [data[: 5 * MIB], data[5 * MIB :]]
    done = await upload(chunks, A, pieces, x_kvobj_namespace="large", x_kvobj_parent="root")
    assert done.status == 200, done.body
    got = await chunks.get(A)
    assert (got.body, got.headers["x-kvobj-parent"], got.headers["x-kvobj-tokens"]) == (data, "root", "16")
    head = await chunks.get(A, method="HEAD")
    assert head.headers["x-kvobj-digest"] == blake3(data).hexdigest()
    assert (await chunks.get(f"{A}?partNumber=2")).body == pieces[1]
    again = await upload(chunks, A, [bytes(5 * MIB), bytes(MIB)], x_kvobj_namespace="large", x_kvobj_parent="root")
    assert again.headers["x-kvobj-existed"] == "true"
    assert (await chunks.get(A)).body == data
    short = await upload(chunks, B, [bytes(5 * MIB)], x_kvobj_namespace="large", x_kvobj_parent=A)
    assert detail(short) == (409, "LayoutMismatch")
    orphan = await upload(chunks, B, pieces, x_kvobj_namespace="large", x_kvobj_parent=C)
    assert detail(orphan) == (409, "ParentNotFound")


async def test_an_upload_belongs_to_who_began_it(chunks: Chunks) -> None:
    await chunks.declare("open", access={"bob": "write"}, chunk_bytes=None)
    headers = {"x-kvobj-namespace": "open", "x-kvobj-parent": "root"}
    for user in (ALICE, BOB):
        begun = await chunks.driver.request("POST", f"/chunks/{A}?uploads", headers=headers, user=user)
        upload_id = begun.xml.findtext("UploadId")
        put = await chunks.driver.request("PUT", f"/chunks/{A}?partNumber=1&uploadId={upload_id}", body=b"x", user=BOB)
        assert put.status == (200 if user is BOB else 404)


async def test_a_copy_into_a_kv_bucket_is_a_chunk(chunks: Chunks) -> None:
    await chunks.driver.put("/plain", b"")
    await chunks.driver.put("/plain/source", body("a"))

    async def copy(key: str, **headers: str) -> Answer:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return await chunks.driver.request(
            "PUT", f"/chunks/{key}", headers={"x-amz-copy-source": "/plain/source", **fields}
        )

    assert (await copy("loose")).headers["x-kvobj-existed"] == "false"
    assert (await copy(A, x_kvobj_namespace="ns", x_kvobj_parent="root")).headers["x-kvobj-existed"] == "false"
    assert (await chunks.get(A)).headers["x-kvobj-parent"] == "root"
    assert detail(await copy(B, x_kvobj_namespace="ns", x_kvobj_parent=C)) == (409, "ParentNotFound")
    await chunks.driver.put("/plain/source", b"short")
    assert detail(await copy(B, x_kvobj_namespace="ns", x_kvobj_parent=A)) == (409, "LayoutMismatch")


# -- restarts ----------------------------------------------------------------------------------------------------------
async def test_what_follows_on_a_chunk_that_power_loss_took_goes_before_anything_is_served(
    tmp_path: Path, shm_path: Path
) -> None:
    settings = node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)
    async with running_node(settings) as node:
        chunks = Chunks(node)
        await chunks.driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        await chunks.declare("ns")
        assert (await chunks.put(A, body("a"), parent="root", x_kvobj_durability="local")).status == 200
        assert (await chunks.put(B, body("b"), parent=A, x_kvobj_durability="memory")).status == 200
        assert (await chunks.put(C, body("c"), parent=B, x_kvobj_durability="local")).status == 200
    shutil.rmtree(shm_path / "arena")
    async with running_node(settings) as node:
        chunks = Chunks(node)
        assert [(await chunks.get(key)).status for key in (A, B, C)] == [200, 404, 404]
        assert node.recovery.dropped_orphans == 1
        assert (await chunks.driver.get("/chunks?list-type=2")).texts("Contents/Key") == [A]


async def test_parts_outlive_the_process_that_took_them(tmp_path: Path, shm_path: Path) -> None:
    settings = node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)
    pieces = cut(body("a"), 2)
    async with running_node(settings) as node:
        chunks = Chunks(node)
        await chunks.driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        await chunks.declare("parted", axis="layer")
        assert (await put_part(chunks, A, 1, 2, pieces[1])).headers["x-kvobj-parts"] == "1/2"
        await flush(node, timeout_seconds=10)
    async with running_node(settings) as node:
        chunks = Chunks(node)
        assert (await chunks.get(A)).status == 404
        assert (await put_part(chunks, A, 0, 2, pieces[0])).headers["x-kvobj-parts"] == "2/2"
        assert (await chunks.get(A)).body == body("a")
