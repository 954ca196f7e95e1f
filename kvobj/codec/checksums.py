"""The hash functions of the data path, under the names that requests and rows use for them.

Guarantees: every function releases the GIL over large inputs, so they run beside the event loop on a pool; none copies. Only
XXHash does neither: awscrt takes nothing but bytes there, so it is fed in small copies. Hardly a client asks for it.
Does not decide where it runs: callers hash more than 64 KiB on a pool. This is the one module that imports awscrt.

Seen on one core of an AMD EPYC server, GB/s over 32 MiB: blake3 6.4, sha256 1.3, sha1 1.2, md5 0.7. CRCs of bytes in the cache, and
of 32 MiB out of it: with AVX-512 crc32 57 and 29, and by awscrt crc32c 29 and 20, crc64nvme 30, crc32 3.0; without (Zen 3) crc32 25
and 11, crc32c 31 and 13, crc64nvme 25 and 11, and by awscrt 2.5, 19 and 4.3, 11 and 7.7.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Final, Protocol, Self

from awscrt import checksums as _crt  # type: ignore[import-untyped]
from blake3 import blake3

from kvobj.codec.native_crcs import Crc, CrcName, native_crc

ALGORITHMS: Final = frozenset(
    {
        "md5",
        "sha1",
        "sha256",
        "sha512",
        "crc32",
        "crc32c",
        "crc64nvme",
        "xxhash64",
        "xxhash3",
        "xxhash128",
        "blake3",
    }
)
"""What a `Digester` can compute."""

CRC_BYTES: Final = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
"""Width of each CRC, most significant byte first as S3 prints it."""

_LONG_BYTES: Final[Mapping[CrcName, int]] = {"crc32": 8 * 1024, "crc32c": 64 * 1024, "crc64nvme": 32 * 1024}
"""From here on the native library makes up for what it takes more to be called than awscrt: 1 to 4 µs."""
_XXHASH_PIECE_BYTES: Final = 256 * 1024


@cache
def fast_algorithms() -> frozenset[str]:
    """Those that are made about as fast as memory is read: cheaper where the bytes arrive, while they are in the core's cache, than
    on another thread."""
    names = {"crc32c", "crc64nvme"}
    return frozenset(names if native_crc("crc32") is None else names | {"crc32"})


def crc32c(view: memoryview, previous: int = 0) -> int:
    """CRC-32C (RFC 3720, Castagnoli) of `view`, going on from `previous`, the value for the bytes before it."""
    crc: Crc = _crt.crc32c if view.nbytes < _LONG_BYTES["crc32c"] else _long_crc("crc32c")
    return crc(view, previous)


@cache
def _long_crc(name: CrcName) -> Crc:
    """For views from `_LONG_BYTES` on."""
    of_awscrt: Crc = getattr(_crt, name)
    return native_crc(name) or of_awscrt


def blake3_digest(view: memoryview) -> bytes:
    """The 32-byte BLAKE3 digest of `view`."""
    return blake3(view).digest()


def combine_crc(algorithm: str, first: bytes, second: bytes, *, second_bytes: int) -> bytes:
    """CRC of two spans of bytes put together, from the CRC of each and the length of the second.

    `algorithm` is one of `CRC_BYTES`. Makes a FULL_OBJECT checksum of a multipart upload out of those of its parts (S3
    reference, "Checking object integrity") without reading them again.
    """
    combined: int
    left, right = int.from_bytes(first, "big"), int.from_bytes(second, "big")
    match algorithm:
        case "crc32":
            combined = _crt.combine_crc32(left, right, second_bytes)
        case "crc32c":
            combined = _crt.combine_crc32c(left, right, second_bytes)
        case "crc64nvme":
            combined = _crt.combine_crc64nvme(left, right, second_bytes)
        case _:
            raise ValueError(f"not a CRC: {algorithm}")
    return combined.to_bytes(CRC_BYTES[algorithm], "big")


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc:
    """One of `CRC_BYTES`."""

    __slots__ = ("_long", "_long_bytes", "_short", "_size_bytes", "_value")

    def __init__(self, name: CrcName) -> None:
        self._short: Crc = getattr(_crt, name)
        self._long = _long_crc(name)
        self._long_bytes = _LONG_BYTES[name]
        self._size_bytes = CRC_BYTES[name]
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = (self._short if data.nbytes < self._long_bytes else self._long)(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._size_bytes, "big")


class _XxHash:
    """One of awscrt's XXHashes (seed 0, as S3's). It cannot go on once its digest was asked for."""

    __slots__ = ("_hash", "_value")

    def __init__(self, algorithm: str) -> None:
        kind = _crt.XXHash
        made = {"xxhash64": kind.new_xxhash64, "xxhash3": kind.new_xxhash3_64, "xxhash128": kind.new_xxhash3_128}
        self._hash = made[algorithm]()
        self._value: bytes | None = None

    def update(self, data: memoryview, /) -> None:
        assert self._value is None, "XXHash cannot go on after its digest"
        for start in range(0, len(data), _XXHASH_PIECE_BYTES):
            self._hash.update(bytes(data[start : start + _XXHASH_PIECE_BYTES]))

    def digest(self) -> bytes:
        if self._value is None:
            self._value = self._hash.finalize()
        return self._value


class _Computed:
    """A digest that came from elsewhere."""

    __slots__ = ("_digest",)

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def update(self, data: memoryview, /) -> None:
        raise AssertionError(f"a digest that is computed cannot go on ({len(data)} bytes)")

    def digest(self) -> bytes:
        return self._digest


def _new_hash(algorithm: str) -> _Hash:
    match algorithm:
        case "crc32" | "crc32c" | "crc64nvme":
            return _Crc(algorithm)
        case "xxhash64" | "xxhash3" | "xxhash128":
            return _XxHash(algorithm)
        case "blake3":
            return blake3()
        case "md5" | "sha1" | "sha256" | "sha512":
            # MD5 and SHA-1 are what S3 clients announce; nothing here rests its safety on them.
            return hashlib.new(algorithm, usedforsecurity=False)
        case _:
            raise ValueError(f"unknown digest algorithm: {algorithm}")


class Digester:
    """Several digests of one stream of bytes, fed view by view in order.

    `algorithms` are names out of `ALGORITHMS`, lower case; another raises ValueError. Not thread-safe: one `update`
    at a time, on any thread. An update goes through the whole view once for each algorithm: smaller pieces would sit
    in the cache, but each hand-back of the GIL can cost a switch interval (5 ms) on a busy loop, so fewer and larger
    calls win.
    """

    __slots__ = ("_hashes", "size_bytes")

    def __init__(self, algorithms: frozenset[str]) -> None:
        self._hashes: dict[str, _Hash] = {name: _new_hash(name) for name in sorted(algorithms)}
        self.size_bytes = 0

    @classmethod
    def computed(cls, digests: Mapping[str, bytes]) -> Self:
        """One that was fed elsewhere, and has these digests by algorithm. It cannot go on."""
        digester = cls(frozenset())
        digester._hashes = {name: _Computed(digest) for name, digest in digests.items()}
        return digester

    @property
    def algorithms(self) -> frozenset[str]:
        """The names this digester was made with."""
        return frozenset(self._hashes)

    def update(self, view: memoryview) -> None:
        """Go on with the bytes of `view`, which is only read and not kept."""
        for each in self._hashes.values():
            each.update(view)
        self.size_bytes += len(view)

    def digest(self, algorithm: str) -> bytes:
        """The digest of the bytes so far; of a CRC, most significant byte first. KeyError if it was not asked for."""
        return self._hashes[algorithm].digest()

    def hexdigest(self, algorithm: str) -> str:
        """`digest` as lower-case hex, the form of an ETag."""
        return self.digest(algorithm).hex()

    def base64(self, algorithm: str) -> str:
        """`digest` as base64, the form of S3's x-amz-checksum headers."""
        return base64.b64encode(self.digest(algorithm)).decode("ascii")
