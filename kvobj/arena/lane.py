"""Whom a region serves alone: one bucket, told from others that had or will have its name.

A region that was shown to somebody may be looked at for ever. A bucket that is made anew under an old name may be another user's,
so its bytes never go where the old one's lay.
"""

from __future__ import annotations

from typing import Protocol, Self

import msgspec


class NamedBucket(Protocol):
    """What is needed of a bucket: no two of a name were made at one time."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def created_ms(self) -> int:
        """When it was made."""
        ...

    @property
    def owner(self) -> str:
        """The id of the user whose it is."""
        ...


class Lane(msgspec.Struct, frozen=True, gc=False):
    """A bucket that has regions of its own. `created_ms` is 0 where nobody knows which bucket of the name it was."""

    name: str
    created_ms: int = 0
    owner: str = ""

    @classmethod
    def of(cls, bucket: NamedBucket) -> Self:
        """The lane of a bucket."""
        return cls(bucket.name, bucket.created_ms, bucket.owner)
