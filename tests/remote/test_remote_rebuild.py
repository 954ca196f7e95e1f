"""A node is lost and made again from its remote alone: real processes, an empty disk, and everything shared is as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from raw_http import Credentials as RawCredentials
from raw_http import RawS3
from rebuild_world import (
    ENVIRONMENT,
    SHARED,
    World,
    admin,
    configure,
    document,
    kv_client,
    lose,
    node_settings,
    run,
    seen,
    settle,
)
from remote_servers import RemoteStore
from server_process import MIB, ServerProcess, wait_until

from kvobj.app.offline_remote import rebuild_remote
from kvobj.client import ROOT
from kvobj.config import load_settings
from kvobj.ids.chunk_ids import chunk_ids, token_bytes


@pytest.fixture
def world(kvobj_remote: RemoteStore, tmp_path: Path) -> Iterator[World]:
    with ServerProcess(tmp_path / "node", node_settings(kvobj_remote)) as node:
        yield World(node, kvobj_remote)


POLICY = (
    b'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:GetObject",'
    b'"Resource":"arn:aws:s3:::one/*"}]}'
)


def test_a_lost_node_is_made_again_from_its_remote_and_serves_what_was_shared(  # noqa: PLR0915 - one long story
    world: World,
) -> None:
    node, random = world.node, Random(3)
    bodies = {
        f"/one/dir/{number}": random.randbytes(size)
        for number, size in enumerate((0, 1, 999, 70_000, 300_000, 3 * MIB))
    }
    assert (
        admin(node, "user", "add", "ann", "--user-access-key", "ann-access", "--user-secret-key", "ann-secret-key")[0]
        == 0
    )
    with node.raw(timeout_seconds=60) as raw:
        for bucket in ("one", "two", "gone"):
            assert raw.request("PUT", f"/{bucket}", payload=None).status == 200
        for path, body in bodies.items():
            world.put(raw, path, body, content_type="text/x-test", x_amz_meta_of="a test", x_amz_tagging="a=b&c=d")
        world.put(raw, "/one/a b/\u00fc", b"another name", x_amz_acl="public-read")
        world.put(raw, "/one/replaced", b"before")
        world.put(raw, "/one/replaced", b"after")
        world.put(raw, "/one/deleted", b"deleted")
        world.put(raw, "/two/was shared", b"then local")
        assert raw.request("PUT", "/two/was shared", b"local", headers={}, payload=b"local").status == 200
        assert raw.request("PUT", "/two/local", b"local", headers={}, payload=b"local").status == 200
        assert raw.request("DELETE", "/one/deleted", payload=None).status == 204
        assert raw.request("PUT", "/one", POLICY, query={"policy": ""}, payload=POLICY).status in (200, 204)
        assert raw.request("DELETE", "/gone", payload=None).status == 204
        tagging = b"<Tagging><TagSet><Tag><Key>late</Key><Value>tag</Value></Tag></TagSet></Tagging>"
        assert raw.request("PUT", "/one/dir/1", tagging, query={"tagging": ""}, payload=tagging).status == 200
        before = {path: seen(raw, path) for path in (*bodies, "/one/a b/\u00fc", "/one/replaced")}
        tags = document(raw, "/one/dir/1", "tagging")
        acl = document(raw, "/one/a b/\u00fc", "acl")
        listing = raw.request("GET", "/one", query={"list-type": "2"}, payload=None).body
    assert all(status == 200 for status, _, _ in before.values())
    settle(node)
    lose(node)

    status, report = admin(node, "rebuild", "--remote")
    assert status == 0, report
    assert (report["buckets"], report["objects"], report["lineage"], report["problems"]) == (2, len(before), 2, 0)
    assert report["made_credentials"]
    assert admin(node, "fsck", "--remote", "--read")[0] == 0

    node.start()
    with node.raw(timeout_seconds=60) as raw:
        assert {path: seen(raw, path) for path in before} == before
        assert {path: seen(raw, path)[1] for path in bodies} == bodies
        assert document(raw, "/one/dir/1", "tagging") == tags
        assert document(raw, "/one/a b/\u00fc", "acl") == acl
        assert document(raw, "/one", "policy") == POLICY
        assert raw.request("GET", "/one", query={"list-type": "2"}, payload=None).body == listing
        for path in ("/one/deleted", "/two/local", "/two/was shared", "/gone/x"):
            assert raw.request("GET", path, payload=None).status == 404
        assert raw.request("HEAD", "/gone", payload=None).status == 404
        world.put(raw, "/two/afterwards", b"new")
    users = node.admin("GET", "/api/v1/users")["users"]
    assert {user["id"] for user in users} == {"root", "ann"}
    # And once more: the second lineage is as good as the first.
    settle(node)
    lose(node)
    status, report = admin(node, "rebuild", "--remote")
    assert (status, report["lineage"], report["objects"]) == (0, 3, len(before) + 1), report
    node.start()
    with node.raw() as raw:
        assert seen(raw, "/two/afterwards")[1] == b"new"
        assert {path: seen(raw, path) for path in before} == before


def test_what_was_removed_stays_removed_though_the_node_is_lost_at_once(
    kvobj_remote: RemoteStore, tmp_path: Path
) -> None:
    settings = node_settings(kvobj_remote)
    # The remote is told of nothing by itself.
    settings = replace(settings, remote=kvobj_remote.tier(manifest_interval='"600 s"'))
    with ServerProcess(tmp_path / "node", settings) as node, node.raw(timeout_seconds=60) as raw:
        world = World(node, kvobj_remote)

        def is_told(what: str) -> None:
            wait_until(
                lambda: not node.status()["remote"]["manifests"]["untold_records"], timeout_seconds=10, what=what
            )

        assert admin(node, "user", "add", "ann")[0] == 0
        assert admin(node, "bucket", "create", "cache", "--kind", "kv")[0] == 0
        for bucket in ("one", "gone"):
            assert raw.request("PUT", f"/{bucket}", payload=None).status == 200
        for key in ("shadowed", "overwritten", "kept"):
            world.put(raw, f"/one/{key}", b"first")
        for key, durability in (("shadowed", "memory"), ("overwritten", "local"), ("kept", "memory")):
            headers = {"x-kvobj-durability": durability}
            reply = raw.request("PUT", f"/one/{key}", b"second", headers=headers, payload=b"second")
            assert reply.headers["x-kvobj-durability"] == durability
        for key in ("shadowed", "overwritten"):
            assert raw.request("DELETE", f"/one/{key}", payload=None).status == 204
            is_told(f"a DELETE of {key} to be told")
        world.put(raw, "/one/kept", b"third")
        assert raw.request("DELETE", "/gone", payload=None).status == 204
        is_told("a DELETE of a bucket to be told")
        with kv_client(node) as client:
            for name in ("m", "n"):
                client.declare_namespace(
                    name, {"model": name, "chunk_tokens": 16, "ids": "foreign", "layout": {"kind": "opaque"}}
                )
                client.put_chunk(f"{name}/c", b"chunk", namespace=client.namespace(name), durability="shared")
            client.remove_namespace("m")
            is_told("the removal of a namespace to be told")
        assert admin(node, "recall", "--bucket", "cache")[0] == 0
        is_told("a recall to be told")
        assert admin(node, "user", "remove", "ann")[0] == 0
        is_told("the removal of a user to be told")
        lose(node)
        status, report = admin(node, "rebuild", "--remote")
        assert (status, report["buckets"], report["namespaces"], report["users"]) == (0, 2, 1, 0), report
        assert report["objects"] == 1
        node.start()
        with node.raw() as after:
            assert after.request("GET", "/one/kept", payload=None).body == b"third"


def test_chains_and_namespaces_come_back_and_a_chain_that_lost_a_chunk_ends_before_it(world: World) -> None:
    node, store = world.node, world.store
    tokens = list(range(64 * 16))
    assert admin(node, "bucket", "create", "cache", "--kind", "kv", "--durability", "memory")[0] == 0
    with kv_client(node) as client:
        client.declare_namespace("m", {"model": "m", "chunk_tokens": 16, "ids": "kvobj", "layout": {"kind": "opaque"}})
        space = client.namespace("m")
        joined = chunk_ids(space.key, space.root, token_bytes(tokens), chunk_tokens=16)
        ids = [joined[start : start + 32] for start in range(0, len(joined), 32)]
        parent: bytes | str = ROOT
        for number, chunk in enumerate(ids):
            stored = client.put_chunk(
                chunk, b"chunk %d " % number * 40, namespace=space, parent=parent, tokens=16, durability="shared"
            )
            assert stored.durability == "shared"
            parent = chunk
        for number in range(3):
            client.put_chunk(f"foreign-{number}", b"foreign", durability="shared")
        client.put_chunk("only-here", b"local", durability="local")
        before = client.match(namespace=space, tokens=tokens, detail=True)
    assert (before.matched, before.tokens) == (64, 64 * 16)
    lose(node)
    # One blob in the middle of the chain is gone from the remote as well.
    victim = next(key for key in store.keys("store/blobs/") if key.endswith("/cache/" + ids[40].hex()))
    store.remove([victim])
    kept = tuple(store.keys("store/manifests/"))

    status, report = admin(node, "rebuild", "--remote", "--keep-missing")
    assert (status, report["objects"], report["missing_objects"]) == (1, 67, 1), report
    assert [finding["kind"] for finding in report["findings"]] == ["missing-blob"]
    assert set(kept) <= set(store.keys("store/manifests/")), "the lineage before is kept"
    status, found = admin(node, "fsck", "--remote")
    assert (status, found["missing_blobs"], found["untold_rows"], found["stale_rows"]) == (1, 1, 0, 0), found

    status, report = admin(node, "rebuild", "--remote")
    assert (status, report["complaint"].count("--replace")) == (2, 1)
    secret = (node.data / "credentials").read_bytes()
    status, report = admin(node, "rebuild", "--remote", "--replace")
    assert (status, report["objects"], report["missing_objects"], report["orphans"]) == (1, 43, 1, 23), report
    assert (report["namespaces"], report["closed_namespaces"], report["lineage"]) == (1, 0, 3)
    assert (node.data / "credentials").read_bytes() == secret
    status, found = admin(node, "fsck", "--remote", "--read")
    assert status == 0, found

    node.start()
    with kv_client(node) as client:
        space = client.namespace("m")
        after = client.match(namespace=space, tokens=tokens, detail=True)
        assert (after.matched, after.tokens) == (40, 640)
        assert [chunk.id for chunk in after.chunks] == [chunk.id for chunk in before.chunks[:40]]
        assert client.match(ids=[f"foreign-{number}" for number in range(3)]).matched == 3
        assert bytes(client.get_chunk(ids[39], namespace=space) or b"") == b"chunk 39 " * 40
        assert client.get_chunk(ids[40], namespace=space) is None
        assert client.get_chunk("only-here") is None
        # The chain grows on where it ends, with the sums that it had.
        client.put_chunk(ids[40], b"again", namespace=space, parent=ids[39], tokens=16, durability="shared")
        assert client.match(namespace=space, tokens=tokens).matched == 41


def test_the_old_node_is_fenced_and_secrets_need_the_key_that_they_were_sealed_under(
    world: World, tmp_path: Path
) -> None:
    old, store = world.node, world.store
    assert (
        admin(old, "user", "add", "ann", "--user-access-key", "ann-access", "--user-secret-key", "ann-secret-key")[0]
        == 0
    )
    assert admin(old, "bucket", "create", "cache", "--kind", "kv")[0] == 0
    with kv_client(old) as client:
        client.declare_namespace("m", {"model": "m", "chunk_tokens": 16, "ids": "kvobj", "layout": {"kind": "opaque"}})
    with old.raw() as raw:
        assert raw.request("PUT", "/one", payload=None).status == 200
        world.put(raw, "/one/key", b"kept")
    settle(old)
    old.kill()
    assert not any(b"ann-secret-key" in (store.read(key) or b"") for key in store.keys("store/manifests/"))

    settings = node_settings(store)
    with closing(ServerProcess(tmp_path / "new", settings)) as new:
        configure(new, replace(settings, sections={}, environment={}))
        status, told = admin(new, "rebuild", "--remote", environment={})
        assert (status, "1 users and 1 namespaces do not open" in told["complaint"]) == (2, True), told
        configure(new, settings)
        status, report = admin(new, "rebuild", "--remote")
        assert (status, report["users"], report["problems"], report["lineage"]) == (0, 1, 0, 2), report

        old.start()
        with old.raw() as raw:
            reply = raw.request("PUT", "/one/late", b"late", headers=SHARED, payload=b"late")
            assert reply.status == 503, reply
            assert raw.request("GET", "/one/key", payload=None).body == b"kept"
        assert old.status()["remote"]["claim"] == "fenced"
        new.start()
        with RawS3(new.host, new.port, RawCredentials("ann-access", "ann-secret-key"), 30) as raw:
            assert raw.request("GET", "/", payload=None).status == 200
        with new.raw() as raw:
            assert raw.request("GET", "/one/key", payload=None).body == b"kept"
            assert raw.request("GET", "/one/late", payload=None).status == 404
            world.put(raw, "/one/next", b"next")
        settle(new)
        new.kill()
        # As if the key were lost, too: the store key, which it follows from where none is given, is not in the manifests.
        (new.data / "store_key").write_bytes(bytes(32))
        configure(new, replace(settings, sections={}, environment={}))
        status, report = admin(new, "rebuild", "--remote", "--replace", "--without-secrets", environment={})
        assert (status, report["closed_users"], report["closed_namespaces"], report["objects"]) == (1, 1, 1, 2), report
        assert {finding["kind"] for finding in report["findings"]} == {"closed-user", "closed-namespace"}
        new.settings = replace(settings, sections={}, environment={})
        new.start()
        with new.raw() as raw:
            assert raw.request("GET", "/one/key", payload=None).body == b"kept"


def test_fsck_finds_what_is_missing_short_changed_and_nobodys_on_the_remote(world: World) -> None:
    node, store = world.node, world.store
    with node.raw() as raw:
        assert raw.request("PUT", "/one", payload=None).status == 200
        for name in ("gone", "short", "changed", "sound"):
            world.put(raw, f"/one/{name}", name.encode() * 1000)
    settle(node)
    assert node.terminate() == 0
    assert admin(node, "fsck", "--remote", "--read")[1]["problems"] == 0
    keys = {key.rpartition("/")[2]: key for key in store.keys("store/blobs/")}
    frames = {name: store.read(key) or b"" for name, key in keys.items()}
    store.remove([keys["gone"]])
    store.write(keys["short"], frames["short"][:-1])
    store.write(keys["changed"], frames["changed"][:-1] + b"!")
    store.write("store/blobs/" + "ab" * 16 + "/one/nobodys", b"left over")
    store.write("store/blobs/readme", b"a stranger")

    status, found = admin(node, "fsck", "--remote")
    kinds = sorted(finding["kind"] for finding in found["findings"])
    assert (status, kinds) == (1, ["different-size", "foreign-object", "leftover-blob", "missing-blob"])
    status, found = admin(node, "fsck", "--remote", "--read")
    assert (status, found["corrupt_blobs"], found["problems"]) == (1, 1, 3)
    assert next(each for each in found["findings"] if each["kind"] == "corrupt-blob")["key"] == "changed"

    status, text, _ = run(node, "fsck", "--remote")
    assert status == 1
    assert any(line.startswith("missing-blob: bucket=one key=gone blob_id=") for line in text.splitlines())

    # A rebuild would bring back what the journal's last manifest removed, if that is lost.
    heads = [key for key in store.keys("store/manifests/") if key.endswith(".head")]
    assert len(heads) >= 1
    store.remove([key for key in store.keys("store/manifests/") if key.endswith((".head", ".part"))])
    status, found = admin(node, "fsck", "--remote")
    assert (status, found["unreadable_manifests"]) == (1, 1)


def test_an_empty_prefix_and_a_missing_tier_are_refused_by_name(kvobj_remote: RemoteStore, tmp_path: Path) -> None:
    for remote, complaint in ((kvobj_remote.tier(), "no store lies there"), (None, "names no remote tier")):
        node = ServerProcess(tmp_path / "node")
        configure(node, replace(node_settings(kvobj_remote), remote=remote))
        status, told = admin(node, "rebuild", "--remote")
        assert status == 2
        assert complaint in told["complaint"]
        status, told = admin(node, "rebuild", "--replace")
        assert (status, "is for --remote" in told["complaint"]) == (2, True)


def test_a_node_before_radosgw_is_made_again_too(radosgw: RemoteStore, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "node", node_settings(radosgw)) as node:
        world = World(node, radosgw)
        with node.raw(timeout_seconds=60) as raw:
            assert raw.request("PUT", "/one", payload=None).status == 200
            for number in range(12):
                world.put(raw, f"/one/{number}", b"%d" % number * 3000, x_amz_meta_number=str(number))
            assert raw.request("DELETE", "/one/7", payload=None).status == 204
            before = {f"/one/{number}": seen(raw, f"/one/{number}") for number in range(12)}
        lose(node)
        status, told, _ = run(node, "rebuild", "--remote")
        assert status == 0, told
        shown = dict(line.rsplit(maxsplit=1) for line in told.splitlines() if line.startswith(("objects", "lineage")))
        assert shown == {"objects": "11", "lineage": "2"}
        assert "root's keys are new" in told
        node.start()
        with node.raw() as raw:
            assert {path: seen(raw, path)[1:] for path in before if path != "/one/7"} == {
                path: kept[1:] for path, kept in before.items() if path != "/one/7"
            }
            assert seen(raw, "/one/7")[0] == 404


def test_a_rebuild_that_was_cut_short_is_made_again_in_the_lineage_that_it_took(world: World) -> None:
    node = world.node
    with node.raw() as raw:
        assert raw.request("PUT", "/one", payload=None).status == 200
        for number in range(20):
            world.put(raw, f"/one/{number}", b"%d" % number)
    lose(node)
    settings = load_settings(node.configuration, environment=ENVIRONMENT)

    def ignore(_kind: str, _finding: dict[str, object]) -> None:
        """Nothing is wrong here."""

    for lineage, step in enumerate(("records", "objects", "snapshot"), start=2):

        def cut_short(_done: int, _total: int, reached: str, step: str = step) -> None:
            if reached == step:
                raise InterruptedError(step)

        with pytest.raises(InterruptedError, match=step):
            rebuild_remote(settings, cut_short, ignore)
        status, report = admin(node, "rebuild", "--remote")
        assert (status, report["objects"], report["lineage"]) == (0, 20, lineage), (step, report)
        status, found = admin(node, "fsck", "--remote", "--read")
        assert (status, found["objects"]) == (0, 20), (step, found)
        shutil.rmtree(node.data)  # and the next machine is lost, too
