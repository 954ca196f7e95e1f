"""Who signs: an access key and its secret."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Credentials:
    """One user's keys. The secret is not printed."""

    access_key: str
    secret_key: str = field(repr=False)
