"""Two stores that were given one place for a tier: the second is refused, and the first keeps what it has."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from real_store import node_settings, running_node
from s3_driver import Driver

from kvobj.app.offline import fsck, rebuild
from kvobj.app.tier_claim import CLAIM_FILE, arena_kept, claimed
from kvobj.config.settings import ServerSettings, Settings
from kvobj.errors import ConfigurationError, StoreFullError, UnavailableError

BODY = bytes(range(256)) * 4096
DATA = Path("/absent/data")


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    made = node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)
    return replace(made, nvme=replace(made.nvme, path=tmp_path / "nvme"))


def of_another(settings: Settings, tmp_path: Path, *, memory: Path | None = None) -> Settings:
    """The same configuration with another data directory, and with another place for memory if one is given."""
    dram = settings.dram if memory is None else replace(settings.dram, path=memory)
    return replace(settings, server=ServerSettings(data=tmp_path / "other"), dram=dram)


async def store_a_chunk(settings: Settings, durability: str) -> None:
    """Of class `memory`: it ends as a crash would, and leaves its arena, which alone has the chunk."""
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        await driver.put("/chunks", b"", x_kvobj_bucket_kind="kv")
        put = await driver.put("/chunks/a", BODY, x_kvobj_durability=durability)
        assert (put.status, put.headers["x-kvobj-durability"]) == (200, durability)


async def found(settings: Settings) -> object:
    async with running_node(settings) as node:
        return (await Driver(store=node.store).get("/chunks/a")).body


async def start(settings: Settings) -> None:
    async with running_node(settings):
        pass


def problem_of(settings: Settings) -> str:
    with pytest.raises(ConfigurationError) as refused:
        asyncio.run(start(settings))
    (problem,) = refused.value.problems
    return problem


def test_the_segments_of_another_store_are_not_taken(settings: Settings, tmp_path: Path, shm_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    other = of_another(settings, tmp_path, memory=shm_path / "other")
    problem = problem_of(other)
    assert problem.startswith(f"tiers: nvme: {tmp_path}/nvme belongs to another store (")
    assert "give this one a path of its own" in problem
    with pytest.raises(ConfigurationError):
        rebuild(other, lambda *_: None)
    assert asyncio.run(found(settings)) == BODY
    shutil.rmtree(tmp_path / "nvme")
    asyncio.run(start(other))


def test_the_memory_of_another_store_is_not_taken_as_long_as_that_is_there(settings: Settings, tmp_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "memory"))
    other = replace(of_another(settings, tmp_path), nvme=replace(settings.nvme, path=tmp_path / "other-nvme"))
    problem = problem_of(other)
    assert problem.startswith("tiers: dram: ")
    assert f"holds the memory of the store in {tmp_path}/data" in problem
    assert asyncio.run(found(settings)) == BODY
    shutil.rmtree(tmp_path / "data")
    asyncio.run(start(other))


def test_a_copy_of_a_data_directory_does_not_take_the_originals_memory(settings: Settings, tmp_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "memory"))
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    copied = of_another(settings, tmp_path)
    assert "holds the memory of the store in" in problem_of(copied)
    with pytest.raises(ConfigurationError):
        fsck(copied, lambda *_: None)
    shutil.rmtree(tmp_path / "data")  # moved, that is
    assert asyncio.run(found(copied)) == BODY


def test_a_copy_of_a_data_directory_does_not_take_the_originals_segments(
    settings: Settings, tmp_path: Path, shm_path: Path
) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    copied = of_another(settings, tmp_path, memory=shm_path / "other")
    problem = problem_of(copied)
    assert problem.startswith(f"tiers: nvme: {tmp_path}/nvme holds the segments of the store in {tmp_path}/data, ")
    assert "or move that data directory away" in problem
    with pytest.raises(ConfigurationError, match="holds the segments of the store in"):
        fsck(copied, lambda *_: None)
    assert asyncio.run(found(settings)) == BODY
    shutil.rmtree(tmp_path / "data")  # moved, that is
    assert asyncio.run(found(copied)) == BODY
    shutil.copytree(tmp_path / "other", tmp_path / "data")
    assert f"holds the segments of the store in {tmp_path}/other" in problem_of(settings)


def test_a_copy_with_its_memory_and_its_segments_inside_starts_beside_the_original(tmp_path: Path) -> None:
    def inside(data: Path) -> Settings:
        made = node_settings(data, data, dram_mib=16, nvme_mib=64)
        assert made.nvme.path is None
        return made

    asyncio.run(store_a_chunk(inside(tmp_path / "data"), "memory"))
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    for each in ("other", "data"):
        assert asyncio.run(found(inside(tmp_path / each))) == BODY


def test_segments_that_an_earlier_version_left_unmarked_are_the_stores_own(settings: Settings, tmp_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    (tmp_path / "nvme" / CLAIM_FILE).unlink()
    assert asyncio.run(found(settings)) == BODY
    assert (tmp_path / "nvme" / CLAIM_FILE).exists()


def test_a_new_store_takes_no_segments_that_it_finds(settings: Settings, tmp_path: Path, shm_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    (tmp_path / "nvme" / CLAIM_FILE).unlink()
    assert "another store (it holds segments)" in problem_of(of_another(settings, tmp_path, memory=shm_path / "other"))
    assert asyncio.run(found(settings)) == BODY


def test_a_directory_is_one_processes_at_a_time(tmp_path: Path) -> None:
    with (
        claimed(tmp_path, b"1" * 16, DATA),
        pytest.raises(UnavailableError, match="in use by another process"),
        claimed(tmp_path, b"1" * 16, DATA),
    ):
        pass
    with claimed(tmp_path, b"1" * 16, DATA):
        pass
    with claimed(tmp_path, b"2" * 16, DATA, also=(b"1" * 16,)):
        pass
    with pytest.raises(ConfigurationError), claimed(tmp_path, b"1" * 16, DATA):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_keeps_no_store_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with claimed(tmp_path, b"1" * 16, DATA):
        pass
    with pytest.raises(ConfigurationError), claimed(tmp_path, b"2" * 16, DATA):
        pass


@pytest.mark.parametrize(("module", "call"), [(fcntl, "flock"), (os, "pread"), (os, "pwrite")])
def test_a_file_that_cannot_be_read_locked_or_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str
) -> None:
    monkeypatch.setattr(module, call, failing(errno.EIO))
    with (
        pytest.raises(ConfigurationError, match="cannot be used: Input/output error"),
        claimed(tmp_path, b"1" * 16, DATA),
    ):
        pass


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_check_writes_nothing_beside_the_segments(settings: Settings, tmp_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    claim = tmp_path / "nvme" / CLAIM_FILE
    claim.write_bytes(claim.read_bytes().splitlines(keepends=True)[0])
    before = (claim.read_bytes(), claim.stat().st_mtime_ns)
    assert fsck(settings, lambda *_: None).problems == 0
    assert (claim.read_bytes(), claim.stat().st_mtime_ns) == before
    claim.unlink()
    assert fsck(settings, lambda *_: None).problems == 0
    assert not claim.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_writes_beside_the_segments_is_of_whose_directory_it_is(settings: Settings, tmp_path: Path) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    claim = tmp_path / "nvme" / CLAIM_FILE
    claim.unlink()
    os.chown(tmp_path / "nvme", 12345, 23456)
    assert rebuild(settings, lambda *_: None).problems == 0
    assert (claim.stat().st_uid, claim.stat().st_gid) == (12345, 23456)


def test_the_arenas_directory_is_one_processes_at_a_time(settings: Settings, shm_path: Path) -> None:
    with (
        arena_kept(shm_path / "arena"),
        pytest.raises(UnavailableError, match="arena's directory is in use by another"),
    ):
        asyncio.run(start(settings))
    assert not (shm_path / "arena").exists()
    asyncio.run(store_a_chunk(settings, "memory"))
    with (
        arena_kept(shm_path / "arena"),
        pytest.raises(UnavailableError, match="arena's directory is in use by another"),
    ):
        rebuild(settings, lambda *_: None)
    assert asyncio.run(found(settings)) == BODY


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_a_full_disk_keeps_no_store_from_starting(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    asyncio.run(store_a_chunk(settings, "local"))
    claim = tmp_path / "nvme" / CLAIM_FILE
    text = claim.read_bytes()
    claim.unlink()
    real = getattr(os, call)
    refused = 0

    def refuse(*arguments: object, **named: object) -> object:
        nonlocal refused
        is_claim = arguments[0] == claim if call == "open" else arguments[1] == text
        if is_claim:
            refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, refuse)
    assert asyncio.run(found(settings)) == BODY
    assert refused == 1
    assert not claim.exists() if call == "open" else claim.read_bytes() == b""


def test_a_path_that_is_no_directory_is_told(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "nvme").write_bytes(b"")
    assert problem_of(settings) == f"tiers: nvme: {tmp_path}/nvme: cannot be used: File exists"
    (tmp_path / "memory").write_bytes(b"")
    inside = replace(settings, nvme=replace(settings.nvme, path=None))
    unusable = replace(inside, dram=replace(settings.dram, path=tmp_path / "memory"))
    told = f"tiers: dram: {tmp_path}/memory: cannot be used: "
    assert problem_of(unusable) == f"{told}File exists"
    asyncio.run(start(inside))
    for command in (rebuild, fsck):
        with pytest.raises(ConfigurationError, match=told):
            command(unusable, lambda *_: None)
    assert fsck(inside, lambda *_: None).problems == 0


def test_serving_with_memory_where_nothing_can_be_made_exits_2_and_names_the_tier(tmp_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text(
        f'[server]\ndata = "{tmp_path}/data"\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
        '[[tiers]]\nkind = "dram"\ncapacity = "16MiB"\npath = "/proc/kvobj"\n'
        '[[tiers]]\nkind = "nvme"\ncapacity = "64MiB"\n'
    )
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "\n  tiers: dram: /proc/kvobj: cannot be used: " in ended.stderr


def test_no_room_for_the_memory_is_no_fault_of_the_configurations(settings: Settings) -> None:
    with pytest.raises(StoreFullError, match="no room for the arena"):
        asyncio.run(start(replace(settings, dram=replace(settings.dram, capacity_bytes=1 << 60))))
