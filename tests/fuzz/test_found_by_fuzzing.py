"""What the fuzz found, as behaviours; the cases themselves are in corpus/regressions and run with their targets."""

import base64
import hashlib

import pytest
from fuzz_framing import StepBody
from s3_driver import Driver, FakeBody

from kvobj.api.aws_chunked import MAX_LINE_BYTES, AwsChunkedSource
from kvobj.api.chunk_headers import parse_chunk_headers, parse_pin
from kvobj.api.errors import S3Error
from kvobj.api.request import HostRules, parse_target
from kvobj.api.routing import parse_operation

MIB = 1 << 20


@pytest.mark.parametrize("step", [100, 500, 1 << 16])
async def test_a_line_is_too_long_however_it_was_cut_into_reads(step: int) -> None:
    body = b"0\r\nx:" + b"y" * MAX_LINE_BYTES + b"\r\n\r\n"
    source = AwsChunkedSource(
        StepBody(body, length=len(body), first=step, step=step), 0, signing=None, with_trailer=True
    )
    with pytest.raises(S3Error, match="a line is too long"):
        await source.finish()


@pytest.mark.parametrize("space", ["\xa0", "\x85", "\x1f"])
def test_white_space_that_only_text_knows_is_around_numbers_and_pins(space: str) -> None:
    assert parse_pin({"x-kvobj-pin": space + "0f" * 16}) == b"\x0f" * 16
    assert parse_chunk_headers({"x-kvobj-tokens": f"16{space}"}).tokens == 16


@pytest.mark.parametrize("digits", [20, 5000])
def test_any_number_of_digits_may_be_asked_for_as_an_events_number(digits: int) -> None:
    target = parse_target("/chunks?events&after=" + "9" * digits, "", HostRules())
    with pytest.raises(S3Error, match="after must be an event's number"):
        parse_operation("GET", target, {})


@pytest.mark.parametrize("kind", ["FULL_OBJECT", "full_object", "NONSENSE"])
async def test_complete_refuses_a_type_that_its_checksum_cannot_have(kind: str) -> None:
    driver = Driver()
    await driver.request("PUT", "/bucket")
    upload_id = (await driver.request("POST", "/bucket/key?uploads")).xml.findtext("UploadId")
    etags = []
    for number, data in ((1, bytes(5 * MIB)), (2, b"end")):
        part = await driver.request(
            "PUT",
            f"/bucket/key?partNumber={number}&uploadId={upload_id}",
            body=data,
            headers={"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(data).digest()).decode()},
        )
        etags.append(part.headers["etag"])
    document = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in enumerate(etags, 1)
    )
    answer = await driver.request(
        "POST",
        f"/bucket/key?uploadId={upload_id}",
        body=f"<CompleteMultipartUpload>{document}</CompleteMultipartUpload>".encode(),
        headers={"x-amz-checksum-sha256": "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=", "x-amz-checksum-type": kind},
    )
    assert (answer.status, answer.code) == (400, "InvalidRequest")


@pytest.mark.parametrize("size_bytes", [6, 2**31 - 1])
async def test_no_room_is_reserved_for_more_than_a_framed_body_can_hold(size_bytes: int) -> None:
    driver = Driver()
    await driver.request("PUT", "/bucket")
    body = FakeBody(b"5", length=5)
    answer = await driver.request(
        "PUT",
        "/bucket/key",
        body=body,
        headers={"content-encoding": "aws-chunked", "x-amz-decoded-content-length": str(size_bytes)},
        payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
    assert (answer.status, answer.code) == (400, "IncompleteBody")
    assert not body.accepted
