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


@pytest.mark.parametrize(
    "document",
    [
        "<a>x</a>".encode("utf-16"),
        "<a>x</a>".encode("utf-16-le"),
        "<a>x</a>".encode("utf-16-be"),
        "<a>x</a>".encode("utf-32"),
        b'<?xml version="1.0" encoding="UTF-16"?><a>x</a>',
        b'<?xml version="1.0" encoding="ISO-8859-1"?><a>\xe9</a>',
        b'<?xml version="1.0" encoding="windows-1252"?><a>x</a>',
        b'<?xml version="1.0" encoding="UTF-7"?><a>+ADw-</a>',
        b"<a>\xe9</a>",
        b"<a>\xc0\xbc</a>",
        b"<a>\xed\xa0\x80</a>",
        b"<a>\0</a>",
        b"<a>x</a>\0",
        b"<a>&#0;</a>",
        b"<a>&#xD800;</a>",
        b"<a>&nbsp;</a>",
        b"<a>&a;</a>",
    ],
)
def test_what_is_not_utf8_text_is_refused(document: bytes) -> None:
    with pytest.raises(xml.XmlSyntaxError):
        xml.parse(document, root="a")


@pytest.mark.parametrize(
    "document",
    [
        "<a>\u00e9</a>".encode(),
        "\ufeff<a>\u00e9</a>".encode(),
        '<?xml version="1.0" encoding="utf-8"?><a>\u00e9</a>'.encode(),
        '<?xml version="1.0" encoding="UTF8" standalone="yes"?>\n<a>\u00e9</a>\n'.encode(),
        b'<?xml version="1.0" encoding="US-ASCII"?><a>&#xe9;</a>',
        "<a><![CDATA[\u00e9]]></a>".encode(),
    ],
)
def test_utf8_is_read_with_and_without_mark_and_declaration(document: bytes) -> None:
    assert xml.parse(document, root="a").text == "\u00e9"


@pytest.mark.parametrize(
    "document",
    [
        b"<a " + b" ".join(b'b%d=""' % index for index in range(xml.MAX_ATTRIBUTES + 1)) + b"/>",
        b"<a " + b" ".join(b'b%d=""' % index for index in range(10_000)) + b"/>",
        b'<a b="' + b"c" * 200_000 + b'"/>',
        b"<a><!--" + b"c" * 200_000 + b"--></a>",
        b"<" + b"a" * 200_000,
        b"<a></a" + b" " * 200_000,
        b"<a>" + b"&#" + b"0" * 200_000,
    ],
)
def test_a_tag_without_end_is_refused_before_it_ends(document: bytes) -> None:
    with pytest.raises(xml.XmlSyntaxError):
        xml.parse(document, root="a")


@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 70_000, 1_000_000])
def test_long_text_is_whole_wherever_it_is_cut(size: int) -> None:
    value = ("\u00e9\u20ac" * size)[:size]
    assert xml.parse(f"<a><b>{value}</b><b><![CDATA[{value}]]></b></a>".encode(), root="a").children == [
        xml.Element("b", value),
        xml.Element("b", value),
    ]


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
