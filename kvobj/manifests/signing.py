"""Who wrote a manifest: a tag over its digest and its name, under a key that follows from the store's wrapping key.

Who can write to the bucket on the remote, and has not the key, can thus take manifests away or put back older ones, and no more:
not make one, change one, or pass one off as another. A store without a wrapping key of the configuration's signs nothing, since a
rebuild elsewhere could check nothing. Manifests of older versions are not signed either; a node with a key begins with a snapshot
of its own, after which none of them counts any more.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final, Self

from blake3 import blake3

from kvobj.errors import UntrustedError

TAG_BYTES: Final = 32
_CONTEXT: Final = "kvobj 2026-11-22 signature of manifests"


@dataclass(frozen=True, slots=True)
class Signing:
    """Signs with `key`, None: not at all; and believes what is signed so. `accepts_any`: believes the others as well."""

    key: bytes | None = field(default=None, repr=False)
    accepts_any: bool = False

    @classmethod
    def under(cls, wrapping_key: bytes | None, *, accepts_any: bool = False) -> Self:
        """What goes with a wrapping key of the configuration's. None: it has none."""
        key = None if wrapping_key is None else blake3(wrapping_key, derive_key_context=_CONTEXT).digest()
        return cls(key, accepts_any)

    def tag(self, digest: bytes, name: str) -> bytes:
        """The signature of the manifest with this digest under this key of the bucket's (without the tier's prefix)."""
        if self.key is None:
            raise ValueError("nothing is signed without a key")
        return blake3(digest + name.encode(), key=self.key).digest()

    def check(self, digest: bytes, tag: bytes | None, name: str) -> None:
        """`UntrustedError` for a manifest that is not to be believed. `tag` None: it is not signed."""
        if self.accepts_any:
            return
        if self.key is None:
            if tag is not None:
                raise UntrustedError("a manifest is signed, and no wrapping key is given to check it with", name=name)
            return
        if tag is None:
            raise UntrustedError("a manifest is not signed", name=name)
        if not hmac.compare_digest(tag, self.tag(digest, name)):
            raise UntrustedError("a manifest is signed under another wrapping key, or forged", name=name)


def reading_under(wrapping_key: bytes | None) -> Signing:
    """For who reads another node's manifests, and writes none: without a key nothing can be checked, and is believed."""
    return Signing.under(wrapping_key, accepts_any=wrapping_key is None)


UNSIGNED: Final = Signing()
"""Of a store without a wrapping key of its configuration's."""
