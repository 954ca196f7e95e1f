"""Requests and replies over real sockets, on both event loops: bodies, framing, order, ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import subprocess
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext, create_default_context

import pytest
from http_peers import Answer, Peer, Served, Views, echo, pattern, receive_all, serving, until
from module_paths import ModulePaths

from kvobj.api.http import HttpSettings
from kvobj.api.message import Handler, Reply, RequestBody, RequestHead
from kvobj.errors import IncompleteBodyError, InvalidRequestError
from kvobj.wire.body_handover import ReceiveMode
from kvobj.wire.receive_check import choose_receive_mode

MIB = 1024 * 1024
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"
SHORT_BYTES, SHORT_REPLIES = 48 * 1024, 400


def put(body: bytes, *fields: str, target: str = "/a") -> bytes:
    lines = [f"PUT {target} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def numbered_replies() -> Handler:
    """Answers with a short body, another one each time."""
    numbers = itertools.count()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), pattern(SHORT_BYTES, next(numbers)))

    return handle


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"PUT /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n" + trailers + b"\r\n"


@pytest.mark.parametrize("mode", list(ReceiveMode))
@pytest.mark.parametrize("size", [1, 4096, 65_535, 65_537, 300_000, 3 * MIB])
async def test_a_body_of_any_size_arrives_and_the_request_glued_to_it_is_served(size: int, mode: ReceiveMode) -> None:
    body = pattern(size)
    async with serving(echo, receive_mode=mode) as served:
        peer = await served.connect()
        sending = asyncio.ensure_future(peer.send(put(body) + NEXT))
        first = await peer.answer()
        second = await peer.answer()
        await sending
        assert (first.status, first.body == body) == (200, True)
        assert second.headers["x-target"] == "/next"


async def test_bytes_glued_to_the_end_of_a_long_body_are_the_next_request() -> None:
    body = pattern(MIB)
    async with serving(echo) as served:
        peer = await served.connect()
        request = put(body)
        await peer.send(request[:-10])
        await peer.send(request[-10:] + NEXT + put(b"third"))
        assert (await peer.answer()).body == body
        assert (await peer.answer()).headers["x-target"] == "/next"
        assert (await peer.answer()).body == b"third"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"".join(put(b"%d" % index) for index in range(500)))
        assert [(await peer.answer()).body for _ in range(500)] == [b"%d" % index for index in range(500)]


async def test_bytes_that_came_before_the_handler_asked_are_not_lost() -> None:
    asked = asyncio.Event()

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        await asked.wait()
        return await echo(head, body)

    body = pattern(2 * MIB)
    async with serving(handle) as served:
        peer = await served.connect()
        sending = asyncio.ensure_future(peer.send(put(body) + NEXT))
        await until(lambda: any(connection.is_in_flight for connection in served.server._connections))
        for _ in range(50):
            await asyncio.sleep(0)
        asked.set()
        assert (await peer.answer()).body == body
        assert (await peer.answer()).status == 200
        await sending


async def test_progress_is_reported_with_growing_counts_up_to_the_whole() -> None:
    counts: list[int] = []

    async def handle(_: RequestHead, body: RequestBody) -> Reply:
        buffer = bytearray(MIB)
        await body.receive_into(memoryview(buffer), counts.append)
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(put(pattern(MIB)))
        await peer.answer()
    assert counts == sorted(set(counts))
    assert counts[-1] == MIB


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_client_that_vanishes_mid_body_fails_the_reader_and_nothing_else(framing: str) -> None:
    failures: list[BaseException] = []
    begun = asyncio.Event()

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        if head.target == "/next":
            return Reply(200)
        buffer = memoryview(bytearray(MIB))
        try:
            await body.receive_into(buffer, lambda _: begun.set())
        except (IncompleteBodyError, ConnectionError) as error:
            failures.append(error)
            raise
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        start = put(pattern(MIB)) if framing == "length" else chunked(pattern(MIB))
        await peer.send(start[: MIB // 2])
        await begun.wait()
        peer.vanish()
        await until(lambda: bool(failures))
        await until(lambda: not served.server._connections)
        other = await served.connect()
        await other.send(NEXT)
        assert (await other.answer()).status == 200


async def test_a_client_that_ends_early_but_still_listens_gets_to_know() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(put(pattern(1000))[:-1])
        peer.writer.write_eof()
        assert (await peer.answer()).status == 400
        assert await peer.rest() == b""


async def test_a_cancelled_receive_leaves_the_buffer_alone_and_the_rest_readable() -> None:
    begun = asyncio.Event()
    buffer = bytearray(MIB)

    async def handle(_: RequestHead, body: RequestBody) -> Reply:
        receiving = asyncio.ensure_future(body.receive_into(memoryview(buffer), lambda _: begun.set()))
        await begun.wait()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        before = bytes(buffer)
        rest = len(await receive_all(body))
        assert bytes(buffer) == before
        return Reply(200, (), str(MIB - rest).encode())

    body = b"\x01" * MIB
    async with serving(handle) as served:
        peer = await served.connect()
        request = put(body)
        await peer.send(request[: MIB // 2])
        await begun.wait()
        await peer.send(request[MIB // 2 :] + NEXT[:-2])
        answer = await peer.answer()
        assert answer.body == str(buffer.count(1)).encode()


@pytest.mark.parametrize("sizes", [[1], [5, 70_000, 1, 300_000], [65_536] * 40])
async def test_a_chunked_body_is_received_in_place_and_the_connection_goes_on(sizes: list[int]) -> None:
    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        if body.length == 0:
            return Reply(200, (("x-target", head.target),))
        buffer = bytearray(sum(sizes))
        with memoryview(buffer) as view:
            await body.receive_into(view[:1], lambda _: None)
            await body.receive_into(view[1:], lambda _: None)
        end = await body.read_some(10)
        return Reply(200, (), bytes(buffer) + end)

    chunks = [pattern(size, seed) for seed, size in enumerate(sizes)]
    async with serving(handle) as served:
        peer = await served.connect()
        sending = asyncio.ensure_future(peer.send(chunked(*chunks, trailers=b"x-checksum: abc\r\n") + NEXT))
        assert (await peer.answer()).body == b"".join(chunks)
        assert (await peer.answer()).headers["x-target"] == "/next"
        await sending


@pytest.mark.parametrize(
    "framed",
    [
        b"5;name=value\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n",
        b" 5\r\nhello\r\n",
        b"-1\r\n",
        b"0x5\r\n",
    ],
)
async def test_malformed_chunks_fail_the_body_and_close_the_connection(framed: bytes) -> None:
    async def handle(_: RequestHead, body: RequestBody) -> Reply:
        try:
            await receive_all(body)
        except InvalidRequestError:
            return Reply(400)
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + NEXT)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await peer.rest() == b""


async def test_continue_is_said_when_the_body_is_wanted_and_not_before() -> None:
    wanted = asyncio.Event()

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        await wanted.wait()
        await body.accept()
        await body.accept()
        return await echo(head, body)

    async with serving(handle) as served:
        peer = await served.connect()
        head, body = put(b"hello", "Expect: 100-continue").split(b"\r\n\r\n")
        await peer.send(head + b"\r\n\r\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.reader.read(1), 0.05)
        wanted.set()
        assert (await peer.answer()).status == 100
        await peer.send(body + NEXT)
        assert (await peer.answer()).body == b"hello"
        assert (await peer.answer()).headers["x-target"] == "/next"


async def test_reading_the_body_says_continue_by_itself() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        head, body = put(b"hello", "Expect: 100-continue").split(b"\r\n\r\n")
        await peer.send(head + b"\r\n\r\n")
        assert (await peer.answer()).status == 100
        await peer.send(body)
        assert (await peer.answer()).body == b"hello"


async def test_a_refused_expectation_gets_the_final_status_and_a_closed_connection() -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(403)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(put(b"x" * 100, "Expect: 100-continue")[:-100])
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        peer.writer.write_eof()
        assert await peer.rest() == b""


@pytest.mark.parametrize("status", [200, 403])
async def test_who_asks_about_an_empty_body_is_told_to_continue_whatever_becomes_of_it(status: int) -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(status)

    async with serving(handle) as served:
        peer = await served.connect()
        for method in ("PUT", "POST"):
            await peer.send(put(b"", "Expect: 100-continue").replace(b"PUT", method.encode(), 1))
            assert (await peer.answer()).status == 100
            assert (await peer.answer()).status == status
        await peer.send(put(b"").replace(b"PUT", b"GET", 1).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert (await peer.answer()).status == status


async def refuse(head: RequestHead, _body: RequestBody) -> Reply:
    return Reply(200 if head.target == "/next" else 403)


async def test_a_short_unread_body_is_dropped_and_the_connection_kept() -> None:
    async with serving(refuse) as served:
        peer = await served.connect()
        await peer.send(put(b"x" * 200_000) + NEXT)
        assert (await peer.answer()).status == 403
        assert (await peer.answer()).status == 200


async def test_a_long_unread_body_closes_the_connection_after_the_reply() -> None:
    async with serving(refuse) as served:
        peer = await served.connect()
        await peer.send(put(b"x" * 2 * MIB)[:100_000])
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        peer.writer.write_eof()
        assert await peer.rest() == b""


async def test_a_body_outlived_by_its_request_cannot_be_read() -> None:
    kept: list[RequestBody] = []

    async def handle(_: RequestHead, body: RequestBody) -> Reply:
        kept.append(body)
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(put(b"hello"))
        await peer.answer()
        with pytest.raises(IncompleteBodyError):
            await kept[0].accept()


async def test_views_are_not_reused_before_a_slow_reader_has_them() -> None:
    contents = [pattern(3 * MIB, seed) for seed in range(4)]
    stream = Views(contents)

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: %d" % (12 * MIB) in head
        received = bytearray()
        while len(received) < 12 * MIB:
            received += await peer.reader.read(10_000)
        assert received == b"".join(contents)
    assert stream.closed == 1


@pytest.mark.parametrize(
    "failing", [Views([b"a" * MIB, b"b"], fail_after=1), Views([b"a"], length=2), Views([b"ab"], length=1)]
)
async def test_a_stream_that_fails_resets_the_connection(failing: Views) -> None:
    failing.closed = 0

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), failing)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        assert await peer.is_cut()
        await until(lambda: failing.closed == 1)
        assert b"kvobj_s3_cut_replies_total 1.0" in served.metrics.render()


async def short_replies_that_nobody_takes(served: Served) -> Peer:
    """A client that has asked for more short replies than the sockets hold, and reads none: the server waits for it."""
    peer = await served.connect()
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await peer.send(NEXT * SHORT_REPLIES)
    await until(lambda: any(each.wire.is_flushing for each in served.server._connections))
    return peer


async def test_short_replies_that_a_client_is_slow_to_take_arrive_whole_and_in_order() -> None:
    async with serving(numbered_replies()) as served:
        peer = await short_replies_that_nobody_takes(served)
        assert len(served.lines) < SHORT_REPLIES
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(SHORT_REPLIES):
            assert (await peer.answer()).body == pattern(SHORT_BYTES, number)
        await until(lambda: len(served.lines) == SHORT_REPLIES)
        assert not any("cut" in json.loads(line) for line in served.lines)


async def test_a_client_that_goes_before_it_has_a_short_reply_has_it_cut_and_its_connection_ended() -> None:
    async with serving(numbered_replies()) as served:
        peer = await short_replies_that_nobody_takes(served)
        peer.vanish()
        await until(lambda: not served.server._connections)
        assert json.loads(served.lines[-1])["cut"]
        assert b"kvobj_s3_cut_replies_total 1.0" in served.metrics.render()


async def test_a_client_that_goes_mid_reply_frees_the_stream() -> None:
    stream = Views([pattern(8 * MIB)] * 4)

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        await peer.reader.readexactly(1000)
        peer.vanish()
        await until(lambda: stream.closed == 1)
        await until(lambda: not served.server._connections)


async def test_a_head_reply_announces_a_length_and_sends_no_body() -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), content_length=12345)

    async with serving(handle) as served:
        peer = await served.connect()
        for _ in range(2):
            await peer.send(b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await peer.answer(is_head=True)).headers["content-length"] == "12345"


async def test_a_stream_given_to_head_or_204_is_closed_unsent() -> None:
    stream = Views([b"abc"])

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200 if head.method == "HEAD" else 204, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(b"HEAD /a HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await peer.answer(is_head=True)).headers["content-length"] == "3"
        await peer.send(NEXT)
        answer = await peer.answer()
        assert "content-length" not in answer.headers
        assert (answer.status, stream.closed) == (204, 2)


async def test_a_large_bytes_body_arrives_whole() -> None:
    content = pattern(2 * MIB)

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), content)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        assert (await peer.answer()).body == content


async def test_a_reply_with_a_line_break_in_a_field_becomes_a_500() -> None:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (("x-meta", "a\r\nset-cookie: b"),))

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        answer = await peer.answer()
        assert answer.status == 500
        assert "set-cookie" not in answer.headers


async def test_a_handler_that_fails_is_a_500_and_the_connection_goes_on() -> None:
    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        if head.target == "/next":
            return Reply(200)
        raise RuntimeError("a bug")

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(b"GET /bug HTTP/1.1\r\nHost: h\r\n\r\n" + NEXT)
        assert (await peer.answer()).status == 500
        assert (await peer.answer()).status == 200


async def test_the_target_and_fields_reach_the_handler_as_sent() -> None:
    seen: list[RequestHead] = []

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        seen.append(head)
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        target = "/b//x/../%2F%7e+a?uploads=&a=b+c&&x"
        await peer.send(f"GET {target} HTTP/1.1\r\nHost: h\r\nX-A:  one \r\nX-A: tw\xf6\r\n\r\n".encode("latin-1"))
        await peer.answer()
        await peer.send(b"GET http://H:80/p?q HTTP/1.1\r\nHost: h:80\r\n\r\n")
        await peer.answer()
    assert seen[0].target == target
    assert [value for name, value in seen[0].headers if name == "x-a"] == ["one", "tw\xf6"]
    assert (seen[0].remote, seen[0].is_tls, seen[0].request_id) == ("127.0.0.1", False, "REQUEST1")
    assert seen[1].target == "/p?q"


async def test_http_10_closes_unless_it_asks_to_stay() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await peer.answer()).headers["connection"] == "keep-alive"
        await peer.send(b"GET /a HTTP/1.0\r\n\r\n")
        assert (await peer.answer()).headers["connection"] == "close"
        assert await peer.rest() == b""


async def test_the_request_log_has_one_line_each_and_no_signature() -> None:
    async def handle(_head: RequestHead, body: RequestBody) -> Reply:
        await receive_all(body)
        return Reply(201, (), b"made", log={"bucket": "b", "status": "of the handler"})

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(put(b"hello", target="/b/k?X-Amz-Signature=abcdef&x-amz-%53ignature=abcdef&n=1"))
        await peer.answer()
        (line,) = map(json.loads, served.lines)
    assert line["target"] == "/b/k?X-Amz-Signature=-&x-amz-%53ignature=-&n=1"
    assert (line["status"], line["bytes_in"], line["bucket"], line["method"]) == (201, 5, "b", "PUT")


async def test_requests_are_counted_by_method_and_class() -> None:
    async with serving(refuse) as served:
        peer = await served.connect()
        await peer.send(put(b"x") + NEXT)
        await peer.answer()
        await peer.answer()
        text = served.metrics.render().decode()
    assert 'kvobj_s3_requests_total{method="PUT",status="4xx"} 1.0' in text
    assert 'kvobj_s3_requests_total{method="GET",status="2xx"} 1.0' in text


async def test_the_check_at_start_finds_that_bodies_can_be_received_in_place() -> None:
    async with serving(echo, receive_mode=None) as served:
        assert served.server.receive_mode is ReceiveMode.DIRECT


async def test_where_the_check_fails_bodies_are_copied() -> None:
    async def fail() -> None:
        raise OSError("no loopback here")

    assert await choose_receive_mode(logging.getLogger("kvobj-test-http"), fail) is ReceiveMode.COPIED


async def test_drain_finishes_what_is_in_flight_and_closes_what_is_idle() -> None:
    release = asyncio.Event()

    async def handle(head: RequestHead, _body: RequestBody) -> Reply:
        if head.target == "/slow":
            await release.wait()
        return Reply(200)

    async with serving(handle) as served:
        idle, busy = await served.connect(), await served.connect()
        await idle.send(NEXT)
        await idle.answer()
        await busy.send(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        await until(lambda: any(connection.is_in_flight for connection in served.server._connections))
        draining = asyncio.ensure_future(served.server.drain(10))
        assert await idle.rest() == b""
        release.set()
        answer = await busy.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await draining


async def test_drain_gives_up_in_time_and_aclose_resets_what_is_left() -> None:
    cancelled = asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Reply(200)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        await until(lambda: any(connection.is_in_flight for connection in served.server._connections))
        assert not await served.server.drain(0.01)
        await served.server.aclose()
        assert cancelled.is_set()
        assert await peer.is_cut()


async def test_a_listening_socket_outlives_its_server() -> None:
    async with serving(echo) as served:
        port = served.server.ports[0]
        await served.server.drain(1)
        # The kernel still accepts, since the caller holds the original; nobody of the server takes it from there, or ends it.
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(NEXT)
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)


@pytest.fixture(scope="module")
def tls_contexts(module_paths: ModulePaths) -> tuple[SSLContext, SSLContext]:
    folder: Path = module_paths.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = SSLContext(PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, create_default_context(cafile=str(certificate))


async def test_tls_serves_bodies_and_streams(tls_contexts: tuple[SSLContext, SSLContext]) -> None:
    contents = [pattern(2 * MIB, seed) for seed in range(2)]

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        assert head.is_tls
        if head.target == "/next":
            return Reply(200, (), Views(contents))
        return await echo(head, body)

    server_context, client_context = tls_contexts
    async with serving(handle, server_context=server_context, client_context=client_context) as served:
        peer: Peer = await served.connect()
        body = pattern(MIB)
        sending = asyncio.ensure_future(peer.send(put(body) + NEXT))
        first: Answer = await peer.answer()
        second = await peer.answer()
        await sending
        assert first.body == body
        assert second.body == b"".join(contents)


async def test_over_tls_refusals_and_timeouts_are_told_and_departures_leave_nothing(
    tls_contexts: tuple[SSLContext, SSLContext],
) -> None:
    server_context, client_context = tls_contexts
    async with serving(echo, server_context=server_context, client_context=client_context) as served:
        for sent, code in (
            (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", b"BadRequest"),
            (b"GET / HTTP/1.1\r\nHost: h\r\n", b"RequestTimeout"),
            (b"PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\nabc", b"RequestTimeout"),
        ):
            peer = await served.connect()
            await peer.send(sent)
            await until(lambda sent=sent: any(each.wire.bytes_in == len(sent) for each in served.server._connections))  # type: ignore[misc]
            served.turn(31)
            answer = await peer.answer()
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert b"<Code>" + code in answer.body
            await peer.aclose()
        for count in range(0, len(put(b"hello")), 7):
            peer = await served.connect()
            await peer.send(put(b"hello")[:count])
            peer.vanish()
        await until(lambda: not served.server._connections)
        assert [line for line in served.lines if not line.startswith("{")] == []


async def test_the_admin_port_is_the_same_server_under_another_name() -> None:
    async with serving(echo, HttpSettings(name="admin", sweep_seconds=3600.0)) as served:
        peer = await served.connect()
        await peer.send(NEXT)
        await peer.answer()
        assert b"kvobj_admin_requests_total" in served.metrics.render()
