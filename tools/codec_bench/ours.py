"""Our codecs as a store uses them: a window cut into chunks, each a frame through `kvobj.tensors.codecs` and back.

Bits count whole frames. What comes back is held against what went in: a lossless codec must give back every bit, and the
errors of a lossy one must stay within its frame's certificate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from codec_bench.datasets import DataSet, Window, chunks, plain_bytes
from codec_bench.metrics import Decoded, errors, relative
from codec_bench.rows import Row
from kvobj.tensors import codecs
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import Profile, Rope
from kvobj.tensors.torch_profiles import make_profile

CODECS: Final = ("x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "eq:83/2", "h4", "ek:120/0", "ek", "ek:500/0")


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """One chunk's frame, and what it decodes to."""

    frame_bytes: int
    decoded: list[torch.Tensor]
    tightness: float | None
    """Largest measured error over the certified one, 1 or less where the certificate holds; None where the codec is lossless."""


def measure(data: DataSet, codec: str, tokens: int) -> Row:
    """One codec over all test windows. AssertionError where a lossless codec lost a bit."""
    stored = 0
    tightness: list[float] = []
    pairs: list[tuple[Window, Decoded]] = []
    profile = profile_of(data) if codec.startswith("ek") else None
    for window in data.test:
        cut = chunks([t for layer in window for t in (layer.k, layer.v)], tokens)
        parts = [code_chunk(chunk, codec, profile, number * tokens) for number, chunk in enumerate(cut)]
        stored += sum(part.frame_bytes for part in parts)
        tightness += [part.tightness for part in parts if part.tightness is not None]
        whole = [torch.cat([part.decoded[at] for part in parts]) for at in range(2 * len(window))]
        pairs.append((window, tuple(zip(whole[::2], whole[1::2], strict=True))))
    found = errors(pairs, causal=data.causal)
    worst = max(tightness, default=None)
    return Row(
        data.name,
        codec,
        "ours",
        tokens,
        8 * stored / data.values,
        found.relative_k,
        found.relative_v,
        found.attention,
        found.worst_cosine,
        None if worst is None else worst <= 1.0,
        worst,
    )


def form_of(tensors: Sequence[torch.Tensor]) -> TensorForm:
    """The form of a chunk given as k and v of each layer, [tokens, heads, head_dim]."""
    tokens, heads, head_dim = tensors[0].shape
    return TensorForm("kv", "bf16", len(tensors) // 2, heads, head_dim, tokens)


def plain_of(tensors: Sequence[torch.Tensor]) -> bytes:
    """The chunk's plain bytes in the default order, [layer][kv][head][token][dim]."""
    return b"".join(plain_bytes(tensor.transpose(0, 1)) for tensor in tensors)


def profile_of(data: DataSet) -> Profile:
    """The profile that `ek` needs, of the windows that calibrate."""
    windows = [torch.stack([torch.stack((layer.k, layer.v)) for layer in window]) for window in data.calibration]
    form = form_of([t for layer in data.calibration[0] for t in (layer.k, layer.v)])
    rope = None if data.rope_theta is None else Rope.of(data.rope_theta, form.head_dim)
    return make_profile(windows, form, rope)


def code_chunk(
    tensors: Sequence[torch.Tensor], codec: str, profile: Profile | None = None, first_position: int = 0
) -> CodedChunk:
    """Encode and decode k and v of each layer, each [tokens, heads, head_dim] bf16."""
    form, plain = form_of(tensors), plain_of(tensors)
    frame = memoryview(bytearray(codecs.encode_bound(codec, form)))
    length = codecs.encode_frame(
        memoryview(plain), frame, codec=codec, form=form, profile=profile, first_position=first_position
    )
    frame = frame[:length]
    head = codecs.parse_tensor_frame(frame, len(frame))
    back = bytearray(form.plain_bytes)
    codecs.decode_frame(frame, head, memoryview(back), profile=profile)
    if not codecs.is_lossy(codec):
        assert back == plain, f"{codec} lost a bit"
        return CodedChunk(len(frame), list(tensors), None)
    flat = torch.frombuffer(back, dtype=torch.bfloat16)
    blocks = flat.view(form.blocks, form.kv_heads, form.tokens, form.head_dim).transpose(1, 2)
    decoded = list(blocks)
    certificate = head.certificate
    shares = [
        _share(largest_error(tensors[at::2], decoded[at::2]), bound)
        for at, bound in ((0, certificate.max_error_k), (1, certificate.max_error_v))
    ] + [
        _share(relative(torch.stack(list(tensors[at::2])), torch.stack(decoded[at::2])), bound)
        for at, bound in ((0, certificate.relative_l2_k), (1, certificate.relative_l2_v))
    ]
    return CodedChunk(len(frame), decoded, max(shares))


def largest_error(tensors: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference of two lists of tensors."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(tensors, decoded, strict=True))


def _share(error: float, bound: float) -> float:
    return error / bound if bound else (0.0 if error == 0.0 else float("inf"))
