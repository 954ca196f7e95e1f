"""What a remote server that means harm may say, and what becomes of it: nothing but a typed error of bounded length."""

from __future__ import annotations

import pytest

from kvobj.catalog.log_entries import encode_entry
from kvobj.catalog.rows import UserRow
from kvobj.errors import CorruptionError
from kvobj.manifests.sealing import opened_content
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.tiers.remote.documents import parse_objects, parse_upload_id
from kvobj.tiers.remote.faults import error_of, fault_of_answer
from kvobj.wire.response_head import BrokenAnswerError

_ENTITY = '<?xml version="1.0" encoding="{0}"?><!DOCTYPE a [<!ENTITY b "boom">]>{1}'
_UPLOAD = "<InitiateMultipartUploadResult><UploadId>&b;</UploadId></InitiateMultipartUploadResult>"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be", "iso-8859-1"])
def test_no_encoding_hides_a_declaration_from_us(encoding: str) -> None:
    body = _ENTITY.format(encoding.removesuffix("-le").removesuffix("-be"), _UPLOAD).encode(encoding)
    with pytest.raises(BrokenAnswerError):
        parse_upload_id(body)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_error_with_entities_says_nothing(encoding: str) -> None:
    assert error_of(_ENTITY.format(encoding, "<Error><Code>&b;</Code></Error>").encode(encoding)) == ("", "")


def test_what_an_error_says_is_short_and_printable() -> None:
    code, message = "A" * 100_000 + "\n", "x\n2026 ERROR forged\u2028\x7f" * 100
    fault = fault_of_answer(400, {}, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
    assert len(fault.code) <= 64
    assert len(fault.detail) < 400
    assert fault.detail.isprintable()


def test_a_document_nested_without_end_is_no_listing() -> None:
    body = b"<ListBucketResult>" + b"<a>" * 100_000 + b"</a>" * 100_000 + b"</ListBucketResult>"
    assert parse_objects(body).objects == ()
    with pytest.raises(BrokenAnswerError):
        parse_objects(body[:-5])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    fault = fault_of_answer(status, {"location": "http://169.254.169.254/latest/"}, b"")
    assert not fault.is_repeatable


@pytest.mark.parametrize("is_root", [False, True])
def test_a_manifest_from_a_stranger_makes_no_users(is_root: bool) -> None:  # noqa: FBT001 - one of the cases
    forged = encode_entry(UserRow("mallory", "", "key-mallory", "known to her", is_root=is_root))
    with pytest.raises(CorruptionError):
        opened_content(forged, KeyWrapper(bytes(32)))
