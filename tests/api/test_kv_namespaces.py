"""?namespace and ?namespaces: declared once, opened by those who may, listed in pages, removed with their chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from kv_driver import CHUNK_BYTES, FORMATS, JSON, MSGPACK, KvDriver, declaration, kv_node, payload, rows, stream
from s3_driver import BOB, ROOT, Answer, FakeBody, MeanwhileBody

from kvobj.catalog.lmdb_namespaces import LmdbNamespaces
from kvobj.catalog.namespace_protocol import NamespaceRow


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


@pytest.mark.parametrize("form", FORMATS)
async def test_a_declaration_gives_a_key_a_root_and_the_size_of_a_chunk(kv: KvDriver, form: str) -> None:
    declared = await kv.call("PUT", "namespace=llama", declaration(salt="tenant"), form=form)
    assert declared.status == 200
    value = declared.value
    assert value["name"] == "llama"
    assert value["chunk_bytes"] == CHUNK_BYTES
    assert value["existed"] is False
    assert value["declaration"]["salt"] == "tenant"
    assert value["declaration"]["rank"] == {"tensor": [0, 1], "pipeline": [0, 1]}
    raw = {
        name: value[name] if form == MSGPACK else bytes.fromhex(value[name]) for name in ("key", "root", "fingerprint")
    }
    assert len(raw["key"]) == 32
    assert raw["root"] == blake3(raw["fingerprint"], key=raw["key"]).digest()
    read = await kv.call("GET", "namespace=llama", form=form)
    assert {**read.value, "existed": False} == value


async def test_the_same_declaration_again_changes_nothing_and_another_names_what_differs(kv: KvDriver) -> None:
    first = await kv.call("PUT", "namespace=llama", declaration())
    again = await kv.call("PUT", "namespace=llama", declaration())
    assert again.value == {**first.value, "existed": True}
    other = await kv.call("PUT", "namespace=llama", declaration(salt="x", adapter="lora"))
    assert (other.status, other.code) == (409, "NamespaceConflict")
    assert sorted(other.detail["differs"]) == ["adapter", "salt"]
    assert other.detail["namespace"] == "llama"
    assert (await kv.call("GET", "namespace=llama")).value["key"] == first.value["key"]


async def test_settings_are_changed_by_another_put_and_told_to_the_owner_alone(kv: KvDriver) -> None:
    first = await kv.declare("llama")
    changed = await kv.call("PUT", "namespace=llama", declaration(access={"bob": "read"}, quota={"chunks": 5}))
    assert changed.value["key"] == first.key.hex()
    assert changed.value["access"] == {"bob": "read"}
    assert changed.value["quota"] == {"chunks": 5, "size_bytes": None}
    seen = await kv.call("GET", "namespace=llama", user=BOB)
    assert seen.value["key"] == first.key.hex()
    assert seen.value["may_write"] is False
    assert "access" not in seen.value
    assert "quota" not in seen.value


async def test_wrong_declarations_are_refused_by_field(kv: KvDriver) -> None:
    good = declaration()
    for value, field in (
        ({**good, "colour": 1}, "colour"),
        ({name: good[name] for name in good if name != "model"}, "model"),
        ({**good, "chunk_tokens": 0}, "chunk_tokens"),
        ({**good, "ids": "md5"}, "ids"),
        ({**good, "layout": {"kind": "kv", "dtype": "bf16"}}, "layout.layers"),
    ):
        answer = await kv.call("PUT", "namespace=llama", value)
        assert (answer.code, answer.detail.get("field")) == ("InvalidRequest", field)
    for name in ("a%2Fb", "default", "%20", "x" * 129):
        assert (await kv.call("PUT", f"namespace={name}", good)).code == "InvalidRequest"
    assert (await kv.call("PUT", "namespace=llama", raw=b"[]")).code == "InvalidRequest"
    assert (await kv.call("GET", "namespace=llama")).code == "NoSuchNamespace"


@pytest.mark.parametrize(
    ("method", "query", "document"),
    [
        ("PUT", "namespace=n", {**declaration(), "access": {"alice": "write"}}),
        ("POST", "match", {"ids": ["of-bob"]}),
        ("POST", "mget", {"ids": ["of-bob"]}),
        ("POST", "sessions", {}),
    ],
)
async def test_who_owned_a_bucket_when_he_began_to_ask_may_do_nothing_with_its_next_owners(
    kv: KvDriver, method: str, query: str, document: dict[str, object]
) -> None:
    async def handed_on() -> None:
        assert (await kv.driver.request("DELETE", "/cache")).status == 204
        made = await kv.driver.request("PUT", "/cache", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
        assert made.status == 200
        assert (await kv.put("of-bob", b"bytes", user=BOB)).status == 200

    late = await kv.driver.request(
        method,
        f"/cache?{query}",
        body=MeanwhileBody(msgspec.json.encode(document), handed_on),
        headers={"content-type": JSON},
        payload="UNSIGNED-PAYLOAD",
    )
    assert late.status == 404
    assert msgspec.json.decode(late.body)["error"]["code"] == "NoSuchBucket"
    assert (await kv.call("GET", "namespace=n", user=BOB)).code == "NoSuchNamespace"


@pytest.mark.parametrize("standing", [False, True])
@pytest.mark.parametrize("access", [{}, {"alice": "write"}])
async def test_a_declaration_that_waits_for_its_turn_tells_and_changes_nothing_of_the_next_owners_bucket(
    kv: KvDriver, monkeypatch: pytest.MonkeyPatch, access: dict[str, str], *, standing: bool
) -> None:
    assert kv.chunks is not None
    turn = kv.chunks._book._changing
    asked = LmdbNamespaces.namespace
    of_bob: list[str] = []

    async def asked_late(self: LmdbNamespaces, bucket: str, name: str) -> NamespaceRow | None:
        if not turn.locked():
            return await asked(self, bucket, name)
        monkeypatch.undo()
        turn.release()  # as if the request had waited for it until here
        assert (await kv.driver.request("DELETE", "/cache")).status == 204
        made = await kv.driver.request("PUT", "/cache", user=BOB, headers={"x-kvobj-bucket-kind": "kv"})
        assert made.status == 200
        if standing:
            of_bob.append((await kv.call("PUT", "namespace=n", declaration(), user=BOB)).value["key"])
        await turn.acquire()
        return await asked(self, bucket, name)

    monkeypatch.setattr(LmdbNamespaces, "namespace", asked_late)
    late = await kv.call("PUT", "namespace=n", declaration(access=access))
    assert (late.status, late.code) == (404, "NoSuchBucket")
    now = await kv.call("GET", "namespace=n", user=BOB)
    assert now.code == (None if standing else "NoSuchNamespace")
    assert [now.value["key"], now.value["access"]] == [*of_bob, {}] if standing else not of_bob


async def test_only_owners_and_root_declare_and_remove(kv: KvDriver) -> None:
    await kv.declare("llama", access={"bob": "write"})
    for method, value in (("PUT", declaration()), ("DELETE", None)):
        answer = await kv.call(method, "namespace=llama", value, user=BOB)
        assert (answer.status, answer.code) == (403, "AccessDenied")
        assert answer.detail["hint"] == "only the bucket's owner declares and removes namespaces"
    assert (await kv.call("PUT", "namespace=second", declaration(), user=ROOT)).status == 200


async def test_absent_and_forbidden_namespaces_answer_alike(kv: KvDriver) -> None:
    await kv.declare("mine")
    await kv.declare("shared", access={"bob": "read"})
    forbidden = await kv.call("GET", "namespace=mine", user=BOB)
    absent = await kv.call("GET", "namespace=none", user=BOB)
    assert (forbidden.status, forbidden.code) == (404, "NoSuchNamespace")
    for answer, asked in ((forbidden, "mine"), (absent, "none")):
        assert answer.detail.pop("namespace") == asked
        answer.value["error"].pop("request_id")
    assert forbidden.value == absent.value


async def test_namespaces_are_listed_in_pages_with_their_usage_and_without_keys(kv: KvDriver) -> None:
    llama = await kv.declare("llama")
    await kv.declare("mistral", access={"bob": "read"})
    await kv.put_chain(llama, llama.ids(list(range(32))))
    whole = (await kv.call("GET", "namespaces")).value
    assert [(each["name"], each["chunks"], each["size_bytes"]) for each in whole["namespaces"]] == [
        ("default", 0, 0),
        ("llama", 2, 2 * CHUNK_BYTES),
        ("mistral", 0, 0),
    ]
    assert all("key" not in each for each in whole["namespaces"])
    assert whole["next_start_after"] is None
    names, after = [], ""
    while after is not None:
        page = (await kv.call("GET", f"namespaces&max-keys=2&start-after={after}")).value
        names += [each["name"] for each in page["namespaces"]]
        after = page["next_start_after"]
    assert names == ["default", "llama", "mistral"]
    of_bob = (await kv.call("GET", "namespaces", user=BOB)).value
    assert [each["name"] for each in of_bob["namespaces"]] == ["mistral"]


async def test_removing_a_namespace_recalls_its_chunks_and_no_others(kv: KvDriver) -> None:
    llama, other = await kv.declare("llama"), await kv.declare("other")
    for namespace in (llama, other):
        await kv.put_chain(namespace, namespace.ids(list(range(48))))
    gone = await kv.call("DELETE", "namespace=llama")
    assert (gone.status, gone.value) == (200, {"recalled": 3})
    assert {row.namespace for row in await rows(kv)} == {"other"}
    told = (await kv.node.catalog.history.read("cache", after=0)).events
    assert [(event.type, event.namespace) for event in told[-2:]] == [("removed", "llama"), ("cleared", "llama")]
    assert (await kv.call("GET", "namespace=llama")).code == "NoSuchNamespace"
    assert (await kv.call("DELETE", "namespace=llama")).code == "NoSuchNamespace"
    # Declared anew it has another key: no chunk of before can be named again.
    assert (await kv.declare("llama")).key != llama.key


async def test_the_namespace_default_is_there_and_stays(kv: KvDriver) -> None:
    read = (await kv.call("GET", "namespace=default")).value
    assert (read["ids"], read["key"], read["declaration"]) == ("foreign", "", {})
    assert (await kv.put("loose", payload(b"x"))).status == 200
    assert (await kv.call("DELETE", "namespace=default")).code == "InvalidRequest"
    assert (await kv.driver.get("/cache/loose")).status == 200


async def test_a_name_is_not_declared_while_keys_of_another_namespace_begin_with_it(kv: KvDriver) -> None:
    assert (await kv.put("llm/x", payload(b"x"))).status == 200
    refused = await kv.call("PUT", "namespace=llm", declaration(ids="foreign"))
    assert (refused.status, refused.code) == (409, "NamespaceConflict")
    assert refused.detail["differs"] == ["keys"]
    assert (await kv.call("GET", "namespace=llm")).status == 404


async def test_removing_a_namespace_beside_requests_keeps_to_a_rate(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    for first in range(20):
        await kv.put_chain(namespace, namespace.ids([first] * 16))
    assert kv.pace is not None
    kv.turn(60_000)  # a request a minute from now: the store is busy for as long as this takes
    kv.pace.note_request()
    kv.turn(-60_000)
    assert (await kv.call("DELETE", "namespace=llama")).value == {"recalled": 20}
    # Four at a time, in the time in which the collector takes one; nothing is waited for after the last.
    assert len(kv.waits) >= 4
    assert max(kv.waits) <= 0.05
    assert not await rows(kv)


OTHER_LAYOUT = {"kind": "kv", "dtype": "fp16", "layers": 4, "kv_heads": 2, "head_dim": 4}
"""Of as many bytes a chunk as `declaration`'s."""


async def redeclare(kv: KvDriver, part_axis: str | None = None) -> None:
    """`n` is removed, and declared with another layout."""
    assert (await kv.call("DELETE", "namespace=n")).status == 200
    await kv.declare("n", layout=OTHER_LAYOUT, ids="foreign", part_axis=part_axis)


@pytest.mark.parametrize("durability", ["memory", "local"])
@pytest.mark.parametrize("is_declared_anew", [False, True])
async def test_a_chunk_on_its_way_to_a_namespace_does_not_outlive_it(
    kv: KvDriver,
    durability: str,
    is_declared_anew: bool,  # noqa: FBT001 - a test's parameter
) -> None:
    await kv.declare("n", ids="foreign")

    async def removed() -> None:
        if is_declared_anew:
            await redeclare(kv)
        else:
            assert (await kv.call("DELETE", "namespace=n")).status == 200

    late = await kv.driver.request(
        "PUT",
        "/cache/n/key",
        body=MeanwhileBody(bytes(CHUNK_BYTES), removed),
        headers={"x-kvobj-namespace": "n", "x-kvobj-durability": durability},
        payload="UNSIGNED-PAYLOAD",
    )
    assert (late.status, late.code) == (404, "NoSuchNamespace")
    assert await rows(kv) == []
    if not is_declared_anew:
        await kv.declare("n", ids="foreign", chunk_tokens=32)


async def test_chunks_put_together_into_a_namespace_that_was_declared_anew_are_refused(kv: KvDriver) -> None:
    await kv.declare("n", ids="foreign")
    chunks: list[tuple[dict[str, object], bytes]] = [
        ({"id": key, "namespace": "n"}, bytes(CHUNK_BYTES)) for key in ("a", "b")
    ]

    class BetweenChunks(FakeBody):
        """Its second chunk comes after the namespace was declared anew."""

        is_over = False

        async def read_some(self, limit: int) -> bytes:
            if self.unread_bytes < CHUNK_BYTES and not self.is_over:
                self.is_over = True
                await redeclare(kv)
            return await super().read_some(limit)

    body = BetweenChunks(stream(chunks), step=512)
    late = await kv.mput(body, payload_hash="UNSIGNED-PAYLOAD")
    assert body.is_over
    assert late.status == 200
    assert [each["error"]["code"] for each in late.value["items"]] == ["NoSuchNamespace"] * 2
    assert await rows(kv) == []


async def test_parts_of_a_namespace_that_was_declared_anew_are_no_parts_of_its_chunks(kv: KvDriver) -> None:
    async def put_part(index: int, data: bytes) -> int:
        answer = await kv.put("n/key", data, namespace="n", part=f"{index}/2")
        return answer.status

    half = CHUNK_BYTES // 2
    await kv.declare("n", ids="foreign", part_axis="layer")
    assert await put_part(0, b"a" * half) == 200
    await redeclare(kv, part_axis="layer")
    assert await put_part(1, b"b" * half) == 200
    assert await rows(kv) == []
    assert await put_part(0, b"c" * half) == 200
    assert (await kv.driver.get("/cache/n/key")).body == b"c" * half + b"b" * half


async def test_a_part_on_its_way_to_a_namespace_is_not_taken_by_the_next_of_its_name(kv: KvDriver) -> None:
    half = CHUNK_BYTES // 2

    async def put_part(index: int, body: MeanwhileBody) -> Answer:
        named = {"x-kvobj-namespace": "n", "x-kvobj-part": f"{index}/2"}
        return await kv.driver.request("PUT", "/cache/n/key", body=body, headers=named, payload="UNSIGNED-PAYLOAD")

    async def replaced() -> None:
        await redeclare(kv, part_axis="layer")
        assert (await kv.put("n/key", b"b" * half, namespace="n", part="1/2")).status == 200

    await kv.declare("n", ids="foreign", part_axis="layer")
    late = await put_part(0, MeanwhileBody(b"a" * half, replaced))
    assert (late.status, late.code) == (404, "NoSuchNamespace")
    assert await rows(kv) == []
    assert (await kv.put("n/key", b"c" * half, namespace="n", part="0/2")).status == 200
    assert (await kv.driver.get("/cache/n/key")).body == b"c" * half + b"b" * half


async def test_an_upload_begun_in_a_namespace_is_not_completed_in_the_next_of_its_name(kv: KvDriver) -> None:
    await kv.declare("n", ids="foreign")
    begun = await kv.driver.request("POST", "/cache/n/key?uploads", headers={"x-kvobj-namespace": "n"})
    (upload_id,) = begun.texts("UploadId")
    part = await kv.driver.request("PUT", f"/cache/n/key?partNumber=1&uploadId={upload_id}", body=bytes(CHUNK_BYTES))
    assert part.status == 200
    await redeclare(kv)
    listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>"
    ended = await kv.driver.request("POST", f"/cache/n/key?uploadId={upload_id}", body=document.encode())
    assert ended.code == "NoSuchNamespace"
    assert await rows(kv) == []


async def test_a_removal_that_is_late_leaves_the_next_namespace_of_the_name_alone(kv: KvDriver) -> None:
    await kv.declare("n", ids="foreign")
    assert (await kv.put("n/old", bytes(CHUNK_BYTES), namespace="n")).status == 200
    assert kv.chunks is not None
    pace = kv.chunks._pace
    redone: list[bool] = []

    class Paused:
        """The first removal is passed by a second one between two of its steps."""

        batch = 1

        async def after(self, chunks: int, *, seconds: float) -> None:
            if not redone:
                redone.append(True)
                await redeclare(kv)
                assert (await kv.put("n/new", bytes(CHUNK_BYTES), namespace="n")).status == 200
            await pace.after(chunks, seconds=seconds)

    for number in range(12):
        assert (await kv.put(f"n/old{number}", bytes(CHUNK_BYTES), namespace="n")).status == 200
    kv.chunks._pace = Paused()
    assert (await kv.call("DELETE", "namespace=n")).code == "NoSuchNamespace"
    assert redone
    assert (await kv.driver.get("/cache/n/new")).status == 200


async def test_a_removal_that_is_late_within_a_page_leaves_the_next_namespace_of_the_name_alone(
    kv: KvDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kv.declare("n", ids="foreign")
    for number in range(3):
        assert (await kv.put(f"n/key{number}", bytes(CHUNK_BYTES), namespace="n")).status == 200
    catalog = kv.node.catalog
    read = catalog._live_page
    redone: list[bool] = []

    async def passed(function: Callable[..., Any], *arguments: object) -> object:
        """A second removal passes the first one, which has read its page and hidden nothing of it."""
        result = function(*arguments)
        if function == read and not redone:
            redone.append(True)
            await redeclare(kv)
            assert (await kv.put("n/key1", b"x" * CHUNK_BYTES, namespace="n")).status == 200
        return result

    monkeypatch.setattr(catalog, "_on_thread", passed)
    assert (await kv.call("DELETE", "namespace=n")).code == "NoSuchNamespace"
    assert redone
    assert (await kv.driver.get("/cache/n/key1")).body == b"x" * CHUNK_BYTES


async def test_a_late_delete_of_chunks_leaves_the_parts_in_the_next_bucket_of_the_name(
    kv: KvDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = CHUNK_BYTES // 2
    await kv.declare("n", ids="foreign", part_axis="layer")
    for key in ("n/a", "n/b"):
        assert (await kv.put(key, b"a" * half, namespace="n", part="0/2")).status == 200
    catalog = kv.node.catalog
    abort = catalog.abort_upload
    redone: list[bool] = []

    async def passed(*arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - handed on
        """After the first one's parts the bucket goes, and is made anew with parts of the second one."""
        await abort(*arguments, **keywords)
        if not redone:
            redone.append(True)
            assert (await kv.driver.request("DELETE", "/cache")).status == 204
            assert (await kv.driver.request("PUT", "/cache", headers={"x-kvobj-bucket-kind": "kv"})).status == 200
            await kv.declare("n", ids="foreign", part_axis="layer")
            assert (await kv.put("n/b", b"b" * half, namespace="n", part="0/2")).status == 200

    monkeypatch.setattr(catalog, "abort_upload", passed)
    body = b"<Delete><Object><Key>n/a</Key></Object><Object><Key>n/b</Key></Object></Delete>"
    await kv.driver.request("POST", "/cache?delete", body=body)
    assert redone
    assert (await kv.put("n/b", b"c" * half, namespace="n", part="1/2")).status == 200
    assert (await kv.driver.get("/cache/n/b")).body == b"b" * half + b"c" * half


async def test_a_part_that_comes_after_its_namespace_was_removed_is_not_kept(kv: KvDriver) -> None:
    async def gone() -> None:
        assert (await kv.call("DELETE", "namespace=n")).status == 200

    await kv.declare("n", ids="foreign", part_axis="layer")
    late = await kv.driver.request(
        "PUT",
        "/cache/n/key",
        body=MeanwhileBody(bytes(CHUNK_BYTES // 2), gone),
        headers={"x-kvobj-namespace": "n", "x-kvobj-part": "0/2"},
        payload="UNSIGNED-PAYLOAD",
    )
    assert (late.status, late.code) == (404, "NoSuchNamespace")
    uploads = (await kv.node.catalog.list_uploads("cache", groups=True)).rows
    assert [await kv.node.catalog.parts("cache", each.key, each.upload_id) for each in uploads] == [()] * len(uploads)
