"""Headers that a presigned URL carries in its query."""

from __future__ import annotations

import pytest

from kvobj.api.errors import S3Error
from kvobj.api.query_headers import with_query_headers
from kvobj.api.request import HostRules, parse_target


def taken(query: str, fields: dict[str, str] | None = None) -> dict[str, str]:
    return with_query_headers(fields or {}, parse_target(f"/bucket/key?{query}", "h", HostRules()))


def test_a_header_in_the_query_counts_as_one_and_the_signature_s_own_parameters_do_not() -> None:
    assert taken("X-Amz-Meta-Colour=blue&x-amz-checksum-mode=ENABLED&X-Amz-Expires=60&x-id=PutObject") == {
        "x-amz-meta-colour": "blue",
        "x-amz-checksum-mode": "ENABLED",
    }


def test_the_checksum_of_the_body_that_was_not_there_when_the_url_was_made_is_ignored() -> None:
    # As the SDK for JavaScript presigns every PutObject: AAAAAA== is the CRC32 of no bytes.
    assert taken("x-amz-checksum-crc32=AAAAAA%3D%3D&x-amz-sdk-checksum-algorithm=CRC32") == {}
    sent = {"x-amz-checksum-crc32": "NSRBwg=="}
    assert taken("x-amz-checksum-crc32=AAAAAA%3D%3D", sent) == sent


def test_a_header_that_came_twice_and_differs_is_refused() -> None:
    assert taken("x-amz-acl=private", {"x-amz-acl": "private"}) == {"x-amz-acl": "private"}
    with pytest.raises(S3Error) as caught:
        taken("x-amz-acl=private", {"x-amz-acl": "public-read"})
    assert caught.value.code == "InvalidArgument"
