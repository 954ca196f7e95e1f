"""Values about chunks that the store and the API hand each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvobj.catalog.chunk_records import EncodedChunks
from kvobj.catalog.namespace_protocol import NamespaceRow


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `is_owner`: the bucket's owner or root, who may use every namespace of it."""

    user_id: str
    is_owner: bool


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """A namespace that the caller may use, with its key (b"" in the namespace `default`, which needs none)."""

    row: NamespaceRow
    key: bytes = field(repr=False)
    may_write: bool


class ChunkDetail(msgspec.Struct, frozen=True, gc=False):
    """One chunk of a detailed match, as replies have it. `id` is what the asker calls it, a raw id or a string; `digest` is None
    only where nobody knows it (several blobs)."""

    id: Any
    size_bytes: int
    digest: bytes | None
    tier: str
    codec: str


@dataclass(frozen=True, slots=True)
class MissExplanation:
    """Where a chain breaks and why (`kv-api` §5). `namespace_differs` names the fields in which the other namespace differs."""

    at: int
    reason: str
    when_ms: int | None = None
    namespace_differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MatchReply:
    """What `?match` answers. `expected_load_ms` is what reading the run is thought to take, from the tiers it lies in."""

    matched: int
    tokens: int
    size_bytes: int
    expected_load_ms: int
    pin: bytes | None
    grant: int
    deadline_ms: int
    chunks: tuple[ChunkDetail, ...] | EncodedChunks | None
    explain: MissExplanation | None
