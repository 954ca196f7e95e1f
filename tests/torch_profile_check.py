"""A profile that torch makes, held against numpy: run by `unit/test_profiles.py` where torch is installed."""

from __future__ import annotations

import numpy as np
import torch
from profile_models import Model

from kvobj.tensors.profiles import BASIS_ONE
from kvobj.tensors.torch_profiles import make_profile


def main() -> None:
    """An AssertionError where the two differ."""
    model = Model(2, 32, theta=1e4)
    rows = model.rows(400, seed=5)
    found = make_profile([torch.tensor(rows).reshape(1, 1, 400, 2, 32)], model.form(400), None)
    means = np.frombuffer(found.data, "<f4", 64, found.means_at)
    norms = np.linalg.norm(rows, axis=1)
    kept = rows[(norms >= 0.3 * np.median(norms)) & (norms <= 3 * np.median(norms))]
    assert np.allclose(means, kept.mean(axis=0), atol=1e-5)
    basis = np.frombuffer(found.data, "<i2", 64 * 64, found.bases_at).reshape(64, 64) / BASIS_ONE
    assert np.allclose(basis.T @ basis, np.eye(64), atol=2e-3)
    variances = ((kept - kept.mean(axis=0)) @ basis).var(axis=0)
    assert np.all(variances[:-1] >= variances[1:] * 0.999)
    print("as numpy makes it")  # noqa: T201 - what the test waits for


if __name__ == "__main__":
    main()
