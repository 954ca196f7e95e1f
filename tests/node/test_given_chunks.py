"""Matches and pins tell of what their asker would be given: a chunk of which a lossy copy alone is left is not there for others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from kv_driver import JSON, MSGPACK, ids_in, kv_node
from s3_driver import ALICE
from tier_codecs import LAYOUT, TOKENS, Coded, coded_node, lossy, tensor

from kvobj.app.node import flush
from kvobj.catalog.chunk_heads import matched_chunk
from kvobj.catalog.rows import ObjectRow
from kvobj.store.given_chunks import PLAIN, GivenChunks
from kvobj.store.representation import Accepted

CHUNKS = 4


async def put_chain(
    coded: Coded, *, durability: str = "memory", chunks: int = CHUNKS, first_token: int = 0
) -> list[bytes]:
    """One chain, each chunk of its own bytes, written down."""
    ids = coded.namespace.ids(list(range(first_token, first_token + TOKENS * chunks)), TOKENS)
    for number, each in enumerate(ids):
        answer = await coded.kv.put(
            each.hex(),
            tensor(number),
            namespace="n",
            parent=ids[number - 1].hex() if number else "root",
            durability=durability,
        )
        assert answer.status == 200, answer.body
    assert await flush(coded.node, timeout_seconds=20.0)
    return ids


async def matched(coded: Coded, ids: list[bytes], form: str = JSON, **asked: object) -> dict[str, object]:
    answer = await coded.kv.match("n", form=form, ids=ids_in(form, ids), **asked)
    assert answer.status == 200, answer.value
    value: dict[str, object] = answer.value
    return value


@pytest.mark.parametrize("form", [JSON, MSGPACK])
async def test_a_match_ends_where_a_get_would_miss_and_counts_what_its_asker_accepts(
    tmp_path: Path, shm_path: Path, form: str
) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        ids = await put_chain(coded)
        assert (await matched(coded, ids, form))["matched"] == CHUNKS
        await coded.drop_from_memory(ids[2].hex())
        assert (await coded.get(ids[2].hex())).status == 404
        found = await matched(coded, ids, form, detail="chunks", explain=True)
        assert found["matched"] == 2
        assert found["tokens"] == 2 * TOKENS
        chunks = found["chunks"]
        assert isinstance(chunks, list)
        assert [chunk["tier"] for chunk in chunks] == ["dram", "dram"]
        assert found["explain"] == {"at": 2, "reason": "not-accepted", "when_ms": None, "namespace_differs": []}
        for accept, count in (
            (["raw"], 2),
            (["x3", "raw"], 2),
            ([codec, "raw"], CHUNKS),
            ([f"{codec};max-error=9", "raw"], CHUNKS),
            ([f"{codec};max-error=0.00001", "raw"], 2),
            (["raw;max-error=9"], CHUNKS),
            ([codec], CHUNKS),
            (["x3"], 0),
        ):
            assert (await matched(coded, ids, form, accept=accept))["matched"] == count, accept
            statuses = [(await coded.get(each.hex(), accept=", ".join(accept))).status for each in ids]
            assert (404 not in statuses) == (count == CHUNKS), accept


async def test_what_a_match_misses_is_stored_by_who_puts_the_rest_and_found_by_the_next_match(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        ids = await put_chain(coded)
        for each in ids:
            await coded.drop_from_memory(each.hex())
        assert (await matched(coded, ids))["matched"] == 0
        answer = await coded.kv.put(ids[0].hex(), tensor(0), namespace="n", parent="root")
        assert answer.headers["x-kvobj-existed"] == "false"
        assert (await matched(coded, ids))["matched"] == 1
        assert (await coded.get(ids[0].hex())).body == tensor(0)


async def test_a_pinned_match_pins_the_run_that_is_given_and_nothing_where_none_is(
    tmp_path: Path, shm_path: Path
) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        ids = await put_chain(coded)
        await coded.drop_from_memory(ids[2].hex())
        session = await coded.kv.open_session()
        found = await matched(coded, ids, session=session, pin=True)
        assert found["matched"] == 2
        assert coded.node.catalog.leases.usage().pins == 1, "the longer run's pin is let go of"
        pin = bytes.fromhex(str(found["pin"]))
        row = await coded.node.catalog.leases.pin(pin, user=ALICE.id, bucket="cache")
        assert row is not None
        assert [target.key for target in row.targets] == [ids[1].hex()]
        taken = await matched(coded, ids, session=session, pin=True, accept=[codec, "raw"])
        assert taken["matched"] == CHUNKS
        await coded.drop_from_memory(ids[0].hex())
        none = await matched(coded, ids, session=session, pin=True)
        assert (none["matched"], none["pin"]) == (0, None)
        assert coded.node.catalog.leases.usage().pins == 2


async def test_a_tail_that_its_holder_would_not_be_given_is_not_live(tmp_path: Path, shm_path: Path) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True) as coded:
        ids = [each.hex() for each in await put_chain(coded)]
        await coded.drop_from_memory(ids[1])
        session = await coded.kv.open_session()
        for document, live in (
            ({"namespace": "n"}, [True, False, True, True]),
            ({}, [True, False, True, True]),
            ({"namespace": "n", "accept": [codec, "raw"]}, [True] * CHUNKS),
        ):
            answer = await coded.kv.call("POST", "pins", {"session": session, "tails": ids, **document})
            assert [each["live"] for each in answer.value["pins"]] == live, document


async def test_a_wrong_accept_is_refused_and_named(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={}) as coded:
        for accept in (["eq4;max-error=inf"], ["raw;max-error="], ["raw, xa"], ["raw"] * 65):
            answer = await coded.kv.match("n", ids=[], accept=accept)
            assert (answer.status, answer.code) == (400, "InvalidRequest"), accept
            assert "accept" in str(answer.value)


async def test_copies_of_a_namespace_that_was_lossy_are_told_apart_before_and_after_a_start(
    tmp_path: Path, shm_path: Path
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        ids = await put_chain(coded)
        await coded.kv.declare("n", layout=LAYOUT, chunk_tokens=TOKENS, codecs={}, lossy=False)
        await coded.drop_from_memory(ids[1].hex())
        assert (await matched(coded, ids))["matched"] == 1
    async with kv_node(tmp_path, shm_path) as kv:
        namespace = (await kv.call("GET", "namespace=n")).value
        assert not namespace["lossy"]
        kv.node.home_demotion.look()  # as a start has it done in the background
        await kv.node.home_demotion.step()
        answer = await kv.match("n", ids=ids_in(JSON, ids))
        assert answer.value["matched"] == 0, "memory begins empty"


async def test_only_rows_that_have_a_lossy_copy_are_asked_about(tmp_path: Path, shm_path: Path) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True) as coded:
        node = coded.node
        asked: list[str] = []

        async def would_give(row: ObjectRow, accepts: Sequence[Accepted]) -> bool:
            asked.append(row.key)
            return await node.store.would_give(row, accepts)

        given = GivenChunks(node.catalog, lossy=node.lossy, in_memory=node.dram.held, would_give=would_give)
        ids = await put_chain(coded, durability="local")
        lossy_id = await put_chain(coded, chunks=1, first_token=1000)
        for each in (*ids[2:], *lossy_id):
            await coded.drop_from_memory(each.hex())
        rows = [matched_chunk(await coded.row(each.hex())) for each in (*ids, *lossy_id)]
        assert await given.run("cache", rows, PLAIN) == CHUNKS
        assert asked == [lossy_id[0].hex()]
