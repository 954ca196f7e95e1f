"""Hugging Face transformers: a `DynamicCache` saved and loaded by token prefix (docs/engines/transformers.md).

    store = PrefixCache(LinkSettings.parse({"endpoint": …, "bucket": …}, os.environ), model)
    cache, known = store.load(input_ids)
    output = model.generate(input_ids, past_key_values=cache)
    store.save(output, cache)

A sequence is stored in chunks of `chunk_tokens` tokens, each under the id of its chain, so that any later sequence that begins
alike finds them, in this process or another. What cannot be reached is a miss: `load` gives an empty cache then, and `save`
stores nothing. What the caller has wrong is told by `InvalidRequestError`: more than one sequence, a cache of another kind or
shape, a model that was changed since, or is in training with dropout.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel

from kvobj.client.kv_values import ROOT, NewChunk
from kvobj.connectors.link import StoreLink
from kvobj.connectors.link_settings import LinkSettings
from kvobj.connectors.transformers_fitness import check_dropout, check_layer, check_states
from kvobj.connectors.transformers_model import declaration_of, namespace_name, shape_of
from kvobj.connectors.transformers_weights import fingerprint_of
from kvobj.errors import InvalidRequestError

CHUNK_TOKENS: Final = 64
SAVED_BYTES_AT_ONCE: Final = 64 * 1024 * 1024
"""So much host memory, or one chunk, is used for what is about to be stored."""

_TOKEN_DTYPES: Final = frozenset(
    {
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    }
)

TokenIds: TypeAlias = "torch.Tensor | Sequence[int]"


class PrefixCache:
    """The stored caches of one model. Thread-safe; a context manager. `settings`: where the store is; its namespace and declaration
    are made from the model.

    `name`: what the model is called, by default `config.name_or_path`. `salt`: who has another one shares nothing. `adapter`: of a
    model with an adapter that its modules do not tell. `rank`: (index, count) where each process has a share of the heads, an
    equal one: caches have these heads alone.
    """

    def __init__(
        self,
        settings: LinkSettings,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
        salt: str = "",
        adapter: str | None = None,
        rank: tuple[int, int] = (0, 1),
    ) -> None:
        _check_settings(settings)
        _check_text("name", name, is_optional=True)
        _check_text("salt", salt)
        _check_text("adapter", adapter, is_optional=True)
        if not _is_whole(chunk_tokens):
            raise InvalidRequestError(f"chunk_tokens is a whole number, and not {chunk_tokens!r}")
        name = name or model.config.name_or_path
        if not name:
            raise InvalidRequestError("the model's configuration does not name it: give a name")
        if chunk_tokens < 1:
            raise InvalidRequestError("a chunk has at least one token", chunk_tokens=chunk_tokens)
        self._model = model
        self._shape = shape_of(model, rank=rank)
        self._fingerprint = fingerprint_of(model)
        self._chunk_tokens = chunk_tokens
        declaration = declaration_of(
            model,
            self._shape,
            name=name,
            fingerprint=self._fingerprint,
            chunk_tokens=chunk_tokens,
            salt=salt,
            adapter=adapter,
            rank=rank,
        )
        self.namespace = namespace_name(declaration)
        """The namespace's name in the bucket."""
        self._link = StoreLink(replace(settings, namespace=self.namespace, declaration=declaration))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, input_ids: TokenIds) -> tuple[DynamicCache, int]:
        """A cache for the sequence with as many of its first tokens as are stored, and how many these are; the caller's own.

        At least the last token is left for the model to compute: its logits are not stored.
        """
        tokens = _tokens(input_ids)
        self._check_model()
        cache = DynamicCache(config=self._model.config)
        space = self._link.namespace()
        ids = [] if space is None else space.chunk_ids(tokens)
        held = self._link.hold_run(ids) if ids else 0
        if not held:
            return cache, 0
        try:
            pool, loaded = self._loaded(ids[:held])
        finally:
            self._link.release(ids[:held])
        known = min(loaded * self._chunk_tokens, len(tokens) - 1)
        if known > 0:
            self._fill(cache, pool[:loaded], known)
        return cache, known

    def save(self, input_ids: TokenIds, cache: DynamicCache) -> int:
        """Store what of the cache is not stored yet, in whole chunks; how many of the sequence's first tokens are stored now.

        `input_ids`: the tokens that the cache is of, and perhaps more, as `generate` returns them; fewer are `InvalidRequestError`,
        since nobody can tell which of the cache's they are. The cache is left as it is.
        """
        tokens = _tokens(input_ids)
        self._check_model()
        length = self._checked_length(cache)
        if length > len(tokens):
            raise InvalidRequestError(
                f"the cache has {length} tokens, and the sequence {len(tokens)}: give all that it is of"
            )
        count = min(len(tokens), length) // self._chunk_tokens
        space = self._link.namespace() if count else None
        if space is None:
            return 0
        ids = space.chunk_ids(tokens[: count * self._chunk_tokens])
        stored = held = self._link.hold_run(ids)  # held, since those that follow need them as parents
        try:
            at_once = max(1, SAVED_BYTES_AT_ONCE // self._chunk_bytes)
            while stored < count:
                stop = min(count, stored + at_once)
                wanted = stop - stored
                done = self._link.store(self._chunks(cache, ids, stored, stop))
                done_run = done.index(False) if False in done else wanted
                stored += done_run
                if done_run < wanted:
                    break
        finally:
            self._link.release(ids[:held])
        return stored * self._chunk_tokens

    def report(self) -> dict[str, object]:
        """Hits, misses, errors and whether the store answers; asks nobody."""
        return self._link.report()

    def close(self) -> None:
        """Let go of the store. Every call after it is a miss. Idempotent."""
        self._link.close()

    # -- inside --------------------------------------------------------------------------------------------------
    @property
    def _chunk_bytes(self) -> int:
        return self._shape.token_bytes * self._chunk_tokens

    def _pool(self, chunks: int) -> tuple[memoryview, torch.Tensor]:
        """Host memory for so many chunks: as bytes, and as [chunk, layer, kv, head, token, dim]."""
        shape = self._shape
        room = memoryview(bytearray(chunks * self._chunk_bytes))
        flat = torch.frombuffer(room, dtype=shape.dtype)
        return room, flat.view(chunks, shape.layers, 2, shape.kv_heads, self._chunk_tokens, shape.head_dim)

    def _loaded(self, ids: Sequence[bytes]) -> tuple[torch.Tensor, int]:
        """The chunks' tensors, and how many of the first ones are right."""
        room, pool = self._pool(len(ids))
        size = self._chunk_bytes
        rooms = [room[start : start + size] for start in range(0, len(room), size)]
        loaded = self._link.load(ids, rooms)
        return pool, loaded.index(False) if False in loaded else len(ids)

    def _fill(self, cache: DynamicCache, pool: torch.Tensor, known: int) -> None:
        shape = self._shape
        for index, layer in enumerate(cache.layers):
            # [chunk, kv, head, token, dim] of one layer, to [kv, batch, head, all tokens, dim]: the one copy on the host.
            joined = pool[:, index].permute(1, 2, 0, 3, 4).reshape(2, 1, shape.kv_heads, -1, shape.head_dim)
            keys, values = joined[..., :known, :].to(shape.device)
            layer.update(keys, values)

    def _chunks(self, cache: DynamicCache, ids: Sequence[bytes], start: int, stop: int) -> list[NewChunk]:
        """The chunks from `start` to `stop`, copied out of the cache."""
        shape, tokens = self._shape, self._chunk_tokens
        room, pool = self._pool(stop - start)
        split = (shape.kv_heads, stop - start, tokens, shape.head_dim)
        for index, layer in enumerate(cache.layers):
            for axis, states in enumerate((layer.keys, layer.values)):
                part = states.detach()[0, :, start * tokens : stop * tokens].reshape(split)
                pool[:, index, axis].copy_(part.transpose(0, 1))
        size = self._chunk_bytes
        return [
            NewChunk(ids[at], room[(at - start) * size : (at - start + 1) * size], parent=ids[at - 1] if at else ROOT)
            for at in range(start, stop)
        ]

    def _check_model(self) -> None:
        """`InvalidRequestError` where the model is not the one any more that the namespace was made from: what is stored under its
        name would be another model's. And where the same tokens would give another cache each time."""
        if self._model.device != self._shape.device or fingerprint_of(self._model) != self._fingerprint:
            raise InvalidRequestError(
                "the model has other weights, another dtype or device, or other adapters than when this PrefixCache was made: "
                "make another"
            )
        check_dropout(self._model)

    def _checked_length(self, cache: DynamicCache) -> int:
        """How many tokens the cache has. `InvalidRequestError` unless it is one of this model, of one sequence."""
        shape = self._shape
        if type(cache) is not DynamicCache:
            raise InvalidRequestError(f"a cache of class {type(cache).__name__} is not supported: DynamicCache is")
        for layer in cache.layers:
            check_states(layer)
        length = int(cache.get_seq_length())
        if not length:
            return 0
        if len(cache.layers) != shape.layers:
            raise InvalidRequestError(f"the cache has {len(cache.layers)} layers, and the model {shape.layers}")
        wanted = (1, shape.kv_heads, length, shape.head_dim)
        for layer in cache.layers:
            check_layer(layer)
            for states in (layer.keys, layer.values):
                if states is None:
                    raise InvalidRequestError("the cache has states in some of its layers only")
                if tuple(states.shape) != wanted or states.dtype != shape.dtype:
                    raise InvalidRequestError(
                        f"the cache has states of {tuple(states.shape)} {states.dtype}, and the model of one sequence "
                        f"{wanted} {shape.dtype}"
                    )
        return length


def _check_settings(settings: object) -> None:
    if not isinstance(settings, LinkSettings):
        raise InvalidRequestError(
            f"settings are LinkSettings, which LinkSettings.parse makes of a table, and not a {type(settings).__name__}"
        )


def _check_text(name: str, value: object, *, is_optional: bool = False) -> None:
    """What is no text would be declared as it is, and refused by the server at every use: misses for good."""
    if not (isinstance(value, str) or (is_optional and value is None)):
        raise InvalidRequestError(f"{name} is a text, {'or None, ' if is_optional else ''}and not {value!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(input_ids: TokenIds) -> list[int]:
    """The token ids of one sequence. `InvalidRequestError` for what is none, first of all a tokenizer's whole answer."""
    if isinstance(input_ids, Mapping):
        raise InvalidRequestError("of what a tokenizer answers give its input_ids alone: tokenizer(…)['input_ids']")
    if isinstance(input_ids, str | bytes | bytearray):
        raise InvalidRequestError("give the token ids of one sequence, and not its text or bytes")
    if not isinstance(input_ids, torch.Tensor):
        try:
            return list(map(operator.index, input_ids))
        except TypeError as error:
            raise InvalidRequestError(
                f"give the token ids of one sequence, a tensor or a list of whole numbers: {error}"
            ) from error
    if input_ids.dtype not in _TOKEN_DTYPES:
        raise InvalidRequestError(
            f"give the token ids of one sequence, which are whole numbers, and not a tensor of {input_ids.dtype}"
        )
    if input_ids.dim() > 1 and math.prod(input_ids.shape[:-1]) != 1:
        raise InvalidRequestError(
            "one sequence at a time: call once for each row of a batch", shape=tuple(input_ids.shape)
        )
    tokens: list[int] = input_ids.reshape(-1).tolist()
    return tokens
