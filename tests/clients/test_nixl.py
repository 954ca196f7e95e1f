"""NIXL's OBJ plug-in, the S3 client of vLLM's `obj` tier, SGLang's `nixl` and llm-d, against a real server.

Each agent is one setting of the plug-in. Its look-ups must be answered with 200 or 404: anything else fails a whole batch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import pytest
from certificates import Authority
from client_suite import body_of
from engine_process import EngineProcess, digest_of, needs_engines
from module_paths import ModulePaths
from recording_relay import RecordingRelay
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_engines()

PROBE: Final = "__nixl_probe__/connectivity_test"
"""What vLLM's `obj` tier looks up at its start; a plain 404 says that the bucket can be reached."""
PREFIX: Final = "kv/example--Model-8B_0123456789ab_r0/0a1/b2_g0"
SIZES: Final = (1, 4096, 65_537, MIB, 12 * MIB + 5)
BUCKETS: Final = ("plain", "chunks")
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "path-style": {},
    "virtual-hosted": {"use_virtual_addressing": "true"},
    "when-required": {"req_checksum": "required", "resp_checksum": "required"},
    "when-supported": {"req_checksum": "supported", "resp_checksum": "supported"},
    "crt": {"crtMinLimit": str(5 * MIB)},
}


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    buckets = (BucketSetting("plain"), BucketSetting("chunks", "kv", "memory"))
    settings = ServerSettings(dram_bytes=192 * MIB, buckets=buckets)
    with ServerProcess(module_paths.mktemp("nixl"), settings) as running:
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    with EngineProcess("nixl_objects.py", module_paths.mktemp("nixl-engine") / "engine.log") as running:
        yield running


def open_agent(engine: EngineProcess, server: ServerProcess, name: str, **more: str) -> str:
    credentials = server.credentials()
    host = "localhost" if more.get("use_virtual_addressing") == "true" else "127.0.0.1"
    parameters = {
        "endpoint_override": f"http://{host}:{server.port}",
        "scheme": "http",
        "region": credentials.region,
        "access_key": credentials.access_key,
        "secret_key": credentials.secret_key,
        "num_threads": "4",
        **more,
    }
    engine.ask("open", name=name, parameters=parameters)
    return name


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_objects_are_looked_up_written_and_read_at_offsets(
    engine: EngineProcess, server: ServerProcess, setting: str, bucket: str
) -> None:
    agent = open_agent(engine, server, f"{setting}-{bucket}", bucket=bucket, **SETTINGS[setting])
    keys = [f"{PREFIX}/{setting}/{size}.bin" for size in SIZES]
    assert engine.ask("query", name=agent, keys=[PROBE, *keys]) == [False] * (1 + len(keys))
    objects = [(key, size, seed) for seed, (key, size) in enumerate(zip(keys, SIZES, strict=True))]
    for _first_and_again in range(2):  # again: an object is replaced, a chunk is there already
        assert engine.ask("write", name=agent, objects=objects) == "DONE"
    assert engine.ask("query", name=agent, keys=[*keys, PROBE]) == [True] * len(keys) + [False]
    whole = engine.ask("read", name=agent, ranges=[(key, 0, size) for key, size in zip(keys, SIZES, strict=True)])
    assert whole == {"state": "DONE", "digests": [digest_of(size, seed) for seed, size in enumerate(SIZES)]}
    offsets = (0, 65_536, 8 * MIB - 7, SIZES[-1] - 65_536)
    pieces = engine.ask("read", name=agent, ranges=[(keys[-1], offset, 65_536) for offset in offsets])
    body = body_of(SIZES[-1], len(SIZES) - 1)
    expected = [hashlib.sha256(body[offset : offset + 65_536]).hexdigest() for offset in offsets]
    assert pieces == {"state": "DONE", "digests": expected}


def test_what_it_sends_is_what_is_written_of_it(engine: EngineProcess, server: ServerProcess) -> None:
    with RecordingRelay(server.port) as relay:
        for name, setting in (("default", {}), ("plain", SETTINGS["when-required"])):
            endpoint = f"http://127.0.0.1:{relay.port}"
            agent = open_agent(engine, server, f"sent-{name}", bucket="plain", endpoint_override=endpoint, **setting)
            key = f"sent/{name}"
            assert engine.ask("write", name=agent, objects=[(key, 70_000, 1)]) == "DONE"
            read = engine.ask("read", name=agent, ranges=[(key, 100, 5)])
            assert engine.ask("query", name=agent, keys=[key]) == [True]
            assert read["digests"] == [hashlib.sha256(body_of(70_000, 1)[100:105]).hexdigest()]
        heads = {(head.method, head.target): head.headers for head in relay.heads()}
    put = heads["PUT", "/plain/sent/default"]
    assert "content-length" not in put
    assert put["transfer-encoding"] == "chunked"
    assert put["content-encoding"] == "aws-chunked"
    assert put["x-amz-content-sha256"] == "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    assert put["x-amz-trailer"] == "x-amz-checksum-crc64nvme"
    assert put["x-amz-decoded-content-length"] == "70000"
    assert put["expect"] == "100-continue"
    plain = heads["PUT", "/plain/sent/plain"]
    assert (plain["content-length"], "x-amz-trailer" in plain) == ("70000", False)
    assert heads["GET", "/plain/sent/default"]["range"] == "bytes=100-104"
    assert heads["GET", "/plain/sent/default"]["x-amz-checksum-mode"] == "enabled", (
        "no other client has it in lower case"
    )
    assert ("HEAD", "/plain/sent/default") in heads


@pytest.mark.parametrize("bucket", BUCKETS)
def test_an_empty_object_is_there(engine: EngineProcess, server: ServerProcess, bucket: str) -> None:
    agent = open_agent(engine, server, f"empty-{bucket}", bucket=bucket)
    assert engine.ask("write", name=agent, objects=[("empty.meta", 0, 1)]) == "DONE"
    assert engine.ask("query", name=agent, keys=["empty.meta"]) == [True]
    with server.raw() as raw:
        reply = raw.request("HEAD", f"/{bucket}/empty.meta")
    assert (reply.status, reply.headers["content-length"]) == (200, "0")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_missing_object_fails_its_batch_and_nothing_else(
    engine: EngineProcess, server: ServerProcess, bucket: str
) -> None:
    agent = open_agent(engine, server, f"missing-{bucket}", bucket=bucket)
    assert engine.ask("write", name=agent, objects=[("there", 5000, 1), ("gone", 5000, 2)]) == "DONE"
    with server.raw() as raw:
        assert raw.request("DELETE", f"/{bucket}/gone").status == 204
    failed = engine.ask("read", name=agent, ranges=[("there", 0, 5000), ("gone", 0, 5000)])
    assert failed["state"].startswith("ERR")
    assert engine.ask("query", name=agent, keys=["gone", "there"]) == [False, True]
    again = engine.ask("read", name=agent, ranges=[("there", 0, 5000)])
    assert again == {"state": "DONE", "digests": [digest_of(5000, 1)]}


def test_hundreds_of_keys_are_looked_up_and_written_at_once(engine: EngineProcess, server: ServerProcess) -> None:
    agent = open_agent(engine, server, "many", bucket="chunks")
    keys = [f"{PREFIX}/many/{number:04}.bin" for number in range(256)]
    objects = [(key, 16_384, number) for number, key in enumerate(keys) if number % 2]
    assert engine.ask("write", name=agent, objects=objects) == "DONE"
    assert engine.ask("query", name=agent, keys=keys) == [bool(number % 2) for number in range(256)]
    read = engine.ask("read", name=agent, ranges=[(key, 0, size) for key, size, _seed in objects])
    assert read["state"] == "DONE"
    assert read["digests"] == [digest_of(size, seed) for _key, size, seed in objects]


def test_a_chunk_of_another_size_is_refused_and_the_first_stays(engine: EngineProcess, server: ServerProcess) -> None:
    agent = open_agent(engine, server, "conflict", bucket="chunks")
    assert engine.ask("write", name=agent, objects=[("conflict", 4096, 1)]) == "DONE"
    assert engine.ask("write", name=agent, objects=[("conflict", 4097, 2)]).startswith("ERR")
    read = engine.ask("read", name=agent, ranges=[("conflict", 0, 4096)])
    assert read == {"state": "DONE", "digests": [digest_of(4096, 1)]}


def test_wrong_keys_are_told_from_a_miss(engine: EngineProcess, server: ServerProcess) -> None:
    agent = open_agent(engine, server, "wrong", bucket="plain", secret_key="not-the-right-one")
    with pytest.raises(RuntimeError, match="nixl"):
        engine.ask("query", name=agent, keys=[PROBE])
    assert engine.ask("write", name=agent, objects=[("wrong", 10, 1)]).startswith("ERR")
    with server.raw() as raw:
        assert raw.request("HEAD", "/plain/wrong").status == 404


def test_it_speaks_tls_with_an_authority_of_ones_own(engine: EngineProcess, tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    certificate, key = tmp_path / "tls.pem", tmp_path / "tls.key"
    authority.sign().write(certificate, key)
    files = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
    settings = ServerSettings(buckets=(BucketSetting("plain"),), sections={"server": files})
    with ServerProcess(tmp_path / "tls", settings) as server:
        more = {"bucket": "plain", "endpoint_override": f"https://127.0.0.1:{server.port}", "scheme": "https"}
        agent = open_agent(engine, server, "tls", ca_bundle=str(authority.bundle), **more)
        assert engine.ask("query", name=agent, keys=[PROBE]) == [False]
        assert engine.ask("write", name=agent, objects=[("tls", 3 * MIB, 1)]) == "DONE"
        read = engine.ask("read", name=agent, ranges=[("tls", 0, 3 * MIB)])
        assert read == {"state": "DONE", "digests": [digest_of(3 * MIB, 1)]}
