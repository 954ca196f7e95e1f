"""A remote server that answers wrongly, late, half or not at all: right bytes or a typed error, within the deadline, every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, cast

import pytest
import uvloop
from odd_server import Asked, Line, Right, Script, World, error, etag, noise, odd_world, rightly, saying

from kvobj.errors import RemoteRefusedError, StoreFullError, TierUnavailableError
from kvobj.tiers.protocol import ByteRange

KIB: Final = 1024
SIZE: Final = 216 * KIB  # four parts, the last of them short


def both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The product's loop receives in place, the stock loop copies: all must hold on both."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def on_loop(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        run(asyncio.wait_for(test(), 30))

    on_loop.__name__ = test.__name__
    return cast("Callable[..., None]", on_loop)


async def read(world: World, key: str = "t/a", size: int = SIZE) -> tuple[bool, bytes, list[int]]:
    into, fronts = bytearray(size), list[int]()
    found = await world.bucket.get(key, ByteRange(0, size), memoryview(into), fronts.append)
    assert fronts == sorted(fronts)
    return found, bytes(into), fronts


async def assert_right(world: World, body: bytes) -> None:
    found, came, fronts = await read(world, size=len(body))
    assert found
    assert came == body
    assert fronts[-1] == len(body)


def spoiled(spoil: Callable[[Right, Line], Coroutine[Any, Any, None]]) -> Script:
    async def script(asked: Asked, line: Line) -> None:
        await spoil(line.server.answer(asked), line)

    return script


async def _truncated(right: Right, line: Line) -> None:
    await line.send(right.head() + right.body[: len(right.body) // 2])
    await line.close()


async def _reset_in_mid_body(right: Right, line: Line) -> None:
    await line.send(right.head() + right.body[: len(right.body) // 2])
    await line.reset()


async def _half_a_head(right: Right, line: Line) -> None:
    await line.send(right.head()[:30])
    await line.close()


async def _nothing(_: Right, line: Line) -> None:
    await line.close()


async def _stalls_in_mid_body(right: Right, line: Line) -> None:
    await line.send(right.head() + right.body[: len(right.body) // 2])
    await line.wait_gone()


async def _trickles(right: Right, line: Line) -> None:
    await line.send(right.head())
    for byte in right.body:
        if line.reader.at_eof():
            break
        await line.send(bytes([byte]))
        await asyncio.sleep(0.02)
    await line.close()


async def _another_range(right: Right, line: Line) -> None:
    await line.send(right.head(content_range=f"bytes 1-{len(right.body)}/{SIZE}") + right.body)


async def _another_length(right: Right, line: Line) -> None:
    await line.send(right.head(content_length=str(len(right.body) - 1)) + right.body[:-1])


async def _no_length(right: Right, line: Line) -> None:
    await line.send(right.head(content_length="") + right.body)
    await line.close()


async def _the_whole_object(_: Right, line: Line) -> None:
    body = line.server.objects["t/a"]
    await line.send(Right(200, {}, body).whole())


async def _not_http(_: Right, line: Line) -> None:
    await line.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await line.close()


async def _busy(_: Right, line: Line) -> None:
    await line.send(error(503, "SlowDown").whole())


async def _failing(_: Right, line: Line) -> None:
    await line.send(Right(500, {"content-length": "4"}, b"oops").whole())


SPOILERS: Final = [
    _truncated,
    _reset_in_mid_body,
    _half_a_head,
    _nothing,
    _stalls_in_mid_body,
    _trickles,
    _another_range,
    _another_length,
    _no_length,
    _the_whole_object,
    _not_http,
    _busy,
    _failing,
]


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("place", [0, 2], ids=["first part", "inner part"])
def test_a_spoiled_part_is_asked_for_again_and_the_bytes_are_right(
    spoil: Callable[[Right, Line], Coroutine[Any, Any, None]], place: int, loop: Callable[..., None]
) -> None:
    async def main() -> None:
        async with odd_world() as world:
            body = world.server.objects["t/a"] = noise(SIZE)
            world.server.scripts = [*[rightly] * place, spoiled(spoil), spoiled(spoil)]
            await assert_right(world, body)
            # Of a kept connection that ends before an answer nobody can say that the server failed.
            assert world.count("repeats_total", operation="GetObject") >= (2 if spoil is not _nothing else 0)
            assert len(world.server.asked) >= 6

    loop(asyncio.wait_for(main(), 30))


@both_loops
async def test_a_broken_body_is_gone_on_with_at_the_byte_it_reached() -> None:
    async with odd_world() as world:
        body = world.server.objects["t/a"] = noise(60 * KIB)
        world.server.scripts = [spoiled(_truncated), spoiled(_reset_in_mid_body)]
        await assert_right(world, body)
        firsts = [each.byte_range[0] for each in world.server.of("GET")]
        assert firsts[:2] == [0, 30 * KIB]
        assert firsts[2] > 30 * KIB  # a reset may take with it what the kernel still held


@both_loops
async def test_a_server_without_ranges_still_gives_an_object_that_fits_one_request() -> None:
    async with odd_world() as world:
        body = world.server.objects["t/a"] = noise(60 * KIB)
        world.server.scripts = [saying(Right(200, {}, body))]
        await assert_right(world, body)
        assert len(world.server.asked) == 1


@both_loops
async def test_what_never_comes_right_is_an_error_in_time_and_nothing_writes_afterwards() -> None:
    async with odd_world(operation_timeout_seconds=1.0) as world:
        world.server.objects["t/a"] = noise(SIZE)
        world.server.always = spoiled(_stalls_in_mid_body)
        started = asyncio.get_running_loop().time()
        into = bytearray(SIZE)
        with pytest.raises(TierUnavailableError):
            await world.bucket.get("t/a", ByteRange(0, SIZE), memoryview(into), lambda _: None)
        assert asyncio.get_running_loop().time() - started < 2.0
        into[:] = bytes(SIZE)
        await asyncio.sleep(0)
        assert bytes(into) == bytes(SIZE)


@both_loops
async def test_a_cancelled_read_writes_no_more_and_its_connections_are_closed() -> None:
    async with odd_world(stall_timeout_seconds=5.0) as world:
        world.server.objects["t/a"] = noise(SIZE)
        lines: list[Line] = []

        async def stall(asked: Asked, line: Line) -> None:
            lines.append(line)
            await _stalls_in_mid_body(line.server.answer(asked), line)

        world.server.always = stall
        into, came = bytearray(SIZE), asyncio.Event()
        reading = asyncio.create_task(
            world.bucket.get("t/a", ByteRange(0, SIZE), memoryview(into), lambda _: came.set())
        )
        await came.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        into[:] = bytes(SIZE)
        for line in lines:
            await line.gone.wait()
        assert bytes(into) == bytes(SIZE)
        assert world.count("requests_total", operation="GetObject", outcome="cancelled") >= 1


@both_loops
async def test_a_missing_object_is_false_and_a_bare_404_is_not_believed() -> None:
    async with odd_world() as world:
        assert (await read(world, "t/none"))[0] is False
        world.server.always = saying(Right(404, {}, b"<html>not here</html>"))
        with pytest.raises(TierUnavailableError):
            await read(world, "t/none", KIB)
        world.server.always = saying(error(404, "NoSuchBucket"))
        with pytest.raises(RemoteRefusedError) as caught:
            await read(world, "t/none")
        assert caught.value.reason == "bucket"
        assert world.bucket.health.state == "refused"
        assert "no such bucket" in world.bucket.health.reason


@pytest.mark.parametrize("status", [302, 400, 404, 405])
async def test_what_is_answered_without_an_error_code_is_no_answer_of_the_server(status: int) -> None:
    async with odd_world() as world:
        world.server.always = saying(Right(status, {"content-type": "text/plain"}, b"default backend"))
        for _ in range(10):
            with pytest.raises(TierUnavailableError):
                await world.bucket.put("t/a", memoryview(b"body"))
        assert world.bucket.health.state == "down"
        assert str(status) in world.bucket.health.reason
        assert world.count("requests_total", operation="PutObject", outcome="missing") == 0
        assert world.count("requests_total", operation="PutObject", outcome="error") > 0


async def test_what_the_server_does_not_have_is_no_failure_of_it() -> None:
    async with odd_world() as world:
        for _ in range(20):
            assert await world.bucket.get_small("t/none", max_bytes=10) is None
            assert await world.bucket.head("t/none") is None  # the answer to a HEAD has no body, and no code
        assert world.bucket.health.state == "ok"
        for operation in ("GetObject", "HeadObject"):
            assert world.count("requests_total", operation=operation, outcome="missing") >= 20


async def test_a_condition_length_or_range_is_refused_without_a_code_as_well_as_with_one() -> None:
    async with odd_world() as world:
        world.server.always = saying(Right(412))
        for _ in range(20):
            assert await world.bucket.put_small("t/a", b"body", if_absent=True) is None
        world.server.always = saying(Right(416))
        for _ in range(20):
            with pytest.raises(TierUnavailableError):
                await read(world)
        world.server.always = saying(Right(413))  # of a proxy that passes no such bodies
        for _ in range(20):
            with pytest.raises(TierUnavailableError):
                await world.bucket.put_small("t/a", b"body")
        assert world.bucket.health.state == "ok"


async def test_an_upload_that_is_answered_without_an_etag_was_not_taken_by_the_server() -> None:
    async with odd_world() as world:
        world.server.scripts = [saying(Right(200, {"content-type": "text/html"}, b"<html>Maintenance</html>"))]
        await world.bucket.put("t/a", memoryview(b"body"))
        assert world.server.objects["t/a"] == b"body"
        assert world.count("repeats_total", operation="PutObject") == 1
        world.server.always = saying(Right(200))
        with pytest.raises(TierUnavailableError):
            await world.bucket.put_small("t/b", b"body")


@pytest.mark.parametrize(
    ("right", "kind", "reason"),
    [
        (error(403, "InvalidAccessKeyId"), RemoteRefusedError, "credentials"),
        (error(403, "SignatureDoesNotMatch"), RemoteRefusedError, "credentials"),
        (error(400, "ExpiredToken"), RemoteRefusedError, "credentials"),
        (error(403, "AccessDenied"), RemoteRefusedError, "access"),
        (Right(403), RemoteRefusedError, "access"),
        (error(403, "RequestTimeTooSkewed"), RemoteRefusedError, "clock"),
        (error(301, "PermanentRedirect"), RemoteRefusedError, "region"),
        (error(400, "AuthorizationHeaderMalformed"), RemoteRefusedError, "region"),
        (error(403, "QuotaExceeded"), StoreFullError, ""),
        (error(507, "InsufficientCapacity"), StoreFullError, ""),
        (Right(507), StoreFullError, ""),
        (error(501, "NotImplemented"), TierUnavailableError, ""),
    ],
    ids=lambda each: str(getattr(each, "status", getattr(each, "__name__", each))),
)
async def test_what_no_repeat_cures_is_asked_once_and_told_by_its_name(
    right: Right, kind: type[Exception], reason: str
) -> None:
    async with odd_world() as world:
        world.server.always = saying(right)
        with pytest.raises(kind) as caught:
            await world.bucket.put("t/a", memoryview(b"body"))
        assert type(caught.value) is kind
        assert getattr(caught.value, "reason", "") == reason
        assert len(world.server.asked) == 1
        world.server.always = None
        await world.bucket.put("t/a", memoryview(b"body"))
        assert world.bucket.health.state in ("ok", "degraded")


async def test_a_server_that_asks_to_wait_is_given_the_time_it_asks_for() -> None:
    async with odd_world() as world:
        world.server.scripts = [saying(error(503, "SlowDown", retry_after="1"))]  # S3 tells whole seconds
        started = asyncio.get_running_loop().time()
        await world.bucket.put("t/a", memoryview(b"body"))
        assert asyncio.get_running_loop().time() - started >= 1.0
        world.server.scripts = [saying(error(503, "SlowDown", retry_after="60"))]
        with pytest.raises(TierUnavailableError, match="slow down"):
            await world.bucket.put("t/a", memoryview(b"body"))  # longer than the operation has


@both_loops
async def test_a_kept_connection_that_was_closed_costs_nothing_but_another() -> None:
    async with odd_world() as world:
        body = world.server.objects["t/a"] = noise(10 * KIB)

        async def hang_up(_: Asked, line: Line) -> None:
            await line.close()

        world.server.scripts = [rightly, hang_up]
        await assert_right(world, body)
        await assert_right(world, body)  # the server read the request, and hung up
        assert world.count("repeats_total", operation="GetObject") == 0
        assert len(world.server.asked) == 3


@both_loops
async def test_a_connection_is_kept_and_one_that_shall_close_is_not() -> None:
    async with odd_world() as world:
        body = world.server.objects["t/a"] = noise(10 * KIB)
        before = world.server.connections
        for _ in range(3):
            await assert_right(world, body)
        assert world.server.connections == before

        async def last(asked: Asked, line: Line) -> None:
            right = line.server.answer(asked)
            await line.send(right.head(connection="close") + right.body)

        world.server.scripts = [last]
        await assert_right(world, body)
        await assert_right(world, body)
        assert world.server.connections == before + 1


# -- writes ----------------------------------------------------------------------------------------------------------


def early(script: Script) -> Script:
    """A script that is run before the request's body is read."""
    script.is_early = True  # type: ignore[attr-defined]
    return script


@both_loops
async def test_a_server_that_refuses_before_the_body_is_there_is_understood() -> None:
    async with odd_world(part_bytes=64 * 2**20) as world:
        body = memoryview(noise(40 * 2**20))  # more than any socket buffer takes

        async def refuse(_: Asked, line: Line) -> None:
            await line.send(error(403, "AccessDenied", connection="close").whole())
            await line.wait_gone()

        world.server.scripts = [early(refuse)]
        with pytest.raises(RemoteRefusedError) as caught:
            await world.bucket.put("t/a", body)
        assert caught.value.reason == "access"


async def _flip(asked: Asked, line: Line) -> None:
    """A bit of the body changes on its way up."""
    body = bytearray(asked.body)
    body[len(body) // 2] ^= 1
    await line.send(line.server.answer(replace(asked, body=bytes(body))).whole())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("check", ["crc32c", "md5", "sha256"])
def test_a_byte_that_changes_on_its_way_up_is_found_and_sent_again(check: str, loop: Callable[..., None]) -> None:
    loop(asyncio.wait_for(_flip_on_the_way_up(check), 30))


async def _flip_on_the_way_up(check: str) -> None:
    async with odd_world(is_probed=False) as world:
        world.server.knows_crc, world.server.has_md5_etags = check == "crc32c", check != "sha256"
        assert (await world.bucket.probe()).upload_check == check

        for size in (10 * KIB, SIZE):
            body = noise(size, 7)
            world.server.scripts = [_flip] if size <= 64 * KIB else [rightly, _flip, rightly, _flip]
            await world.bucket.put("t/a", memoryview(body))
            assert world.server.objects["t/a"] == body
        assert world.count("repeats_total", operation="PutObject") == 1
        assert world.count("repeats_total", operation="UploadPart") == 2


@both_loops
async def test_of_parts_that_are_summed_together_the_one_that_changed_is_sent_again() -> None:
    async with odd_world(is_probed=False, part_bytes=2**20) as world:
        world.server.knows_crc = False
        assert (await world.bucket.probe()).upload_check == "md5"
        body = noise(4 * 2**20 + 100)
        world.server.scripts = [rightly, rightly, _flip]
        await world.bucket.put("t/a", memoryview(body))
        assert world.server.objects["t/a"] == body
        assert world.count("repeats_total", operation="UploadPart") == 1


async def _lost(asked: Asked, line: Line) -> None:
    """It is done, and nobody is told."""
    line.server.answer(asked)
    await line.close()


@both_loops
async def test_a_complete_whose_answer_was_lost_is_recognised() -> None:
    async with odd_world() as world:
        body = noise(SIZE)

        async def lose_complete(asked: Asked, line: Line) -> None:
            is_complete = asked.method == "POST" and "uploadId" in asked.query
            await (_lost if is_complete and line.server.uploads else rightly)(asked, line)

        world.server.always = lose_complete
        made = await world.bucket.put("t/a", memoryview(body))
        assert world.server.objects["t/a"] == body
        found = await world.bucket.head("t/a")
        assert found is not None
        assert found.size_bytes == SIZE
        assert made.endswith('-4"')


@both_loops
async def test_another_object_is_not_taken_for_ours_when_the_upload_is_gone() -> None:
    async with odd_world() as world:
        world.server.objects["t/a"] = noise(SIZE, 1)  # as long, other bytes

        async def swallow(asked: Asked, line: Line) -> None:
            if asked.method == "POST" and "uploadId" in asked.query:
                line.server.uploads.clear()
                await line.close()
                return
            await rightly(asked, line)

        world.server.always = swallow
        with pytest.raises(TierUnavailableError):
            await world.bucket.put("t/a", memoryview(noise(SIZE, 2)))


@both_loops
async def test_a_complete_that_fails_after_its_status_is_no_success() -> None:
    async with odd_world() as world:
        body = noise(SIZE)
        world.server.scripts = [*[rightly] * 5, saying(Right(200, {}, error(500, "InternalError").body))]
        await world.bucket.put("t/a", memoryview(body))
        assert world.server.objects["t/a"] == body
        assert world.count("repeats_total", operation="CompleteMultipartUpload") == 1


@both_loops
async def test_a_write_that_fails_or_is_cancelled_leaves_no_upload() -> None:
    async with odd_world() as world:
        came = asyncio.Event()

        async def refuse_parts(asked: Asked, line: Line) -> None:
            await (saying(error(403, "AccessDenied")) if asked.method == "PUT" else rightly)(asked, line)

        async def hold_parts(asked: Asked, line: Line) -> None:
            if asked.method == "PUT":
                came.set()
                await line.wait_gone()
            else:
                await rightly(asked, line)

        world.server.always = refuse_parts
        with pytest.raises(RemoteRefusedError):
            await world.bucket.put("t/a", memoryview(noise(SIZE)))
        assert not world.server.uploads
        world.server.always = hold_parts
        writing = asyncio.create_task(world.bucket.put("t/a", memoryview(noise(SIZE))))
        await came.wait()
        assert world.server.uploads
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not world.server.uploads
        assert "t/a" not in world.server.objects


@both_loops
async def test_a_conditional_write_whose_answer_was_lost_knows_its_own_bytes() -> None:
    async with odd_world() as world:
        world.server.scripts = [_lost]
        assert await world.bucket.put_small("t/a", b"mine", if_absent=True)
        assert world.server.objects["t/a"] == b"mine"
        del world.server.objects["t/a"]

        async def lose_to_another(_: Asked, line: Line) -> None:
            line.server.objects["t/a"] = b"theirs"
            await line.close()

        world.server.scripts = [lose_to_another]
        assert await world.bucket.put_small("t/a", b"mine", if_absent=True) is None
        assert (
            await world.bucket.put_small("t/a", b"theirs", if_absent=True) is None
        )  # nothing was lost: it was there before
        assert await world.bucket.put_small("t/a", b"next", if_match='"another"') is None
        assert world.server.objects["t/a"] == b"theirs"


@both_loops
async def test_small_reads_are_bounded_and_read_in_whatever_framing_they_come() -> None:
    async with odd_world() as world:

        async def in_chunks(_: Asked, line: Line) -> None:
            await line.send(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\netag: "e"\r\n\r\n3\r\nabc\r\n')
            await line.send(b"4;x=y\r\ndefg\r\n0\r\ntrailer: x\r\n\r\n")

        async def to_the_end(_: Asked, line: Line) -> None:
            await line.send(b"HTTP/1.1 200 OK\r\netag: e\r\n\r\nabc")
            await line.close()

        async def too_long(_: Asked, line: Line) -> None:
            await line.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffff\r\n")
            await line.wait_gone()

        world.server.scripts = [in_chunks, to_the_end]
        assert await world.bucket.get_small("t/a", max_bytes=7) == (b"abcdefg", '"e"')
        assert await world.bucket.get_small("t/a", max_bytes=7) == (b"abc", '"e"')
        assert await world.bucket.get_small("t/none", max_bytes=7) is None
        world.server.always = too_long
        with pytest.raises(TierUnavailableError):
            await world.bucket.get_small("t/a", max_bytes=7)


# -- restraint -------------------------------------------------------------------------------------------------------


@both_loops
async def test_the_first_head_wins_and_the_late_connection_is_closed() -> None:
    async with odd_world(hedge_seconds=0.05, stall_timeout_seconds=5.0) as world:
        body = world.server.objects["t/a"] = noise(60 * KIB)
        lines: list[Line] = []

        async def late(_: Asked, line: Line) -> None:
            lines.append(line)
            await line.wait_gone()

        world.server.scripts = [late]
        before = world.server.connections
        await assert_right(world, body)
        await lines[0].gone.wait()
        assert world.server.connections == before + 1  # kept ones may lead nowhere any more
        assert world.count("hedges_total", outcome="won") == 1
        assert len(world.server.asked) == 2
        world.server.scripts = []
        await assert_right(world, body)
        assert len(world.server.asked) == 3


@both_loops
async def test_where_the_second_request_fails_the_first_is_waited_for() -> None:
    async with odd_world(hedge_seconds=0.05) as world:
        body = world.server.objects["t/a"] = noise(60 * KIB)
        second = asyncio.Event()

        async def late(asked: Asked, line: Line) -> None:
            await second.wait()
            await rightly(asked, line)

        async def fail(_: Asked, line: Line) -> None:
            await line.send(error(500, "InternalError").whole())
            second.set()

        world.server.scripts = [late, fail]
        await assert_right(world, body)
        assert world.count("hedges_total", outcome="lost") == 1


@both_loops
async def test_second_requests_are_bounded_however_slow_the_server_is() -> None:
    async with odd_world(hedge_seconds=0.001) as world:
        body = world.server.objects["t/a"] = noise(KIB)

        async def slow(asked: Asked, line: Line) -> None:
            await asyncio.sleep(0.005)
            await rightly(asked, line)

        world.server.always = slow
        for _ in range(60):
            await assert_right(world, body)
        hedges = world.count("hedges_total", outcome="won") + world.count("hedges_total", outcome="lost")
        assert 5 <= hedges <= 10 + 6
        assert world.bucket.health.state == "ok"


async def test_a_failing_server_sees_few_repeats_and_then_nothing_until_it_is_well() -> None:
    async with odd_world(connections=4) as world:
        world.server.always = saying(error(500, "InternalError"))
        for _ in range(40):
            with pytest.raises(TierUnavailableError):
                await world.bucket.get_small("t/a", max_bytes=10)
        assert len(world.server.asked) < 40
        assert world.bucket.health.state == "down"
        assert not world.bucket.health.is_usable
        assert "InternalError" in world.bucket.health.reason
        assert world.count("breaker_open") == 1.0
        world.server.always = None
        world.server.objects["t/a"] = b"well"
        async with asyncio.timeout(10):
            while not world.bucket.health.is_usable:  # noqa: ASYNC110 - it is asked in the background, and nobody is told
                await asyncio.sleep(0.02)
        assert await world.bucket.get_small("t/a", max_bytes=10) == (b"well", etag(b"well"))


async def test_requests_at_once_are_bounded() -> None:
    async with odd_world(connections=3) as world:
        body = world.server.objects["t/a"] = noise(SIZE)
        at_once = most = 0

        async def count(asked: Asked, line: Line) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.001)
            at_once -= 1
            await rightly(asked, line)

        world.server.always = count
        await asyncio.gather(*[assert_right(world, body) for _ in range(5)])
        assert most == 3


@both_loops
async def test_waiting_for_a_turn_is_not_held_against_the_server() -> None:
    async with odd_world(connections=1, request_timeout_seconds=0.5) as world:
        body = world.server.objects["t/a"] = noise(KIB)

        async def slow(asked: Asked, line: Line) -> None:
            await asyncio.sleep(0.1)
            await rightly(asked, line)

        world.server.always = slow
        await asyncio.gather(*[assert_right(world, body) for _ in range(10)])  # the last of them after a second
        assert world.count("repeats_total", operation="GetObject") == 0
        assert world.bucket.health.state == "ok"


@both_loops
async def test_reads_that_are_given_up_at_any_moment_leave_room_for_others() -> None:
    async with odd_world(connections=3, hedge_seconds=0.002) as world:
        body = world.server.objects["t/a"] = noise(SIZE)
        for number in range(40):
            reading = asyncio.create_task(read(world))
            for _ in range(number):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        async with asyncio.timeout(10):
            await asyncio.gather(*[assert_right(world, body) for _ in range(6)])
        assert world.count("connections") <= 3


@both_loops
async def test_uploads_leave_connections_to_reads() -> None:
    async with odd_world(connections=4) as world:
        body = world.server.objects["t/a"] = noise(KIB)
        held = asyncio.Event()

        async def hold_uploads(asked: Asked, line: Line) -> None:
            if asked.method == "PUT":
                await held.wait()
            await rightly(asked, line)

        world.server.always = hold_uploads
        writes = [asyncio.create_task(world.bucket.put(f"t/{number}", memoryview(body))) for number in range(8)]
        async with asyncio.timeout(2):
            await assert_right(world, body)
        held.set()
        await asyncio.gather(*writes)
