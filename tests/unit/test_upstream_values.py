"""What is read of an upstream's replies, and what several processes' findings of one come to."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.store.upstream.health import UpstreamHealth, latest
from kvobj.store.upstream.object_fields import METADATA_BYTES_MAX, object_fields, parse_object_fields

ROW = ObjectRow(
    bucket="cache",
    key="k",
    blobs=(),
    size_bytes=0,
    etag="e",
    modified_ms=0,
    owner="root",
    durability=Durability.MEMORY,
    headers={"content-type": "text/plain", "cache-control": "no-store"},
    metadata={"lmcache-form": "1 3 2 32 256 1024", "colour": "grün"},
)
FOUND = UpstreamHealth("cache", "ok", "", 5, 10, is_held_back=False, last_error="", last_error_ms=0)


def test_a_chunks_own_fields_come_back_as_they_were_sent_and_text_as_clients_are_told_it() -> None:
    sent = object_fields(ROW)
    assert all(value.isascii() for value in sent.values())
    headers, metadata = parse_object_fields(sent)
    assert headers == ROW.headers
    assert metadata == {"lmcache-form": "1 3 2 32 256 1024", "colour": "=?UTF-8?B?Z3LDvG4=?="}
    # Sent on by the store that fetched it, it stays the same.
    row = msgspec.structs.replace(ROW, headers=headers, metadata=metadata)
    assert object_fields(row) == sent


def test_what_no_object_can_have_is_passed_over() -> None:
    fields = {
        "content-type": "binary/octet-stream",
        "cache-control": "a\x00b",
        "content-language": "x" * 9000,
        "x-amz-meta-good": "1",
        "x-amz-meta-b ad": "2",
        "x-amz-meta-": "3",
        "x-amz-meta-wide": "ü",
        "server": "kvobj",
    }
    assert parse_object_fields(fields) == ({}, {"good": "1"})
    assert parse_object_fields({"x-amz-meta-long": "x" * (METADATA_BYTES_MAX + 1)}) == ({}, {})


@given(st.dictionaries(st.sampled_from(["expires", "x-amz-meta-a", "x-amz-meta-b", "etag"]), st.text()))
def test_whatever_a_reply_says_what_is_kept_can_be_sent_on(fields: dict[str, str]) -> None:
    headers, metadata = parse_object_fields(fields)
    row = msgspec.structs.replace(ROW, headers=headers, metadata=metadata)
    assert parse_object_fields(object_fields(row)) == (headers, metadata)


def test_of_several_processes_the_one_that_was_heard_last_says_how_an_upstream_is() -> None:
    unasked = msgspec.structs.replace(FOUND, state="unasked", heard_ms=0)
    failed = msgspec.structs.replace(
        FOUND, state="down", reason="no", heard_ms=9, last_error="no", last_error_ms=9, namespaces={"a": "why"}
    )
    found = latest([unasked, failed, msgspec.structs.replace(FOUND, namespaces={"b": "also"})])
    assert (found.state, found.reason, found.heard_ms) == ("ok", "", 10)
    assert (found.last_error, found.last_error_ms) == ("no", 9)
    assert found.namespaces == {"a": "why", "b": "also"}
    assert latest([unasked]).state == "unasked"
