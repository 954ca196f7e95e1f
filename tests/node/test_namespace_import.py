"""A namespace with the key of another store: the same chunks by the same ids on both sides, and the key in nobody else's hands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from kv_driver import CHUNK_BYTES, FORMATS, JSON, MSGPACK, KvDriver, declaration, kv_node, payload
from module_paths import ModulePaths
from raw_http import RawReply
from s3_driver import ALICE, BOB, ROOT
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.admin.cli import main

KEY = bytes(range(32))
LAYOUT = {"kind": "kv", "dtype": "bf16", "layers": 4, "kv_heads": 1, "head_dim": 8}


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


# -- the call --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMATS)
async def test_root_gives_a_namespace_its_key_and_ids_follow_from_it(kv: KvDriver, form: str) -> None:
    given = KEY if form == MSGPACK else KEY.hex()
    declared = await kv.call("PUT", "namespace=llama", declaration(key=given), user=ROOT, form=form)
    assert declared.status == 200, declared.value
    assert declared.value["key"] == given
    read = (await kv.call("GET", "namespace=llama", form=MSGPACK)).value
    assert read["root"] == blake3(read["fingerprint"], key=KEY).digest()
    assert "key" not in read["declaration"]


async def test_only_administrators_give_a_key(kv: KvDriver) -> None:
    for user in (ALICE, BOB):  # Alice owns the bucket, and may declare
        answer = await kv.call("PUT", "namespace=llama", declaration(key=KEY.hex()), user=user)
        assert (answer.status, answer.code) == (403, "AccessDenied")
    assert (await kv.call("GET", "namespace=llama")).code == "NoSuchNamespace"


async def test_a_namespace_that_stands_keeps_its_key_and_another_is_refused(kv: KvDriver) -> None:
    own = await kv.declare("llama")
    other = await kv.call("PUT", "namespace=llama", declaration(key=KEY.hex()), user=ROOT)
    assert (other.status, other.code, other.detail["differs"]) == (409, "NamespaceConflict", ["key"])
    same = await kv.call("PUT", "namespace=llama", declaration(key=own.key.hex()), user=ROOT)
    assert (same.status, same.value["existed"], same.value["key"]) == (200, True, own.key.hex())
    differing = declaration(key=own.key.hex(), salt="x")
    otherwise = await kv.call("PUT", "namespace=llama", differing, user=ROOT)
    assert (otherwise.code, otherwise.detail["differs"]) == ("NamespaceConflict", ["salt"])
    assert (await kv.call("GET", "namespace=llama")).value["key"] == own.key.hex()


@pytest.mark.parametrize("wrong", ["", "00" * 31, "00" * 33, " " + "00" * 31 + " ", "xy" * 32, 7, None, ["00"]])
async def test_what_is_no_key_is_refused_and_not_repeated(kv: KvDriver, wrong: object) -> None:
    answer = await kv.call("PUT", "namespace=llama", declaration(key=wrong), user=ROOT)
    assert (answer.status, answer.code, answer.detail["field"]) == (400, "InvalidRequest", "key")
    assert "0000" not in answer.value["error"]["message"]
    assert (await kv.call("GET", "namespace=llama")).code == "NoSuchNamespace"


async def test_a_given_key_lies_wrapped_and_is_in_no_log(
    kv: KvDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    assert (await kv.call("PUT", "namespace=llama", declaration(key=KEY.hex()), user=ROOT)).status == 200
    row = await kv.node.catalog.namespaces.namespace("cache", "llama")
    assert row is not None
    assert KEY not in row.wrapped_key
    assert KEY.hex() not in caplog.text
    written = small_files(tmp_path)
    assert any(row.wrapped_key in each for each in written), "the row is on disk, so its absence below means something"
    assert not any(KEY in each or KEY.hex().encode() in each for each in written)


def small_files(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.stat().st_size < 64 * MIB]


# -- two servers and the command line --------------------------------------------------------------------------------
Admin = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def stores(module_paths: ModulePaths) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    settings = ServerSettings(
        dram_bytes=32 * MIB, nvme_bytes=64 * MIB, buckets=[BucketSetting("cache", "kv"), BucketSetting("files")]
    )
    root = module_paths.mktemp("import")
    with ServerProcess(root / "one", settings) as one, ServerProcess(root / "two", settings) as two:
        yield one, two


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Admin:
    """Runs the command line against a server; returns status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(server: ServerProcess, *arguments: str) -> tuple[int, str, str]:
        pair = server.credentials()
        access = {"KVOBJ_ACCESS_KEY": pair.access_key, "KVOBJ_SECRET_KEY": pair.secret_key}
        endpoint = f"http://127.0.0.1:{server.admin_port}"
        status = main(["--endpoint", endpoint, *arguments], environment=access)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def declare(server: ServerProcess, name: str, **fields: object) -> dict[str, str]:
    body = json.dumps({"model": "m", "chunk_tokens": 16, "layout": LAYOUT, "ids": "kvobj", **fields}).encode()
    with server.raw() as raw:
        reply = raw.request(
            "PUT", "/cache", body, query={"namespace": name}, headers={"content-type": JSON}, payload=body
        )
    assert reply.status == 200, reply.body
    value: dict[str, str] = json.loads(reply.body)
    return value


def match(server: ServerProcess, name: str, tokens: list[int]) -> dict[str, int]:
    body = json.dumps({"namespace": name, "tokens": tokens}).encode()
    with server.raw() as raw:
        reply: RawReply = raw.request(
            "POST", "/cache", body, query={"match": ""}, headers={"content-type": JSON}, payload=body
        )
    assert reply.status == 200, reply.body
    found: dict[str, int] = json.loads(reply.body)
    return found


def test_an_exported_namespace_names_the_same_chunks_in_the_other_store(
    stores: tuple[ServerProcess, ServerProcess], admin: Admin, tmp_path: Path
) -> None:
    one, two = stores
    declared = declare(one, "llama", salt="tenant")
    status, out, err = admin(one, "namespace", "export", "llama", "--bucket", "cache")
    exported = tmp_path / "llama.namespace.json"
    assert status == 0, err
    assert declared["key"] not in out + err, "the key goes into the file alone"
    assert json.loads(exported.read_text())["key"] == declared["key"]
    assert exported.stat().st_mode & 0o777 == 0o600
    status, out, err = admin(two, "--json", "namespace", "import", str(exported), "--bucket", "cache")
    assert (status, err) == (0, "")
    imported = json.loads(out)
    assert (imported["existed"], imported["root"]) == (False, declared["root"])
    assert imported["fingerprint"] == declared["fingerprint"]
    # What a client computes of the one's key and tokens is what the other finds.
    tokens = list(range(16))
    span = b"".join(token.to_bytes(4, "little") for token in tokens)
    chunk_id = blake3(bytes.fromhex(declared["root"]) + span, key=bytes.fromhex(declared["key"])).hexdigest()
    data = payload(b"one")
    with two.raw() as raw:
        headers = {"x-kvobj-namespace": "llama", "x-kvobj-parent": "root"}
        assert raw.request("PUT", f"/cache/{chunk_id}", data, headers=headers, payload=data).status == 200
    assert len(data) == CHUNK_BYTES
    assert match(two, "llama", tokens)["matched"] == 1
    assert match(one, "llama", tokens)["matched"] == 0
    assert declared["key"] not in two.log_path.read_text() + one.log_path.read_text()


def test_an_import_again_changes_nothing_and_into_another_namespace_is_refused(
    stores: tuple[ServerProcess, ServerProcess], admin: Admin, tmp_path: Path
) -> None:
    one, two = stores
    declare(one, "twice")
    assert admin(one, "namespace", "export", "twice", "--bucket", "cache", "--output", "f")[0] == 0
    assert admin(two, "namespace", "import", "f", "--bucket", "cache")[0] == 0
    status, out, _ = admin(two, "--json", "namespace", "import", "f", "--bucket", "cache")
    assert (status, json.loads(out)["existed"]) == (0, True)
    own = declare(two, "own")
    exported = json.loads((tmp_path / "f").read_text())
    (tmp_path / "g").write_text(json.dumps(exported | {"name": "own"}))
    status, _, err = admin(two, "namespace", "import", "g", "--bucket", "cache")
    assert status == 1
    assert "another key" in err
    assert declare(two, "own") == own | {"existed": True}
    (tmp_path / "h").write_text(json.dumps(exported | {"name": "other", "fingerprint": "00" * 32}))
    status, _, err = admin(two, "namespace", "import", "h", "--bucket", "cache")
    assert status == 1
    assert "fingerprint" in err
    assert exported["key"] not in err


def test_lists_and_shows_tell_no_key(stores: tuple[ServerProcess, ServerProcess], admin: Admin) -> None:
    one, _ = stores
    declared = declare(one, "shown")
    status, out, _ = admin(one, "--json", "namespace", "list", "--bucket", "cache")
    assert status == 0
    assert {"default", "shown"} <= {each["name"] for each in json.loads(out)["namespaces"]}
    assert declared["key"] not in out
    assert "shown" in admin(one, "namespace", "list", "--bucket", "cache")[1]
    status, out, _ = admin(one, "--json", "namespace", "show", "shown", "--bucket", "cache")
    shown = json.loads(out)
    assert (status, shown["declaration"]["model"], shown["chunk_bytes"]) == (0, "m", CHUNK_BYTES)
    assert declared["key"] not in out
    assert declared["root"] in admin(one, "namespace", "show", "shown", "--bucket", "cache")[1]


def test_misuse_is_told_and_overwrites_nothing(
    stores: tuple[ServerProcess, ServerProcess], admin: Admin, tmp_path: Path
) -> None:
    one, _ = stores
    declare(one, "misused")
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        status, _, err = admin(one, "namespace", "export", "misused", "--bucket", "cache", "--output", name)
        assert status == 2
        assert name in err
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
    assert admin(one, "namespace", "import", "there", "--bucket", "cache")[0] == 2
    assert admin(one, "namespace", "import", "absent", "--bucket", "cache")[0] == 2
    for name, bucket in (("default", "cache"), ("none", "cache"), ("misused", "files"), ("misused", "absent")):
        assert admin(one, "namespace", "export", name, "--bucket", bucket)[0] == 1
    assert not list(tmp_path.glob("*.namespace.json"))
