"""Look-ups of a scheduler over a real store: what is found whatever else is asked in its step, and what of it is held."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from link_world import settings_of
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.client import NewChunk
from kvobj.connectors import StoreLink
from kvobj.connectors.lookups import PINS_MAX, TOUCH_SECONDS, TOUCHED_MAX, Lookups

SETTINGS = ServerSettings(
    dram_bytes=64 * MIB, nvme_bytes=128 * MIB, buckets=(BucketSetting("cache", kind="kv", durability="memory"),)
)
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("lookups"), SETTINGS) as running:
        yield running


@pytest.fixture
def link(server: ServerProcess) -> Iterator[StoreLink]:
    with closing(StoreLink(settings_of(server))) as link:
        yield link


@pytest.fixture
def lookups(link: StoreLink) -> Iterator[Lookups]:
    with closing(Lookups(link, name_of=bytes.decode, deadline_seconds=DEADLINE_SECONDS)) as lookups:
        yield lookups


def keys_of(front: str, count: int) -> list[bytes]:
    return [b"%s/%d" % (front.encode(), index) for index in range(count)]


def stored(link: StoreLink, keys: list[bytes]) -> list[bytes]:
    assert all(link.store([NewChunk(key.decode(), key) for key in keys]))
    return keys


def answers(lookups: Lookups, asked: dict[str, list[bytes]]) -> dict[str, list[bool | None]]:
    """What requests that ask in one step are told in the end."""

    def told() -> dict[str, list[bool | None]]:
        return {request: [lookups.ask(key, request) for key in keys] for request, keys in asked.items()}

    told()
    lookups.flush()
    wait_until(
        lambda: not any(None in each for each in told().values()), timeout_seconds=DEADLINE_SECONDS, what="the answers"
    )
    return told()


def test_more_than_may_be_held_is_found_block_by_block_whichever_request_asks_first(
    lookups: Lookups, link: StoreLink
) -> None:
    long, short = stored(link, keys_of("long", PINS_MAX + 200)), stored(link, keys_of("short", 100))
    asked = {"long": [*long, *keys_of("new", 200)], "short": short}
    assert answers(lookups, asked) == {"long": [True] * len(long) + [False] * 200, "short": [True] * 100}
    held = link.report()["held"]
    assert isinstance(held, int)
    assert 0 < held <= PINS_MAX
    lookups.ended("long")
    assert answers(lookups, {"again": long[:10]}) == {"again": [True] * 10}
    lookups.ended("again")
    lookups.ended("short")
    assert link.report()["held"] == 0


def test_a_touch_of_many_blocks_costs_no_more_than_going_over_them(lookups: Lookups) -> None:
    keys = keys_of("touched", 16 * TOUCHED_MAX)
    began = time.monotonic()
    lookups.touch(keys)
    assert time.monotonic() - began < TOUCH_SECONDS, "the scheduler waits for it"
    assert list(lookups._touched) == keys[-TOUCHED_MAX:]
