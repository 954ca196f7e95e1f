"""From a TOML document to `Settings`: every section, then the rules that hold between them.

Pure: the environment comes as an argument. A fault never stops the reading; `ConfigurationError` carries all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final

from kvobj.config.bucket_name import bucket_name_problem
from kvobj.config.credential_rules import (
    access_key_problem,
    display_name_problem,
    secret_key_problem,
    user_name_problem,
)
from kvobj.config.settings import (
    BUCKET_FIELDS,
    AdminSettings,
    BucketKindName,
    BucketSettings,
    CatalogSettings,
    CodecName,
    DebugSettings,
    DurabilityName,
    EventSettings,
    GcSettings,
    LimitSettings,
    ListenAddress,
    LmSettings,
    LogSettings,
    Network,
    PolicySettings,
    RegionsName,
    RemoteRuleName,
    RootCredentials,
    SameHostName,
    SameHostSettings,
    SecuritySettings,
    ServerSettings,
    Settings,
    TlsSettings,
    UserSettings,
)
from kvobj.config.table_reader import TableReader
from kvobj.config.tiers import read_tiers
from kvobj.config.upstreams import check_upstreams, read_upstream
from kvobj.errors import ConfigurationError

ACCESS_KEY_VARIABLE: Final = "KVOBJ_ACCESS_KEY"
SECRET_KEY_VARIABLE: Final = "KVOBJ_SECRET_KEY"  # noqa: S105 - the name of a variable, not a secret
ROOT_USER_ID: Final = "root"

_ZMQ_ENDPOINT: Final = re.compile(r"tcp://[^\s:/]+:[0-9]{1,5}|tcp://\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}|ipc://\S+")
_PLACEHOLDER: Final = re.compile(r"[{}]")
_WRAPPING_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
# 20 times as long is the longest that a session may ask for, and 1 s is the shortest that it is given.
_LEASE_TTL_SECONDS_MIN: Final = 0.05
_MIB: Final = 2**20
_TIB: Final = 2**40


def parse_settings(document: Mapping[str, object], *, environment: Mapping[str, str]) -> Settings:
    """Settings of a parsed TOML document. Raises `ConfigurationError` with every problem, each starting with its path."""
    problems: list[str] = []
    root = TableReader(document, "", problems)
    server = _read_server(root.table("server"))
    admin_reader = root.table("admin")
    admin = AdminSettings(listen=admin_reader.address("listen", AdminSettings().listen), tls=_read_tls(admin_reader))
    admin_reader.finish()
    buckets = tuple(_read_bucket(reader) for reader in root.tables("buckets"))
    users = tuple(_read_user(reader, environment) for reader in root.tables("users"))
    upstreams = tuple(read_upstream(reader, environment) for reader in root.tables("upstreams"))
    catalog = _read_catalog(root.table("catalog"))
    tier_readers = root.tables("tiers")
    tiers = read_tiers(tier_readers if root.has("tiers") else None, problems, environment=environment)
    settings = Settings(
        server=server,
        admin=admin,
        buckets=buckets,
        users=users,
        root_credentials=_root_credentials(environment, problems),
        catalog=catalog,
        hbm=tiers.hbm,
        dram=tiers.dram,
        nvme=tiers.nvme,
        remote=tiers.remote,
        upstreams=upstreams,
        gc=_read_gc(root.table("gc")),
        policy=_read_policy(root.table("policy")),
        events=_read_events(root.table("events")),
        lm=_read_lm(root.table("lm")),
        security=_read_security(root.table("security"), environment),
        same_host=_read_same_host(root.table("same_host")),
        limits=_read_limits(root.table("limits")),
        log=_read_log(root.table("log")),
        debug=_read_debug(root.table("debug")),
    )
    root.finish()
    _check_names_are_unique(settings, problems)
    _check_owners(settings, problems)
    _check_shared(settings, problems)
    check_upstreams(settings.upstreams, settings.buckets, problems)
    if settings.server.listen == settings.admin.listen and settings.admin.listen.port != 0:
        problems.append(f"admin.listen: is the same as server.listen ({settings.admin.listen})")
    if problems:
        raise ConfigurationError(problems)
    return settings


def _read_server(reader: TableReader) -> ServerSettings:
    default = ServerSettings()
    tls = _read_tls(reader)
    workers = reader.whole_number("workers", default.workers, low=1, high=256)
    default_bucket = reader.optional_text("default_bucket")
    if default_bucket is not None and (problem := bucket_name_problem(default_bucket)):
        reader.report("default_bucket", problem)
    domains = tuple(domain.lower() for domain in reader.texts("domains"))
    for position, domain in enumerate(domains):
        if domain.startswith(".") or "/" in domain or ":" in domain:
            reader.report(f"domains[{position}]", f"must be a bare host name without port, not {domain!r}")
    hosts_reader = reader.table("hosts")
    hosts = {host.lower(): bucket for host, bucket in hosts_reader.items()}
    for host, bucket in hosts.items():
        if bucket and (problem := bucket_name_problem(bucket)):
            hosts_reader.report(f'"{host}"', problem)
    settings = ServerSettings(
        listen=reader.address("listen", default.listen),
        data=Path(reader.text("data", str(default.data))),
        region=reader.text("region", default.region),
        domains=domains,
        hosts=hosts,
        default_bucket=default_bucket,
        workers=workers,
        tls=tls,
        unsigned_payload_needs_tls=reader.flag(
            "unsigned_payload_needs_tls", default=default.unsigned_payload_needs_tls
        ),
        trusted_proxies=_read_networks(reader, "trusted_proxies"),
    )
    reader.finish()
    return settings


def _read_tls(reader: TableReader) -> TlsSettings | None:
    """The section's pair, if it has one."""
    certificate = reader.optional_text("tls_certificate")
    key = reader.optional_text("tls_key")
    if (certificate is None) != (key is None):
        reader.report("tls_key" if key is None else "tls_certificate", "is missing: TLS needs certificate and key")
    return TlsSettings(Path(certificate), Path(key)) if certificate and key else None


def _read_networks(reader: TableReader, key: str) -> tuple[Network, ...]:
    networks: list[Network] = []
    for position, text in enumerate(reader.texts(key)):
        try:
            networks.append(ip_network(text))
        except ValueError:
            reader.report(f"{key}[{position}]", f"must be a network such as 10.0.0.0/8, not {text!r}")
    return tuple(networks)


def _read_bucket(reader: TableReader) -> BucketSettings:
    name = reader.required_text("name")
    if name and (problem := bucket_name_problem(name)):
        reader.report("name", problem)
    kind: BucketKindName = reader.choice("kind", ("ordinary", "kv"), "ordinary")
    # The class follows the kind, as the contract's defaults do: chunks can be computed again, ordinary data cannot.
    durability: DurabilityName = reader.choice(
        "durability", ("memory", "local", "shared"), "memory" if kind == "kv" else "local"
    )
    codec: CodecName = reader.choice("codec", ("raw", "zp"), "raw")
    regions: RegionsName = reader.choice("regions", ("shared", "own"), "shared")
    owner = reader.text("owner", ROOT_USER_ID)
    remote: RemoteRuleName = reader.choice("remote", ("never", "reused", "evicted", "always"), "never")
    reader.finish()
    return BucketSettings(
        name=name,
        kind=kind,
        durability=durability,
        codec=codec,
        regions=regions,
        owner=owner,
        remote=remote,
        stated=frozenset(field for field in BUCKET_FIELDS if reader.has(field)),
    )


def _read_user(reader: TableReader, environment: Mapping[str, str]) -> UserSettings:
    user_id = reader.required_text("id")
    if user_id == ROOT_USER_ID:
        reader.report("id", f"{ROOT_USER_ID} is the user of DATA/credentials: choose another")
    elif user_id and (problem := user_name_problem(user_id)):
        reader.report("id", problem)
    display_name = reader.text("display_name", user_id)
    if display_name not in ("", user_id) and (problem := display_name_problem(display_name)):
        reader.report("display_name", problem)
    access_key = reader.required_text("access_key")
    if access_key and (problem := access_key_problem(access_key)):
        reader.report("access_key", problem)
    secret_key = _read_secret(reader, environment)
    same_host: SameHostName = reader.choice("same_host", ("no", "all", "trusted"), "no")
    user = UserSettings(
        id=user_id,
        display_name=display_name,
        access_key=access_key,
        secret_key=secret_key,
        same_host=same_host,
    )
    reader.finish()
    return user


def _read_secret(reader: TableReader, environment: Mapping[str, str]) -> str:
    written = reader.optional_text("secret_key")
    variable = reader.optional_text("secret_key_env")
    if (written is None) == (variable is None):
        reader.report("secret_key", "exactly one of secret_key and secret_key_env must be there")
        return ""
    if variable is not None:
        if not environment.get(variable):
            reader.report("secret_key_env", f"the environment has no {variable}")
            return ""
        key, secret = "secret_key_env", environment[variable]
    else:
        key, secret = "secret_key", written or ""
    if problem := secret_key_problem(secret):
        reader.report(key, problem)
    return secret


def _root_credentials(environment: Mapping[str, str], problems: list[str]) -> RootCredentials | None:
    access_key = environment.get(ACCESS_KEY_VARIABLE, "")
    secret_key = environment.get(SECRET_KEY_VARIABLE, "")
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        problems.append(f"{ACCESS_KEY_VARIABLE} and {SECRET_KEY_VARIABLE}: only one of the two is set")
        return None
    if problem := access_key_problem(access_key):
        problems.append(f"{ACCESS_KEY_VARIABLE}: {problem}")
    if problem := secret_key_problem(secret_key):
        problems.append(f"{SECRET_KEY_VARIABLE}: {problem}")
    return RootCredentials(access_key=access_key, secret_key=secret_key)


def _read_catalog(reader: TableReader) -> CatalogSettings:
    default = CatalogSettings()
    if reader.choice("kind", ("lmdb", "postgres"), "lmdb") == "postgres":
        reader.report("kind", "postgres is not available in this version")
        reader.ignore_rest()
    settings = CatalogSettings(
        map_bytes=reader.size_bytes("map_size", default.map_bytes, low=_MIB, high=64 * _TIB),
        volatile_map_bytes=reader.size_bytes("volatile_map_size", default.volatile_map_bytes, low=_MIB, high=_TIB),
    )
    reader.finish()
    return settings


def _read_gc(reader: TableReader) -> GcSettings:
    default = GcSettings()
    settings = GcSettings(
        lease_ttl_seconds=reader.seconds("lease_ttl", default.lease_ttl_seconds, low=_LEASE_TTL_SECONDS_MIN),
        grace_seconds=reader.seconds("grace", default.grace_seconds),
        sweep_interval_seconds=reader.seconds("sweep_interval", default.sweep_interval_seconds),
        upload_ttl_seconds=reader.seconds("upload_ttl", default.upload_ttl_seconds),
        chunk_ttl_seconds=reader.seconds("chunk_ttl", 1.0) if reader.has("chunk_ttl") else None,
        chunks_per_second=reader.whole_number("rate", default.chunks_per_second, low=1, high=1_000_000),
        scrub_bytes_per_second=reader.size_bytes("scrub_rate", default.scrub_bytes_per_second, low=0, high=_TIB),
        reconcile_interval_seconds=reader.seconds("reconcile_interval", default.reconcile_interval_seconds),
    )
    reader.finish()
    return settings


def _read_policy(reader: TableReader) -> PolicySettings:
    default = PolicySettings()
    settings = PolicySettings(
        kind=reader.choice("kind", ("gipe", "lru"), default.kind),
        history=reader.whole_number("history", default.history, low=1, high=256),
        write_margin=reader.fraction("write_margin", default.write_margin, low=0.1, high=100.0),
    )
    reader.finish()
    return settings


def _read_events(reader: TableReader) -> EventSettings:
    default = EventSettings()
    settings = EventSettings(
        retention_seconds=reader.seconds("retention", default.retention_seconds),
        max_events=reader.whole_number("max_events", default.max_events, low=1000, high=100_000_000),
        zmq=_zmq_endpoint(reader, "zmq"),
        zmq_connect=reader.flag("zmq_connect", default=default.zmq_connect),
        zmq_replay=_zmq_endpoint(reader, "zmq_replay"),
        zmq_topic=reader.optional_text("zmq_topic") or default.zmq_topic,
    )
    if settings.zmq is None and (settings.zmq_replay is not None or settings.zmq_connect or settings.zmq_topic):
        reader.report("zmq", "is missing: the other zmq keys are about its stream")
    if _PLACEHOLDER.search(settings.zmq_topic.replace("{bucket}", "").replace("{namespace}", "")):
        reader.report("zmq_topic", "may hold {bucket} and {namespace} and no other braces")
    reader.finish()
    return settings


def _zmq_endpoint(reader: TableReader, key: str) -> str | None:
    endpoint = reader.optional_text(key)
    if endpoint is not None and not _ZMQ_ENDPOINT.fullmatch(endpoint):
        reader.report(key, f"must be like tcp://127.0.0.1:5557 or ipc:///run/kvobj-events, not {endpoint!r}")
        return None
    return endpoint


def _read_lm(reader: TableReader) -> LmSettings:
    default = LmSettings()
    settings = LmSettings(
        listen=reader.address("listen", ListenAddress("127.0.0.1", 0)) if reader.has("listen") else None,
        bucket=reader.optional_text("bucket") or default.bucket,
        user=reader.text("user", default.user),
        allow=_read_networks(reader, "allow") if reader.has("allow") else default.allow,
        connections=reader.whole_number("connections", default.connections, low=1, high=100_000),
    )
    if settings.bucket and (problem := bucket_name_problem(settings.bucket)):
        reader.report("bucket", problem)
    if settings.listen is not None:
        if not settings.bucket:
            reader.report("bucket", "is missing: the KV bucket that LMCache's chunks are in")
        # Who listens for others must say whom he means: nothing else keeps strangers out.
        if not reader.has("allow") and not _is_loopback(settings.listen.host):
            reader.report(
                "allow", f"is missing: {settings.listen} is reached from elsewhere, and lm:// knows no credentials"
            )
    reader.finish()
    return settings


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_security(reader: TableReader, environment: Mapping[str, str]) -> SecuritySettings:
    variable = reader.optional_text("wrapping_key_env")
    reader.finish()
    if variable is None:
        return SecuritySettings()
    written = environment.get(variable)
    if not written:
        reader.report("wrapping_key_env", f"the environment has no {variable}")
    elif not _WRAPPING_KEY.fullmatch(written):
        reader.report("wrapping_key_env", f"{variable} must be 64 hex digits")
    else:
        return SecuritySettings(bytes.fromhex(written))
    return SecuritySettings()


def _read_same_host(reader: TableReader) -> SameHostSettings:
    default = SameHostSettings()
    socket = reader.optional_text("socket")
    settings = SameHostSettings(
        enabled=reader.flag("enabled", default=default.enabled),
        socket=None if socket is None else Path(socket),
        connections=reader.whole_number("connections", default.connections, low=1, high=100_000),
        staging_bytes=reader.size_bytes("staging", default.staging_bytes, low=_MIB, high=_TIB),
        staging_total_bytes=reader.size_bytes("staging_total", default.staging_total_bytes, low=_MIB, high=_TIB),
    )
    reader.finish()
    return settings


def _read_limits(reader: TableReader) -> LimitSettings:
    default = LimitSettings()
    settings = LimitSettings(
        connections=reader.whole_number("connections", default.connections, low=1, high=1_000_000),
        address_connections=reader.whole_number(
            "address_connections", default.address_connections, low=1, high=1_000_000
        ),
        concurrent_requests=reader.whole_number(
            "concurrent_requests", default.concurrent_requests, low=1, high=1_000_000
        ),
        # S3 keys of 1,024 bytes need about 3 KiB when percent-encoded: a line must hold one with its query.
        request_line_bytes=reader.size_bytes("request_line", default.request_line_bytes, low=4096, high=_MIB),
        header_bytes=reader.size_bytes("header_size", default.header_bytes, low=4096, high=_MIB),
        header_fields=reader.whole_number("header_fields", default.header_fields, low=16, high=10_000),
        header_timeout_seconds=reader.seconds("header_timeout", default.header_timeout_seconds),
        idle_timeout_seconds=reader.seconds("idle_timeout", default.idle_timeout_seconds),
        progress_timeout_seconds=reader.seconds("progress_timeout", default.progress_timeout_seconds),
        reserve_timeout_seconds=reader.seconds("reserve_timeout", default.reserve_timeout_seconds),
        bucket_uploads=reader.whole_number("bucket_uploads", default.bucket_uploads, low=1, high=10_000_000),
        unfinished_bytes_per_user=reader.optional_size_bytes("unfinished_bytes_per_user", low=0, high=1024 * _TIB),
        drain_timeout_seconds=reader.seconds("drain_timeout", default.drain_timeout_seconds),
    )
    reader.finish()
    return settings


def _read_log(reader: TableReader) -> LogSettings:
    settings = LogSettings(
        level=reader.choice("level", ("debug", "info", "warning", "error"), "info"),
        requests=reader.flag("requests", default=True),
    )
    reader.finish()
    return settings


def _read_debug(reader: TableReader) -> DebugSettings:
    settings = DebugSettings(
        lifecycle_day_seconds=reader.seconds("lifecycle_day", DebugSettings().lifecycle_day_seconds),
        explain_signatures=reader.flag("explain_signatures", default=DebugSettings().explain_signatures),
    )
    reader.finish()
    return settings


def _check_owners(settings: Settings, problems: list[str]) -> None:
    known = {ROOT_USER_ID, *(user.id for user in settings.users)}
    for position, bucket in enumerate(settings.buckets):
        if bucket.owner not in known:
            problems.append(f"buckets[{position}].owner: {bucket.owner} is no user of this file")


def _check_shared(settings: Settings, problems: list[str]) -> None:
    if settings.remote is not None:
        return
    needed = 'needs a remote tier ([[tiers]] kind = "remote")'
    for position, bucket in enumerate(settings.buckets):
        if bucket.durability == "shared":
            problems.append(f"buckets[{position}].durability: shared {needed}")
        if bucket.remote != "never":
            problems.append(f"buckets[{position}].remote: {bucket.remote} {needed}")


def _check_names_are_unique(settings: Settings, problems: list[str]) -> None:
    columns = (
        ("buckets", "name", [bucket.name for bucket in settings.buckets]),
        ("users", "id", [user.id for user in settings.users]),
        ("users", "access_key", [user.access_key for user in settings.users]),
    )
    for section, key, values in columns:
        for position, value in enumerate(values):
            if value and value in values[:position]:
                problems.append(f"{section}[{position}].{key}: is used by {section}[{values.index(value)}] already")
    if settings.root_credentials is not None:
        for position, user in enumerate(settings.users):
            if user.access_key == settings.root_credentials.access_key:
                problems.append(f"users[{position}].access_key: is the root user's ({ACCESS_KEY_VARIABLE})")
