"""The bare server beside which LMCache's S3 adapter is measured: it has to answer what the adapter asks, or it is no limit."""

from __future__ import annotations

import socket

import pytest
from engines_s3_limit import answer_head, bare_s3_server

SIZE = 5000


@pytest.mark.parametrize(
    ("field", "status", "content_range", "bytes_sent"),
    [
        (b"", b"200 OK", b"", (0, SIZE)),
        (b"Range: bytes=0-8388607\r\n", b"206 Partial Content", b"bytes 0-4999/5000", (0, SIZE)),
        (b"range:bytes=10-19\r\n", b"206 Partial Content", b"bytes 10-19/5000", (10, 20)),
        (b"Range: bytes=4096-\r\n", b"206 Partial Content", b"bytes 4096-4999/5000", (4096, SIZE)),
    ],
)
def test_a_get_is_answered_with_what_it_asks_for(
    field: bytes, status: bytes, content_range: bytes, bytes_sent: tuple[int, int]
) -> None:
    head, start, stop = answer_head(b"GET /key HTTP/1.1\r\nHost: bucket\r\n" + field, SIZE)
    line, *fields = head.split(b"\r\n")
    told = dict(each.split(b": ", 1) for each in fields if each)
    assert line == b"HTTP/1.1 " + status
    assert (start, stop) == bytes_sent
    assert told[b"Content-Length"] == b"%d" % (stop - start)
    assert told.get(b"Content-Range", b"") == content_range


def test_a_head_is_told_the_size_and_sent_nothing() -> None:
    head, start, stop = answer_head(b"HEAD /key HTTP/1.1\r\nHost: bucket", SIZE)
    assert b"Content-Length: 5000\r\n" in head
    assert start == stop


def test_requests_on_one_connection_are_answered_one_after_the_other() -> None:
    with bare_s3_server(SIZE) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"HEAD /a HTTP/1.1\r\n\r\nGET /a HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n")
        connection.sendall(b"GET /b HTTP/1.1\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as stream:
            answer = stream.read()
    assert answer.count(b"HTTP/1.1 ") == 3
    assert len(answer.rpartition(b"\r\n\r\n")[2]) == SIZE
