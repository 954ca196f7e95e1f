"""The hand-over demo with a tiny model: four ways from prefill to decode, processes of their own, and the same bits each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_handover import BUCKET, MODES, Handover, Plan, describe, hand_over, table
from engine_process import needs_engines
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

needs_engines()

SHAPE = {
    "layers": 6,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "inner": 128,
    "vocabulary": 128,
    "chunk_tokens": 64,
    "seed": 5,
}
LINK_MIB_S = 2.0
"""A layer of both chunks, 32 KiB, takes 16 ms on it: so times tell of the order of things, on a busy machine as well."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(chunks=2, tokens=8, runs=1, link_mib_s=LINK_MIB_S, shape=tuple(SHAPE.items()))


@pytest.fixture(scope="module")
def done(plan: Plan, module_paths: ModulePaths) -> dict[str, Handover]:
    directory: Path = module_paths.mktemp("handover")
    bucket = BucketSetting(BUCKET, kind="kv", durability="memory")
    settings = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=64 * MIB, buckets=(bucket,))
    with ServerProcess(directory / "server", settings) as server:
        results, _ = hand_over(plan, server, directory)
    assert [each.mode for each in results] == list(MODES)
    return {each.mode: each for each in results}


def test_every_way_generates_the_tokens_and_has_the_bits_of_a_run_without_any(done: dict[str, Handover]) -> None:
    assert [(each.mode, each.same_tokens, each.same_bits) for each in done.values()] == [
        (mode, True, True) for mode in MODES
    ]
    assert len({each.tokens for each in done.values()}) == 1
    assert len(done["push"].tokens) == 8


def test_attention_to_layer_0_begins_long_before_the_last_layer_has_come(done: dict[str, Handover]) -> None:
    """Over the paced link five more layers follow the first."""
    layer_seconds = 2 * 2 * 2 * 64 * 16 * 4 / (LINK_MIB_S * MIB)
    for mode in ("push", "pull", "shared"):
        assert done[mode].first_token - done[mode].first_layer > 3 * layer_seconds, mode
    assert done["push"].first_layer < done["pull"].first_layer < done["whole"].first_layer
    assert done["push"].first_token < done["whole"].first_token


def test_the_table_says_of_every_way_what_it_took_and_when_it_is_best(plan: Plan, done: dict[str, Handover]) -> None:
    text = describe(plan, SHAPE, "0") + table(plan, list(done.values()))
    assert all(f"\n{mode} " in text for mode in MODES)
    assert "paced to 2 MiB/s" in text
    assert "OTHER" not in text
