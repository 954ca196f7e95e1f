"""Rows of the independent model (`reference.py`) over a data set, and what it says of a frame's overhead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from codec_bench import reference
from codec_bench.datasets import DataSet, Window, chunks
from codec_bench.metrics import Decoded, errors
from codec_bench.rows import Row

Words = npt.NDArray[np.uint16]

STEPS: Final = {"eq57": (83, 0), "eq55": (90, 0), "eq4": (83, 1), "eq:83/2": (83, 2), "eq3": (500, 0)}
CODECS: Final = ("x3", "xa", *STEPS)


def words_of(tensor: torch.Tensor) -> Words:
    """The words of a bf16 tensor, in its own order."""
    found: Words = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return found


def tensor_of(words: Words) -> torch.Tensor:
    """A bf16 tensor of words."""
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def measure(data: DataSet, codec: str, tokens: int) -> Row:
    """What `codec` should take and lose, over all test windows."""
    stored = 0
    pairs: list[tuple[Window, Decoded]] = []
    for window in data.test:
        decoded: list[list[torch.Tensor]] = []
        for chunk in chunks([t for layer in window for t in (layer.k, layer.v)], tokens):
            sizes, back = _coded(chunk, codec)
            stored += reference.frame_bytes(sizes, kinds=2)
            decoded.append(back)
        whole = [torch.cat([part[at] for part in decoded]) for at in range(2 * len(window))]
        pairs.append((window, tuple(zip(whole[::2], whole[1::2], strict=True))))
    bits = 8 * stored / data.values
    if codec not in STEPS:
        return Row(data.name, codec, "model", tokens, bits)
    found = errors(pairs, causal=data.causal)
    return Row(
        data.name,
        codec,
        "model",
        tokens,
        bits,
        found.relative_k,
        found.relative_v,
        found.attention,
        found.worst_cosine,
    )


def _coded(chunk: Sequence[torch.Tensor], codec: str) -> tuple[list[int], list[torch.Tensor]]:
    words = [words_of(tensor) for tensor in chunk]
    if codec == "x3":
        return [reference.x3(each).total for each in words], list(chunk)
    if codec == "xa":
        return [reference.xa(each).total for each in words], list(chunk)
    coded = [reference.eq(each, *STEPS[codec]) for each in words]
    return [each.size().total for each in coded], [tensor_of(each.decoded()) for each in coded]


def overhead(chunk: Sequence[torch.Tensor], codec: str, frame_bytes: int) -> float:
    """Bits a value of a frame of `eq` that are neither symbols nor guarded rows: head, directory, padding, tables, states.

    `chunk` is k and v of each layer. The symbols' share is their entropy under the tables, escapes counted.
    """
    sizes = [reference.eq(words_of(tensor), *STEPS[codec]).size() for tensor in chunk]
    coded = sum(size.payload + size.guard for size in sizes)
    return float(8 * (frame_bytes - coded) / sum(tensor.numel() for tensor in chunk))


def real_size_chunk(data: DataSet, layers: int = 32, heads: int = 8, tokens: int = 256) -> list[torch.Tensor]:
    """Chunks of the set's windows put together to one of a usual model: k and v of each layer, [tokens, heads, head_dim].

    ValueError where the set has too little.
    """
    windows = (*data.calibration, *data.test)
    pieces = [
        chunk for window in windows for chunk in chunks([t for layer in window for t in (layer.k, layer.v)], tokens)
    ]
    of_kind: list[list[torch.Tensor]] = [[tensor for piece in pieces for tensor in piece[at::2]] for at in (0, 1)]
    beside = heads // of_kind[0][0].shape[1]
    if len(of_kind[0]) < layers * beside:
        raise ValueError(f"{len(of_kind[0])} layers of chunks are too few for {layers} of {heads} heads")
    found = []
    for layer in range(layers):
        found += [torch.cat(kind[layer * beside : (layer + 1) * beside], dim=1) for kind in of_kind]
    return found
