"""A small model for tests of `ek`: correlated columns, keys turned by position, and its profile made with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kernel_blocks import Words, words_of

from kvobj.tensors.form import Kind, TensorForm
from kvobj.tensors.profiles import BlockBasis, Profile, Rope


@dataclass(frozen=True)
class Model:
    """One layer; `k` has RoPE where it is asked for."""

    heads: int
    head_dim: int
    kind: Kind = "k"
    theta: float | None = None
    seed: int = 1

    @property
    def columns(self) -> int:
        """Of a token."""
        return self.heads * self.head_dim

    @property
    def rope(self) -> Rope | None:
        """Its rotation."""
        return None if self.theta is None else Rope.of(self.theta, self.head_dim)

    def form(self, tokens: int, dtype: str = "bf16") -> TensorForm:
        """Of a chunk."""
        return TensorForm(self.kind, dtype, 1, self.heads, self.head_dim, tokens)  # type: ignore[arg-type]

    def rows(self, tokens: int, seed: int) -> npt.NDArray[np.float64]:
        """[tokens, columns] before RoPE."""
        fixed, random = np.random.default_rng(self.seed), np.random.default_rng(seed)
        mixed = fixed.standard_normal((self.columns, self.columns)) * (np.arange(self.columns)[:, None] + 1.0) ** -0.8
        return random.standard_normal((tokens, self.columns)) @ mixed + 2 * fixed.standard_normal(self.columns)

    def words(self, tokens: int, seed: int = 2, position: int = 0, dtype: str = "bf16") -> Words:
        """A chunk's block, [head][token][dim], its first token at a position."""
        x = self.rows(tokens, seed).reshape(tokens, self.heads, self.head_dim)
        if self.rope is not None:
            angles = (position + np.arange(tokens))[:, None, None] * np.array(self.rope.frequencies)
            a, b = np.split(x, 2, axis=-1)
            x = np.concatenate(
                (a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), axis=-1
            )
        return words_of(np.ascontiguousarray(x.transpose(1, 0, 2), np.float32), dtype)

    def profile(self) -> Profile:
        """From rows that no test encodes."""
        rows = self.rows(6 * self.columns, seed=77)
        means = rows.mean(axis=0)
        covariance = np.cov((rows - means).T, bias=True)
        basis = np.linalg.eigh(covariance)[1][:, ::-1]
        rms = float(np.sqrt(np.diag(covariance).mean()))
        return Profile.build(self.form(1), [BlockBasis(rms, means.tolist(), basis.ravel().tolist())], self.rope)
