"""?match: exact runs of ids and of tokens, in both formats, with what lies where and why a chain breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from kv_driver import (
    CHUNK_BYTES,
    FORMATS,
    JSON,
    MSGPACK,
    KvDriver,
    ids_in,
    kv_node,
    payload,
    rows,
    tokens_in,
)
from s3_driver import ALICE, BOB

from kvobj.store.places import DEFAULT_HINT

TOKENS = list(range(1000, 1000 + 16 * 5))


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


@pytest.mark.parametrize("form", FORMATS)
async def test_a_match_finds_the_longest_stored_run_of_ids(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:3])
    answer = await kv.match("llama", form=form, ids=ids_in(form, ids))
    assert answer.status == 200
    assert answer.value["matched"] == 3
    assert answer.value["tokens"] == 48
    assert answer.value["size_bytes"] == 3 * CHUNK_BYTES
    assert answer.value["pin"] is None
    assert "chunks" not in answer.value
    assert "explain" not in answer.value


@pytest.mark.parametrize("form", FORMATS)
async def test_a_match_of_tokens_is_that_of_the_ids_they_make(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:40])
    assert len(ids) == 3
    await kv.put_chain(namespace, ids, last_tokens=8)
    answer = await kv.match("llama", form=form, tokens=tokens_in(form, TOKENS[:40]))
    assert (answer.value["matched"], answer.value["tokens"]) == (3, 40)
    # With more tokens the short chunk is another one: the run ends before it.
    assert (await kv.match("llama", form=form, tokens=tokens_in(form, TOKENS))).value["matched"] == 2


async def test_a_list_that_is_no_chain_is_matched_exactly(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    other = namespace.ids([7, *TOKENS[1:]])
    await kv.put_chain(namespace, ids)
    await kv.put_chain(namespace, other)
    for mixed, matched in (
        ([*ids[:2], other[2], *ids[3:]], 2),
        ([ids[1], ids[0]], 0),
        ([ids[0], ids[0], ids[1]], 1),
        ([*ids, *other], 5),
        ([], 0),
    ):
        answer = await kv.match("llama", form=MSGPACK, ids=b"".join(mixed))
        assert answer.value["matched"] == matched


@pytest.mark.parametrize("form", FORMATS)
async def test_details_tell_of_every_chunk_of_the_run(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:2])
    answer = await kv.match("llama", form=form, ids=ids_in(form, ids), detail="chunks")
    digests = [blake3(payload(each)).digest() for each in ids[:2]]
    assert answer.value["chunks"] == [
        {
            "id": each if form == MSGPACK else each.hex(),
            "size_bytes": CHUNK_BYTES,
            "digest": digest if form == MSGPACK else digest.hex(),
            "tier": "dram",
            "codec": "raw",
        }
        for each, digest in zip(ids[:2], digests, strict=True)
    ]
    assert answer.value["expected_load_ms"] == 1


@pytest.mark.parametrize("form", FORMATS)
async def test_foreign_keys_are_named_without_their_namespace(kv: KvDriver, form: str) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    for key in ("a", "b/c"):
        assert (await kv.put(f"engine/{key}", b"x", namespace="engine")).status == 200
    answer = await kv.match("engine", form=form, ids=["a", "b/c", "d"], detail="chunks")
    assert answer.value["matched"] == 2
    assert [chunk["id"] for chunk in answer.value["chunks"]] == ["a", "b/c"]


async def test_keys_of_the_namespace_default_need_no_declaration(kv: KvDriver) -> None:
    assert (await kv.put("loose", b"x")).status == 200
    assert (await kv.match(ids=["loose", "absent"])).value["matched"] == 1


@pytest.mark.parametrize("form", FORMATS)
async def test_an_engines_chain_is_computed_from_tokens_and_named_by_raw_digests_too(kv: KvDriver, form: str) -> None:
    await kv.declare("lm", ids="lmcache", chunk_tokens=4, layout={"kind": "opaque"})
    first = "6309ed506b8721905753f5c73c070bb21c3aafbd9b474b1e231f41368b71123c"
    second = "98efc76eafb06cfe774c31ff151f300b61a614c27982a211bb8cdbd83a8c0e19"
    assert (await kv.put(f"lm/{first}", b"x", namespace="lm", parent="root")).status == 200
    assert (await kv.put(f"lm/{second}", b"y", namespace="lm", parent=first)).status == 200
    by_tokens = await kv.match("lm", form=form, tokens=tokens_in(form, range(1, 9)))
    assert by_tokens.value["matched"] == 2
    by_ids = await kv.match("lm", form=form, ids=ids_in(form, [bytes.fromhex(first), bytes.fromhex(second)]))
    assert by_ids.value["matched"] == 2


async def test_the_policy_is_told_the_whole_request_and_its_hint(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:40])
    await kv.put_chain(namespace, ids[:1])
    await kv.match("llama", tokens=TOKENS[:40], hint={"output_tokens": 512})
    await kv.match("llama", ids=[each.hex() for each in ids[:2]])
    told = [
        ([trace.chunks.key(index) for index in range(len(trace.chunks))], trace.partial_last, trace.hint)
        for trace in kv.requests
    ]
    assert told == [([each.hex() for each in ids], True, 4), ([each.hex() for each in ids[:2]], False, 0)]


@pytest.mark.parametrize("form", FORMATS)
async def test_a_match_pins_the_tail_in_the_same_step(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:4])
    session = await kv.open_session(form=form)
    answer = await kv.match("llama", form=form, ids=ids_in(form, ids), session=session, pin=True)
    assert answer.value["matched"] == 4
    pin = answer.value["pin"]
    assert len(pin) == (16 if form == MSGPACK else 32)
    assert answer.value["grant"] == 1
    assert 0 < answer.value["deadline_ms"] <= 30_000
    again = await kv.match("llama", form=form, ids=ids_in(form, ids), session=session, pin=True)
    assert again.value["pin"] != pin
    assert again.value["grant"] == 2
    assert kv.node.catalog.leases.usage().pins == 2


async def test_a_match_that_finds_nothing_pins_nothing(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    session = await kv.open_session()
    answer = await kv.match("llama", ids=[each.hex() for each in namespace.ids(TOKENS)], session=session, pin=True)
    assert (answer.value["matched"], answer.value["pin"]) == (0, None)
    assert kv.node.catalog.leases.usage().pins == 0


async def test_what_a_pin_holds_is_read_after_a_delete_has_hidden_it(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:32])
    await kv.put_chain(namespace, ids)
    session = await kv.open_session()
    found = await kv.match("llama", ids=[each.hex() for each in ids], session=session, pin=True)
    assert (await kv.driver.request("DELETE", f"/cache/{ids[0].hex()}")).status == 204
    assert (await kv.match("llama", ids=[each.hex() for each in ids])).value["matched"] == 0
    assert (await kv.driver.get(f"/cache/{ids[0].hex()}")).status == 404
    read = await kv.driver.get(f"/cache/{ids[0].hex()}", x_kvobj_pin=found.value["pin"])
    assert (read.status, read.body) == (200, payload(ids[0]))


# -- explain ------------------------------------------------------------------------------------------------------


async def test_explain_says_nothing_of_a_run_that_is_whole(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    assert "explain" not in (await kv.match("llama", ids=[ids[0].hex()], explain=True)).value


async def test_explain_tells_never_stored_from_deleted(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:3])
    named = [each.hex() for each in ids]
    never = (await kv.match("llama", ids=named, explain=True)).value["explain"]
    assert never == {"at": 3, "reason": "never-stored", "when_ms": None, "namespace_differs": []}
    assert (await kv.driver.request("DELETE", f"/cache/{named[1]}")).status == 204
    gone = (await kv.match("llama", ids=named, explain=True)).value["explain"]
    assert (gone["at"], gone["reason"]) == (1, "deleted")
    assert gone["when_ms"] > 0


async def test_explain_names_a_chunk_that_hangs_elsewhere(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:3])
    skipped = [ids[0].hex(), ids[2].hex()]
    explained = (await kv.match("llama", ids=skipped, explain=True)).value["explain"]
    assert (explained["at"], explained["reason"]) == (1, "parent-missing")


async def test_explain_tells_nothing_of_ids_of_a_namespace_that_the_asker_may_not_use(kv: KvDriver) -> None:
    hidden = await kv.declare("hidden")
    await kv.declare("shared", salt="other", access={"bob": "read"})
    ids = hidden.ids(TOKENS[:32])
    await kv.put_chain(hidden, ids)

    async def explained(chunk_id: bytes) -> object:
        asked = {"namespace": "shared", "ids": [chunk_id], "explain": True}
        return (await kv.call("POST", "match", asked, user=BOB)).value["explain"]

    nothing = await explained(bytes(32))
    assert await explained(ids[1]) == nothing
    assert (await kv.driver.request("DELETE", f"/cache/{ids[1].hex()}")).status == 204
    assert await explained(ids[1]) == nothing
    assert (
        await kv.driver.request(
            "POST", f"/cache/{ids[1].hex()}?uploads", headers={"x-kvobj-namespace": "hidden", "x-kvobj-parent": "root"}
        )
    ).status == 200
    assert await explained(ids[1]) == nothing


async def test_explain_sees_an_upload_in_progress(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    assert (
        await kv.driver.request("POST", "/cache/engine/a?uploads", headers={"x-kvobj-namespace": "engine"})
    ).status == 200
    explained = (await kv.match("engine", ids=["a"], explain=True)).value["explain"]
    assert (explained["at"], explained["reason"]) == (0, "uploading")


async def test_explain_names_the_fields_in_which_the_namespace_that_has_the_tokens_differs(kv: KvDriver) -> None:
    far = await kv.declare("far", model="other", adapter="lora", salt="s")
    near = await kv.declare("near", salt="tenant")
    await kv.declare("asked")
    for namespace in (far, near):
        await kv.put_chain(namespace, namespace.ids(TOKENS[:32]))
    explained = (await kv.match("asked", tokens=TOKENS[:32], explain=True)).value["explain"]
    assert explained["reason"] == "other-namespace"
    assert explained["namespace_differs"] == ["salt"]
    assert explained["at"] == 0


async def test_explain_does_not_look_into_namespaces_that_the_asker_may_not_use(kv: KvDriver) -> None:
    hidden = await kv.declare("hidden", salt="tenant")
    await kv.declare("shared", access={"bob": "read"})
    await kv.put_chain(hidden, hidden.ids(TOKENS[:16]))
    answer = await kv.call("POST", "match", {"namespace": "shared", "tokens": TOKENS[:16], "explain": True}, user=BOB)
    assert answer.value["explain"]["reason"] == "never-stored"


# -- bad input ----------------------------------------------------------------------------------------------------

GOOD_ID = "0" * 64
BAD_JSON = [
    ({"ids": ["00"]}, "InvalidChunkId"),
    ({"ids": ["0" * 63]}, "InvalidChunkId"),
    ({"ids": ["A" * 64]}, "InvalidChunkId"),
    ({"ids": [" 0" * 32]}, "InvalidChunkId"),
    ({"ids": ["0" * 65, "0" * 63]}, "InvalidChunkId"),
    ({"ids": ["é" * 64]}, "InvalidChunkId"),
    ({"ids": [1]}, "InvalidChunkId"),
    ({"ids": GOOD_ID}, "InvalidChunkId"),
    ({"tokens": [2**32]}, "InvalidTokens"),
    ({"tokens": [-1]}, "InvalidTokens"),
    ({"tokens": [2**70]}, "InvalidTokens"),
    ({"tokens": [1.5]}, "InvalidTokens"),
    ({"tokens": ["1"]}, "InvalidTokens"),
    ({"tokens": [True]}, "InvalidTokens"),
    ({}, "InvalidRequest"),
    ({"ids": [GOOD_ID], "tokens": [1]}, "InvalidRequest"),
    ({"ids": [GOOD_ID], "colour": 1}, "InvalidRequest"),
    ({"ids": [GOOD_ID], "detail": "all"}, "InvalidRequest"),
    ({"ids": [GOOD_ID], "pin": True}, "InvalidRequest"),
    ({"ids": [GOOD_ID], "pin": True, "session": "00"}, "NoSuchSession"),
    ({"ids": [GOOD_ID], "pin": True, "session": "0" * 32}, "NoSuchSession"),
    ({"ids": [GOOD_ID] * 65_537}, "BatchTooLarge"),
    ({"tokens": [1] * (16 * 65_536 + 1)}, "BatchTooLarge"),
    ({"ids": [], "namespace": "absent"}, "NoSuchNamespace"),
    ({"ids": [], "namespace": "no/name"}, "NoSuchNamespace"),
    ([], "InvalidRequest"),
]
BAD_MSGPACK = [
    ({"ids": b"\0" * 31}, "InvalidChunkId"),
    ({"ids": b"\0" * 33}, "InvalidChunkId"),
    ({"ids": ["00"]}, "InvalidChunkId"),
    ({"tokens": b"\0" * 5}, "InvalidTokens"),
    ({"tokens": [1]}, "InvalidTokens"),
    ({"ids": b"\0" * 32 * 65_537}, "BatchTooLarge"),
    ({"tokens": b"\0" * 4 * (4 * 1024 * 1024 + 1)}, "BatchTooLarge"),
    ({"ids": b"", "pin": True, "session": b"short"}, "NoSuchSession"),
    ({"ids": b"", "session": "0" * 32}, "InvalidRequest"),
]


@pytest.mark.parametrize(("form", "table"), [(JSON, BAD_JSON), (MSGPACK, BAD_MSGPACK)])
async def test_a_wrong_request_is_refused_by_a_typed_error_and_changes_nothing(
    kv: KvDriver, form: str, table: list[tuple[object, str]]
) -> None:
    namespace = await kv.declare("llama")
    await kv.put_chain(namespace, namespace.ids(TOKENS[:16]))
    before = await rows(kv)
    for value, code in table:
        asked = {"namespace": "llama", **value} if isinstance(value, dict) else value
        answer = await kv.call("POST", "match", asked, form=form)
        assert (answer.code, answer.status) == (code, 404 if code.startswith("NoSuch") else 400), str(value)[:100]
        assert answer.answer.headers["content-type"] == form
        error = answer.value["error"]
        assert error["resource"] == "/cache"
        assert error["request_id"] == answer.answer.headers["x-amz-request-id"]
    assert await rows(kv) == before
    assert kv.node.catalog.leases.usage().pins == 0
    assert kv.requests == []


async def test_an_unknown_field_is_named(kv: KvDriver) -> None:
    answer = await kv.match(ids=[], colour=1)
    assert "colour" in answer.value["error"]["message"]


async def test_bytes_that_are_no_document_are_an_invalid_request(kv: KvDriver) -> None:
    for form in FORMATS:
        for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"ids": ["\xff"]}', b"nope"):
            answer = await kv.call("POST", "match", form=form, raw=raw)
            assert (answer.status, answer.code) == (400, "InvalidRequest"), raw[:20]


async def test_another_content_type_is_refused_and_the_error_comes_in_what_accept_names(kv: KvDriver) -> None:
    answer = await kv.call("POST", "match", form="text/plain", raw=b"{}", accept=MSGPACK)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert answer.answer.headers["content-type"] == MSGPACK


async def test_tokens_of_a_namespace_whose_ids_only_its_engine_knows_are_refused(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    answer = await kv.match("engine", tokens=[1, 2])
    assert (answer.code, answer.detail) == ("InvalidRequest", {"field": "tokens"})


async def test_a_foreign_key_that_can_be_no_key_is_refused(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    for key in ("", "a\0b", "x" * 1024):
        assert (await kv.match("engine", ids=[key])).code == "InvalidChunkId"
    assert (await kv.match("engine", form=MSGPACK, ids=b"\0" * 32)).code == "InvalidChunkId"


async def test_a_body_above_the_limit_is_refused_unread(kv: KvDriver) -> None:
    answer = await kv.call("POST", "match", raw=b" " * (16 * 1024 * 1024 + 1))
    assert (answer.status, answer.code) == (400, "EntityTooLarge")
    assert not answer.answer.request_body.accepted


async def test_the_kv_api_is_for_kv_buckets(kv: KvDriver) -> None:
    answer = await kv.call("POST", "match", {"ids": []}, bucket="files")
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert "kind kv" in answer.value["error"]["message"]
    assert (await kv.call("POST", "match", {"ids": []}, bucket="nowhere")).code == "NoSuchBucket"


async def test_who_is_granted_nothing_is_denied_and_who_is_granted_something_is_told_absent(kv: KvDriver) -> None:
    await kv.declare("private")
    asked = {"namespace": "private", "ids": []}
    assert (await kv.call("POST", "match", asked, user=BOB)).code == "AccessDenied"
    await kv.declare("shared", access={"bob": "read"})
    assert (await kv.call("POST", "match", asked, user=BOB)).code == "NoSuchNamespace"
    assert (await kv.call("POST", "match", {"namespace": "shared", "ids": []}, user=BOB)).status == 200
    assert (await kv.call("POST", "match", {"ids": []}, user=BOB)).code == "NoSuchNamespace"


async def test_who_may_not_use_the_namespace_default_is_told_what_to_do_and_nothing_of_the_bucket(kv: KvDriver) -> None:
    denied = await kv.call("POST", "match", {"ids": []}, user=BOB)
    assert (denied.status, denied.code) == (403, "AccessDenied")
    assert denied.detail["hint"] == DEFAULT_HINT
    assert all(word in DEFAULT_HINT for word in ("namespace default", "owner", "--owner USER", "grant"))
    await kv.declare("private")
    # Where the namespace is another's, and where there is none, alike.
    for name in ("private", "nowhere"):
        answer = await kv.call("POST", "match", {"namespace": name, "ids": []}, user=BOB)
        assert (answer.code, answer.detail) == ("AccessDenied", denied.detail)
    await kv.declare("shared", access={"bob": "read"})
    absent = await kv.call("POST", "match", {"ids": []}, user=BOB)
    assert (absent.code, absent.detail["hint"]) == ("NoSuchNamespace", DEFAULT_HINT)
    assert "hint" not in (await kv.call("POST", "match", {"namespace": "private", "ids": []}, user=BOB)).detail
    for answer in (denied, absent):
        assert ALICE.id.encode() not in answer.answer.body, "whose the bucket is is not the asker's to know"
    anonymous = await kv.driver.send("POST", "/cache?match", [("host", "127.0.0.1:9000"), ("accept", JSON)], b"{}")
    assert b"hint" not in anonymous.body


async def test_a_wrong_signature_is_told_in_the_calls_format(kv: KvDriver) -> None:
    reply = await kv.driver.send("POST", "/cache?match", [("host", "127.0.0.1:9000"), ("accept", JSON)], b"{}")
    assert reply.status == 403
    assert b'"code":"AccessDenied"' in reply.body


async def test_a_match_finds_no_chunk_of_another_namespace_and_pins_none(kv: KvDriver) -> None:
    mine, theirs = await kv.declare("mine"), await kv.declare("theirs", salt="x")
    ids = theirs.ids(TOKENS)
    await kv.put_chain(theirs, ids[:3])
    session = await kv.open_session()
    answer = await kv.match("mine", ids=ids_in(JSON, ids), session=session, pin=True, detail="chunks")
    assert (answer.value["matched"], answer.value["pin"], answer.value["chunks"]) == (0, None, [])
    assert (await kv.match("theirs", ids=ids_in(JSON, ids))).value["matched"] == 3
    assert mine.name != theirs.name
