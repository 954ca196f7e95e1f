"""What a configuration says, as frozen values with their units in their names. Defaults stand here and nowhere else.

`config_example.toml` beside this package states every default; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Final, Literal

BucketKindName = Literal["ordinary", "kv"]
DurabilityName = Literal["memory", "local", "shared"]
CodecName = Literal["raw", "zp"]
HbmCodecName = Literal["raw"]
HbmMemoryName = Literal["device", "host"]
PolicyName = Literal["gipe", "lru"]
RegionsName = Literal["shared", "own"]
SameHostName = Literal["no", "all", "trusted"]
RemoteRuleName = Literal["never", "reused", "evicted", "always"]
AddressingName = Literal["path", "virtual"]
RemoteChecksumsName = Literal["auto", "sha256", "crc32c", "none"]
LogLevelName = Literal["debug", "info", "warning", "error"]
Network = IPv4Network | IPv6Network

BUCKET_FIELDS: Final = ("kind", "owner", "durability", "codec", "remote")
"""What a bucket is made with, and keeps whatever the file says later."""


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen. `host` has no brackets; port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files of a listener's certificate chain and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The S3 listener and the data directory. Host rules are those of design §8; `trusted_proxies` may say who a client is."""

    listen: ListenAddress = ListenAddress("127.0.0.1", 9000)
    data: Path = Path("kvobj-data")
    region: str = "us-east-1"
    domains: tuple[str, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    default_bucket: str | None = None
    workers: int = 1
    tls: TlsSettings | None = None
    unsigned_payload_needs_tls: bool = False
    trusted_proxies: tuple[Network, ...] = ()


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The listener for metrics, health and `kvobj-admin`, which has a pair of its own where it speaks TLS."""

    listen: ListenAddress = ListenAddress("127.0.0.1", 9001)
    tls: TlsSettings | None = None


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """A bucket that a start makes if it is absent. An existing bucket of this name is left as it is, but for `regions`: whether
    its chunks lie in regions of the arena that are its alone. `remote`: what of it goes to the remote tier beside class shared.
    `stated`: which of `BUCKET_FIELDS` the file has, and are not merely their defaults."""

    name: str
    kind: BucketKindName = "ordinary"
    durability: DurabilityName = "local"
    codec: CodecName = "raw"
    regions: RegionsName = "shared"
    owner: str = "root"
    remote: RemoteRuleName = "never"
    stated: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class UserSettings:
    """A user that a start adds, or puts in place of the one with the same id. Not an administrator. `same_host`: whether its
    processes on this machine may map all of the arena, and write into it."""

    id: str
    display_name: str
    access_key: str
    secret_key: str = field(repr=False)
    same_host: SameHostName = "no"


@dataclass(frozen=True, slots=True)
class RootCredentials:
    """Credentials of the root user, who may do everything."""

    access_key: str
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    """The LMDB catalog. Map sizes are bounds on what it may grow to: address space now, disk or memory only when used."""

    kind: Literal["lmdb"] = "lmdb"
    map_bytes: int = 64 * 2**30
    volatile_map_bytes: int = 4 * 2**30


@dataclass(frozen=True, slots=True)
class HbmSettings:
    """The hbm tier: `capacity_bytes` of the memory of GPU number `device`. `max_sms`: how many of its multiprocessors kernels
    may use, None for all. `memory` "host": host memory in the GPU's place, to try it out."""

    capacity_bytes: int
    kind: Literal["hbm"] = "hbm"
    device: int = 0
    codec: HbmCodecName = "raw"
    max_sms: int | None = None
    memory: HbmMemoryName = "device"


@dataclass(frozen=True, slots=True)
class DramSettings:
    """The dram tier. None for capacity or path: sized and placed by the machine (`docs/operations.md`)."""

    kind: Literal["dram"] = "dram"
    capacity_bytes: int | None = None
    path: Path | None = None
    high_watermark: float = 0.9
    region_bytes: int = 256 * 2**20
    huge_pages: bool = True


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """The nvme tier, which is the home tier. None for capacity: sized by the disk; for path: `DATA/nvme`."""

    kind: Literal["nvme"] = "nvme"
    capacity_bytes: int | None = None
    path: Path | None = None
    high_watermark: float = 0.9
    segment_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """The remote tier: a bucket of an S3 server, and in it the keys that begin with `prefix` (empty, or with a slash at its end).

    `endpoint` has no slash behind it. `connections`: to the server at once. A request has `request_timeout_seconds`, an operation
    of many requests, repeats included, `operation_timeout_seconds`; a body that does not move for `stall_timeout_seconds` is given
    up and gone on with on another connection. `hedge_seconds`: when a read is asked for a second time, None: by what answers
    usually take, 0: never. `checksums`: how bytes are checked on their way up; "auto": as the server can. `queue_bytes`: of
    objects that wait to be uploaded; beyond, writes wait. `outbox_bytes`: of changes that the remote is to be told of; beyond,
    uploads wait, and changes of settings are refused. `manifest_interval_seconds`: how long names and removals wait for company
    before they are written. `share_timeout_seconds`: how long a write of class `shared` waits until it is that, less than S3
    clients wait for an answer.
    """

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str = field(repr=False)
    kind: Literal["remote"] = "remote"
    prefix: str = ""
    region: str = "us-east-1"
    addressing: AddressingName = "path"
    part_bytes: int = 8 * 2**20
    connections: int = 32
    connect_timeout_seconds: float = 5.0
    request_timeout_seconds: float = 30.0
    operation_timeout_seconds: float = 120.0
    stall_timeout_seconds: float = 1.0
    hedge_seconds: float | None = None
    ca_bundle: Path | None = None
    checksums: RemoteChecksumsName = "auto"
    queue_bytes: int = 64 * 2**30
    outbox_bytes: int = 256 * 2**20
    manifest_interval_seconds: float = 1.0
    share_timeout_seconds: float = 50.0


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """Another kvobj that is asked for the chunks of the KV bucket `bucket`, at the bucket that `server` names; of that the fields
    about addresses, credentials and times count. `timeout_seconds`: what one question has, repeats included. `durability`: the
    class that writes of class `shared` get there.
    """

    bucket: str
    server: RemoteSettings
    timeout_seconds: float = 10.0
    durability: DurabilityName = "local"


@dataclass(frozen=True, slots=True)
class GcSettings:
    """Times and rates of leases and collection (design §5). None for `chunk_ttl_seconds`: chunks go for want of room only."""

    lease_ttl_seconds: float = 30.0
    grace_seconds: float = 30.0
    sweep_interval_seconds: float = 10.0
    upload_ttl_seconds: float = 600.0
    chunk_ttl_seconds: float | None = None
    chunks_per_second: int = 2200
    scrub_bytes_per_second: int = 16 * 2**20
    reconcile_interval_seconds: float = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Which chunks dram and nvme keep (`docs/policy.md`).

    `history`: accesses remembered for each chunk that the tiers can hold. `write_margin`: how many times more than what goes for
    it a chunk must be worth to be written to nvme. Both are gipe's.
    """

    kind: PolicyName = "gipe"
    history: int = 16
    write_margin: float = 1.1


@dataclass(frozen=True, slots=True)
class EventSettings:
    """The log of stored and removed chunks, and its stream in vLLM's ZMQ format, off where `zmq` is None.

    `zmq` is bound, or connected to where `zmq_connect` says so; `zmq_replay` is always bound. In `zmq_topic`, `{bucket}` and
    `{namespace}` stand for those of the events. `max_events` bounds the removals remembered, too.
    """

    retention_seconds: float = 24 * 3600.0
    max_events: int = 1_000_000
    zmq: str | None = None
    zmq_connect: bool = False
    zmq_replay: str | None = None
    zmq_topic: str = ""


@dataclass(frozen=True, slots=True)
class LmSettings:
    """LMCache's own protocol on one KV bucket, used as one user; off where `listen` is None. It knows no credentials: `allow` says
    from where it may be reached."""

    listen: ListenAddress | None = None
    bucket: str = ""
    user: str = "root"
    allow: tuple[Network, ...] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
    connections: int = 256


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Keys that the environment gives. None: the wrapping key of namespace keys follows from the data directory's store key."""

    wrapping_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SameHostSettings:
    """The path by shared memory for clients on this machine (docs/same-host.md). None for `socket`: `DATA/same-host.sock`.

    `staging_bytes` is the largest staging room of one connection, `staging_total_bytes` what all may have together.
    """

    enabled: bool = True
    socket: Path | None = None
    connections: int = 256
    staging_bytes: int = 256 * 2**20
    staging_total_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Bounds of the server. What goes over one is refused, never queued without end. None for
    `unfinished_bytes_per_user`: a quarter of the home tier's capacity."""

    connections: int = 1024
    address_connections: int = 512
    concurrent_requests: int = 512
    request_line_bytes: int = 8 * 2**10
    header_bytes: int = 32 * 2**10
    header_fields: int = 100
    header_timeout_seconds: float = 10.0
    idle_timeout_seconds: float = 60.0
    progress_timeout_seconds: float = 60.0
    reserve_timeout_seconds: float = 10.0
    bucket_uploads: int = 10_000
    unfinished_bytes_per_user: int | None = None
    drain_timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Structured log lines on standard error; `requests`: one more for each request."""

    level: LogLevelName = "info"
    requests: bool = True


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """For tests and for who debugs a client: how long lifecycle rules take a day to be; whether a signature that does not match is
    answered with what was to be signed (never with the signature)."""

    lifecycle_day_seconds: float = 86400.0
    explain_signatures: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole configuration, checked across its fields. Tiers are fast to slow: hbm where there is one, dram, then nvme, the home
    tier, and remote where there is one."""

    server: ServerSettings = field(default_factory=ServerSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    buckets: tuple[BucketSettings, ...] = ()
    users: tuple[UserSettings, ...] = ()
    root_credentials: RootCredentials | None = None
    catalog: CatalogSettings = field(default_factory=CatalogSettings)
    hbm: HbmSettings | None = None
    dram: DramSettings = field(default_factory=DramSettings)
    nvme: NvmeSettings = field(default_factory=NvmeSettings)
    remote: RemoteSettings | None = None
    upstreams: tuple[UpstreamSettings, ...] = ()
    gc: GcSettings = field(default_factory=GcSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    events: EventSettings = field(default_factory=EventSettings)
    lm: LmSettings = field(default_factory=LmSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    same_host: SameHostSettings = field(default_factory=SameHostSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    log: LogSettings = field(default_factory=LogSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)
