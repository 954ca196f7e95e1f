"""`kvobj-admin` and the client under it, against a real admin port."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import pytest
from admin_server import FakeCatalog, FakeStore, admin_service, running_admin_server
from rich.console import Console

from kvobj.admin.access import DEFAULT_ENDPOINT, AccessFlags, find_access
from kvobj.admin.cli import main
from kvobj.admin.render import duration_text, print_status, print_values, ratio_text, size_text, time_text
from kvobj.api.admin_api import AdminService
from kvobj.api.admin_authentication import AdminAuthentication
from kvobj.api.sigv4 import SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow, UserRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.client import AdminClient, Credentials, Endpoint, SignedConnection
from kvobj.clock import SystemClock
from kvobj.config import Settings
from kvobj.data_directory import DataDirectory
from kvobj.errors import AccessDeniedError, InvalidRequestError, NoSuchBucketError, UnavailableError
from kvobj.gc.recall import RecallQuery

ACCESS = ["--access-key", "root-key", "--secret-key", "root-secret"]


@pytest.fixture
def store() -> FakeStore:
    catalog = FakeCatalog()
    catalog.users_by_id["root"] = UserRow("root", "root", "root-key", "root-secret", is_root=True)
    catalog.buckets_by_name["cache"] = BucketRow("cache", BucketKind.KV, "root", 0, Durability.MEMORY)
    for key in ("a/1", "a/[bold]2", "b é"):
        catalog.rows["cache", key] = ObjectRow("cache", key, (), 10, "e-0", 0, "root", Durability.LOCAL)
    return FakeStore(catalog)


@pytest.fixture
def endpoint(store: FakeStore) -> Iterator[str]:
    def make() -> AdminService:
        clock = SystemClock()
        users = UserDirectory(cast("Catalog", store.catalog), clock)
        verifier = SignatureVerifier(clock)
        return admin_service(store, AdminAuthentication(users, verifier, regions=frozenset({"us-east-1"})))

    with running_admin_server(make) as url:
        yield url


Admin = Callable[..., tuple[int, str, str]]


@pytest.fixture
def admin(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Admin:
    """Runs the command line; returns status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
        status = main(arguments, environment=environment)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_status_prints_a_table(admin: Admin, endpoint: str) -> None:
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "status")
    assert status == 0
    assert "nvme (home)" in out
    assert "75.0 %" in out
    assert "up 1 h 2 min" in out
    assert "O_DIRECT, kernel" in " ".join(out.split())
    assert "note: the nvme tier does buffered I/O" in out


def test_what_a_server_says_of_a_tiers_io_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = [{"name": "nvme", "mode": "[bold]direct", "transfers": "threads: \x1b[31m[/]"}, {"name": "dram"}]
    print_status(Console(width=200), {"tiers": tiers})
    out = capsys.readouterr().out
    assert "[bold]direct, threads: \\x1b[31m[/]" in out
    assert out.splitlines()[-1].split() == ["dram", "-", "-", "-", "-", "-", "-", "-", "-"]


def test_status_shows_gc_and_leases(admin: Admin, endpoint: str) -> None:
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "status")
    lines = [line.split() for line in out.splitlines()]
    assert ["held", "1.0", "MiB"] in lines
    assert ["sessions", "3"] in lines


def test_figures_are_shown_with_their_units(admin: Admin, endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "status")
    lines = [line.split() for line in out.splitlines()]
    assert ["reclaim", "lag", "0.5", "s"] in lines
    assert ["get", "1.5/s"] in lines
    assert ["huge", "pages", "yes"] in lines
    values = {"created_ms": 0, "sent_bytes_per_second": 3 * 2.0**30, "hits": 1234567.0, "part": 0.12345}
    print_values(Console(width=200), "values", {**values, "chunk_bytes": 1024, "chunk": 3, "is_root": False})
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["created", "1970-01-01", "00:00:00"],
        ["sent", "3.0", "GiB/s"],
        ["hits", "1234567"],
        ["part", "0.123"],
        ["chunk", "bytes", "1.0", "KiB"],
        ["chunk", "3"],
        ["is", "root", "no"],
    ]


def test_gc_lists_what_would_go_and_then_does_it(admin: Admin, endpoint: str, store: FakeStore) -> None:
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "gc", "--dry-run")
    assert status == 0
    assert "a/[bold]2" in out
    assert "expired" in out
    assert "2 chunks, 2.0 MiB would go" in out
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "gc")
    assert (status, out.strip()) == (0, "condemned 3 chunks, removed 2 (2.0 MiB), 1 were asked for and stay")
    store.quiet = True
    assert "quiet time" in admin("--endpoint", endpoint, *ACCESS, "gc")[1]
    assert "quiet time" in admin("--endpoint", endpoint, *ACCESS, "gc", "--dry-run")[1]


def test_flush_goes_on_until_nothing_is_left(store: FakeStore, endpoint: str, admin: Admin) -> None:
    store.flush_steps = 3
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "flush")
    assert (status, out.strip()) == (0, "wrote down 9 blobs, 9.0 MiB; uploaded 3 objects, 0 B")
    assert [local for local, _ in store.flushed] == [False, False, False]
    assert all(seconds <= 1.0 for _, seconds in store.flushed)


def test_a_flush_that_has_not_the_time_says_what_is_left_and_exits_1(
    store: FakeStore, endpoint: str, admin: Admin
) -> None:
    store.flush_steps = 100
    status, _, err = admin("--endpoint", endpoint, *ACCESS, "flush", "--timeout", "0")
    assert status == 1
    assert "99 objects to upload (99.0 MiB); the remote is full" in err


def test_a_local_flush_asks_for_no_upload(store: FakeStore, endpoint: str, admin: Admin) -> None:
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "--json", "flush", "--local")
    assert (status, [local for local, _ in store.flushed]) == (0, [True])
    assert json.loads(out)["uploaded_objects"] == 0


def test_recall_waits_for_its_end_and_says_what_it_did(admin: Admin, endpoint: str, store: FakeStore) -> None:
    conditions = ["--writer", "mallory", "--from", "2026-01-31T08:00", "--to", "2026-01-31T10:00+01:00"]
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "recall", "--bucket", "cache", *conditions)
    assert (status, out.strip()) == (0, "done; 2 chunks, 2.0 MiB removed")
    start_ms = 1_769_846_400_000
    query = RecallQuery("cache", writer="mallory", from_ms=start_ms, to_ms=start_ms + 3_600_000)
    assert store.recalled == [(query, False)]


def test_a_recall_of_no_bucket_or_at_no_time_is_misuse(admin: Admin, endpoint: str, store: FakeStore) -> None:
    for arguments in (["recall"], ["recall", "--bucket", "cache", "--from", "yesterday"]):
        with pytest.raises(SystemExit) as ending:
            admin("--endpoint", endpoint, *ACCESS, *arguments)
        assert ending.value.code == 2
    assert admin("--endpoint", endpoint, *ACCESS, "recall", "--bucket", "absent")[0] == 1
    assert store.recalled == []


def test_a_recall_of_no_time_at_all_is_misuse(admin: Admin, endpoint: str) -> None:
    times = ["--from", "2026-02-01", "--to", "2026-01-01"]
    status, _, err = admin("--endpoint", endpoint, *ACCESS, "recall", "--bucket", "cache", *times)
    assert status == 2
    assert "--from and --to" in err


def test_every_command_speaks_json(admin: Admin, endpoint: str) -> None:
    for command in (["status"], ["ls"], ["inspect", "cache", "a/1"], ["verify"], ["flush"], ["user", "list"]):
        status, out, err = admin("--json", "--endpoint", endpoint, *ACCESS, *command)
        assert (status, err) == (0, "")
        assert isinstance(json.loads(out), dict)


def test_flags_may_stand_behind_the_command(admin: Admin, endpoint: str) -> None:
    status, out, _ = admin("user", "list", "--endpoint", endpoint, *ACCESS, "--json")
    assert (status, json.loads(out)["users"][0]["id"]) == (0, "root")


def test_ls_lists_buckets_and_then_objects(admin: Admin, endpoint: str) -> None:
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "ls")
    assert "cache" in out
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "ls", "cache", "a/")
    assert [line.split()[-1] for line in out.splitlines()] == ["a/1", "a/[bold]2"]
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "--json", "ls", "cache")
    assert [json.loads(line)["key"] for line in out.splitlines()] == ["a/1", "a/[bold]2", "b é"]


def test_names_that_would_write_on_the_terminal_are_shown_as_escapes(
    admin: Admin, endpoint: str, store: FakeStore
) -> None:
    key = "a\x1b[2J\nb\u202e[red]"
    store.catalog.rows["cache", key] = ObjectRow("cache", key, (), 10, "e-0", 0, "own\x07er", Durability.LOCAL)
    shown = "a\\x1b[2J\\nb\\u202e[red]"
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "ls", "cache", "a\x1b")
    assert out.removesuffix("\n").endswith(f"  {shown}")
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "inspect", "cache", key)
    assert shown in out
    assert "own\\x07er" in out
    status, _, err = admin("--endpoint", endpoint, *ACCESS, "inspect", "cache", f"{key}?")
    assert (status, shown in err, "\x1b" in err) == (1, True, False)
    _, out, _ = admin("--endpoint", endpoint, *ACCESS, "--json", "ls", "cache", "a\x1b")
    assert json.loads(out)["key"] == key


def test_inspect_of_an_absent_key_exits_1(admin: Admin, endpoint: str) -> None:
    status, out, err = admin("--endpoint", endpoint, *ACCESS, "inspect", "cache", "absent")
    assert (status, out) == (1, "")
    assert "no such key" in err


def test_verify_exits_1_and_names_what_is_wrong(admin: Admin, endpoint: str, store: FakeStore) -> None:
    assert admin("--endpoint", endpoint, *ACCESS, "verify")[0] == 0
    store.damaged["cache", "b é"] = "digest mismatch in nvme"
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "verify", "cache")
    assert status == 1
    assert "cache/b é: digest mismatch in nvme" in out
    assert "3 objects, 30 B verified, 1 wrong" in out


def test_a_bucket_is_created_with_its_kind(admin: Admin, endpoint: str, store: FakeStore) -> None:
    assert admin("--endpoint", endpoint, *ACCESS, "bucket", "create", "chunks", "--kind", "kv")[0] == 0
    assert store.catalog.buckets_by_name["chunks"].kind is BucketKind.KV
    assert admin("--endpoint", endpoint, *ACCESS, "bucket", "create", "chunks")[0] == 1


def test_what_of_a_bucket_goes_to_the_remote_is_shown_and_changed(
    admin: Admin, endpoint: str, store: FakeStore
) -> None:
    assert admin("--endpoint", endpoint, *ACCESS, "bucket", "set", "cache", "--remote", "evicted")[0] == 1
    before = store.catalog.buckets_by_name["cache"]
    store.catalog.buckets_by_name["cache"] = msgspec.structs.replace(before, remote=RemoteRule.ALWAYS)
    assert "always" in admin("--endpoint", endpoint, *ACCESS, "ls")[1]
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "--json", "bucket", "set", "cache", "--remote", "never")
    assert (status, json.loads(out)["remote"]) == (0, "never")
    assert store.catalog.buckets_by_name["cache"] == before
    assert admin("--endpoint", endpoint, *ACCESS, "bucket", "create", "far", "--remote", "reused")[0] == 1


def test_a_bucket_is_made_for_a_user_that_exists(admin: Admin, endpoint: str, store: FakeStore) -> None:
    create = ("--endpoint", endpoint, *ACCESS, "bucket", "create", "chunks", "--owner", "engine")
    status, _, err = admin(*create)
    assert (status, "user" in err, "chunks" in store.catalog.buckets_by_name) == (1, True, False)
    assert admin("--endpoint", endpoint, *ACCESS, "user", "add", "engine")[0] == 0
    assert admin(*create)[0] == 0
    assert store.catalog.buckets_by_name["chunks"].owner == "engine"


def test_users_come_and_go(admin: Admin, endpoint: str, store: FakeStore) -> None:
    status, out, _ = admin("--endpoint", endpoint, *ACCESS, "--json", "user", "add", "main", "--display-name", "Main")
    assert status == 0
    assert json.loads(out)["secret_key"] == store.catalog.users_by_id["main"].secret_key
    assert admin("--endpoint", endpoint, *ACCESS, "user", "remove", "main")[0] == 0
    assert admin("--endpoint", endpoint, *ACCESS, "user", "remove", "main")[0] == 1


def test_a_wrong_secret_exits_1(admin: Admin, endpoint: str) -> None:
    status, _, err = admin("--endpoint", endpoint, "--access-key", "root-key", "--secret-key", "wrong", "status")
    assert status == 1
    assert "signature" in err


def test_a_server_that_is_not_there_exits_1(admin: Admin) -> None:
    status, _, err = admin("--endpoint", "http://127.0.0.1:1", *ACCESS, "status")
    assert status == 1
    assert "no answer from the server" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["--access-key", "x", "status"],
        ["--profile", "absent", "status"],
        ["--endpoint", "not a url", *ACCESS, "status"],
        ["--endpoint", "http://host:99999", *ACCESS, "status"],
        ["--data", "absent", "status"],
        ["--data", "absent", "fsck"],
        ["--data", "absent", "rebuild"],
    ],
)
def test_misuse_exits_2(admin: Admin, arguments: list[str]) -> None:
    status, out, err = admin(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("kvobj-admin: ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["inspect", "cache"],
        ["bucket", "create", "x", "--kind", "odd"],
        ["bucket", "set", "x"],
        ["user", "add", ""],
        ["flush", "--timeout", "-1"],
        ["flush", "--timeout", "soon"],
        ["flush", "--timeout", "nan"],
    ],
)
def test_wrong_arguments_exit_2(admin: Admin, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        admin(*arguments)
    assert caught.value.code == 2


def test_a_data_directory_gives_endpoint_and_credentials(admin: Admin, endpoint: str, tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "kvobj-data") as data:
        made = data.root_credentials()
        data.write_endpoints(s3="http://127.0.0.1:1", admin=endpoint)
        status, _, err = admin("--data", "kvobj-data", "status")
        assert (status, "access key" in err.lower()) == (1, True)  # it was reached; those keys are not its own
        status, out, _ = admin("credentials")
        assert out == f"export AWS_ACCESS_KEY_ID={made.access_key}\nexport AWS_SECRET_ACCESS_KEY={made.secret_key}\n"


@pytest.mark.parametrize("named", [["--data", "kvobj-data"], []], ids=["named", "default"])
def test_of_a_data_directory_without_a_server_nothing_else_is_asked(
    admin: Admin, endpoint: str, store: FakeStore, tmp_path: Path, named: list[str]
) -> None:
    with DataDirectory.open(tmp_path / "kvobj-data") as data:
        keys = data.root_credentials()
        data.write_endpoints(s3="http://127.0.0.1:1", admin=endpoint)
        store.catalog.users_by_id["root"] = UserRow("root", "root", keys.access_key, keys.secret_key, is_root=True)
        assert admin(*named, "status")[0] == 0
    told = "kvobj-admin: no server runs on kvobj-data (no kvobj-data/endpoints): start it, or give --endpoint\n"
    assert admin(*named, "status") == (2, "", told)
    assert admin(*named, "--endpoint", endpoint, "status")[0] == 0
    assert admin(*named, "credentials")[0] == 0


def test_a_data_directory_that_is_named_counts_whosever_the_keys_are(admin: Admin, tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "data").close()
    status, _, err = admin("--data", "data", *ACCESS, "status")
    assert (status, err.partition(" (")[0]) == (2, "kvobj-admin: no server runs on data")


def test_where_a_server_is_has_to_be_readable(admin: Admin, tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as data:
        data.root_credentials()
    (tmp_path / "data" / "endpoints").write_text("torn")
    status, _, err = admin("--data", "data", "status")
    assert (status, "data/endpoints: does not say where" in err) == (2, True)


def test_keys_of_no_data_directory_are_for_the_default_address() -> None:
    for flags, environment in (
        (AccessFlags(access_key="a", secret_key="s"), {}),
        (AccessFlags(), {"KVOBJ_ACCESS_KEY": "a", "KVOBJ_SECRET_KEY": "s"}),
    ):
        assert find_access(flags, environment).endpoint == DEFAULT_ENDPOINT


def test_the_environment_gives_credentials(admin: Admin, endpoint: str) -> None:
    environment = {"KVOBJ_ACCESS_KEY": "root-key", "KVOBJ_SECRET_KEY": "root-secret"}
    assert admin("--endpoint", endpoint, "status", **environment)[0] == 0


def test_a_profile_gives_everything(admin: Admin, endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "kvobj").mkdir()
    profiles = tmp_path / "kvobj" / "profiles.toml"
    profiles.write_text(f'[here]\nendpoint = "{endpoint}"\naccess_key = "root-key"\nsecret_key = "root-secret"\n')
    assert admin("--profile", "here", "status", XDG_CONFIG_HOME=str(tmp_path))[0] == 0
    profiles.write_text("[here]\ncolour = 1\n")
    status, _, err = admin("--profile", "here", "status", XDG_CONFIG_HOME=str(tmp_path))
    assert status == 2
    assert "here.colour: is no known key" in err


@dataclass(frozen=True)
class Report:
    objects: int
    missing_blobs: int

    @property
    def problems(self) -> int:
        return self.missing_blobs


@pytest.mark.parametrize(("problems", "status"), [(0, 0), (2, 1)])
def test_offline_commands_run_on_a_stopped_store(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: int, status: int
) -> None:
    DataDirectory.open(tmp_path / "data").close()
    offline = types.ModuleType("kvobj.app.offline")

    def fsck(
        settings: Settings,
        report: Callable[[str, dict[str, object]], None],
        *,
        is_configured: bool,
        notice: Callable[[str], None],
    ) -> Report:
        assert not is_configured
        notice("a note")
        for position in range(problems):
            report("blob without frame", {"blob_id": position})
        assert settings.server.data == tmp_path / "data"
        return Report(5, problems)

    def rebuild(
        _settings: Settings,
        progress: Callable[[int, int, str], None],
        *,
        is_configured: bool,
        keep_missing: bool,
        notice: Callable[[str], None],
    ) -> Report:
        assert (is_configured, keep_missing) == (False, True)
        notice("another note")
        progress(1, 2, "scan")
        return Report(5, problems)

    offline.fsck = fsck  # type: ignore[attr-defined]
    offline.rebuild = rebuild  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvobj.app", types.ModuleType("kvobj.app"))
    monkeypatch.setitem(sys.modules, "kvobj.app.offline", offline)
    found, out, _ = admin("--data", "data", "--json", "fsck")
    assert (found, json.loads(out)["objects"], len(json.loads(out)["findings"])) == (status, 5, problems)
    assert json.loads(out)["notes"] == ["a note"]
    found, out, _ = admin("rebuild", "--data", "data", "--keep-missing")
    assert found == status
    assert "another note" in out
    assert "problems" in out


def test_a_connection_turns_answers_into_typed_errors(endpoint: str) -> None:
    credentials = Credentials("root-key", "root-secret")
    with SignedConnection(Endpoint.parse(endpoint), credentials) as connection:
        client = AdminClient(connection)
        with pytest.raises(NoSuchBucketError):
            list(client.objects("absent"))
        with pytest.raises(InvalidRequestError, match="root user"):
            client.remove_user("root")
        with pytest.raises(UnavailableError, match="not JSON"):
            connection.request("GET", "/health/live").document()
        assert client.status()["is_ready"] is True
    with (
        SignedConnection(Endpoint.parse(endpoint), Credentials("root-key", "wrong")) as connection,
        pytest.raises(AccessDeniedError),
    ):
        AdminClient(connection).status()


def test_a_kept_connection_that_the_server_closed_is_opened_again(store: FakeStore, endpoint: str) -> None:
    with SignedConnection(Endpoint.parse(endpoint), Credentials("root-key", "root-secret")) as connection:
        client = AdminClient(connection)
        client.status()
        sock = connection._wire._socket
        assert sock is not None
        sock.shutdown(2)
        assert len(client.buckets()) == len(store.catalog.buckets_by_name)


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("http://127.0.0.1:9001", "127.0.0.1:9001"),
        ("http://example.org", "example.org"),
        ("https://example.org:443/", "example.org"),
        ("http://[::1]:9001", "[::1]:9001"),
    ],
)
def test_endpoints_name_their_host(url: str, header: str) -> None:
    assert Endpoint.parse(url).host_header == header


@pytest.mark.parametrize(
    "url",
    [
        *("", "127.0.0.1:9001", "ftp://x", "http://", "http://x/path", "http://x:y", "http://x:0", "http://x#y"),
        *("http://a..b", "http://.x", f"http://{'a' * 64}", "http://a\0b", "http://x :1", "http://user:secret@x"),
    ],
)
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        Endpoint.parse(url)


def test_figures_for_people() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 3 * 2**29, None, True)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "-",
        "-",
    ]
    assert time_text(0) == "1970-01-01 00:00:00"
    assert [duration_text(seconds) for seconds in (5, 65, 3700, 90000)] == ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]
    assert (ratio_text(0.5), ratio_text(None)) == ("50.0 %", "-")
