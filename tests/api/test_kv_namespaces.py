"""?namespace and ?namespaces: declared once, opened by those who may, listed in pages, removed with their chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from kv_driver import CHUNK_BYTES, FORMATS, JSON, MSGPACK, KvDriver, declaration, kv_node, payload, rows
from s3_driver import BOB, ROOT, MeanwhileBody


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


async def test_only_owners_and_root_declare_and_remove(kv: KvDriver) -> None:
    await kv.declare("llama", access={"bob": "write"})
    for method, value in (("PUT", declaration()), ("DELETE", None)):
        answer = await kv.call(method, "namespace=llama", value, user=BOB)
        assert (answer.status, answer.code) == (403, "AccessDenied")
    assert (await kv.call("PUT", "namespace=second", declaration(), user=ROOT)).status == 200


async def test_absent_and_forbidden_namespaces_answer_alike(kv: KvDriver) -> None:
    await kv.declare("mine")
    await kv.declare("shared", access={"bob": "read"})
    forbidden = await kv.call("GET", "namespace=mine", user=BOB)
    absent = await kv.call("GET", "namespace=none", user=BOB)
    assert (forbidden.status, forbidden.code) == (404, "NoSuchNamespace")
    for answer in (forbidden, absent):
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
