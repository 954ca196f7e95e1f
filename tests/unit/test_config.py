"""The configuration: defaults, the annotated example, and every problem told at once with its path."""

from __future__ import annotations

import re
import tomllib
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.config import (
    BucketSettings,
    EventSettings,
    HbmSettings,
    ListenAddress,
    LmSettings,
    PolicySettings,
    RemoteSettings,
    RootCredentials,
    Settings,
    UserSettings,
    example_text,
    load_settings,
    parse_settings,
)
from kvobj.errors import ConfigurationError

SECRET = "a-secret-of-some-length"
REMOTE = '[[tiers]]\nkind="remote"\n'


def parse(text: str, **environment: str) -> Settings:
    return parse_settings(tomllib.loads(text), environment=environment)


def problems(text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, **environment)
    return caught.value.problems


def test_the_example_states_the_defaults() -> None:
    assert parse(example_text()) == Settings()


def test_the_example_is_valid_with_everything_uncommented() -> None:
    lines = [re.sub(r"^# (?=[a-z\"\[].*(?:=|\]\]))", "", line) for line in example_text().splitlines()]
    settings = parse(
        "\n".join(lines),
        KVOBJ_MAIN_SECRET=SECRET,
        KVOBJ_REMOTE_SECRET=SECRET,
        KVOBJ_UPSTREAM_SECRET=SECRET,
        KVOBJ_WRAPPING_KEY="0f" * 32,
    )
    assert settings.security.wrapping_key == b"\x0f" * 32
    assert settings.server.default_bucket == "cache"
    assert settings.server.tls is not None
    assert settings.admin.tls == settings.server.tls
    assert settings.limits.unfinished_bytes_per_user == 64 * 2**30
    assert settings.server.hosts == {"cache.example": "cache"}
    assert settings.buckets == (BucketSettings("cache", "kv", "memory", "raw"),)
    assert settings.users == (UserSettings("main", "main", "main-access", SECRET),)
    assert settings.hbm == HbmSettings(8 * 2**30, max_sms=16)
    assert settings.dram.capacity_bytes == 4 * 2**30
    assert settings.dram.path == Path("/dev/shm/kvobj")
    assert settings.nvme.capacity_bytes == 64 * 2**30
    assert settings.remote == RemoteSettings(
        "https://s3.example.com",
        "kvobj-cache",
        "remote-access",
        SECRET,
        prefix="cluster-1/",
        ca_bundle=Path("/etc/kvobj/remote-ca.pem"),
    )


def test_the_remote_tier_stands_behind_nvme_and_makes_shared_a_class_to_ask_for() -> None:
    tiers = (
        '[[tiers]]\nkind="dram"\n[[tiers]]\nkind="nvme"\n'
        f'{REMOTE}endpoint="http://127.0.0.1:7480/"\nbucket="far"\naccess_key="AKIAIOSFODNN7EXAMPLE"\nsecret_key="their/own+rules="\n'
    )
    settings = parse(
        f'{tiers}prefix="a/b"\nhedge="off"\n[[buckets]]\nname="abc"\ndurability="shared"\nremote="evicted"'
    )
    assert settings.buckets == (BucketSettings("abc", durability="shared", remote="evicted"),)
    assert settings.remote == RemoteSettings(
        "http://127.0.0.1:7480", "far", "AKIAIOSFODNN7EXAMPLE", "their/own+rules=", prefix="a/b/", hedge_seconds=0.0
    )
    assert "their/own" not in repr(settings)
    assert parse(f'{tiers}hedge="200 ms"').remote == RemoteSettings(
        "http://127.0.0.1:7480", "far", "AKIAIOSFODNN7EXAMPLE", "their/own+rules=", hedge_seconds=0.2
    )


def test_the_wrapping_key_comes_from_the_environment_and_has_32_bytes() -> None:
    text = '[security]\nwrapping_key_env = "WRAPPING"'
    assert parse(text, WRAPPING="aB" * 32).security.wrapping_key == b"\xab" * 32
    assert problems(text) == ["security.wrapping_key_env: the environment has no WRAPPING"]
    for wrong in ("ab", "ab" * 31, "ab" * 33, "g" * 64, " " + "ab" * 32):
        assert problems(text, WRAPPING=wrong) == ["security.wrapping_key_env: WRAPPING must be 64 hex digits"]


def test_the_wrapping_key_is_not_printed() -> None:
    settings = parse('[security]\nwrapping_key_env = "W"', W="12" * 32)
    assert "121212" not in repr(settings)
    assert repr(b"\x12" * 32) not in repr(settings)


def test_an_empty_document_is_the_embedded_default() -> None:
    settings = parse("")
    assert settings.server.listen == ListenAddress("127.0.0.1", 9000)
    assert settings.admin.listen == ListenAddress("127.0.0.1", 9001)
    assert settings.server.data == Path("kvobj-data")
    assert settings.gc.lease_ttl_seconds == 30.0
    assert settings.root_credentials is None


def test_the_keys_of_the_design_are_read() -> None:
    settings = parse(
        """
        [server]
        listen = "0.0.0.0:0"
        domains = ["S3.example.com"]
        [server.hosts]
        "Cache.example" = "bucket-name"
        [[tiers]]
        kind = "dram"
        capacity = "64 MiB"
        high_watermark = 0.8
        [[tiers]]
        kind = "nvme"
        capacity = "1 GiB"
        [gc]
        lease_ttl = "500 ms"
        upload_ttl = "10 min"
        [debug]
        lifecycle_day = "10 s"
        """
    )
    assert settings.server.listen.port == 0
    assert settings.server.domains == ("s3.example.com",)
    assert settings.server.hosts == {"cache.example": "bucket-name"}
    assert (settings.dram.capacity_bytes, settings.dram.high_watermark) == (64 * 2**20, 0.8)
    assert settings.dram.region_bytes == 64 * 2**20
    assert settings.gc.lease_ttl_seconds == 0.5
    assert settings.gc.upload_ttl_seconds == 600.0
    assert settings.debug.lifecycle_day_seconds == 10.0


def test_every_problem_is_told_at_once_with_its_path() -> None:
    found = problems(
        """
        colour = "green"
        [server]
        listen = "9000"
        region = 7
        [[tiers]]
        kind = "dram"
        capacity = 4
        [[tiers]]
        kind = "nvme"
        capacity = "4 GiBi"
        watermark = 1
        [gc]
        grace = "soon"
        """
    )
    assert {problem.split(":")[0] for problem in found} == {
        "server.listen",
        "server.region",
        "tiers[0].capacity",
        "tiers[1].capacity",
        "tiers[1].watermark",
        "gc.grace",
        "colour",
    }
    assert len(found) == 7
    assert any("unknown unit 'GiBi'" in problem for problem in found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[[tiers]]\nkind="nvme"\n[[tiers]]\nkind="dram"', "tiers: must be one dram tier and then one nvme tier"),
        ('[[tiers]]\nkind="dram"', "tiers: must be one dram tier and then one nvme tier"),
        ("tiers = []", "tiers: must be one dram tier and then one nvme tier"),
        (f'{REMOTE}endpoint="x"', "tiers[0].endpoint: must be like https://s3.example.com"),
        (f'{REMOTE}endpoint="http://h:1/path"', "tiers[0].endpoint: must be like https://s3.example.com"),
        (f'{REMOTE}bucket="X"', "tiers[0].bucket: must be"),
        (f'{REMOTE}prefix="a/../b"', "tiers[0].prefix: must be names"),
        (f'{REMOTE}prefix="/a"', "tiers[0].prefix: must be names"),
        (f'{REMOTE}access_key="a/b"', "tiers[0].access_key: must be printable"),
        (f'{REMOTE}secret_key="a b"', "tiers[0].secret_key: must be printable"),
        (f'{REMOTE}secret_key_env="NOT_THERE"', "tiers[0].secret_key_env: the environment has no NOT_THERE"),
        (f'{REMOTE}region="r"', "tiers[0].secret_key: exactly one of secret_key and secret_key_env"),
        (f'{REMOTE}part_size="1 MiB"', "tiers[0].part_size: must be from"),
        (f'{REMOTE}hedge="soon"', "tiers[0].hedge: must be adaptive or off or a duration"),
        (f'{REMOTE}hedge="2 weeks"', "tiers[0].hedge: has the unknown unit"),
        (f'{REMOTE}checksums="none"\nendpoint="http://h"', "tiers[0].checksums: none is for https alone"),
        (
            '[[tiers]]\nkind="remote"\n[[tiers]]\nkind="dram"\n[[tiers]]\nkind="nvme"',
            "tiers: must be one dram tier and then one nvme tier, which is home, with one hbm tier before them or none",
        ),
        ('[[tiers]]\nkind="hbm"', "tiers[0].capacity: is missing"),
        ('[[tiers]]\nkind="hbm"\ncapacity="1 GiB"\ncodec="eq4"', "tiers[0].codec: must be one of raw"),
        (
            '[[tiers]]\nkind="dram"\n[[tiers]]\nkind="nvme"\n[[tiers]]\nkind="hbm"\ncapacity="1 GiB"',
            "tiers: must be one dram tier and then one nvme tier, which is home, with one hbm tier before them or none",
        ),
        ('[[tiers]]\nkind="tape"', "tiers[0].kind: must be one of hbm, dram, nvme, remote, not 'tape'"),
        ("[[tiers]]", "tiers[0].kind: is missing"),
        ('tiers = "dram"', "tiers: must be tables, written [[tiers]], not the text 'dram'"),
        ('[catalog]\nkind="postgres"\ndsn_env="DSN"', "catalog.kind: postgres is not available in this version"),
        ("[server]\nworkers=257", "server.workers: must be from 1 to 256"),
        ("[server]\nworkers=true", "server.workers: must be a whole number, not true or false"),
        ('[server]\ntls_key="x"', "server.tls_certificate: is missing"),
        ('[admin]\ntls_certificate="x"', "admin.tls_key: is missing"),
        ('[limits]\nunfinished_bytes_per_user="-1 B"', "limits.unfinished_bytes_per_user: "),
        ('[server]\ndata=""', "server.data: must not be empty"),
        ('[server]\ndomains=["a.b:9000"]', "server.domains[0]: must be a bare host name"),
        (
            '[server]\ntrusted_proxies=["10.0.0.0/8", "10.0.0.1/8"]',
            "server.trusted_proxies[1]: must be a network such as",
        ),
        ("[server]\ndomains=[1]", "server.domains: must be a list of texts"),
        ('[server.hosts]\n"a.b"="X"', 'server.hosts."a.b": must be 3 to 63'),
        ('[admin]\nlisten="127.0.0.1:9000"', "admin.listen: is the same as server.listen"),
        ('[[buckets]]\nname="UPPER"', "buckets[0].name: must be 3 to 63"),
        ('[[buckets]]\nname="abc"\n[[buckets]]\nname="abc"', "buckets[1].name: is used by buckets[0] already"),
        ('[[buckets]]\nname="abc"\ndurability="shared"', "buckets[0].durability: shared needs a remote tier"),
        ('[[buckets]]\nname="abc"\nremote="always"', "buckets[0].remote: always needs a remote tier"),
        (
            '[[buckets]]\nname="abc"\nremote="sometimes"',
            "buckets[0].remote: must be one of never, reused, evicted, always",
        ),
        ('[[buckets]]\nname="abc"\ncodec="x3"', "buckets[0].codec: must be one of raw, zp"),
        ('[[tiers]]\nkind="dram"\ncapacity="8 MiB"\nregion_size="16 MiB"', "tiers[0].region_size: is larger"),
        ('[[tiers]]\nkind="dram"\nhigh_watermark=1.5', "tiers[0].high_watermark: must be from 0.1 to 0.99"),
        ('[[tiers]]\nkind="dram"\nhigh_watermark="x"', "tiers[0].high_watermark: must be a number"),
        ("[limits]\nconnections=0", "limits.connections: must be from 1 to"),
        ('[gc]\nlease_ttl="49 ms"', "gc.lease_ttl: must be from 0.05 s to"),
        ('[[buckets]]\nname="cache"\nowner="nobody"', "buckets[0].owner: nobody is no user of this file"),
        ('[[buckets]]\nname="cache"\nregions="all"', "buckets[0].regions: must be one of shared, own"),
        ('[[users]]\nid="u"\nsame_host="yes"', "users[0].same_host: must be one of no, all, trusted"),
        ('[same_host]\nstaging="1 KiB"', "same_host.staging: must be from"),
        ('[same_host]\nenabled="yes"', "same_host.enabled: must be true or false"),
        ('[log]\nlevel="loud"', "log.level: must be one of debug, info, warning, error"),
        ('[log]\nrequests="yes"', "log.requests: must be true or false"),
        ('server = "x"', "server: must be a table"),
        ('[lm]\nlisten="127.0.0.1:65432"', "lm.bucket: is missing"),
        ('[lm]\nbucket="UPPER"', "lm.bucket: must be 3 to 63"),
        (
            '[lm]\nlisten="0.0.0.0:65432"\nbucket="cache"',
            "lm.allow: is missing: 0.0.0.0:65432 is reached from elsewhere",
        ),
        ('[lm]\nlisten="kv.example:65432"\nbucket="cache"', "lm.allow: is missing"),
        ('[lm]\nallow=["10.0.0.1/8"]', "lm.allow[0]: must be a network such as"),
        ("[lm]\nconnections=0", "lm.connections: must be from 1 to"),
    ],
)
def test_a_wrong_value_is_told_by_its_path(text: str, problem: str) -> None:
    assert any(found.startswith(problem) for found in problems(text)), problems(text)


@pytest.mark.parametrize(("kind", "part"), [("dram", "region_size"), ("nvme", "segment_size")])
@pytest.mark.parametrize("capacity", ["64M", "1 KiB"])
def test_a_tiers_parts_are_not_measured_by_a_capacity_that_is_none(kind: str, part: str, capacity: str) -> None:
    tiers = {"dram": '[[tiers]]\nkind="dram"\n', "nvme": '[[tiers]]\nkind="nvme"\n'}
    tiers[kind] += f'capacity="{capacity}"\n{part}="16 MiB"\n'
    (problem,) = problems("".join(tiers.values()))
    assert problem.startswith(f"tiers[{list(tiers).index(kind)}].capacity: ")


def test_a_bucket_knows_which_of_its_fields_the_file_states() -> None:
    (bucket,) = parse('[[buckets]]\nname="abc"\nkind="kv"\nowner="root"').buckets
    assert bucket.stated == {"kind", "owner"}


def test_users_take_their_secret_from_the_environment() -> None:
    text = '[[users]]\nid="main"\naccess_key="main-key"\nsecret_key_env="NAME"'
    assert parse(text, NAME=SECRET).users == (UserSettings("main", "main", "main-key", SECRET),)
    assert problems(text) == ["users[0].secret_key_env: the environment has no NAME"]


def test_a_user_has_exactly_one_secret() -> None:
    text = '[[users]]\nid="main"\naccess_key="main-key"\n'
    assert problems(text) == ["users[0].secret_key: exactly one of secret_key and secret_key_env must be there"]
    both = text + f'secret_key="{SECRET}"\nsecret_key_env="NAME"'
    assert problems(both, NAME=SECRET) == problems(text)


def test_published_credentials_are_refused() -> None:
    user = '[[users]]\nid="main"\naccess_key="{}"\nsecret_key="{}"'
    assert problems(user.format("minioadmin", SECRET)) == [
        "users[0].access_key: is a published example: choose another"
    ]
    found = problems(user.format("mine", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"))
    assert found == ["users[0].secret_key: is a published example: choose another"]
    found = problems("", KVOBJ_ACCESS_KEY="AKIAIOSFODNN7EXAMPLE", KVOBJ_SECRET_KEY="minioadmin")
    assert [problem.split(":")[0] for problem in found] == ["KVOBJ_ACCESS_KEY", "KVOBJ_SECRET_KEY"]


@pytest.mark.parametrize("name", ["a\\u001bb", "a\\nb", "a" * 129])
def test_a_users_name_is_printable_and_of_bounded_length(name: str) -> None:
    keys = f'access_key="main-key"\nsecret_key="{SECRET}"\n'
    told = "must be 1 to 128 bytes of printable characters"
    assert problems(f'[[users]]\nid="{name}"\n{keys}') == [f"users[0].id: {told}"]
    assert problems(f'[[users]]\nid="main"\ndisplay_name="{name}"\n{keys}') == [f"users[0].display_name: {told}"]


def test_a_display_name_has_the_spaces_of_any_script_and_nothing_that_steers_a_terminal() -> None:
    def told(name: str, key: str) -> list[str]:
        user = {"id": "main", "display_name": "main", key: name}
        named = "\n".join(f'{each}="{value}"' for each, value in user.items())
        return problems(f'[[users]]\n{named}\naccess_key="main-key"\nsecret_key="{SECRET}"\n')

    problem = "must be 1 to 128 bytes of printable characters"
    for space in ("\u3000", "\u00a0"):
        named = f'[[users]]\nid="main"\ndisplay_name="a{space}b"\naccess_key="main-key"\nsecret_key="{SECRET}"\n'
        assert parse(named).users[0].display_name == f"a{space}b"
        assert told(f"a{space}b", "id")[0] == f"users[0].id: {problem}"
    for unfit in ("\\u001b", "\u202e", "\ue000", "\u0378", "\u2028", "\u2029"):
        assert told(f"a{unfit}b", "display_name") == [f"users[0].display_name: {problem}"]


def test_two_users_share_neither_id_nor_access_key() -> None:
    user = f'[[users]]\nid="main"\naccess_key="main-key"\nsecret_key="{SECRET}"\n'
    assert problems(user + user) == [
        "users[1].id: is used by users[0] already",
        "users[1].access_key: is used by users[0] already",
    ]
    found = problems(user, KVOBJ_ACCESS_KEY="main-key", KVOBJ_SECRET_KEY=SECRET)
    assert found == ["users[0].access_key: is the root user's (KVOBJ_ACCESS_KEY)"]


def test_the_environment_overrides_the_root_credentials() -> None:
    settings = parse("", KVOBJ_ACCESS_KEY="root-key", KVOBJ_SECRET_KEY=SECRET)
    assert settings.root_credentials == RootCredentials("root-key", SECRET)
    assert problems("", KVOBJ_ACCESS_KEY="root-key") == [
        "KVOBJ_ACCESS_KEY and KVOBJ_SECRET_KEY: only one of the two is set"
    ]


def test_no_secret_shows_in_a_printed_configuration_or_problem() -> None:
    text = f'[[users]]\nid="main"\naccess_key="main-key"\nsecret_key="{SECRET}"'
    settings = parse(text, KVOBJ_ACCESS_KEY="root-key", KVOBJ_SECRET_KEY=SECRET)
    assert SECRET not in repr(settings)
    assert all(SECRET not in problem for problem in problems(text + '\nunknown="x"'))
    assert "sh ort" not in str(problems(text.replace(SECRET, "sh ort")))


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "kvobj.toml"
    config.write_text('[server]\nlisten = "127.0.0.1:1"\ndata = "elsewhere"\nregion = "eu-west-1"\n')
    settings = load_settings(config, environment={}, data=str(tmp_path / "data"), listen="[::1]:0")
    assert settings.server.listen == ListenAddress("::1", 0)
    assert str(settings.server.listen) == "[::1]:0"
    assert settings.server.data == tmp_path / "data"
    assert settings.server.region == "eu-west-1"


def test_loaded_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "kvobj.toml"
    config.write_text('[[tiers]]\nkind="dram"\npath="a"\n[[tiers]]\nkind="nvme"\npath="b"\n')
    settings = load_settings(config, environment={})
    assert settings.server.data == tmp_path / "kvobj-data"
    assert (settings.dram.path, settings.nvme.path) == (tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("content", [None, b"[server", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_a_problem(tmp_path: Path, content: bytes | None) -> None:
    config = tmp_path / "kvobj.toml"
    if content is not None:
        config.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"kvobj\.toml: "):
        load_settings(config, environment={})


_toml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "name", "listen", "x"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["server", "admin", "buckets", "users", "catalog", "tiers", "gc", "events", "lm", "limits", "log", "debug"]
        ),
        _toml_values,
    )
)
def test_any_document_is_settings_or_a_list_of_problems(document: dict[str, object]) -> None:
    try:
        outcome: object = parse_settings(document, environment={})
    except ConfigurationError as error:
        outcome = error.problems
    assert isinstance(outcome, Settings) or (outcome and isinstance(outcome, list))


def test_lmcaches_protocol_is_off_by_default_and_open_to_whom_it_names() -> None:
    assert parse("").lm == LmSettings()
    assert parse("").lm.listen is None
    assert parse('[lm]\nlisten="localhost:1"\nbucket="cache"').lm.allow == LmSettings().allow
    settings = parse('[lm]\nlisten="0.0.0.0:1"\nbucket="cache"\nallow=["10.0.0.0/8"]\nuser="main"').lm
    assert (settings.listen, settings.user, settings.allow) == (
        ListenAddress("0.0.0.0", 1),  # noqa: S104 - only read
        "main",
        (ip_network("10.0.0.0/8"),),
    )


def test_events_are_kept_for_a_day_and_published_nowhere_by_default() -> None:
    events = parse("").events
    assert events == EventSettings(retention_seconds=86400.0, max_events=1_000_000)
    assert events.zmq is None


def test_the_event_stream_is_read() -> None:
    settings = parse(
        """
        [events]
        retention = "2 h"
        max_events = 5000
        zmq = "tcp://*:5557"
        zmq_connect = true
        zmq_replay = "ipc:///run/replay"
        zmq_topic = "kv@{bucket}@{namespace}"
        """
    )
    assert settings.events == EventSettings(
        7200.0,
        5000,
        "tcp://*:5557",
        zmq_connect=True,
        zmq_replay="ipc:///run/replay",
        zmq_topic="kv@{bucket}@{namespace}",
    )


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('zmq = "127.0.0.1:5557"', "events.zmq:"),
        ('zmq = "tcp://host"', "events.zmq:"),
        ('zmq_replay = "tcp://127.0.0.1:5558"', "events.zmq:"),
        ('zmq_topic = "t"', "events.zmq:"),
        ('zmq = "tcp://*:1"\nzmq_topic = "{model}"', "events.zmq_topic:"),
        ("max_events = 10", "events.max_events:"),
        ('retention = "0 s"', "events.retention:"),
    ],
)
def test_a_wrong_event_stream_is_told_by_its_path(text: str, path: str) -> None:
    (problem,) = problems("[events]\n" + text)
    assert problem.startswith(path)


def test_the_policy_is_named_and_tuned() -> None:
    assert parse("").policy == PolicySettings(kind="gipe", history=16, write_margin=1.1)
    text = '[policy]\nkind = "lru"\nhistory = 4\nwrite_margin = 2.5'
    assert parse(text).policy == PolicySettings(kind="lru", history=4, write_margin=2.5)
    assert [problem.split(":")[0] for problem in problems('[policy]\nkind = "fifo"\nhistory = 0')] == [
        "policy.kind",
        "policy.history",
    ]


def test_unsigned_payloads_and_explanations_are_switched_by_flags() -> None:
    settings = parse("[server]\nunsigned_payload_needs_tls = true\n[debug]\nexplain_signatures = true")
    assert settings.server.unsigned_payload_needs_tls
    assert settings.debug.explain_signatures
    text = '[server]\nunsigned_payload_needs_tls = "yes"\n[debug]\nexplain_signatures = 1'
    assert [problem.split(":")[0] for problem in problems(text)] == [
        "server.unsigned_payload_needs_tls",
        "debug.explain_signatures",
    ]


# -- upstreams -------------------------------------------------------------------------------------------------------
UPSTREAM = """
[[upstreams]]
bucket = "cache"
endpoint = "https://kvobj.example:9000/"
access_key = "near"
secret_key_env = "UPSTREAM_SECRET"
"""


def test_an_upstream_is_read_with_its_defaults() -> None:
    (upstream,) = parse(UPSTREAM, UPSTREAM_SECRET=SECRET).upstreams
    assert (upstream.bucket, upstream.server.bucket, upstream.durability) == ("cache", "cache", "local")
    assert upstream.server.endpoint == "https://kvobj.example:9000"
    assert upstream.server.request_timeout_seconds == upstream.timeout_seconds == 10.0
    assert upstream.server.secret_key == SECRET
    assert SECRET not in repr(upstream)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (UPSTREAM + UPSTREAM, "upstreams[1].bucket"),
        (UPSTREAM + '[[buckets]]\nname = "cache"\nkind = "ordinary"\n', "upstreams[0].bucket"),
        (UPSTREAM.replace("https:", "ftp:"), "upstreams[0].endpoint"),
        (UPSTREAM.replace('"cache"', '"No"'), "upstreams[0].bucket"),
        (UPSTREAM + 'durability = "sacred"\n', "upstreams[0].durability"),
        (UPSTREAM + 'prefix = "x/"\n', "upstreams[0].prefix"),
        (UPSTREAM.replace("_env", "_envy"), "upstreams[0].secret_key"),
    ],
)
def test_what_is_wrong_with_an_upstream_is_told_with_its_path(text: str, path: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse(text, UPSTREAM_SECRET=SECRET)
    assert any(problem.startswith(f"{path}:") for problem in refused.value.problems)
