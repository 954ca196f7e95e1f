"""Events as vLLM puts them on the wire, so that routers that listen to engines see the store too. Pure.

Source: vLLM's `distributed/kv_events.py` (release 0.33.0): a batch is a msgpack array [ts, events, rank], each event a map with
`type`, fields that have their default left out. What the store does not know is left empty: it has no token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kvobj.api.kv.events import name_in
from kvobj.catalog.history_protocol import EventRow, EventType
from kvobj.store.places import DEFAULT_NAMESPACE

MEDIUM: Final = "STORAGE"
"""vLLM's word for what is neither the GPU's memory nor the host's."""

BATCH_KEYS: Final = 1000
"""Block hashes of one batch, about; a batch is one message."""

# An engine's digest of at least 128 bits, written in hex, is told as the bytes that the engine itself would tell.
_HEX_DIGEST: Final = re.compile(r"(?:[0-9a-f]{2}){16,64}\Z").match


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks of one chain, each of `block_size` tokens. Fields that are None here have no default in vLLM: they are sent."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that are gone from every tier."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Nothing that was told before counts any more."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message. `ts` is seconds since the epoch. The store is no rank of an engine: nil, which vLLM's encoder writes too."""

    ts: float
    events: Sequence[WireEvent]
    data_parallel_rank: None = None


encode_batch = msgspec.msgpack.Encoder().encode


def block_hash(namespace: str, key: str) -> bytes:
    """What a chunk is called on the wire: the 32 raw bytes of a chunk id, an engine's digest likewise, else the key's UTF-8."""
    name = name_in(namespace or DEFAULT_NAMESPACE, key)
    return bytes.fromhex(name) if _HEX_DIGEST(name) else name.encode()


def wire_event(event: EventRow) -> WireEvent:
    """One event in vLLM's form."""
    hashes = [block_hash(event.namespace, key) for key in event.keys]
    match event.type:
        case EventType.STORED:
            return BlockStored(
                block_hashes=hashes,
                parent_block_hash=block_hash(event.namespace, event.parent) if event.parent else None,
                token_ids=[],
                block_size=event.tokens // len(hashes) if hashes else 0,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
            )
        case EventType.REMOVED:
            return BlockRemoved(block_hashes=hashes, medium=MEDIUM)
        case EventType.CLEARED:
            return AllBlocksCleared()


class Topics:
    """Which topic events belong to, by a template with `{bucket}` and `{namespace}`."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.is_one = "{" not in template

    @property
    def of_all(self) -> str:
        """The one topic, where there is one."""
        return self._template

    def of(self, event: EventRow) -> str:
        """The topic of an event."""
        if self.is_one:
            return self._template
        namespace = event.namespace or DEFAULT_NAMESPACE
        return self._template.replace("{bucket}", event.bucket).replace("{namespace}", namespace)

    def is_cleared_by(self, event: EventRow) -> bool:
        """Whether a cleared namespace is all that its topic tells of. Elsewhere it goes untold: its removals were told."""
        has_bucket, has_namespace = "{bucket}" in self._template, "{namespace}" in self._template
        return has_bucket and (has_namespace or not event.namespace)


def batches(events: Iterable[EventRow], topics: Topics) -> Iterator[tuple[str, list[EventRow]]]:
    """Consecutive events of one topic, up to `BATCH_KEYS` keys or a little over, without those that are told nowhere."""
    topic, batch, keys = "", list[EventRow](), 0
    for event in events:
        if event.type is EventType.CLEARED and not topics.is_cleared_by(event):
            continue
        own = topics.of(event)
        if batch and (own != topic or keys + len(event.keys) > BATCH_KEYS):
            yield topic, batch
            batch, keys = [], 0
        topic = own
        batch.append(event)
        keys += max(1, len(event.keys))
    if batch:
        yield topic, batch
