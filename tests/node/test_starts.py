"""What a start makes of what it finds: chunks whose parents are lost, after whatever tool looked first; a wrong wrapping key."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import node_settings, running_node
from s3_driver import Driver
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting

from kvobj.app import node as node_module
from kvobj.app.admin_state import NodeView
from kvobj.app.lm_listener import start_lm
from kvobj.app.node import flush, open_node
from kvobj.app.offline import fsck, rebuild
from kvobj.clock import SystemClock, boot_ms
from kvobj.config import parse_settings
from kvobj.config.settings import BucketSettings, LmSettings, SecuritySettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.errors import ConfigurationError
from kvobj.metrics import Metrics
from kvobj.store.chunk_values import Caller


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    return node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)


async def leave_a_chain(settings: Settings) -> None:
    """A chain of three whose middle is in memory alone; the process ends and leaves the arena. A holder's session is open."""
    async with running_node(settings) as node:
        # On a slow machine the chain takes longer than write-behind leaves its middle alone.
        await node.write_behind.aclose()
        driver = Driver(store=node.store)
        await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        for key, parent, durability in (("a", "root", "local"), ("b", "a", "memory"), ("c", "b", "local")):
            put = await driver.put(f"/chunks/{key}", key.encode(), x_kvobj_parent=parent, x_kvobj_durability=durability)
            assert put.headers["x-kvobj-durability"] == durability
        await node.catalog.leases.open_session(
            user="alice", bucket="chunks", holder="h", ttl_ms=60_000, now_boot_ms=boot_ms(SystemClock())
        )


async def found_by_a_start(settings: Settings) -> tuple[list[str], int, bool]:
    """Live keys, orphans dropped, whether it is quiet time."""
    async with running_node(settings) as node:
        keys = [row.key for row in (await node.catalog.list_objects("chunks")).rows]
        return keys, node.recovery.dropped_orphans, node.catalog.leases.usage().quiet


def test_after_a_crash_nothing_is_lost(settings: Settings) -> None:
    asyncio.run(leave_a_chain(settings))
    assert asyncio.run(found_by_a_start(settings)) == (["a", "b", "c"], 0, False)


def test_after_a_rebuild_beside_a_kept_arena_no_chunk_lacks_its_parent(settings: Settings) -> None:
    asyncio.run(leave_a_chain(settings))
    assert rebuild(settings, lambda *_: None).problems == 0
    assert asyncio.run(found_by_a_start(settings)) == (["a"], 1, True)
    assert asyncio.run(found_by_a_start(settings))[:2] == (["a"], 0)


def test_a_check_of_a_crashed_store_takes_nothing_from_it(settings: Settings) -> None:
    asyncio.run(leave_a_chain(settings))
    assert fsck(settings, lambda *_: None).problems == 0
    assert asyncio.run(found_by_a_start(settings)) == (["a", "b", "c"], 0, False)


def test_a_check_after_a_reboot_does_not_hide_from_the_start_what_was_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(node_module, "current_boot_id", lambda: "earlier")
        asyncio.run(leave_a_chain(settings))
    assert fsck(settings, lambda *_: None).problems == 0
    assert asyncio.run(found_by_a_start(settings)) == (["a"], 1, True)


# -- the wrapping key --------------------------------------------------------------------------------------------------


async def declare(settings: Settings) -> None:
    async with running_node(settings) as node:
        await Driver(store=node.store).put("/chunks", b"", x_kvobj_bucket_kind="kv")
        bucket = await node.catalog.bucket("chunks")
        assert bucket is not None
        document = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "kvobj"}
        await node.kv.book.declare(bucket, "ns", document, caller=Caller(user_id="root", is_owner=True))


async def start(settings: Settings) -> None:
    async with running_node(settings):
        pass


def with_key(settings: Settings, byte: int) -> Settings:
    return replace(settings, security=SecuritySettings(wrapping_key=bytes([byte]) * 32))


def test_a_start_with_another_wrapping_key_says_so(settings: Settings) -> None:
    asyncio.run(start(with_key(settings, 1)))  # nothing is declared yet: any key will do
    asyncio.run(declare(with_key(settings, 2)))
    asyncio.run(start(with_key(settings, 2)))
    for wrong in (with_key(settings, 3), settings):
        with pytest.raises(ConfigurationError) as refused:
            asyncio.run(start(wrong))
        (problem,) = refused.value.problems
        assert problem.startswith("security.wrapping_key_env: ")
        assert "bucket=chunks namespace=ns" in problem
    asyncio.run(start(with_key(settings, 2)))


def test_serving_with_another_wrapping_key_exits_2(settings: Settings, tmp_path: Path, shm_path: Path) -> None:
    asyncio.run(declare(settings))
    config = tmp_path / "kvobj.toml"
    config.write_text(
        f'[server]\ndata = "{settings.server.data}"\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
        f'[[tiers]]\nkind = "dram"\ncapacity = "16MiB"\nregion_size = "16MiB"\npath = "{shm_path}/arena"\n'
        '[[tiers]]\nkind = "nvme"\ncapacity = "64MiB"\nsegment_size = "64MiB"\n'
        '[security]\nwrapping_key_env = "KEY"\n'
    )
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
    environment = {**os.environ, "KEY": "07" * 32}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "\n  security.wrapping_key_env: " in ended.stderr


# -- figures -----------------------------------------------------------------------------------------------------------


async def test_events_have_figures(settings: Settings) -> None:
    metrics = Metrics()
    with DataDirectory.open(settings.server.data) as data:
        async with open_node(
            settings, data, clock=SystemClock(), metrics=metrics, log=logging.getLogger("test")
        ) as node:
            driver = Driver(store=node.store)
            await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
            await driver.put("/chunks/a", b"a")
            await driver.put("/chunks/b", b"b")
            text = metrics.render().decode()
            last = float(node.catalog.history.last_sequence())
    assert "\nkvobj_events_kept 2.0" in text
    (line,) = [line for line in text.splitlines() if line.startswith("kvobj_events_last_sequence ")]
    assert 0 < float(line.split()[1]) <= last


# -- what a start tells ------------------------------------------------------------------------------------------------


def unnumbered(note: str) -> str:
    return re.sub(r"[0-9]+", "#", note)


async def notes_of(settings: Settings) -> tuple[str, ...]:
    metrics = Metrics()
    async with running_node(settings) as node:
        view = NodeView(node, clock=SystemClock(), metrics=metrics, receive_mode=lambda: "direct")
        notes = await view.notes()
        # Without figures: what is free on a busy disk differs from one look to the next.
        assert [unnumbered(note) for note in notes] == [unnumbered(note) for note in (await view.status()).notes]
        return notes


def test_a_start_without_the_disk_of_its_segments_says_so_and_drops_no_row(settings: Settings) -> None:
    async def store_a_chunk() -> None:
        async with running_node(settings) as node:
            driver = Driver(store=node.store)
            await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
            put = await driver.put("/chunks/a", bytes(1 << 20), x_kvobj_durability="local")
            assert put.headers["x-kvobj-durability"] == "local"
            assert await flush(node, timeout_seconds=60)

    async def compared() -> int:
        async with running_node(settings) as node:
            assert (await node.upkeep.sweep.sweep()).lost_rows == 0
            return len((await node.catalog.list_objects("chunks")).rows)

    asyncio.run(store_a_chunk())
    assert not any("segment" in note for note in asyncio.run(notes_of(settings)))
    segments = settings.server.data / "nvme"
    segments.rename(settings.server.data.parent / "elsewhere")
    (note,) = [note for note in asyncio.run(notes_of(settings)) if "segment" in note]
    assert note.startswith("1 segment files of the nvme tier were not there at the start")
    assert str(segments / "segment-000000") in note
    assert "Is its disk mounted?" in note
    assert asyncio.run(compared()) == 1


def with_buckets(settings: Settings, text: str) -> Settings:
    return replace(settings, buckets=parse_settings(tomllib.loads(text), environment={}).buckets)


def bucket_notes(settings: Settings, text: str) -> list[str]:
    notes = asyncio.run(notes_of(with_buckets(settings, text)))
    return [note for note in notes if note.startswith("bucket ")]


def test_a_bucket_that_stands_otherwise_than_the_configuration_says_is_told(settings: Settings) -> None:
    standing = '[[buckets]]\nname="cache"\n[[buckets]]\nname="chunks"\nkind="kv"\ndurability="local"\n'
    assert bucket_notes(settings, standing) == []
    assert bucket_notes(settings, standing) == []
    # What follows from the kind, or from nothing that is said, is no difference.
    assert bucket_notes(settings, '[[buckets]]\nname="chunks"\nregions="own"\n') == []
    said = (
        '[[buckets]]\nname="cache"\nkind="kv"\nowner="root"\n'
        '[[buckets]]\nname="chunks"\nkind="kv"\ncodec="zp"\ndurability="memory"\n'
    )
    assert bucket_notes(settings, said) == [
        "bucket cache stands with kind=ordinary; the configuration says kind=kv: left as it is",
        "bucket chunks stands with durability=local codec=raw; the configuration says durability=memory codec=zp: left as it is",
    ]


def test_the_log_warns_once_of_a_bucket_of_another_owner(tmp_path: Path) -> None:
    users = (UserSetting("engine", "engine-key", "engine-secret"),)
    settings = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=256 * MIB, buckets=(BucketSetting("cache"),), users=users)
    with ServerProcess(tmp_path / "server", settings) as server:
        assert server.terminate() == 0
        server.settings = replace(settings, buckets=(BucketSetting("cache", "kv", owner="engine"),))
        server.start()
        told = "bucket cache stands with kind=ordinary owner=root; the configuration says kind=kv owner=engine: left as it is"
        assert told in server.status()["notes"]
        assert server.terminate() == 0
        lines = [json.loads(line) for line in server.log_path.read_text().splitlines() if line.startswith("{")]
    assert [line["level"] for line in lines if line.get("message") == told] == ["warning"]


@pytest.mark.parametrize(
    ("bucket", "user", "problem"),
    [
        ("nowhere", "root", "lm.bucket: no such bucket bucket=nowhere"),
        ("plain", "root", "lm.bucket: lm:// serves a bucket of kind kv bucket=plain"),
        ("chunks", "who", "lm.user: no such user user_id=who"),
        ("chunks", "bob", "lm.user: not the bucket's owner bucket=chunks user_id=bob"),
    ],
)
async def test_what_an_lm_listener_cannot_use_is_told_by_its_own_key(
    settings: Settings, bucket: str, user: str, problem: str
) -> None:
    buckets = (BucketSettings("plain"), BucketSettings("chunks", "kv", "memory"))
    settings = replace(settings, buckets=buckets, lm=LmSettings(bucket=bucket, user=user))
    async with running_node(settings) as node:
        with socket.create_server(("127.0.0.1", 0)) as bound, pytest.raises(ConfigurationError) as refused:
            await start_lm(
                node, node.store, bound, clock=SystemClock(), metrics=Metrics(), log=logging.getLogger("test")
            )
    assert refused.value.problems == [problem]


def test_the_log_tells_of_a_start_and_of_a_stop(tmp_path: Path, shm_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text(
        f'[server]\ndata = "{tmp_path}/data"\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
        f'[[tiers]]\nkind = "dram"\ncapacity = "16MiB"\nregion_size = "16MiB"\npath = "{shm_path}/arena"\n'
        '[[tiers]]\nkind = "nvme"\ncapacity = "64MiB"\nsegment_size = "64MiB"\n'
    )
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
    said = []
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[2]
            server.terminate()
            log = [json.loads(line) for line in server.communicate()[1].splitlines()]
        (ready,) = [line for line in log if line["message"].startswith("ready: ")]
        assert ready["level"] == "info"
        assert f" on {url}, " in ready["message"]
        assert ready["message"].endswith(f"data in {tmp_path}/data, memory new")
        said.append(log[-1]["message"])
    assert said == ["stopped: everything is written down"] * 2
