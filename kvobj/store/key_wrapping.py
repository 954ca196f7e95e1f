"""Namespace keys at rest: wrapped by AES key wrap (RFC 3394), so that a copy of the catalog or of the record log names no chunk;
and users' secrets in manifests, sealed by AES key wrap with padding (RFC 5649).

The wrapping key is the configuration's (`[security] wrapping_key_env`), or follows from the data directory's store key. This module
alone uses the `cryptography` library.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.keywrap import (
    InvalidUnwrap,
    aes_key_unwrap,
    aes_key_unwrap_with_padding,
    aes_key_wrap,
    aes_key_wrap_with_padding,
)

from kvobj.errors import CorruptionError

WRAPPING_KEY_BYTES: Final = 32
_CONTEXT: Final = "kvobj 2026-11-21 wrapping key of namespace keys"


def derived_wrapping_key(store_key: bytes) -> bytes:
    """The wrapping key of a store whose configuration names none."""
    return blake3(store_key, derive_key_context=_CONTEXT).digest()


class KeyWrapper:
    """Wraps and unwraps under one key of 32 bytes. Immutable; any thread."""

    __slots__ = ("_wrapping_key",)

    def __init__(self, wrapping_key: bytes) -> None:
        if len(wrapping_key) != WRAPPING_KEY_BYTES:
            raise ValueError(f"a wrapping key has {WRAPPING_KEY_BYTES} bytes")
        self._wrapping_key = wrapping_key

    def wrap(self, key: bytes) -> bytes:
        """The key, wrapped: 8 bytes longer."""
        return aes_key_wrap(self._wrapping_key, key)

    def unwrap(self, wrapped: bytes, *, bucket: str, namespace: str) -> bytes:
        """The key of a namespace. `CorruptionError` where it was wrapped under another key, or is damaged."""
        try:
            return aes_key_unwrap(self._wrapping_key, wrapped)
        except InvalidUnwrap as error:
            raise CorruptionError(
                "the namespace's key does not unwrap: is [security] wrapping_key_env what it was when it was declared?",
                bucket=bucket,
                namespace=namespace,
            ) from error

    def seal(self, content: bytes) -> bytes:
        """A short secret, encrypted and authenticated; the same content is sealed to the same bytes."""
        return aes_key_wrap_with_padding(self._wrapping_key, content)

    def unseal(self, sealed: bytes) -> bytes | None:
        """What was sealed; None where it was under another key, or is damaged."""
        try:
            return aes_key_unwrap_with_padding(self._wrapping_key, sealed)
        except InvalidUnwrap:
            return None
