"""Where `fsck` and `rebuild` look for the segments of a stopped store, and which places they refuse."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_store import node_settings, running_node
from s3_driver import Driver

from kvobj.admin.cli import main
from kvobj.app.tier_claim import CLAIM_FILE
from kvobj.config.settings import ServerSettings, Settings
from kvobj.data_directory import DataDirectory

BODY = bytes(range(256)) * 4096

Admin = Callable[..., tuple[int, str, str]]


@pytest.fixture
def settings(tmp_path: Path, shm_path: Path) -> Settings:
    made = node_settings(tmp_path / "data", shm_path, dram_mib=16, nvme_mib=64)
    return replace(made, nvme=replace(made.nvme, path=tmp_path / "disk" / "nvme"))


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Admin:
    """Runs a command on the data directory; returns status, standard output and standard error."""

    def run(*arguments: str, data: str = "data") -> tuple[int, str, str]:
        status = main(["--data", str(tmp_path / data), *arguments], environment={})
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def configuration(settings: Settings, nvme: Path | None) -> str:
    """A file of these settings with the nvme tier's path as given."""
    file = settings.server.data.parent / "kvobj.toml"
    path = "" if nvme is None else f'path = "{nvme}"\n'
    file.write_text(
        f'[server]\ndata = "{settings.server.data}"\n'
        f'[[tiers]]\nkind = "dram"\ncapacity = "16MiB"\npath = "{settings.dram.path}"\n'
        f'[[tiers]]\nkind = "nvme"\ncapacity = "64MiB"\nsegment_size = "64MiB"\n{path}'
    )
    return str(file)


async def store_an_object(settings: Settings, body: bytes = BODY) -> None:
    async with running_node(settings) as node:
        driver = Driver(store=node.store)
        await driver.put("/plain", b"")
        put = await driver.put("/plain/a", body)
        assert (put.status, put.headers["x-kvobj-durability"]) == (200, "local")


def stored(settings: Settings, body: bytes = BODY) -> Path:
    """A store with an object, which is stopped; its nvme tier's directory. Nothing is left in memory."""
    asyncio.run(store_an_object(settings, body))
    assert settings.dram.path is not None
    assert not settings.dram.path.exists()
    return settings.nvme.path or settings.server.data / "nvme"


async def found(settings: Settings) -> object:
    async with running_node(settings) as node:
        return (await Driver(store=node.store).get("/plain/a")).body


@pytest.mark.parametrize("command", ["fsck", "rebuild"])
def test_without_a_configuration_segments_are_read_where_the_last_start_had_them(
    settings: Settings, admin: Admin, command: str
) -> None:
    nvme = stored(settings)
    status, out, _ = admin(command)
    assert status == 0
    assert f"no configuration is given: segments are read from {nvme}, where the last start had them" in out
    assert not (settings.server.data / "nvme").exists()
    status, out, _ = admin("--json", command)
    assert (status, json.loads(out)["problems"]) == (0, 0)
    assert str(nvme) in json.loads(out)["notes"][0]
    assert asyncio.run(found(settings)) == BODY


@pytest.mark.parametrize("command", ["fsck", "rebuild"])
def test_a_configuration_that_has_the_segments_elsewhere_is_refused_and_changes_nothing(
    settings: Settings, admin: Admin, tmp_path: Path, command: str
) -> None:
    nvme = stored(settings)
    for other in (None, tmp_path / "elsewhere"):
        status, _, err = admin(command, "--config", configuration(settings, other))
        assert status == 2
        assert str(nvme) in err
        assert str(other or settings.server.data / "nvme") in err
    assert not (tmp_path / "elsewhere").exists()
    assert not (settings.server.data / "nvme").exists()
    assert asyncio.run(found(settings)) == BODY


def test_a_configuration_with_the_place_that_segments_were_moved_to_is_taken(
    settings: Settings, admin: Admin, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    stored(settings).rename(moved)
    for command in ("fsck", "rebuild", "fsck"):
        assert admin(command, "--config", configuration(settings, moved))[0] == 0
    assert asyncio.run(found(replace(settings, nvme=replace(settings.nvme, path=moved)))) == BODY
    assert admin("rebuild")[0] == 0


def test_a_copy_with_a_copy_of_the_segments_is_checked_and_rebuilt_before_it_was_started(
    settings: Settings, admin: Admin, tmp_path: Path, shm_path: Path
) -> None:
    nvme = stored(settings)
    copied = replace(
        settings,
        server=ServerSettings(data=tmp_path / "other"),
        dram=replace(settings.dram, path=shm_path / "other"),
        nvme=replace(settings.nvme, path=tmp_path / "other-nvme"),
    )
    shutil.copytree(settings.server.data, copied.server.data)
    shutil.copytree(nvme, tmp_path / "other-nvme", ignore=shutil.ignore_patterns(CLAIM_FILE))
    status, _, err = admin("rebuild", data="other")
    assert (status, "holds the segments of the store in" in err) == (2, True)
    for command in ("fsck", "rebuild"):
        assert admin(command, "--config", configuration(copied, tmp_path / "other-nvme"), data="other")[0] == 0
    assert asyncio.run(found(copied)) == BODY
    assert asyncio.run(found(settings)) == BODY


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_rebuild_without_the_disk_of_the_segments_is_refused_unless_that_is_lost(
    settings: Settings, admin: Admin, *, is_mounted: bool
) -> None:
    nvme = stored(settings)
    away = nvme.with_name("unmounted")
    nvme.rename(away)
    if is_mounted:  # another disk, or none yet
        nvme.mkdir()
    for arguments in ((), ("--config", configuration(settings, nvme))):
        status, _, err = admin("rebuild", *arguments)
        assert status == 2
        assert f"{nvme}: no segments of this store are there" in err
        assert "--config" in err
        assert "--keep-missing" in err
    assert nvme.exists() is is_mounted
    if is_mounted:
        assert list(nvme.iterdir()) == []
        nvme.rmdir()
    away.rename(nvme)
    assert asyncio.run(found(settings)) == BODY
    shutil.rmtree(nvme)
    status, out, _ = admin("--json", "rebuild", "--keep-missing", "--config", configuration(settings, nvme))
    assert (status, json.loads(out)["missing_blobs"]) == (1, 1)
    assert asyncio.run(found(settings)) != BODY


def test_a_lost_disk_may_be_replaced_by_one_in_another_place(settings: Settings, admin: Admin, tmp_path: Path) -> None:
    nvme = stored(settings)
    other = configuration(settings, tmp_path / "new")
    assert admin("rebuild", "--keep-missing", "--config", other)[0] == 2  # it is there
    shutil.rmtree(nvme)
    assert admin("rebuild", "--config", other)[0] == 2
    assert admin("rebuild", "--keep-missing", "--config", other)[0] == 1


def test_a_store_of_a_version_that_wrote_no_place_down_is_not_rebuilt_from_an_empty_one(
    settings: Settings, admin: Admin
) -> None:
    nvme = stored(settings)
    (settings.server.data / "nvme_path").unlink()
    status, _, err = admin("rebuild")
    assert status == 2
    assert f"{settings.server.data}/nvme: no segments of this store are there" in err
    status, _, err = admin("fsck")
    assert status == 2
    assert f"{settings.server.data}/nvme is not there" in err
    assert not (settings.server.data / "nvme").exists()
    (nvme / CLAIM_FILE).unlink()
    assert admin("rebuild", "--config", configuration(settings, nvme))[0] == 0
    assert asyncio.run(found(settings)) == BODY


def test_a_store_whose_bytes_are_all_in_its_log_needs_no_segments(settings: Settings, admin: Admin) -> None:
    nvme = stored(settings, b"small")
    shutil.rmtree(nvme)
    assert admin("rebuild")[0] == 0
    assert asyncio.run(found(settings)) == b"small"


def test_an_object_that_was_removed_needs_no_segments(settings: Settings, admin: Admin) -> None:
    async def remove() -> None:
        async with running_node(settings) as node:
            assert (await Driver(store=node.store).request("DELETE", "/plain/a")).status == 204

    nvme = stored(settings)
    asyncio.run(remove())
    shutil.rmtree(nvme)
    assert admin("rebuild")[0] == 0


def test_a_start_that_finds_no_segments_does_not_write_its_place_down(
    settings: Settings, admin: Admin, tmp_path: Path
) -> None:
    nvme = stored(settings)
    wrong = replace(settings, nvme=replace(settings.nvme, path=tmp_path / "wrong"))
    assert asyncio.run(found(wrong)) != BODY
    status, out, _ = admin("fsck")
    assert (status, str(nvme) in out) == (0, True)
    assert asyncio.run(found(settings)) == BODY


def test_the_place_within_a_data_directory_moves_along_with_it(
    settings: Settings, admin: Admin, tmp_path: Path
) -> None:
    inside = replace(settings, nvme=replace(settings.nvme, path=None))
    stored(inside)
    with DataDirectory.open(inside.server.data, create=False) as data:
        assert data.noted_nvme_path() == data.nvme_path
    inside.server.data.rename(tmp_path / "moved")
    for command in ("fsck", "rebuild"):
        status, out, _ = admin("--json", command, data="moved")
        assert (status, json.loads(out)["notes"]) == (0, [])
    moved = replace(inside, server=ServerSettings(data=tmp_path / "moved"))
    assert asyncio.run(found(moved)) == BODY


def test_a_place_is_written_down_whole_whatever_its_name(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as data:
        assert data.noted_nvme_path() is None
        for place in (tmp_path / "a b\nc", tmp_path / "data" / "fast", tmp_path / "data"):
            data.note_nvme_path(place)
            assert data.noted_nvme_path() == place
        (tmp_path / "link").symlink_to(tmp_path / "data")
        data.note_nvme_path(tmp_path / "link" / "nvme")
        assert data.noted_nvme_path() == tmp_path / "data" / "nvme"
        assert (tmp_path / "data" / "nvme_path").read_bytes() == b"nvme\n"
