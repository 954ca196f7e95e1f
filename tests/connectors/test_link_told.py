"""What a link tells of what does not work, in its log and its report, against a real server: each cause, once and not for ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from certificates import Authority
from fakes import ManualClock
from link_world import settings_of
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.client import Credentials, KvClient, NewChunk
from kvobj.connectors import LinkSettings, StoreLink
from kvobj.connectors.notes import AGAIN_SECONDS, KINDS_MAX, LINES_MAX, Notes
from kvobj.connectors.outage import Outage, Turn
from kvobj.connectors.tally import Tally
from kvobj.errors import AccessDeniedError, BusyError, ConfigurationError, QuotaExceededError

SETTINGS = ServerSettings(
    dram_bytes=64 * MIB,
    nvme_bytes=128 * MIB,
    buckets=tuple(BucketSetting(name, kind="kv", durability="memory") for name in ("cache", "far")),
)
FOREIGN: dict[str, object] = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign"}
TENSORS: dict[str, object] = {
    **FOREIGN,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": 4, "kv_heads": 1, "head_dim": 8},
}
TENSOR_CHUNK_BYTES = 2048


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("told"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def secured(module_paths: ModulePaths) -> Iterator[tuple[ServerProcess, Authority]]:
    directory = module_paths.mktemp("secured")
    authority = Authority.make(directory)
    certificate, key = directory / "tls.pem", directory / "tls.key"
    authority.sign().write(certificate, key)
    files = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
    settings = ServerSettings(
        dram_bytes=64 * MIB, nvme_bytes=128 * MIB, buckets=SETTINGS.buckets, sections={"server": files}
    )
    with ServerProcess(directory / "server", settings) as running:
        yield running, authority


def owner_of(server: ServerProcess) -> KvClient:
    keys = server.credentials()
    return KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache")


def chunks_of(prefix: str, size_bytes: int, count: int = 16) -> list[NewChunk]:
    return [NewChunk(f"{prefix}/{at}", bytes([at]) * size_bytes) for at in range(count)]


def loads(link: StoreLink, chunks: list[NewChunk]) -> list[bool]:
    return link.load([each.id for each in chunks], [memoryview(bytearray(len(each.data))) for each in chunks])


class TestAnotherSize:
    @pytest.mark.parametrize("same_host", [True, False])
    def test_chunks_that_are_stored_with_another_size_are_told_of_once(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture, *, same_host: bool
    ) -> None:
        place = {"bucket": "cache" if same_host else "far", "same_host": same_host}
        mine, theirs = chunks_of("stored", 4096), chunks_of("stored", 8192)
        with (
            closing(StoreLink(settings_of(server, **place))) as one,
            closing(StoreLink(settings_of(server, **place))) as other,
        ):
            assert all(one.store(mine))
            for _ in range(2):
                assert other.store(theirs) == [False] * 16
            told = other.report()
            assert (told["disagreements"], told["errors"]) == (32, 0)
            assert "another size (4096, not 8192 bytes)" in str(told["last_error"])
            assert one.report()["last_error"] == ""
        (line,) = caplog.messages
        assert line.startswith(f"kvobj: {server.endpoint}/{place['bucket']} (namespace default)")
        assert "16 chunks are stored with another size (4096, not 8192 bytes)" in line
        assert "give it a namespace of its own" in line

    def test_a_single_chunk_that_is_stored_with_another_size_is_told_of(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(StoreLink(settings_of(server, same_host=False))) as link:
            assert link.store(chunks_of("single", 100, 1)) == [True]
            assert link.store(chunks_of("single", 200, 1)) == [False]
        (line,) = caplog.messages
        assert "1 chunks " in line
        assert "ImmutableChunk" in line

    @pytest.mark.parametrize("same_host", [True, False])
    @pytest.mark.parametrize("size_bytes", [2048, 8192])
    def test_loads_of_chunks_that_are_stored_with_another_size_are_told_of_once(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture, size_bytes: int, *, same_host: bool
    ) -> None:
        prefix = f"loaded{size_bytes}{same_host}"
        mine, theirs = chunks_of(prefix, 4096), chunks_of(prefix, size_bytes)
        with closing(StoreLink(settings_of(server, same_host=same_host))) as link:
            assert all(link.store(mine))
            for _ in range(2):
                assert loads(link, theirs) == [False] * 16
            assert loads(link, mine) == [True] * 16
            told = link.report()
            assert (told["disagreements"], told["load_misses"]) == (0, 32)
            assert f"another size (4096, not {size_bytes} bytes)" in str(told["last_error"])
        (line,) = caplog.messages
        assert f"16 chunks are stored with another size (4096, not {size_bytes} bytes)" in line

    def test_chunks_that_their_namespaces_layout_does_not_have_are_told_of_once(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with closing(StoreLink(settings_of(server, namespace="tensors", declaration=TENSORS))) as link:
            for _ in range(2):
                assert link.store(chunks_of("layout", TENSOR_CHUNK_BYTES + 2, 3)) == [False] * 3
            assert link.store(chunks_of("layout", TENSOR_CHUNK_BYTES, 3)) == [True] * 3
            assert "LayoutMismatch" in str(link.report()["last_error"])
        (line,) = caplog.messages
        assert "3 chunks were refused: " in line

    def test_chunks_that_another_engine_has_stored_with_the_same_size_are_nothing_to_tell(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        chunks = chunks_of("race", 4096)
        with (
            closing(StoreLink(settings_of(server))) as one,
            closing(StoreLink(settings_of(server, same_host=False))) as other,
        ):
            for link in (one, other):
                assert link.store(chunks) == [True] * 16
                assert loads(link, chunks) == [True] * 16
                assert link.fetch(["race/0"], [memoryview(bytearray(10))]) != [None], "of any size, as asked for"
                assert link.report()["last_error"] == ""
        assert not caplog.messages


class TestCauses:
    def test_an_outage_that_goes_on_for_another_reason_is_told_of_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        starting = ServerProcess(tmp_path, SETTINGS)
        place = {"endpoint": starting.endpoint, "bucket": "cache", "rest_seconds": 0.05, "rest_seconds_max": 0.05}
        wrong = LinkSettings.parse({**place, "access_key": "KVWRONG", "secret_key": "wrong"}, {})

        def is_refused() -> bool:
            link.present(["a"])
            return "AccessDenied" in str(link.report()["last_error"])

        with caplog.at_level(logging.WARNING, "kvobj.connectors"), closing(StoreLink(wrong)) as link:
            assert link.present(["a"]) == [False]
            with starting:
                wait_until(is_refused, timeout_seconds=20, what="the server to refuse")
                before = len(caplog.messages)
                errors = int(str(link.report()["errors"]))

                def is_asked_again() -> bool:
                    link.present(["a"])
                    return int(str(link.report()["errors"])) > errors + 3

                wait_until(is_asked_again, timeout_seconds=20, what="more probes")
                assert len(caplog.messages) == before, "the same reason is told once"
        first, last = caplog.messages[0], caplog.messages[-1]
        assert "Connection refused" in first
        assert "cannot be used" in last
        assert "InvalidAccessKeyId" in last

    def test_reasons_that_take_turns_are_told_of_seldom(self) -> None:
        clock = ManualClock()
        outage = Outage(rest=1.0, rest_max=1.0, now=clock.monotonic)
        reasons = [UnavailableKind.REFUSED, UnavailableKind.DENIED]
        assert outage.failed(outage.turn(), reasons[0])
        told = 0
        for at in range(int(AGAIN_SECONDS) - 2):
            clock.advance(1.0)
            assert outage.turn() is Turn.PROBE
            told += outage.failed(Turn.PROBE, reasons[(at + 1) % 2])
        assert told == 1
        clock.advance(AGAIN_SECONDS)
        told = 0
        for at in range(20):
            clock.advance(1.0)
            assert outage.turn() is Turn.PROBE
            told += outage.failed(Turn.PROBE, reasons[at % 2])
        assert told == 2
        clock.advance(1.0)
        outage.answered(outage.turn())
        assert outage.failed(outage.turn(), reasons[0])
        clock.advance(1.0)
        assert outage.failed(outage.turn(), reasons[1]), "another outage has reasons of its own"


class UnavailableKind:
    """Two reasons."""

    REFUSED = (OSError, "none")
    DENIED = (AccessDeniedError, "AccessDenied")


class TestRefusals:
    def test_a_refusal_that_comes_back_after_it_was_mended_is_told_of_again(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with owner_of(server) as owner, closing(StoreLink(settings_of(server, namespace="bounded"))) as link:

            def bound(size_bytes: int) -> None:
                owner.declare_namespace("bounded", {**FOREIGN, "quota": {"size_bytes": size_bytes}})

            bound(100_000)
            assert not all(link.store(chunks_of("a", 40_000, 5)))
            assert not all(link.store(chunks_of("b", 40_000, 5)))
            (first,) = caplog.messages
            bound(10_000_000)
            assert all(link.store(chunks_of("c", 40_000, 2)))
            bound(100_000)
            assert not all(link.store(chunks_of("d", 40_000, 5)))
        assert "QuotaExceeded" in first
        _, again = caplog.messages
        assert "QuotaExceeded" in again

    def test_refusals_are_told_apart_by_their_code(self) -> None:
        tally = Tally()
        assert tally.failed(AccessDeniedError("no", code="AccessDenied"), "store") == 1
        assert tally.failed(AccessDeniedError("no", code="AccessDenied"), "store") == 0
        assert tally.failed(AccessDeniedError("no", code="InvalidAccessKeyId"), "store") == 1
        assert tally.failed(AccessDeniedError("no", code="AccessDenied"), "load") == 1

    def test_a_refusal_that_lasts_is_told_of_again_after_minutes_with_how_often_it_was(self) -> None:
        clock = ManualClock()
        tally = Tally(now=clock.monotonic)
        assert tally.failed(BusyError("full"), "store") == 1
        assert [tally.failed(BusyError("full"), "store") for _ in range(6)] == [0] * 6
        clock.advance(AGAIN_SECONDS)
        assert tally.failed(BusyError("full"), "store") == 7
        assert tally.failed(BusyError("full"), "store") == 0

    def test_what_comes_and_goes_all_the_time_does_not_fill_the_log(self) -> None:
        clock = ManualClock()
        tally = Tally(now=clock.monotonic)
        told = 0
        for _ in range(1000):
            told += tally.failed(QuotaExceededError("no more"), "store") > 0
            tally.went_well("load")
            tally.went_well("store")
        assert told == LINES_MAX
        assert tally.failed(QuotaExceededError("no more"), "store") == 0
        clock.advance(AGAIN_SECONDS)
        assert tally.failed(QuotaExceededError("no more"), "store") > 900

    def test_no_number_of_kinds_is_remembered_for_ever(self) -> None:
        notes = Notes(ManualClock().monotonic)
        for kind in range(10 * KINDS_MAX):
            assert notes.happened(("store", kind)) == 1
        assert len(notes) == KINDS_MAX
        assert notes.happened(("store", 10 * KINDS_MAX - 1)) == 0


class TestAuthorities:
    def test_a_link_trusts_the_authorities_that_it_is_given(self, secured: tuple[ServerProcess, Authority]) -> None:
        server, authority = secured
        chunks = chunks_of("trusted", 100_000, 3)
        trusting = settings_of(server, ca_bundle=str(authority.bundle), same_host=False)
        with closing(StoreLink(trusting)) as link, closing(StoreLink(settings_of(server))) as other:
            assert link.store(chunks) == [True] * 3
            assert loads(link, chunks) == [True] * 3
            assert [name for name, _ in link.page(key_prefix="trusted/") or ()] == [str(each.id) for each in chunks]
            assert other.store(chunks) == [False] * 3
            assert "CERTIFICATE_VERIFY_FAILED" in str(other.report()["last_error"])

    @pytest.mark.parametrize("content", [None, "", "no certificate"])
    def test_a_file_without_authorities_is_refused_by_name(
        self, server: ServerProcess, tmp_path: Path, content: str | None
    ) -> None:
        file = tmp_path / "authorities.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigurationError) as caught:
            settings_of(server, ca_bundle=str(file), threads=0)
        assert [each.partition(": ")[0] for each in caught.value.problems] == ["ca_bundle", "threads"]
        assert str(file) in caught.value.problems[0]
        for wrong in (1, ""):
            with pytest.raises(ConfigurationError, match="ca_bundle: is no text"):
                settings_of(server, ca_bundle=wrong)


class TestSameHost:
    def test_why_shared_memory_cannot_be_opened_is_told_once_and_reported(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        socket = server.data / "same-host.sock"
        away = socket.with_name("away.sock")
        chunks = chunks_of("far", 4096, 3)
        with caplog.at_level(logging.INFO, "kvobj.connectors"), closing(StoreLink(settings_of(server))) as link:
            assert link.report()["same_host_reason"] == ""
            socket.rename(away)
            try:
                for _ in range(3):
                    assert link.store(chunks) == [True] * 3
                    assert loads(link, chunks) == [True] * 3
                told = link.report()
            finally:
                away.rename(socket)
            assert told["same_host"] is False
            reason = f"shared memory at {socket} cannot be opened: No such file or directory"
            assert told["same_host_reason"] == reason

            def is_mended() -> bool:
                link.store(chunks)
                return link.report()["same_host"] is True

            wait_until(is_mended, timeout_seconds=20, what="shared memory to be used")
            assert link.report()["same_host_reason"] == ""
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert f"{reason}; chunks go over HTTP" in record.getMessage()
        assert "[same_host] socket" in record.getMessage()

    def test_who_wants_no_shared_memory_is_told_nothing_of_it(
        self, server: ServerProcess, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            caplog.at_level(logging.INFO, "kvobj.connectors"),
            closing(StoreLink(settings_of(server, same_host=False))) as link,
        ):
            assert link.store(chunks_of("unwanted", 10, 1)) == [True]
            assert link.report()["same_host_reason"] == ""
        assert not caplog.messages
