from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api import xml
from kvobj.api.deletes import parse_delete
from kvobj.api.errors import S3Error
from kvobj.api.multipart import parse_complete

COMPLETE = "<Part><PartNumber>1</PartNumber><ETag>&quot;abc&quot;</ETag></Part>"


@pytest.mark.parametrize(
    "document",
    [
        f"<CompleteMultipartUpload>{COMPLETE}</CompleteMultipartUpload>",
        f'{xml.PROLOG}<CompleteMultipartUpload xmlns="{xml.NAMESPACE}">{COMPLETE}</CompleteMultipartUpload>',
        f'<s3:CompleteMultipartUpload xmlns:s3="{xml.NAMESPACE}">{COMPLETE}</s3:CompleteMultipartUpload>',
    ],
)
def test_a_document_is_read_with_and_without_namespace_and_prolog(document: str) -> None:
    (part,) = parse_complete(document.encode())
    assert (part.number, part.etag) == (1, "abc")


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"<Delete>",
        b"<Other/>",
        b"not xml",
        b'<!DOCTYPE Delete [<!ENTITY a "aaaa">]><Delete><Object><Key>&a;</Key></Object></Delete>',
        b'<!DOCTYPE Delete SYSTEM "http://192.0.2.1/x.dtd"><Delete><Object><Key>k</Key></Object></Delete>',
        b'<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]><Delete><Object><Key>&x;</Key></Object></Delete>',
        b"<?php echo 1 ?><Delete><Object><Key>k</Key></Object></Delete>",
        b"<Delete>" + b"<a>" * 20 + b"</a>" * 20 + b"</Delete>",
        b'<?xml version="1.0" encoding="no-such-encoding"?><Delete/>',
        b"<Delete><Object></Object></Delete>",
        b"<Delete></Delete>",
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
    ],
)
def test_entities_depth_and_malformed_documents_are_refused(document: bytes) -> None:
    with pytest.raises(S3Error) as caught:
        parse_delete(document)
    assert caught.value.code == "MalformedXML"


def test_too_many_elements_are_refused() -> None:
    with pytest.raises(xml.XmlSyntaxError):
        xml.parse(b"<a>" + b"<b/>" * xml.MAX_ELEMENTS + b"</a>", root="a")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_document_or_a_refusal(data: bytes) -> None:
    for parse in (parse_delete, parse_complete):
        try:
            parse(data)
        except S3Error as error:
            assert error.code in ("MalformedXML", "InvalidArgument")  # noqa: PT017 - which refusals there are is the point


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")))
def test_what_is_written_reads_back(value: str) -> None:
    document = xml.document("Root", [("Key", value), ("List", [("Item", value)])], namespace=False)
    root = ET.fromstring(document)  # noqa: S314 - our own output
    assert (root.findtext("Key") or "") == value
    assert (root.findtext("List/Item") or "") == value
    assert xml.parse(document, root="Root").child_text("Key") == value


def test_control_characters_become_references() -> None:
    assert xml.text("a\x01<b>&\r") == "a&#x1;&lt;b&gt;&amp;&#xD;"
