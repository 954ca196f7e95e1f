"""Which namespace an engine's chunks belong to: declared from what its configuration fixes, so that two that differ never meet.

An engine's hashes say nothing of the model, the data type or how bytes are laid out, so the namespace has to. Engines' chunks are
`opaque` here (their layouts have paddings and shards of their own) under `foreign` ids; what a declaration has no field for
stands in its `salt` as `name=value`, and a server that refuses a differing one names the fields. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvobj.client.kv_values import DEFAULT_NAME
from kvobj.connectors.link_settings import DECLARED_CHARACTERS_MAX, LinkSettings

_MODEL_CHARACTERS: Final = 64
_DIGEST_CHARACTERS: Final = 12
_OWN: Final = ("revision", "tenant")
_DECLARED_BY: Final = {"model": "model", "revision": "revision", "salt": "tenant"}
"""Texts of a declaration, and by what an engine's user has them longer or shorter."""
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine's configuration fixes about its chunks. `others`: all that changes their bytes and has no field here; ranks of
    `context` and `decode_context` have none in a declaration, and are to be among them."""

    engine: str
    model: str
    chunk_tokens: int
    others: Mapping[str, object]
    tensor: tuple[int, int] = (0, 1)
    """Index and count of the ranks that split heads, where each has chunks of its own."""
    pipeline: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    """… that split a sequence."""
    decode_context: tuple[int, int] = (0, 1)
    """… that split what is decoded from."""


def link_settings(
    values: Mapping[str, object], environment: Mapping[str, str], facts: EngineFacts, *, problems: Sequence[str] = ()
) -> LinkSettings:
    """Settings of a link from an engine's table: those of `LinkSettings` but `declaration`, which is made here, and `revision` (of
    the model) and `tenant` (whom chunks must not be shared beyond). Without `namespace` its name follows from all that is declared;
    with it, ranks that have chunks of their own get a suffix. `ConfigurationError` names every fault, `problems` with the caller's
    own settings among them."""
    found = list(problems)
    found += [f"{name}: is no text" for name in _OWN if name in values and not isinstance(values[name], str)]
    if "declaration" in values:
        found.append("declaration: follows from the engine's configuration")
    if values.get("namespace") == DEFAULT_NAME:
        found.append(
            "namespace: default declares nothing, and would have chunks of every configuration under the same names"
        )
    declared = declaration(facts, revision=values.get("revision"), tenant=str(values.get("tenant", "")))
    found += [
        f"{setting}: the declaration's {name} {problem}"
        for name, setting in _DECLARED_BY.items()
        if (problem := _text_problem(declared[name]))
    ]
    table: dict[str, Any] = {name: value for name, value in values.items() if name not in (*_OWN, "declaration")}
    name = table.pop("namespace", None)
    if isinstance(name, str):
        name += _rank_suffix(facts)
    if not found:  # what is wrong need not have a name, and was told
        name = derived_name(facts, declared) if name is None else name
        table["declaration"] = declared
    if name is not None:
        table["namespace"] = name
    return LinkSettings.parse(table, environment, problems=found)


def declaration(facts: EngineFacts, *, revision: object, tenant: str) -> dict[str, object]:
    """The document that is declared."""
    others = [f"{name}={value}" for name, value in sorted(facts.others.items())]
    return {
        "model": facts.model or "unnamed",
        "revision": revision or None,
        "chunk_tokens": facts.chunk_tokens,
        "layout": {"kind": "opaque"},
        "rank": {"tensor": list(facts.tensor), "pipeline": list(facts.pipeline)},
        "salt": ";".join([f"tenant={tenant}", f"engine={facts.engine}", *others]),
        "ids": "foreign",
    }


def derived_name(facts: EngineFacts, declared: Mapping[str, object]) -> str:
    """A name that no two different declarations share, readable in a listing."""
    digest = hashlib.sha256(msgspec.json.encode(declared, order="deterministic")).hexdigest()[:_DIGEST_CHARACTERS]
    model = _NOT_IN_NAMES.sub("_", facts.model)[-_MODEL_CHARACTERS:]
    return f"{facts.engine}-{model or 'unnamed'}-{digest}"


def partition_fact(told: str, stages: int) -> dict[str, object]:
    """How the layers are cut among a pipeline's stages, where the engine was told: two cuts may give a stage as many layers."""
    return {"partition": told} if told and stages > 1 else {}


def fact_digest(value: object) -> str:
    """Stands for what is too long to be a fact itself, such as the names of all layers."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:_DIGEST_CHARACTERS]


def _text_problem(value: object) -> str:
    """Why a server takes no such text; "" for one that it takes, and for what is none."""
    if not isinstance(value, str):
        return ""
    if len(value) > DECLARED_CHARACTERS_MAX:
        return f"has {len(value)} characters with it, and may have {DECLARED_CHARACTERS_MAX}"
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may have halves of characters in its texts, and so may an environment
        return "has half a character (a lone surrogate) with it, which cannot be sent"
    return ""


def _rank_suffix(facts: EngineFacts) -> str:
    ranks = (
        ("tp", facts.tensor),
        ("pp", facts.pipeline),
        ("cp", facts.context),
        ("dcp", facts.decode_context),
    )
    return "".join(f".{letters}{index}of{count}" for letters, (index, count) in ranks if count > 1)
