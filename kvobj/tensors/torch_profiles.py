"""Makes profiles from calibration tensors, with torch. Offline, once a model: minutes for a large one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import BlockBasis, Profile, ProfileError, Rope

if TYPE_CHECKING:
    import torch

_LEAST_RMS: Final = 2.0**-30
GUARD_LEAST: Final = 0.3
GUARD_MOST: Final = 3.0
"""Tokens whose norm is below or above so many times the median's calibrate nothing: frames carry them as they are."""


def make_profile(
    tensors: Sequence[torch.Tensor],
    form: TensorForm,
    rope: Rope | None,
    *,
    first_positions: Sequence[int] | None = None,
) -> Profile:
    """A profile of the model of `form` from chunks of it.

    `tensors`: [layers, kinds, tokens, kv_heads, head_dim] each, of any float dtype and number of tokens, finite, keys as frames
    hold them: after RoPE, if the model has it. The first token of each is at its `first_positions` (0). Together they should
    have at least a few times as many tokens as the model has columns: what they do not show, the basis does not know.
    Deterministic on one machine; on another, the last bits may differ, and so the digest. `ProfileError`.
    """
    starts = first_positions or [0] * len(tensors)
    wanted = (form.layers, form.kinds, form.kv_heads, form.head_dim)
    if not tensors or len(starts) != len(tensors):
        raise ProfileError("wanted chunks, and a first position for each")
    for tensor in tensors:
        if tensor.ndim != len(wanted) + 1 or (*tensor.shape[:2], *tensor.shape[3:]) != wanted:
            raise ProfileError(f"wanted [{form.layers}, {form.kinds}, tokens, {form.kv_heads}, {form.head_dim}]")
    blocks = []
    for layer in range(form.layers):
        for kind in range(form.kinds):
            is_turned = rope is not None and form.kind in {"kv", "k"} and kind == 0
            of_block = [
                _rows(tensor[layer, kind].double(), rope if is_turned else None, start)
                for tensor, start in zip(tensors, starts, strict=True)
            ]
            blocks.append(_basis(of_block))
    return Profile.build(form, blocks, rope)


def _rows(x: torch.Tensor, rope: Rope | None, start: int) -> torch.Tensor:
    """[tokens, heads, dim] as [tokens kept, columns], before RoPE."""
    import torch  # noqa: PLC0415 - of this module alone

    norms = x.flatten(1).norm(dim=1)
    middle = norms.median()
    kept = (norms >= GUARD_LEAST * middle) & (norms <= GUARD_MOST * middle)
    if rope is not None:
        positions = torch.arange(start, start + x.shape[0], dtype=torch.float64, device=x.device)
        angles = positions[:, None, None] * torch.tensor(rope.frequencies, dtype=torch.float64, device=x.device)
        cosines, sines = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        x = torch.cat((a * cosines + b * sines, b * cosines - a * sines), dim=-1)
    return x[kept].flatten(1)


def _basis(parts: Sequence[torch.Tensor]) -> BlockBasis:
    import torch  # noqa: PLC0415 - of this module alone

    tokens = sum(len(part) for part in parts)
    if not tokens:
        raise ProfileError("no token calibrates")
    means = sum(part.sum(dim=0) for part in parts) / tokens
    assert isinstance(means, torch.Tensor)
    covariance = sum((part - means).T @ (part - means) for part in parts) / tokens
    assert isinstance(covariance, torch.Tensor)
    rms = max(float(covariance.diagonal().mean().sqrt()), _LEAST_RMS)
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(1)  # the strongest first
    return BlockBasis(rms, means.tolist(), vectors.flatten().tolist())
