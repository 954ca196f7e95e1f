"""A request as a fuzz case: parts of a recorded one, changed where S3 looks, and the bytes that stand for them.

The bytes are those of HTTP, so that cases can be read; `#` lines before the request line say what is done with it afterwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from fuzz_mutation import AWKWARD, Mutator

CORPUS: Final = Path(__file__).resolve().parent / "corpus"
_END: Final = b"\r\n\r\n"
_NOISE: Final = frozenset({b"user-agent", b"amz-sdk-invocation-id", b"amz-sdk-request"})
_NOT_TOKEN: Final = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]+").sub
_NOT_IN_LINE: Final = re.compile(rb"[\x00\r\n]+").sub
Field = tuple[bytes, bytes]

METHODS: Final = (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH", b"COPY", b"get", b"X")
PATHS: Final = (
    b"/", b"/bucket", b"/bucket/", b"/bucket/object", b"/bucket/key", b"/bucket/parts", b"/bucket/whole", b"/bucket/a%2Fb", b"/bucket//x", b"/chunks",
    b"/chunks/live", b"/chunks/" + b"00" * 16, b"/chunks/ns/" + b"11" * 32, b"/nobody", b"/bobs/key", b"/bucket/%00", b"/bucket/../x",
    b"/bucket/" + b"k" * 1024, b"/bucket/" + b"k" * 1025, b"/bucket/%C3%BC%F0%9F%94%91", b"/bucket/%ED%A0%80", b"/Bu", b"//", b"/%2e%2e/",
    b"/express--x-s3", b"/bucket/a+b%20c", b"/bucket/%7E~", b"*", b"", b"bucket/object",
)  # fmt: skip
PARAMETERS: Final[dict[bytes, tuple[bytes, ...]]] = {
    b"list-type": (b"2", b"1"),
    b"prefix": (b"a", b"%2F", b"", b"%C3%BC"),
    b"delimiter": (b"/", b"%2F", b"ab", b""),
    b"max-keys": (b"0", b"1", b"2", b"1000", b"1001", b"-1", b"x"),
    b"marker": (b"a", b"object"),
    b"start-after": (b"a",),
    b"continuation-token": (b"MWtleQ==", b"MQ", b"===", b"MWE%3D"),
    b"fetch-owner": (b"true",),
    b"encoding-type": (b"url", b"xml", b""),
    b"key-marker": (b"a", b"parts"),
    b"version-id-marker": (b"null",),
    b"upload-id-marker": (b"UP1", b""),
    b"max-uploads": (b"1", b"0"),
    b"max-parts": (b"1", b"0"),
    b"part-number-marker": (b"0", b"1", b"10000"),
    b"partNumber": (b"1", b"2", b"0", b"10000", b"10001", b"x"),
    b"uploadId": (b"UP1", b"UP2", b"%7EUP", b"", b"a/b"),
    b"versionId": (b"null", b"", b"x"),
    b"response-content-type": (b"text%2Fcss", b"a%0D%0Ab"),
    b"response-expires": (b"x",),
    b"response-content-disposition": (b"%C3%BC",),
    b"x-id": (b"PutObject",),
    b"sessions": (b"0" * 32, b"x", b""),
    b"session": (b"0" * 32, b"x"),
    b"namespace": (b"ns", b"", b"x" * 300, b"%00"),
    b"max-buckets": (b"1", b"0", b"10001", b"x"),
    b"after": (b"0", b"x", b"99999999999999999999", b"9" * 5000),
    b"X-Amz-Date": (b"20260102T030405Z", b"20260102T050405Z", b"20251231T030405Z", b"x"),
    b"X-Amz-Content-Sha256": (b"UNSIGNED-PAYLOAD", b"x", b"0" * 64),
    b"X-Amz-Meta-A": (b"b", b"c", b"%0A", b"%C3%BC"),
    b"layers": (b"0-1", b"1-0", b"0-99999"),
    b"part": (b"0", b"1"),
    b"X-Amz-Expires": (b"1", b"0", b"604801"),
    b"X-Amz-Security-Token": (b"t",),
    b"AWSAccessKeyId": (b"AK",),
} | dict.fromkeys(
    (
        b"uploads", b"delete", b"location", b"versioning", b"versions", b"acl", b"policy", b"policyStatus", b"tagging", b"lifecycle",
        b"cors", b"attributes", b"session", b"website", b"encryption", b"publicAccessBlock", b"object-lock", b"logging", b"select",
        b"match", b"pins", b"mget", b"mput", b"events", b"namespaces", b"restore", b"retention", b"legal-hold", b"torrent",
    ),
    (b"", b"1"),
)  # fmt: skip
DATES: Final = (
    b"Fri, 02 Jan 2026 03:04:05 GMT", b"Friday, 02-Jan-26 03:04:05 GMT", b"Fri Jan  2 03:04:05 2026", b"Thu, 01 Jan 1970 00:00:00 GMT",
    b"20260102T030405Z", b"Fri, 31 Feb 9999 25:61:61 +9999", b"1 Jan 99999999999999 00:00 GMT", b"x", b"0", b"Fri, 02 Jan 0000 00:00:00",
    b"02 Jan 2026 03:04:05 -0000", b"Jan 2026", b"2026-01-02T03:04:05Z",
)  # fmt: skip
_ETAG: Final = b"5d41402abc4b2a76b9719d911017c592"
_ETAGS: Final = (b"*", _ETAG, b'"' + _ETAG + b'"', b'W/"x"', b'"a", "b"', b'""', b'"', b"", b",", b"x" * 4097)
_BASE64: Final = (
    b"NhCmhg==", b"AAAAAA==", b"M3eFcAZSQlc=", b"XUFAKrxLKna5cZ2REBfFkg==", b"=", b"", b"AAAA-2", b"!!!!", b"A" * 44, b"qvTGHdzF6KLavt4PO0gs2a6pQ00=",
    b"LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=", b"LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=-1", b"mnG7TA==",
)  # fmt: skip
FIELDS: Final[dict[bytes, tuple[bytes, ...]]] = {
    b"host": (b"127.0.0.1:9000", b"localhost", b"bucket.localhost:80", b"bucket.s3.example.com", b"[::1]:9", b"", b"a..b.localhost"),
    b"range": (b"bytes=0-1", b"bytes=1-", b"bytes=-2", b"bytes=-0", b"bytes=5-4", b"bytes=0-0,2-3", b"bytes=-", b"BYTES = 1 - 3", b"x=1-2"),
    b"if-match": _ETAGS,
    b"if-none-match": _ETAGS,
    b"if-range": (*_ETAGS, *DATES),
    b"if-modified-since": DATES,
    b"if-unmodified-since": DATES,
    b"date": DATES,
    b"expires": DATES,
    b"x-amz-date": (b"20260102T030405Z", b"20260102T040405Z", b"20261302T030405Z", *DATES),
    b"x-amz-if-match-size": (b"5", b"x", b"", b"9" * 20),
    b"x-amz-if-match-last-modified-time": DATES,
    b"x-amz-copy-source": (b"/bucket/object", b"bucket/parts", b"bucket/%00", b"chunks/live", b"bobs/key", b"/a/../b", b"bucket", b"bucket/object?versionId=x", b"bucket/object?x"),
    b"x-amz-copy-source-range": (b"bytes=0-1", b"bytes=0-4", b"bytes=1-", b"bytes=4-0", b"bytes=0-9999999999"),
    b"x-amz-copy-source-if-match": _ETAGS,
    b"x-amz-copy-source-if-none-match": _ETAGS,
    b"x-amz-copy-source-if-modified-since": DATES,
    b"x-amz-copy-source-if-unmodified-since": DATES,
    b"x-amz-metadata-directive": (b"COPY", b"REPLACE", b"x"),
    b"x-amz-tagging-directive": (b"COPY", b"REPLACE", b"x"),
    b"x-amz-tagging": (b"a=b", b"a=b&a=c", b"", b"a", b"=b", b"%zz=1", b"&".join(b"%d=" % n for n in range(11)), b"a=" + b"v" * 257),
    b"x-amz-acl": (b"private", b"public-read", b"public-read-write", b"authenticated-read", b"bucket-owner-read", b"x"),
    b"x-amz-grant-read": (b'id="bob"', b'uri="http://acs.amazonaws.com/groups/global/AllUsers"', b"id=bob, id=alice", b'emailAddress="x"', b"id", b"="),
    b"x-amz-grant-full-control": (b'id="alice"', b'id="', b","),
    b"x-amz-object-attributes": (b"ETag", b"ETag,ObjectParts,Checksum,StorageClass,ObjectSize", b"x", b""),
    b"x-amz-max-parts": (b"1", b"0", b"x"),
    b"x-amz-part-number-marker": (b"1", b"x"),
    b"x-amz-expected-bucket-owner": (b"alice", b"bob"),
    b"x-amz-checksum-algorithm": (b"CRC32", b"crc64nvme", b"SHA256", b"MD5"),
    b"x-amz-checksum-type": (b"FULL_OBJECT", b"COMPOSITE", b"x"),
    b"x-amz-checksum-mode": (b"ENABLED", b"x"),
    b"x-amz-checksum-crc32": _BASE64,
    b"x-amz-checksum-crc32c": _BASE64,
    b"x-amz-checksum-crc64nvme": _BASE64,
    b"x-amz-checksum-sha1": _BASE64,
    b"x-amz-checksum-sha256": _BASE64,
    b"x-amz-checksum-xxhash": _BASE64,
    b"x-amz-sdk-checksum-algorithm": (b"CRC32", b"SHA1", b"MD5", b"x"),
    b"x-amz-trailer": (b"x-amz-checksum-crc32", b"x-amz-checksum-crc64nvme", b"x", b""),
    b"x-amz-decoded-content-length": (b"5", b"0", b"6", b"-1", b"x", b"99999999999999999999"),
    b"x-amz-content-sha256": (b"UNSIGNED-PAYLOAD", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD", b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", b"STREAMING-UNSIGNED-PAYLOAD-TRAILER", b"0" * 64, b"x"),
    b"content-md5": _BASE64,
    b"content-type": (b"text/plain", b"application/json", b"application/msgpack", b"multipart/form-data; boundary=x", b""),
    b"content-encoding": (b"aws-chunked", b"gzip,aws-chunked", b"AWS-CHUNKED,", b"gzip"),
    b"content-length": (b"5", b"0", b"4", b"", b"x"),
    b"cache-control": (b"no-cache",),
    b"content-disposition": (b"a", b"\xc3\xbc"),
    b"expect": (b"100-continue", b"x"),
    b"origin": (b"https://example.com", b"null", b"*", b""),
    b"access-control-request-method": (b"PUT", b"X", b""),
    b"access-control-request-headers": (b"x-amz-date, content-type", b",", b""),
    b"x-amz-meta-a": (b"b", b"\xc3\xbc", b"\xff", b"v" * 2048, b""),
    b"x-amz-meta-\xc3": (b"x",),
    b"x-amz-storage-class": (b"STANDARD", b"GLACIER", b"x"),
    b"x-amz-server-side-encryption": (b"AES256",),
    b"x-amz-bucket-object-lock-enabled": (b"true", b"false"),
    b"x-amz-mp-object-size": (b"5", b"x", b"99999999999999999999"),
    b"x-amz-rdma-token": (b"7f00:1000:12:1:2:1:fe80", b""),
    b"x-amz-security-token": (b"t",),
    b"x-kvobj-bucket-kind": (b"kv", b"ordinary", b"x"),
    b"x-kvobj-durability": (b"memory", b"local", b"shared", b"x"),
    b"x-kvobj-namespace": (b"ns", b"default", b"x" * 300),
    b"x-kvobj-parent": (b"root", b"00" * 16, b"zz"),
    b"x-kvobj-tokens": (b"16", b"0", b"x"),
    b"x-kvobj-part": (b"0/2", b"2/2", b"x/y", b"0/0"),
    b"x-kvobj-pin": (b"0" * 32, b"x"),
    b"x-kvobj-accept": (b"raw", b"gipe", b""),
    b"x-kvobj-want": (b"digest", b"x"),
    b"x-forwarded-for": (b"1.2.3.4", b"1.2.3.4, ::1", b"fe80::1%eth0", b"::ffff:1.2.3.4,127.0.0.1", b"x, 127.0.0.1", b","),
    b"x-forwarded-proto": (b"https", b"http, https", b""),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """A request's parts, as bytes. `notes` are the `#` lines."""

    method: bytes
    target: bytes
    fields: tuple[Field, ...]
    body: bytes
    notes: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The case's bytes."""
        lines = [b"#" + note for note in self.notes]
        lines += [b"%s %s HTTP/1.1" % (self.method, self.target)]
        lines += [name + b": " + value for name, value in self.fields]
        return b"\r\n".join(lines) + _END + self.body

    def field(self, name: bytes) -> bytes | None:
        """The first value of a header of this lower-case name."""
        return next((value for found, value in self.fields if found.lower() == name), None)


def parse_message(case: bytes) -> Message | None:
    """The parts of a case, or None where the bytes are no case."""
    head, _, body = case.partition(_END)
    lines = head.split(b"\r\n")
    notes = []
    while lines and lines[0][:1] == b"#":
        notes.append(lines.pop(0)[1:])
    if not lines:
        return None
    method, _, rest = lines[0].partition(b" ")
    target, _, _ = rest.rpartition(b" ")
    fields = []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        # The HTTP layer hands no others on.
        fields.append((_NOT_TOKEN(b"", name).lower(), _NOT_IN_LINE(b"", value).strip(b" \t")))
    return Message(method, target, tuple(fields), body, tuple(notes))


def recorded() -> list[bytes]:
    """The requests of real clients, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / "requests").glob("*.http"))]


def recorded_messages() -> list[Message]:
    """`recorded`, in parts, without the fields that only tell of the client: they are long, and nothing reads them."""
    messages = [message for message in map(parse_message, recorded()) if message is not None]
    return [
        replace(message, fields=tuple(field for field in message.fields if field[0] not in _NOISE))
        for message in messages
    ]


class MessageMutator:
    """Changes requests where S3 looks: method, path, parameters, headers, body."""

    def __init__(self, random: Random, pool: list[Message], bodies: list[bytes]) -> None:
        self._random = random
        self._pool = pool
        self._bodies = bodies
        self._bytes = Mutator(random)

    def change(self, message: Message, *, most: int = 4) -> Message:
        """`message` after one to `most` changes."""
        random = self._random
        for _ in range(1 + int(random.random() ** 1.5 * most)):
            choice = random.random()
            if choice < 0.07:
                message = replace(message, method=random.choice(METHODS))
            elif choice < 0.3:
                message = replace(message, target=self._target(message.target))
            elif choice < 0.85:
                message = replace(message, fields=self._fields(list(message.fields)))
            else:
                message = replace(message, body=self._body(message.body))
        return message

    def _value(self, data: bytes) -> bytes:
        """A changed value that cannot end its line."""
        return _NOT_IN_LINE(b"", self._bytes.change(data, most=3))[:12_000]

    def _target(self, target: bytes) -> bytes:
        random = self._random
        path, mark, query = target.partition(b"?")
        choice = random.random()
        if choice < 0.2:
            path = random.choice(PATHS)
        elif choice < 0.35:
            path = self._value(path).replace(b" ", b"%20")
        elif choice < 0.75:
            name = random.choice(tuple(PARAMETERS))
            piece = name + b"=" + random.choice(PARAMETERS[name]) if random.random() < 0.9 else name
            query, mark = (query + b"&" + piece if query else piece), b"?"
        elif choice < 0.85:
            query = b"&".join(piece for piece in query.split(b"&") if random.random() < 0.6)
        else:
            query, mark = self._value(query).replace(b" ", b"%20"), b"?"
        return path + mark + query

    def _fields(self, fields: list[Field]) -> tuple[Field, ...]:
        random = self._random
        choice = random.random()
        at = random.randrange(len(fields)) if fields else 0
        if choice < 0.55 or not fields:
            name = random.choice(tuple(FIELDS))
            value = random.choice(FIELDS[name])
            if random.random() < 0.2:
                value = self._value(value)
            fields = [field for field in fields if field[0] != name or random.random() < 0.05]
            fields.insert(min(at, len(fields)), (name, value))
        elif choice < 0.65:
            del fields[at]
        elif choice < 0.9:
            fields[at] = (fields[at][0], self._value(fields[at][1]).strip(b" \t"))
        elif choice < 0.95:
            fields += list(random.choice(self._pool).fields)[:3]
        else:
            name = _NOT_TOKEN(b"", self._value(fields[at][0])).lower() or b"x"
            fields[at] = (name, _NOT_IN_LINE(b"", random.choice(AWKWARD)))
        return tuple(fields)

    def _body(self, body: bytes) -> bytes:
        if self._bodies and self._random.random() < 0.4:
            body = self._random.choice(self._bodies)
            if self._random.random() < 0.5:
                return body
        return self._bytes.change(body, self._bodies, most=3)
