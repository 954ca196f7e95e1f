"""What a write into a KV bucket meets, by PUT and by ?mput alike: strangers' chunks, partial parents, and a DELETE meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from kv_driver import CHUNK_BYTES, KvDriver, Namespace, chain_stream, kv_node, payload, rows, stream
from s3_driver import BOB, Answer, FakeBody

TOKENS = list(range(16 * 3))
PARTIAL = 4


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


# -- a stranger's chunk ------------------------------------------------------------------------------------------------


async def test_a_batch_onto_a_strangers_key_is_told_nothing_of_it(kv: KvDriver) -> None:
    owned = await kv.declare("owned")
    await kv.declare("open", access={"bob": "write"})
    ids = owned.ids(TOKENS)
    await kv.put_chain(owned, ids[:1])
    for size_bytes, tokens in ((CHUNK_BYTES, 16), (CHUNK_BYTES // 4, PARTIAL)):
        theirs: dict[str, object] = {"id": ids[0], "parent": "root", "namespace": "open", "tokens": tokens}
        mine: dict[str, object] = {"id": ids[1], "parent": "root", "namespace": "open"}
        told = await kv.mput(stream([(theirs, payload(b"x", size_bytes)), (mine, payload(ids[1]))]), user=BOB)
        assert [item["status"] for item in told.value["items"]] == [409, 200]
        error = told.value["items"][0]["error"]
        assert error["code"] == "ImmutableChunk"
        assert "size_bytes" not in error.get("detail", {})
        assert "digest" not in told.value["items"][0]
    assert (await kv.driver.get(f"/cache/{ids[0].hex()}")).body == payload(ids[0])


async def test_a_batch_hangs_nothing_under_a_strangers_chunk(kv: KvDriver) -> None:
    owned = await kv.declare("owned")
    await kv.declare("open", access={"bob": "write"})
    ids = owned.ids(TOKENS)
    await kv.put_chain(owned, ids[:1])
    told = await kv.mput(stream([({"id": ids[1], "parent": ids[0], "namespace": "open"}, payload(ids[1]))]), user=BOB)
    assert [item["error"]["code"] for item in told.value["items"]] == ["ParentNotFound"]
    assert [row.key for row in await rows(kv)] == [ids[0].hex()]


# -- a partial chunk ---------------------------------------------------------------------------------------------------


async def put(kv: KvDriver, namespace: Namespace, key: bytes, data: bytes, *, parent: str, tokens: int = 16) -> Answer:
    headers = {
        "x-kvobj-namespace": namespace.name,
        "x-kvobj-parent": parent,
        "x-kvobj-tokens": str(tokens),
    }
    return await kv.driver.request("PUT", f"/cache/{key.hex()}", body=data, headers=headers)


async def test_nothing_follows_on_a_partial_chunk(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    whole, partial, below = b"\1" * 32, b"\2" * 32, b"\3" * 32
    short = payload(partial, CHUNK_BYTES * PARTIAL // 16)
    assert (await put(kv, namespace, whole, payload(whole), parent="root")).status == 200
    assert (await put(kv, namespace, partial, short, parent=whole.hex(), tokens=PARTIAL)).status == 200
    refused = await put(kv, namespace, below, payload(below), parent=partial.hex())
    assert (refused.status, refused.code, refused.xml.findtext("Differs")) == (409, "LayoutMismatch", "parent")
    told = await kv.mput(chain_stream(namespace, [below], parent=partial))
    assert [item["status"] for item in told.value["items"]] == [409]
    assert told.value["items"][0]["error"]["code"] == "LayoutMismatch"
    assert told.value["items"][0]["error"]["detail"]["differs"] == ["parent"]
    assert (await put(kv, namespace, below, payload(below), parent=whole.hex())).status == 200


async def test_a_batch_may_not_go_on_under_its_own_partial_chunk(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = [bytes([number]) * 32 for number in range(3)]
    short = payload(ids[1], CHUNK_BYTES * PARTIAL // 16)
    told = await kv.mput(
        stream(
            [
                ({"id": ids[0], "parent": "root", "namespace": "llama"}, payload(ids[0])),
                ({"id": ids[1], "parent": ids[0], "namespace": "llama", "tokens": PARTIAL}, short),
                ({"id": ids[2], "parent": ids[1], "namespace": namespace.name}, payload(ids[2])),
            ]
        )
    )
    assert [item["status"] for item in told.value["items"]] == [200, 200, 409]
    assert told.value["items"][2]["error"]["detail"]["differs"] == ["parent"]


# -- parts that never became a chunk, and writes under way ---------------------------------------------------------------


class WatchedBody(FakeBody):
    """A body in whose middle something else happens."""

    def __init__(self, data: bytes, meanwhile: Callable[[], Awaitable[object]]) -> None:
        super().__init__(data)
        self._meanwhile = meanwhile

    def take_whole(self) -> bytes | None:
        return None

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        await self._meanwhile()
        await super().receive_into(buffer, on_bytes)


async def put_part(kv: KvDriver, key: str, part: str, data: bytes) -> Answer:
    headers = {"x-kvobj-namespace": "parted", "x-kvobj-parent": "root", "x-kvobj-part": part}
    return await kv.driver.request("PUT", f"/cache/{key}", body=data, headers=headers)


async def reaped(kv: KvDriver) -> None:
    while await kv.node.reaper.reap_batch():
        pass


@pytest.mark.parametrize("by_document", [False, True])
async def test_a_delete_gives_up_the_parts_of_a_chunk_that_is_not_whole(kv: KvDriver, by_document: bool) -> None:  # noqa: FBT001 - a test's parameter
    await kv.declare("parted", part_axis="layer")
    key = b"\1".hex() * 32
    assert (await put_part(kv, key, "0/2", payload(b"0", CHUNK_BYTES // 2))).headers["x-kvobj-parts"] == "1/2"
    if by_document:
        document = f"<Delete><Object><Key>{key}</Key></Object></Delete>".encode()
        assert (await kv.driver.request("POST", "/cache?delete", body=document)).status == 200
    else:
        assert (await kv.driver.request("DELETE", f"/cache/{key}")).status == 204
    await reaped(kv)
    assert (await kv.node.dram.usage()).blobs == 0
    # The next writers begin anew, and may cut the chunk otherwise.
    assert (await put_part(kv, key, "3/4", payload(b"3", CHUNK_BYTES // 4))).headers["x-kvobj-parts"] == "1/4"


async def test_a_bucket_with_nothing_but_parts_can_be_removed(kv: KvDriver) -> None:
    await kv.declare("parted", part_axis="layer")
    key = b"\1".hex() * 32
    await put_part(kv, key, "0/2", payload(b"0", CHUNK_BYTES // 2))
    assert (await kv.driver.request("DELETE", "/cache")).status == 204
    await reaped(kv)
    assert (await kv.node.dram.usage()).blobs == 0
    assert (await kv.driver.get("/cache?list-type=2")).status == 404


async def test_a_bucket_with_nothing_but_an_upload_of_s3s_can_be_removed(kv: KvDriver) -> None:
    await kv.driver.request("POST", "/cache/k?uploads")
    assert (await kv.driver.request("DELETE", "/cache")).status == 204


async def test_explain_sees_parts_that_are_still_to_come(kv: KvDriver) -> None:
    await kv.declare("parted", part_axis="layer")
    key = b"\1".hex() * 32
    await put_part(kv, key, "0/2", payload(b"0", CHUNK_BYTES // 2))
    explained = (await kv.match("parted", ids=[key], explain=True)).value["explain"]
    assert (explained["at"], explained["reason"]) == (0, "uploading")


async def test_explain_sees_a_put_whose_body_is_on_its_way(kv: KvDriver) -> None:
    seen: list[object] = []

    async def ask() -> None:
        seen.append((await kv.match("default", ids=["k"], explain=True)).value["explain"]["reason"])

    body = WatchedBody(b"some bytes", ask)
    put = await kv.driver.request("PUT", "/cache/k", body=body, payload="UNSIGNED-PAYLOAD")
    assert (put.status, seen) == (200, ["uploading"])
    assert len(kv.node.store.arriving) == 0
    unsent = await kv.driver.request("PUT", "/cache/other", body=FakeBody(b"cut", length=9), payload="UNSIGNED-PAYLOAD")
    assert unsent.status == 400
    explained = (await kv.match("default", ids=["other"], explain=True)).value["explain"]
    assert explained["reason"] == "never-stored"


# -- parts under parts -------------------------------------------------------------------------------------------------


async def put_child_part(kv: KvDriver, key: str, part: str, data: bytes, *, parent: str) -> Answer:
    headers = {"x-kvobj-namespace": "parted", "x-kvobj-parent": parent, "x-kvobj-part": part}
    return await kv.driver.request("PUT", f"/cache/{key}", body=data, headers=headers)


async def test_the_layers_of_a_chain_are_put_one_after_the_other_each_of_all_its_chunks(kv: KvDriver) -> None:
    namespace = await kv.declare("parted", part_axis="layer")
    ids = namespace.ids(TOKENS)
    half = CHUNK_BYTES // 2
    for index in range(2):
        parent = "root"
        for number, chunk_id in enumerate(ids):
            data = payload(chunk_id)[index * half : (index + 1) * half]
            answer = await put_child_part(kv, chunk_id.hex(), f"{index}/2", data, parent=parent)
            assert (answer.status, answer.headers["x-kvobj-parts"]) == (200, f"{index + 1}/2"), number
            parent = chunk_id.hex()
    assert (await kv.match("parted", ids=[each.hex() for each in ids])).value["matched"] == 3


async def test_the_last_part_of_a_chunk_whose_parent_is_not_whole_is_refused_and_may_come_again(kv: KvDriver) -> None:
    namespace = await kv.declare("parted", part_axis="layer")
    parent, child = (each.hex() for each in namespace.ids(TOKENS)[:2])
    half = payload(b"half", CHUNK_BYTES // 2)
    await put_part(kv, parent, "0/2", half)
    assert (await put_child_part(kv, child, "0/2", half, parent=parent)).status == 200
    refused = await put_child_part(kv, child, "1/2", half, parent=parent)
    assert (refused.status, refused.code) == (409, "ParentNotFound")
    await put_part(kv, parent, "1/2", half)
    again = await put_child_part(kv, child, "1/2", half, parent=parent)
    assert (again.status, again.headers["x-kvobj-parts"]) == (200, "2/2")
    assert (await kv.driver.get(f"/cache/{child}")).body == half + half


async def test_a_parent_that_comes_in_another_namespace_or_is_partial_is_none(kv: KvDriver) -> None:
    namespace = await kv.declare("parted", part_axis="layer")
    await kv.declare("other", part_axis="layer")
    parent, child, partial = (each.hex() for each in namespace.ids(TOKENS))
    half = payload(b"half", CHUNK_BYTES // 2)
    headers = {"x-kvobj-namespace": "other", "x-kvobj-parent": "root", "x-kvobj-part": "0/2"}
    assert (await kv.driver.request("PUT", f"/cache/{parent}", body=half, headers=headers)).status == 200
    refused = await put_child_part(kv, child, "0/2", half, parent=parent)
    assert (refused.status, refused.code) == (409, "ParentNotFound")
    headers = {"x-kvobj-namespace": "parted", "x-kvobj-parent": "root", "x-kvobj-part": "0/2", "x-kvobj-tokens": "4"}
    short = payload(b"short", CHUNK_BYTES // 8)
    assert (await kv.driver.request("PUT", f"/cache/{partial}", body=short, headers=headers)).status == 200
    refused = await put_child_part(kv, child, "0/2", half, parent=partial)
    assert (refused.status, refused.code) == (409, "LayoutMismatch")


# -- hints -------------------------------------------------------------------------------------------------------------


async def test_the_policy_is_told_what_a_writer_says_of_its_request(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    (whole, partial, _) = namespace.ids(TOKENS)
    await kv.put(whole.hex(), payload(whole), namespace="llama", parent="root", hint="output-tokens=512")
    short = payload(partial, CHUNK_BYTES // 4)
    await kv.put(partial.hex(), short, namespace="llama", parent=whole.hex(), tokens="4", hint="output-tokens=0")
    told = [
        ([trace.chunks.key(index) for index in range(len(trace.chunks))], trace.partial_last, trace.hint)
        for trace in kv.requests
    ]
    assert told == [([whole.hex()], False, 4), ([partial.hex()], True, 0)]


async def test_a_hint_that_is_none_is_refused_and_one_that_is_left_out_tells_nothing(kv: KvDriver) -> None:
    for hint in ("", "512", "output-tokens=-1", "output-tokens=1 2", "output-tokens=" + "9" * 11):
        refused = await kv.put("k", b"data", hint=hint)
        assert (refused.status, refused.code) == (400, "InvalidArgument"), hint
    assert (await kv.put("k", b"data")).status == 200
    assert kv.requests == []
