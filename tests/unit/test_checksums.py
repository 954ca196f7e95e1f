"""Checksums agree with their published check values, with other implementations, and with themselves however they are fed."""

from __future__ import annotations

import base64
import hashlib
import random
import zlib
from collections.abc import Callable

import pytest
import xxhash
from awscrt import checksums as awscrt  # type: ignore[import-untyped]
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvobj.codec.checksums import ALGORITHMS, CRC_BYTES, Digester, blake3_digest, combine_crc, crc32c

CHECK = b"123456789"


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("crc32", "cbf43926"),
        ("crc32c", "e3069283"),
        ("crc64nvme", "ae8b14860a799888"),
        ("md5", "25f9e794323b453885f5181f1b624d0b"),
        ("sha1", "f7c3bc1d808e04732adf679965ccc34ca7ae3441"),
        ("sha256", "15e2b0d3c33891ebb0f1ef609ec419420c20e320ce94c65fbc8c3312448eb225"),
        ("sha512", hashlib.sha512(CHECK).hexdigest()),
        ("xxhash64", xxhash.xxh64(CHECK).hexdigest()),
        ("xxhash3", xxhash.xxh3_64(CHECK).hexdigest()),
        ("xxhash128", xxhash.xxh3_128(CHECK).hexdigest()),
        ("blake3", "b7d65b48420d1033cb2595293263b6f72eabee20d55e699d0df1973b3c9deed1"),
    ],
)
def test_the_published_check_values(algorithm: str, expected: str) -> None:
    digester = Digester(frozenset({algorithm}))
    digester.update(memoryview(CHECK))
    assert digester.hexdigest(algorithm) == expected
    assert digester.base64(algorithm) == base64.b64encode(bytes.fromhex(expected)).decode()


@given(pieces=st.lists(st.binary(max_size=300), max_size=8))
def test_the_way_it_is_fed_does_not_matter(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    fed, at_once = Digester(ALGORITHMS), Digester(ALGORITHMS)
    for piece in pieces:
        fed.update(memoryview(piece))
    at_once.update(memoryview(whole))
    for algorithm in ALGORITHMS:
        assert fed.digest(algorithm) == at_once.digest(algorithm)
    assert fed.size_bytes == len(whole)
    assert fed.digest("crc32") == zlib.crc32(whole).to_bytes(4, "big")
    assert fed.digest("sha256") == hashlib.sha256(whole).digest()
    assert fed.digest("blake3") == blake3(whole).digest() == blake3_digest(memoryview(whole))


@given(first=st.binary(max_size=200), second=st.binary(max_size=200), algorithm=st.sampled_from(sorted(CRC_BYTES)))
def test_crcs_combine_to_that_of_both(first: bytes, second: bytes, algorithm: str) -> None:
    digests = []
    for content in (first, second, first + second):
        digester = Digester(frozenset({algorithm}))
        digester.update(memoryview(content))
        digests.append(digester.digest(algorithm))
    assert combine_crc(algorithm, digests[0], digests[1], second_bytes=len(second)) == digests[2]


@given(first=st.binary(max_size=200), second=st.binary(max_size=200))
def test_crc32c_goes_on_from_an_earlier_value(first: bytes, second: bytes) -> None:
    assert crc32c(memoryview(second), crc32c(memoryview(first))) == crc32c(memoryview(first + second))


@pytest.mark.parametrize("algorithm", sorted(CRC_BYTES))
def test_a_crc_of_long_views_and_short_is_that_of_the_whole(algorithm: str) -> None:
    content = random.Random(3).randbytes(700_000)
    of_awscrt: Callable[[bytes], int] = getattr(awscrt, algorithm)
    digester, position = Digester(frozenset({algorithm})), 0
    for size in (0, 1, 8191, 8192, 8193, 32_767, 32_768, 100, 65_535, 65_536, 65_537, 262_144):
        digester.update(memoryview(content)[position : position + size])
        position += size
    expected = of_awscrt(content[:position])
    assert digester.digest(algorithm) == expected.to_bytes(CRC_BYTES[algorithm], "big")


@pytest.mark.parametrize("size", [0, 9, 65_535, 65_536, 300_000])
def test_crc32c_of_a_long_view_and_a_short_one(size: int) -> None:
    content = random.Random(4).randbytes(size)
    assert crc32c(memoryview(content), 77) == awscrt.crc32c(content, 77)


@pytest.mark.parametrize("algorithm", sorted(CRC_BYTES))
def test_a_crc_of_a_view_of_larger_items_is_that_of_its_bytes(algorithm: str) -> None:
    view = memoryview(random.Random(5).randbytes(160_000))
    of_bytes, of_words = Digester(frozenset({algorithm})), Digester(frozenset({algorithm}))
    of_bytes.update(view)
    of_words.update(view.cast("Q"))
    assert of_bytes.digest(algorithm) == of_words.digest(algorithm)


def test_a_read_only_view_will_do() -> None:
    view = memoryview(bytearray(CHECK)).toreadonly()
    digester = Digester(ALGORITHMS)
    digester.update(view)
    assert digester.hexdigest("crc32c") == "e3069283"


def test_what_was_not_asked_for_is_not_there() -> None:
    digester = Digester(frozenset({"md5"}))
    assert digester.algorithms == {"md5"}
    with pytest.raises(KeyError):
        digester.digest("sha1")


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="xxh3"):
        Digester(frozenset({"xxh3"}))
    with pytest.raises(ValueError, match="md5"):
        combine_crc("md5", b"", b"", second_bytes=0)


def test_xxhash_of_many_pieces_is_that_of_the_whole_and_cannot_go_on() -> None:
    data = random.Random(1).randbytes(1_000_003)
    digester = Digester(frozenset({"xxhash3"}))
    digester.update(memoryview(data))
    assert digester.digest("xxhash3") == digester.digest("xxhash3") == xxhash.xxh3_64(data).digest()
    with pytest.raises(AssertionError):
        digester.update(memoryview(b"more"))
