"""Fuzz target for the XML of requests but settings (`fuzz_settings`).

A case's first line names the document, the rest is the body. What must hold: only typed refusals; what the reader of XML takes comes
back the same when it is written and read again; and a document is never more than its bounds allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Final

from fuzz_framing import require_refusal
from fuzz_message import recorded_messages
from fuzz_mutation import MAX_CASE_BYTES, Mutator, change_xml

from kvobj.api import xml
from kvobj.api.deletes import MAX_DELETE_KEYS, parse_delete
from kvobj.api.multipart import parse_complete
from kvobj.catalog.rows import MAX_PARTS
from kvobj.errors import KvobjError

XML_TOKENS: Final = (
    b"<", b">", b"/>", b"</", b"<!--", b"-->", b"<![CDATA[", b"]]>", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"&lt;", b"&#x0;", b"&#65;",
    b"&#x1F511;", b"<?xml version='1.0'?>", b"<?xml version='1.0' encoding='utf-16'?>", b"<?xml version='1.0' encoding='ascii'?>", b"<?pi?>",
    b'<?xml version="1.0" encoding="x-unknown"?>', b" xmlns='http://s3.amazonaws.com/doc/2006-03-01/'", b" xmlns:a='b'", b"a:", b"xml:",
    b"<a>" * 9, b"</a>" * 9, b"<a/>" * 50, b"<Key>", b"</Key>",
)  # fmt: skip
_TOKENS: Final = (
    *XML_TOKENS, b"<Object><Key>k</Key></Object>", b"<Quiet>true</Quiet>", b"<VersionId>null", b"<ETag>", b"<Size>5</Size>",
    b"<LastModifiedTime>2026-01-02T03:04:05Z</LastModifiedTime>", b"<Part><PartNumber>1</PartNumber><ETag>e</ETag></Part>", b"<PartNumber>",
    b"<ChecksumCRC32>AAAAAA==</ChecksumCRC32>",
)  # fmt: skip
_SEEDS: Final = {
    b"delete": (
        b"<Delete><Object><Key>a</Key></Object><Object><Key>b</Key><VersionId>null</VersionId><ETag>&quot;x&quot;</ETag></Object><Quiet>true</Quiet></Delete>",
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
        b"<Delete><Object><Key>../../x</Key></Object><Object><Key>" + b"k" * 1025 + b"</Key><VersionId>v</VersionId></Object></Delete>",
        b"\xef\xbb\xbf<?xml version='1.0' encoding='UTF-8'?>\n<Delete xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Object><Key>\xc3\xbc</Key></Object></Delete>",
    ),
    b"complete": (
        b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>e</ETag></Part><Part><ETag>&quot;f&quot;</ETag><PartNumber>2</PartNumber><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></CompleteMultipartUpload>",
        b"<CompleteMultipartUpload/>",
    ),
    b"location": (b"<CreateBucketConfiguration><LocationConstraint>us-east-1</LocationConstraint></CreateBucketConfiguration>",),
    b"any": (b"<a><b>c</b><d/>e<f><g>h</g></f></a>", b"<a>&#x41;<![CDATA[<b>]]></a>", "<a>\u2028ü🔑</a>".encode()),
}  # fmt: skip
_UNWRITABLE: Final = re.compile(rb"&#x|\xef\xbf[\xbe\xbf]").search  # what no XML can hold and S3 sends nevertheless
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*").fullmatch  # expat takes `a:`, of which nothing is left
_BY_ROOT: Final = {
    b"<Delete": b"delete",
    b"<CompleteMultipartUpload": b"complete",
    b"<CreateBucketConfiguration": b"location",
}


def _read_any(body: bytes) -> str:
    root = (
        body.partition(b"<")[2].partition(b">")[0].partition(b" ")[0].strip(b"/").decode("latin-1").rpartition(":")[2]
    )
    return _read_xml(body, root)


def _read_xml(body: bytes, root: str) -> str:
    try:
        element = xml.parse(body, root=root)
    except xml.XmlSyntaxError:
        return "refused"
    nodes = _nodes(element)
    assert isinstance(nodes[1], list | str)
    written = xml.document(element.name, [nodes], namespace=False)
    if not _UNWRITABLE(written) and all(_NAME(name) for name in _names(element)):
        again = xml.parse(written, root=element.name).children[0]
        assert _nodes(again) == nodes, "what was written is read otherwise"
    return "read"


def _names(element: xml.Element) -> list[str]:
    return [element.name, *(name for child in element.children for name in _names(child))]


def _nodes(element: xml.Element) -> xml.Node:
    """An element to write: its children, or its text where it has none (mixed content has no form that S3 uses)."""
    return (element.name, [_nodes(child) for child in element.children] if element.children else element.text)


def _read_delete(body: bytes) -> str:
    entries, _ = parse_delete(body)
    assert 1 <= len(entries) <= MAX_DELETE_KEYS
    for entry in entries:
        entry.key.encode()
        assert entry.problem is not None or len(entry.key.encode()) <= 1024
    return "read"


def _read_complete(body: bytes) -> str:
    parts = parse_complete(body)
    assert 1 <= len(parts) <= MAX_PARTS
    assert all(1 <= part.number <= MAX_PARTS for part in parts)
    return "read"


READERS: Final[dict[bytes, Callable[[bytes], str]]] = {
    b"delete": _read_delete,
    b"complete": _read_complete,
    b"location": lambda body: _read_xml(body, "CreateBucketConfiguration"),
    b"any": _read_any,
}
"""By the name in a case's first line. Each raises nothing but what is a refusal."""


class DocumentTarget:
    """Every document that a request can carry."""

    name = "documents"
    modules = (
        "kvobj/api/xml.py",
        "kvobj/api/deletes.py:parse_delete",
        "kvobj/api/deletes.py:_parse_entry",
        "kvobj/api/multipart.py:parse_complete",
        "kvobj/api/multipart.py:_parse_part",
    )

    def __init__(self) -> None:
        self._seeds = [(name, body) for name, bodies in _SEEDS.items() for body in bodies]
        for message in recorded_messages():
            for root, name in _BY_ROOT.items():
                if root in message.body:
                    self._seeds.append((name, message.body[message.body.index(b"<") :]))
        self._bodies = [body for _, body in self._seeds if len(body) < 2000]

    def seeds(self) -> list[bytes]:
        return [name + b"\n" + body for name, body in self._seeds]

    def make(self, random: Random) -> bytes:
        name, body = random.choice(self._seeds)
        if len(body) > 4000 and random.random() < 0.9:
            name, body = random.choice(self._seeds)
        if random.random() < 0.05:
            name = random.choice(tuple(READERS))
        if random.random() < 0.5:
            body = change_xml(random, body, _TOKENS)[:MAX_CASE_BYTES]
            if random.random() < 0.6:
                return name + b"\n" + body
        return name + b"\n" + Mutator(random, _TOKENS).change(body, self._bodies)

    def run(self, case: bytes) -> str:
        name, _, body = case.partition(b"\n")
        reader = READERS.get(name)
        if reader is None:
            return "no case"
        try:
            outcome = reader(body)
        except KvobjError as error:
            require_refusal(error)
            outcome = "refused"
        if outcome == "read" and b"<!--" not in body and b"<![" not in body:
            assert b"<!" not in body, "a document type or an entity was taken"
            assert b"<?" not in body.lstrip(b"\xef\xbb\xbf")[1:], "a processing instruction was taken"
        return f"{name.decode()} {outcome}"
