"""Lifecycle rules in a whole node, on a clock turned by hand, and in a server whose days are short, as boto3 sees it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from fakes import ManualClock
from raw_http import RawConnection
from real_store import MIB, node_settings
from s3_driver import Driver, WallClock
from server_process import BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.app.admin_state import NodeView
from kvobj.app.node import Node, open_node
from kvobj.clock import boot_ms
from kvobj.config.settings import DebugSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.gc.lifecycle import LifecycleReport
from kvobj.metrics import Metrics

DAY_SECONDS = 1.0
BODY = b"b" * MIB


def rules(*inside: str) -> bytes:
    each = "".join(f"<Rule><Status>Enabled</Status>{rule}</Rule>" for rule in inside)
    return f"<LifecycleConfiguration>{each}</LifecycleConfiguration>".encode()


def days(count: int, key_prefix: str) -> str:
    return f"<Filter><Prefix>{key_prefix}</Prefix></Filter><Expiration><Days>{count}</Days></Expiration>"


@asynccontextmanager
async def running(settings: Settings, clock: ManualClock, metrics: Metrics) -> AsyncIterator[Node]:
    with DataDirectory.open(settings.server.data) as data:
        async with open_node(settings, data, clock=clock, metrics=metrics, log=logging.getLogger("test")) as node:
            yield node


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    made = node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)
    return replace(made, debug=DebugSettings(lifecycle_day_seconds=DAY_SECONDS))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_ms=WallClock().now_ms())  # requests are signed by the real one


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def node(settings: Settings, clock: ManualClock, metrics: Metrics) -> AsyncIterator[Node]:
    async with running(settings, clock, metrics) as opened:
        yield opened


async def listed(driver: Driver, bucket: str) -> list[str]:
    return (await driver.get(f"/{bucket}")).texts("Contents/Key")


async def test_expired_objects_are_gone_and_their_room_is_free_again(
    node: Node, clock: ManualClock, metrics: Metrics
) -> None:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/objects?lifecycle", rules(days(1, "short/"), days(3, "long/")))
    for key in ("short/a", "short/b", "long/a", "kept"):
        assert (await driver.put(f"/objects/{key}", BODY)).status == 200
    await node.sealing.drain()
    used = (await node.nvme.usage()).used_bytes
    lifecycle = node.upkeep.lifecycle
    assert await lifecycle.run_pass() == LifecycleReport()
    clock.advance(DAY_SECONDS)
    assert await lifecycle.run_pass() == LifecycleReport(objects=2, size_bytes=2 * MIB)
    assert await listed(driver, "objects") == ["kept", "long/a"]
    assert (await driver.get("/objects/short/a")).code == "NoSuchKey"
    while await node.reaper.reap_batch():
        pass
    assert (await node.nvme.usage()).used_bytes <= used - 2 * MIB
    figures = node.upkeep.parts.figures()
    assert (figures["lifecycle_objects"], figures["lifecycle_bytes"], figures["lifecycle_passes"]) == (2, 2 * MIB, 2)
    assert b"kvobj_gc_lifecycle_objects 2.0" in metrics.render()


async def test_an_object_that_is_written_again_has_its_days_before_it(node: Node, clock: ManualClock) -> None:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/objects?lifecycle", rules(days(2, "")))
    await driver.put("/objects/a", b"old")
    clock.advance(DAY_SECONDS)
    await driver.put("/objects/a", b"new")
    clock.advance(DAY_SECONDS)
    assert (await node.upkeep.lifecycle.run_pass()).objects == 0
    assert (await driver.get("/objects/a")).body == b"new"
    clock.advance(DAY_SECONDS)
    assert (await node.upkeep.lifecycle.run_pass()).objects == 1


async def test_an_upload_of_its_time_is_ended(node: Node, clock: ManualClock) -> None:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    abort = "<Filter><Prefix>up/</Prefix></Filter><AbortIncompleteMultipartUpload><DaysAfterInitiation>2</DaysAfterInitiation>"
    await driver.put("/objects?lifecycle", rules(abort + "</AbortIncompleteMultipartUpload>"))
    for key in ("up/a", "else"):
        created = await driver.request("POST", f"/objects/{key}?uploads")
        upload_id = created.xml.findtext("UploadId")
        assert (await driver.put(f"/objects/{key}?partNumber=1&uploadId={upload_id}", BODY)).status == 200
    clock.advance(60)
    assert await node.upkeep.lifecycle.run_pass() == LifecycleReport(uploads=1)
    assert (await driver.get("/objects?uploads")).texts("Upload/Key") == ["else"]


async def test_a_pin_reads_a_chunk_whose_time_is_over(node: Node, clock: ManualClock) -> None:
    driver = Driver(store=node.store)
    await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
    await driver.put("/chunks?lifecycle", rules(days(1, "")))
    for number in range(3):
        parent = f"c{number - 1}" if number else "root"
        assert (await driver.put(f"/chunks/c{number}", BODY, x_kvobj_parent=parent)).status == 200
    now_ms = boot_ms(clock)
    leases = node.catalog.leases
    session = await leases.open_session(user="alice", bucket="chunks", holder="h", ttl_ms=60_000, now_boot_ms=now_ms)
    granted = await leases.pin_tails(session.id, ["c1"], user="alice", bucket="chunks", now_boot_ms=now_ms)
    pin = granted.pins[0].pin
    assert pin is not None
    clock.advance(DAY_SECONDS)
    assert (await node.upkeep.lifecycle.run_pass()).objects == 3
    assert await listed(driver, "chunks") == []
    assert (await driver.get("/chunks/c1")).status == 404
    for key in ("c0", "c1"):
        assert (await driver.get(f"/chunks/{key}", x_kvobj_pin=pin.hex())).body == BODY
    assert await node.catalog.lookup_hidden("chunks", "c2") is None
    await leases.close_session(session.id, user="alice", bucket="chunks")


async def test_a_dry_run_of_gc_names_what_would_expire(node: Node, clock: ManualClock, metrics: Metrics) -> None:
    driver = Driver(store=node.store)
    await driver.put("/objects", b"")
    await driver.put("/objects?lifecycle", rules(days(1, "a"), days(1, "b"), days(9, "c")))
    for key in ("a", "b", "c"):
        await driver.put(f"/objects/{key}", b"12345")
    clock.advance(DAY_SECONDS)
    view = NodeView(node, clock=clock, metrics=metrics, receive_mode=lambda: "direct")
    plan = await view.gc_plan(1)
    assert [(victim.key, victim.reason) for victim in plan.victims] == [("a", "lifecycle")]
    assert (plan.chunks, plan.size_bytes) == (2, 10)
    assert await listed(driver, "objects") == ["a", "b", "c"]


async def test_rules_and_the_place_of_a_pass_survive_a_restart(
    settings: Settings, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(settings, clock, Metrics()) as node:
        driver = Driver(store=node.store)
        await driver.put("/objects", b"")
        await driver.put("/objects?lifecycle", rules(days(1, "a"), days(1, "b")))
        for key in ("a", "b"):
            await driver.put(f"/objects/{key}", b"data", x_kvobj_durability="local")
        clock.advance(DAY_SECONDS)
        removed = node.catalog.delete

        async def power_goes_at_b(bucket: str, keys: list[str], **more: object) -> object:
            if keys == ["b"]:
                raise ConnectionAbortedError
            return await removed(bucket, keys, **more)  # type: ignore[arg-type] # handed through

        monkeypatch.setattr(node.catalog, "delete", power_goes_at_b)
        with pytest.raises(ConnectionAbortedError):
            await node.upkeep.lifecycle.run_pass()
        await driver.put("/objects/a", b"data", x_kvobj_durability="local")
    clock.advance(DAY_SECONDS)
    async with running(settings, clock, Metrics()) as node:
        assert (await node.upkeep.lifecycle.run_pass()).objects == 1
        assert await listed(Driver(store=node.store), "objects") == ["a"]
        assert (await node.upkeep.lifecycle.run_pass()).objects == 1


# -- a server, its own worker, and boto3 ---------------------------------------------------------------------------------

LIFECYCLE = {
    "Rules": [
        {
            "ID": "short",
            "Status": "Enabled",
            "Filter": {"Prefix": "short/"},
            "Expiration": {"Days": 1},
        },
        {
            "ID": "tagged",
            "Status": "Enabled",
            "Filter": {"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "1"}], "ObjectSizeGreaterThan": 3}},
            "Expiration": {"Days": 1},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 2, "NewerNoncurrentVersions": 3},
        },
        {
            "ID": "uploads",
            "Status": "Enabled",
            "Filter": {},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        },
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
    ]
}
CORS = {
    "CORSRules": [
        {
            "ID": "one",
            "AllowedMethods": ["GET", "PUT"],
            "AllowedOrigins": ["https://*.test"],
            "AllowedHeaders": ["*"],
            "ExposeHeaders": ["ETag"],
            "MaxAgeSeconds": 600,
        },
        {"AllowedMethods": ["DELETE"], "AllowedOrigins": ["*"]},
    ]
}


def test_boto3_sets_rules_and_a_server_with_short_days_keeps_them(tmp_path: Path) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        buckets=(BucketSetting("objects"),),
        sections={"debug": {"lifecycle_day": '"200 ms"'}},
    )
    with ServerProcess(tmp_path / "server", settings) as server:
        credentials = server.credentials()
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=credentials.access_key,
            aws_secret_access_key=credentials.secret_key,
            region_name=credentials.region,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )
        for read, code in (
            (client.get_bucket_lifecycle_configuration, "NoSuchLifecycleConfiguration"),
            (client.get_bucket_cors, "NoSuchCORSConfiguration"),
        ):
            with pytest.raises(ClientError) as missing:
                read(Bucket="objects")
            assert missing.value.response["Error"]["Code"] == code
        client.put_bucket_lifecycle_configuration(Bucket="objects", LifecycleConfiguration=LIFECYCLE)
        assert client.get_bucket_lifecycle_configuration(Bucket="objects")["Rules"] == LIFECYCLE["Rules"]
        client.put_bucket_cors(Bucket="objects", CORSConfiguration=CORS)
        assert client.get_bucket_cors(Bucket="objects")["CORSRules"] == CORS["CORSRules"]

        put = client.put_object(Bucket="objects", Key="short/a", Body=b"data")
        assert 'rule-id="short"' in put["Expiration"]
        client.put_object(Bucket="objects", Key="tagged", Body=b"data", Tagging="a=1&b=2")
        client.put_object(Bucket="objects", Key="small", Body=b"abc", Tagging="a=1")
        client.create_multipart_upload(Bucket="objects", Key="upload")

        def is_over() -> bool:
            keys = [each["Key"] for each in client.list_objects_v2(Bucket="objects").get("Contents", [])]
            return keys == ["small"] and "Uploads" not in client.list_multipart_uploads(Bucket="objects")

        wait_until(is_over, timeout_seconds=20, what="what has had its time goes")

        with RawConnection(server.host, server.port) as connection:
            request = (
                "OPTIONS /objects/key HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://app.test\r\n"
                "Access-Control-Request-Method: PUT\r\nAccess-Control-Request-Headers: content-type\r\n\r\n"
            )
            connection.send(request.encode())
            reply = connection.read_reply()
            assert reply.status == 200
            assert reply.headers["access-control-allow-origin"] == "https://app.test"
            assert reply.headers["access-control-allow-headers"] == "content-type"
        client.delete_bucket_lifecycle(Bucket="objects")
        client.delete_bucket_cors(Bucket="objects")
        client.close()
