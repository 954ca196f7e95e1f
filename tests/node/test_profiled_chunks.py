"""Chunks that lie as `ek`: their namespace names a profile, an object of its bucket, which stays for as long as it is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from blake3 import blake3
from s3_driver import Answer
from tier_codecs import CHUNK_BYTES, LAYOUT, TOKENS, Coded, coded_node, furthest, tensor, usable

from kvobj.app.node import flush
from kvobj.app.offline import fsck
from kvobj.catalog.rows import LossyCopy
from kvobj.errors import FrameCorruptError
from kvobj.tensors.codecs import TensorForm, decode_frame, parse_tensor_frame
from kvobj.tensors.profiles import BlockBasis, Profile, object_key, parse_named, profile_of

pytestmark = pytest.mark.skipif(not usable("ek"), reason="the kernels are not built")

FORM = TensorForm("kv", "bf16", 8, 4, 64, TOKENS, ("layer", "kv", "head", "token", "dim"))


@cache
def profile(heads: int = 4) -> Profile:
    """Of a model whose columns are independent: nothing to turn."""
    columns = heads * 64
    basis = [1.0 if row == column else 0.0 for row in range(columns) for column in range(columns)]
    form = TensorForm("kv", "bf16", 8, heads, 64, 1)
    return Profile.build(form, [BlockBasis(1.0, [0.0] * columns, basis)] * form.blocks, None)


async def put_profile(coded: Coded, found: Profile) -> str:
    answer = await coded.kv.put(object_key(found.digest), found.data, durability="local")
    assert answer.status == 200, answer.body
    return found.digest.hex()


async def settings(coded: Coded, **fields: object) -> Answer:
    from kv_driver import declaration  # noqa: PLC0415 - a test's own

    value = declaration(layout=LAYOUT, chunk_tokens=TOKENS, **fields)
    return (await coded.kv.call("PUT", "namespace=n", value)).answer


@asynccontextmanager
async def profiled(data: Path, memory: Path) -> AsyncIterator[Coded]:
    async with coded_node(data, memory, codecs={"nvme": "raw"}, lossy=True) as coded:
        named = await put_profile(coded, profile())
        answer = await settings(coded, codecs={"nvme": "ek"}, lossy=True, profile=named)
        assert answer.status == 200, answer.body
        yield coded


async def written(coded: Coded, key: str) -> LossyCopy:
    assert await flush(coded.node, timeout_seconds=20.0)
    await coded.drop_from_memory(key)
    copy = (await coded.row(key)).lossy
    assert copy is not None
    return copy


async def test_a_namespace_with_a_profile_has_copies_that_a_reader_decodes_with_it(
    tmp_path: Path, shm_path: Path
) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        key = await coded.put(1)
        copy = await written(coded, key)
        assert (copy.codec, copy.profile) == ("ek:300/0", profile().digest)
        answer = await coded.get(key, accept="ek")
        assert answer.headers["x-kvobj-profile"] == profile().digest.hex()
        frame = memoryview(answer.body)
        head = parse_tensor_frame(frame, len(frame))
        named = profile_of(head)
        assert named is not None
        fetched = parse_named((await coded.get(object_key(named))).body, named)
        decoded = bytearray(CHUNK_BYTES)
        decode_frame(frame, head, memoryview(decoded), profile=fetched)
        assert blake3(decoded).digest() == copy.digest
        assert 0 < furthest(bytes(decoded), tensor(1)) <= copy.max_error


async def test_a_chunk_is_coded_for_its_place_in_its_chain(tmp_path: Path, shm_path: Path) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        ids = [name.hex() for name in coded.namespace.ids([1] * TOKENS * 2, TOKENS)]
        for key, parent in zip(ids, ["root", ids[0]], strict=True):
            assert (await coded.kv.put(key, tensor(6), namespace="n", parent=parent)).status == 200
        for place, key in enumerate(ids):
            await written(coded, key)
            frame = memoryview((await coded.get(key, accept="ek")).body)
            assert parse_tensor_frame(frame, len(frame)).first_position == place * TOKENS


async def test_the_server_decodes_for_who_has_no_profile(tmp_path: Path, shm_path: Path) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        key = await coded.put(2)
        copy = await written(coded, key)
        answer = await coded.get(key, accept="raw;max-error=1")
        assert blake3(answer.body).digest() == copy.digest
        assert "x-kvobj-lossy" in answer.headers
        await coded.node.read_tier.promotions_done()
        layer = await coded.get(key, "?layers=3-3", accept="raw;max-error=1")
        assert layer.body == answer.body[3 * CHUNK_BYTES // 8 : 4 * CHUNK_BYTES // 8]
        _, items = await coded.kv.mget({"ids": [key], "accept": ["ek"]})
        assert items[0].header["profile"] == profile().digest
        checked = await coded.node.upkeep.copies.check(await coded.row(key))
        assert checked.problem is None
        assert (await coded.get(key, accept="ek:300/1")).status == 404  # there is no ladder of ek


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"codecs": {"nvme": "ek"}}, "codecs.nvme"),
        ({"profile": "ab" * 32}, "profile"),
        ({"profile": "zz"}, "profile"),
        ({"profile": profile(heads=2).digest.hex()}, "profile"),
        ({"profile": blake3(b"no profile").hexdigest()}, "profile"),
    ],
)
async def test_a_profile_that_is_not_there_or_not_of_the_model_is_refused_by_name(
    tmp_path: Path, shm_path: Path, fields: dict[str, object], field: str
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={}, lossy=True) as coded:
        await put_profile(coded, profile(heads=2))
        await coded.kv.put(f"profiles/{blake3(b'no profile').hexdigest()}", b"no profile")
        answer = await settings(coded, lossy=True, **fields)
        assert answer.status == 400
        assert field in answer.body.decode()


async def test_a_profile_that_a_namespace_names_is_not_deleted_and_policy_leaves_it_alone(
    tmp_path: Path, shm_path: Path
) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        name = object_key(profile().digest)
        refusal = await coded.kv.driver.request("DELETE", f"/cache/{name}")
        assert (refusal.status, b"the namespace n names this profile" in refusal.body) == (409, True)
        other = (await coded.kv.put("other", b"x", durability="local")).status
        outcomes = await coded.node.store.delete("cache", ["other", name, "absent"])
        assert (other, [bool(each.kept) for each in outcomes]) == (200, [False, True, False])
        assert [each.key for each in outcomes] == ["other", name, "absent"]
        await coded.node.collector.load()
        while await coded.node.reaper.reap_batch():  # what "other" left goes first
            pass
        freed = await coded.node.collector.make_room(64 * 2**20)
        assert (freed, (await coded.get(name)).status) == (0, 200)
        assert (await settings(coded, codecs={}, lossy=True, profile=None)).status == 200
        assert (await coded.kv.driver.request("DELETE", f"/cache/{name}")).status == 204


async def test_without_its_profile_a_copy_is_a_miss_and_what_is_stored_then_lies_as_it_was_put(
    tmp_path: Path, shm_path: Path
) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        key = await coded.put(3)
        await written(coded, key)
        await coded.node.catalog.delete("cache", [object_key(profile().digest)], now_ms=0)  # as a recall does
        coded.node.profiles._kept.clear()
        assert (await coded.get(key, accept="raw;max-error=1")).status == 404
        assert (await coded.get(key, accept="ek")).status == 200  # who has the profile reads on
        other = await coded.put(4)
        assert await coded.written(other) is None
        assert any("ek is not used in nvme: its profile is gone" in note for note in coded.node.coding_rules.notes())
        await put_profile(coded, profile())
        coded.node.profiles._absent.clear()
        assert (await coded.get(key, accept="raw;max-error=1")).status == 200


async def test_a_restart_reads_the_profile_again_and_a_stopped_store_is_checked_without_it(
    tmp_path: Path, shm_path: Path
) -> None:
    async with profiled(tmp_path, shm_path) as coded:
        key = await coded.put(5)
        copy = await written(coded, key)
        node_settings = coded.node.settings
    found: list[object] = []
    checked = await asyncio.to_thread(fsck, node_settings, lambda kind, finding: found.append((kind, finding)))
    assert checked.problems == 0, found
    async with coded_node(tmp_path, shm_path, codecs={}, lossy=True) as coded:
        answer = await coded.get(key, accept="raw;max-error=1")
        assert blake3(answer.body).digest() == copy.digest


def test_bytes_that_are_not_what_the_name_says_are_no_profile() -> None:
    with pytest.raises(FrameCorruptError):
        parse_named(profile().data + b"x", profile().digest)
