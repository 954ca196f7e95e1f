"""What the engines' pages tell to copy is taken by what it configures, and their tables have every setting."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvobj.config import parse_settings
from kvobj.connectors import LinkSettings
from kvobj.connectors.engine_namespace import EngineFacts, link_settings
from kvobj.connectors.link_settings import CREDENTIALS_FILE
from kvobj.connectors.lmcache.plugin_settings import plugin_settings

REPOSITORY = Path(__file__).resolve().parents[2]
KEYS = {"KVOBJ_ACCESS_KEY": "access", "KVOBJ_SECRET_KEY": "secret"}
FACTS = EngineFacts("engine", "example/Model-8B", 256, {})
LOADERS = {"type", "backend_name", "module_path", "class_name", "interface_v1"}
"""Settings of who loads a plug-in."""


def page(path: str) -> str:
    return (REPOSITORY / path).read_text()


def given(path: str, option: str) -> dict[str, Any]:
    """The JSON that a page gives a command's option, the first that is whole."""
    found = re.search(re.escape(option) + r" '(\{[^']*\})'", page(path))
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


def without_file(settings: dict[str, Any]) -> dict[str, Any]:
    """Its keys come from the environment instead: the page's file is not here."""
    return {name: value for name, value in settings.items() if name != CREDENTIALS_FILE and name not in LOADERS}


@pytest.mark.parametrize(("path", "bucket"), [("README.md", "chunks"), ("docs/engines/lmcache.md", "cache")])
def test_the_l2_adapter_takes_what_is_told_to_copy(path: str, bucket: str) -> None:
    adapter = given(path, "--l2-adapter")
    assert (adapter["type"], adapter["module_path"]) == ("plugin", "kvobj.connectors.lmcache")
    assert CREDENTIALS_FILE in adapter["adapter_params"]
    assert LinkSettings.parse(without_file(adapter["adapter_params"]), KEYS).bucket == bucket


def test_the_connector_takes_what_is_told_to_copy() -> None:
    lines = re.findall(r"^ +(remote_storage_plugin\.\S+): (\S+)$", page("docs/engines/lmcache.md"), re.MULTILINE)
    settings = without_file(plugin_settings(dict(lines), "kvobj"))
    assert LinkSettings.parse(settings, KEYS).bucket == "cache"


def test_vllms_tier_takes_what_is_told_to_copy() -> None:
    told = given("docs/engines/vllm.md", "--kv-transfer-config")
    (tier,) = told["kv_connector_extra_config"]["secondary_tiers"]
    assert (tier["type"], tier["module_path"]) == ("KvobjTier", "kvobj.connectors.vllm")
    assert link_settings(without_file(tier), KEYS, FACTS).bucket == "cache"


def test_sglangs_backend_takes_what_is_told_to_copy() -> None:
    table = given("docs/engines/sglang.md", "--hicache-storage-backend-extra-config")
    assert (table["module_path"], table["class_name"]) == ("kvobj.connectors.sglang", "KvobjHiCache")
    assert link_settings(without_file(table), KEYS, FACTS).bucket == "cache"


@pytest.mark.parametrize("path", ["docs/engines.md", "docs/engines/lmcache.md"])
def test_a_declaration_is_told_with_its_namespace(path: str) -> None:
    found = re.search(
        r'"namespace": "llama8b-fp8",\s+"declaration": \{.*?\}, "ids": "foreign"\}', page(path), re.DOTALL
    )
    assert found is not None
    place = {"endpoint": "http://127.0.0.1:9000", "bucket": "cache"}
    settings = LinkSettings.parse({**place, **json.loads("{" + found[0] + "}")}, KEYS)
    assert settings.declaration is not None
    assert settings.declaration["model"] == "meta-llama/Llama-3.1-8B"


def test_the_lm_listeners_section_is_one() -> None:
    block = page("docs/engines/lm-protocol.md").partition("    [lm]\n")[2].partition("\n\n")[0]
    section = tomllib.loads("[lm]\n" + "\n".join(line.strip() for line in block.splitlines()))
    assert parse_settings(section, environment={}).lm is not None


@pytest.mark.parametrize("path", ["docs/engines.md", "docs/engines/lmcache.md"])
def test_every_setting_of_a_link_stands_in_the_table(path: str) -> None:
    told = {
        name
        for row in re.findall(r"^\| (`[^|]*`) \|", page(path), re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    missing = {each.name for each in fields(LinkSettings)} - told
    assert not missing
