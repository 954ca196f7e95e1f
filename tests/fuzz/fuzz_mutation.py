"""Changes to bytes: what every fuzz target does to its seeds. Seeded, so that a case is its number."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

MAX_CASE_BYTES: Final = 96 * 1024
_OPENING: Final = re.compile(rb"<([A-Za-z]+)[^<>/]*>")
_NUMBER: Final = re.compile(rb"\d+")

NUMBERS: Final = (
    b"0", b"1", b"-1", b"00", b"2", b"5", b"7", b"9", b"15", b"16", b"17", b"255", b"256", b"999", b"1000", b"1001", b"8191",
    b"8192", b"8193", b"9999", b"10000", b"10001", b"65535", b"65536", b"2147483647", b"2147483648", b"4294967296",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551615", b"18446744073709551616", b"99999999999999999999",
    b"9" * 40, b"9" * 5000, b"1e3", b"0x10", b"+1", b" 1", b"1 ", b"1.0", b"NaN", b"\xd9\xa3", b"\xc2\xb2", b"1_0",
)  # fmt: skip
AWKWARD: Final = (
    b"\0", b"\r\n", b"\n", b"\r", b"\t", b" ", b"  ", b"%00", b"%2F", b"%2f", b"%", b"%%", b"%zz", b"%C3%28", b"%FF", b"%25", b"+",
    b"..", b"/../", b"//", b"/./", b"?", b"#", b"&", b"=", b"&&", b";", b",", b'"', b"'", b"\\", b"<", b">", b"&amp;", b"&#0;",
    b"\x7f", b"\x80", b"\xff", b"\xc3\xbc", b"\xed\xa0\x80", b"\xf0\x9f\x94\x91", b"\xef\xbf\xbf", b"\xe2\x80\xa8", b"\xc2\x85",
    b"\xa0", b"\x85", b"\x1c", b"\x1f", b"\x0b", b"\xef\xbb\xbf", b"a" * 1025, b"A" * 9000, b"*", b"{", b"}", b"[", b"]", b"null", b"true", b"${a}", b"\x1b[0m",
)  # fmt: skip

TEXTS: Final = (
    b"", b" ", b"0", b"1", b"-1", b"99999", b"9" * 30, b"x", b"x" * 130, b"y" * 300, b"z" * 1025, b"\xc3\xbc", b"*", b"a*b*c", b"true", b"Enabled", b"GET",
    b"2026-01-02T00:00:00Z", b"2026-01-02", b"2026-01-02T00:00:00+01:00", b"2026-01-02T03:04:05Z", b"9999-12-31T23:59:59-23:59", b"aws:x", b"FULL_CONTROL",
    b"&#x1;", b"&#13;", b"&lt;a&gt;", b"\xe2\x80\xa8", b"../..", b"NaN", b"null",
)  # fmt: skip
NAMES: Final = (
    "Version", "Id", "Statement", "Sid", "Effect", "Principal", "NotPrincipal", "Action", "NotAction", "Resource", "NotResource", "Condition", "x", "",
    "StringEquals", "StringNotLike", "NumericLessThanIfExists", "ForAnyValue:StringLike", "ForAllValues:ArnEquals", "DateEquals", "Bool", "BoolIfExists", "Null",
    "IpAddress", "NotIpAddressIfExists", "StringEqualsIgnoreCase", "BinaryEquals", "ForSome:StringEquals", "aws:SourceIp", "aws:Referer", "aws:UserAgent",
    "aws:CurrentTime", "aws:EpochTime", "aws:SecureTransport", "aws:username", "aws:userid", "aws:PrincipalArn", "aws:PrincipalType", "aws:TagKeys", "s3:prefix",
    "s3:max-keys", "s3:x-amz-acl", "s3:ExistingObjectTag/a", "s3:RequestObjectTag/a", "s3:RequestObjectTagKeys", "s3:signatureAge", "s3:authType", "aws:PrincipalTag/a", "AWS",
)  # fmt: skip


class Mutator:
    """Changes bytes by `random`, with tokens of the target's own language. One thread's."""

    def __init__(self, random: Random, tokens: Sequence[bytes] = ()) -> None:
        self.random = random
        self._tokens = (*tokens, *tokens, *AWKWARD, *NUMBERS) if tokens else (*AWKWARD, *NUMBERS)
        self._changes: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._insert_token,
            self._insert_token,
            self._replace_with_token,
            self._drop_span,
            self._repeat_span,
            self._swap_spans,
            self._truncate,
            self._other_number,
            self._other_number,
            self._random_bytes,
            self._change_case,
        )

    def change(self, data: bytes, others: Sequence[bytes] = (), *, most: int = 4) -> bytes:
        """`data` after one to `most` changes; `others` are what pieces may be taken from."""
        random = self.random
        for _ in range(1 + int(random.random() ** 2 * most)):
            if others and random.random() < 0.12:
                data = self._splice(data, random.choice(others))
            else:
                data = random.choice(self._changes)(data)
        return data[:MAX_CASE_BYTES]

    def token(self) -> bytes:
        """Something that parsers stumble over."""
        return self.random.choice(self._tokens)

    def _at(self, data: bytes) -> int:
        return int(self.random.random() * (len(data) + 1))

    def _span(self, data: bytes) -> tuple[int, int]:
        start = self._at(data)
        length = int(self.random.random() ** 3 * min(len(data), 400)) + 1
        return start, min(len(data), start + length)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\0"
        at = min(self._at(data), len(data) - 1)
        return data[:at] + bytes((data[at] ^ (1 << self.random.randrange(8)),)) + data[at + 1 :]

    def _insert_token(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self.token() + data[at:]

    def _replace_with_token(self, data: bytes) -> bytes:
        start, stop = self._span(data)
        return data[:start] + self.token() + data[stop:]

    def _drop_span(self, data: bytes) -> bytes:
        start, stop = self._span(data)
        return data[:start] + data[stop:]

    def _repeat_span(self, data: bytes) -> bytes:
        start, stop = self._span(data)
        times = self.random.choice((2, 2, 2, 3, 17, 70, 300))
        return data[:start] + data[start:stop] * times + data[stop:]

    def _swap_spans(self, data: bytes) -> bytes:
        first, second = sorted((self._at(data), self._at(data)))
        return data[second:] + data[first:second] + data[:first]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _other_number(self, data: bytes) -> bytes:
        found = _NUMBER.search(data, self._at(data)) or _NUMBER.search(data)
        if found is None:
            return self._insert_token(data)
        random = self.random
        if random.random() < 0.4 and len(found[0]) < 19:
            number = b"%d" % max(0, int(found[0]) + random.choice((-2, -1, 1, 2, 10, 100)))
        else:
            number = random.choice(NUMBERS)
        return data[: found.start()] + number + data[found.end() :]

    def _random_bytes(self, data: bytes) -> bytes:
        start, stop = self._span(data)
        return data[:start] + self.random.randbytes(min(stop - start, 40)) + data[stop:]

    def _change_case(self, data: bytes) -> bytes:
        start, stop = self._span(data)
        return data[:start] + data[start:stop].swapcase() + data[stop:]

    def _splice(self, data: bytes, other: bytes) -> bytes:
        start, stop = self._span(other)
        if self.random.random() < 0.3:
            return data[: self._at(data)] + other[start:]
        at = self._at(data)
        return data[:at] + other[start:stop] + data[at:]


def change_xml(random: Random, data: bytes, tokens: Sequence[bytes]) -> bytes:
    """A document with one element left out, doubled, moved into another's place, or with another text; well-formed if it was."""
    tags = list(_OPENING.finditer(data))
    if not tags:
        return data
    found = random.choice(tags)
    end = data.find(b"</" + found[1] + b">", found.end())
    if end < 0:
        return data
    stop = end + len(found[1]) + 3
    element, text = data[found.start() : stop], data[found.end() : end]
    whole = [token for token in tokens if token.startswith(b"<") and token.endswith(b">")] or [b""]
    other_place = random.choice(tags).end()
    return random.choice(
        (
            data[: found.start()] + data[stop:],
            data[:stop] + element * random.choice((1, 1, 1, 2, 11, 100)) + data[stop:],
            data[:other_place] + element + data[other_place:],
            data[: found.start()] + random.choice(whole) + data[stop:],
            data[: found.start()] + random.choice(whole) + data[found.start() :],
            data[: found.end()] + random.choice(TEXTS) + data[end:],
            data[: found.start()] + text + data[stop:],
        )
    )


def change_json(random: Random, value: Any, values: Sequence[Any]) -> Any:  # noqa: ANN401 - what JSON is
    """A copy of a document with one place left out, doubled, wrapped, or with another value; `values` are what is put in."""
    if isinstance(value, dict) and value and random.random() < 0.75:
        name = random.choice(list(value))
        changed = dict(value)
        choice = random.random()
        if choice < 0.6:
            changed[name] = change_json(random, value[name], values)
        elif choice < 0.75:
            del changed[name]
        elif choice < 0.85:
            changed[random.choice(NAMES)] = changed.pop(name)
        else:
            changed[random.choice(NAMES)] = random.choice(values)
        return changed
    if isinstance(value, list) and value and random.random() < 0.75:
        at = random.randrange(len(value))
        choice = random.random()
        if choice < 0.6:
            return [*value[:at], change_json(random, value[at], values), *value[at + 1 :]]
        if choice < 0.8:
            return [*value[:at], *value[at + 1 :]]
        return [*value, value[at]]
    choice = random.random()
    if choice < 0.6:
        return random.choice(values)
    return [value] if choice < 0.8 else {"AWS": value}
