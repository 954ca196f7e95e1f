"""A small decoder-only transformer with random weights, written plainly: RMSNorm, grouped-query attention, RoPE, SwiGLU.

Weights come from a seed, so every process has the same. One thread and float32: the same shapes give the same bits everywhere on
one machine, which is what lets a cache that was handed over be compared bit for bit. K is stored with RoPE applied.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

KvOfLayer = tuple[Tensor, Tensor]
"""K and V of one layer, each `[kv_heads, tokens, head_dim]`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's sizes. `chunk_tokens`: how many tokens a chunk of its cache has."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    inner: int = 1408
    vocabulary: int = 1024
    chunk_tokens: int = 256
    seed: int = 5

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer of one chunk."""
        return 2 * self.kv_heads * self.chunk_tokens * self.head_dim * 4

    def declaration(self, salt: str) -> dict[str, object]:
        """The namespace of its chunks, put layer by layer or whole (docs/kv-api.md, Namespaces)."""
        return {
            "model": f"random-{self.layers}x{self.hidden}",
            "chunk_tokens": self.chunk_tokens,
            "layout": {
                "kind": "kv",
                "dtype": "fp32",
                "layers": self.layers,
                "kv_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "order": ["layer", "kv", "head", "token", "dim"],
            },
            "part_axis": "layer",
            "ids": "kvobj",
            "rope": {"theta": 10000.0, "applied": True},
            "salt": salt,
        }


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Transformer:
    """See the module's text. For one thread."""

    def __init__(self, shape: Shape) -> None:
        torch.set_num_threads(1)
        self.shape = shape
        generator = torch.Generator().manual_seed(shape.seed)

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / math.sqrt(rows)

        hidden, wide, narrow = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = torch.randn(shape.vocabulary, hidden, generator=generator)
        self._layers = [
            Layer(
                weight(hidden, wide), weight(hidden, narrow), weight(hidden, narrow), weight(wide, hidden),
                weight(hidden, shape.inner), weight(hidden, shape.inner), weight(shape.inner, hidden),
            )
            for _ in range(shape.layers)
        ]  # fmt: skip
        self._head = weight(hidden, shape.vocabulary)

    def prefill(self, tokens: list[int], on_layer: Callable[[int, KvOfLayer], None]) -> None:
        """Run a prompt; `on_layer` is given each layer's K and V as soon as they are there, before its attention is computed."""
        state = self._embedding[torch.tensor(tokens)]
        for index in range(self.shape.layers):
            state = self._step(index, state, start=0, before=None, on_kv=partial(on_layer, index))

    def decode(self, token: int, position: int, cached: Callable[[int], KvOfLayer]) -> tuple[int, list[KvOfLayer]]:
        """The next token after this one, greedily, and this one's K and V. `cached(layer)` is asked for those of all tokens before
        it just when that layer attends to them."""
        state = self._embedding[torch.tensor([token])]
        made: list[KvOfLayer] = []
        for index in range(self.shape.layers):
            state = self._step(index, state, start=position, before=cached(index), on_kv=made.append)
        logits = _normalised(state[-1:]) @ self._head
        return int(logits.argmax()), made

    def _step(
        self,
        index: int,
        state: Tensor,
        *,
        start: int,
        before: KvOfLayer | None,
        on_kv: Callable[[KvOfLayer], None],
    ) -> Tensor:
        layer, shape = self._layers[index], self.shape
        normal = _normalised(state)
        query = _rotated(_heads(normal @ layer.query, shape.heads), start)
        key = _rotated(_heads(normal @ layer.key, shape.kv_heads), start)
        value = _heads(normal @ layer.value, shape.kv_heads)
        on_kv((key, value))
        if before is not None:
            key, value = torch.cat((before[0], key), dim=1), torch.cat((before[1], value), dim=1)
        state = state + _attention(query, key, value) @ layer.out
        normal = _normalised(state)
        return state + (torch.nn.functional.silu(normal @ layer.gate) * (normal @ layer.up)) @ layer.down


def generate(
    model: Transformer, token: int, position: int, count: int, cached: Callable[[int], KvOfLayer]
) -> tuple[list[int], list[float]]:
    """`count` tokens after `token`, greedily, and when each was there (`time.monotonic`). The first step's cache comes by
    `cached`."""
    kept: list[KvOfLayer] = []

    def first(layer: int) -> KvOfLayer:
        kept.append(cached(layer))
        return kept[layer]

    out: list[int] = []
    times: list[float] = []
    for step in range(count):
        token, made = model.decode(token, position + step, first if not step else kept.__getitem__)
        times.append(time.monotonic())
        out.append(token)
        kept = [
            (torch.cat((old[0], new[0]), dim=1), torch.cat((old[1], new[1]), dim=1))
            for old, new in zip(kept, made, strict=True)
        ]
    return out, times


def prompt_of(shape: Shape, chunks: int) -> list[int]:
    """A prompt of so many full chunks and one token more, with which decode begins."""
    generator = torch.Generator().manual_seed(shape.seed + 1)
    drawn = torch.randint(shape.vocabulary, (chunks * shape.chunk_tokens + 1,), generator=generator)
    return [int(token) for token in drawn]


def _normalised(state: Tensor) -> Tensor:
    return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)


def _heads(state: Tensor, heads: int) -> Tensor:
    return state.view(state.shape[0], heads, -1).transpose(0, 1)


def _rotated(state: Tensor, start: int) -> Tensor:
    """RoPE: pairs of halves turned by the token's position (Su et al., "RoFormer", 2021)."""
    half = state.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(start, start + state.shape[1], dtype=torch.float32)[:, None] * frequencies
    left, right = state[..., :half], state[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()), dim=-1)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if query.shape[1] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(key.shape[1] - query.shape[1] + 1)
        scores = scores.masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
