"""A Ceph RADOS Gateway on loopback whose objects are kept in memory: one monitor, manager, OSD and gateway, in the foreground.

What is run is Debian's packages (`PACKAGES`), with a configuration of its own and nothing outside its directory; every process is
stopped by its pid. radosgw 16 speaks neither checksum headers nor unsigned trailers: presigned URLs are what both sides take.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench_support import Credentials, RemoteTarget, wait_until
from command_line import ToolError
from free_ports import free_port, wait_for_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

PACKAGES: Final = "radosgw ceph-mon ceph-osd ceph-mgr ceph-common"
_PROGRAMS: Final = (
    "radosgw",
    "radosgw-admin",
    "ceph",
    "ceph-mon",
    "ceph-osd",
    "ceph-mgr",
    "ceph-authtool",
    "monmaptool",
    "setpriv",
)
_KEY_PAIR: Final = Credentials("mainaccesskey0000001", "mainsecretkey00000000000000000000000001")
_START_SECONDS: Final = 120.0
_COMMAND_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 15.0

# mgr without a pool's autoscaler, pools of one replica, no keys between the daemons; `crc`, since radosgw would insist on secure
# mode and never come up without keys; tcp_nodelay, without which every small reply waits 40 ms.
_CONFIGURATION: Final = """[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon_port}/0
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 2000
mon_data_avail_warn = 2
mon_data_avail_crit = 1
run_dir = {root}/run
admin_socket = {root}/run/$name.$pid.asok
log_file = {root}/log/$name.log
pid_file =
crash_dir = {root}/crash
keyring = {root}/keyring
mon_data = {root}/mon
mgr_data = {root}/mgr
osd_data = {root}/osd
osd_objectstore = memstore
memstore_device_bytes = {store_bytes}
osd_memory_target = 1073741824
osd_class_load_list = *
osd_class_default_list = *
[client]
rgw_data = {root}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_thread_pool_size = 64
rgw_dynamic_resharding = false
{options}
"""


@dataclass(frozen=True, slots=True)
class Radosgw(RemoteTarget):
    """A gateway that runs. `admin` runs radosgw-admin on it with the arguments given and returns its output; RuntimeError if it
    fails."""

    admin: Callable[..., str]


def is_installed() -> bool:
    """Whether all programs are there."""
    return all(shutil.which(program) for program in _PROGRAMS)


def require_radosgw() -> None:
    """`ToolError` with the command that installs it, where it is not there."""
    if not is_installed():
        raise ToolError(f"radosgw is not installed: apt-get install --no-install-recommends {PACKAGES}")


class _Cluster:
    """The daemons and the commands that set them up."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._configuration = str(root / "ceph.conf")
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, is_tried: bool = False) -> str:
        """Run a command with this cluster's configuration; its output. RuntimeError if it fails, or "" where it is only tried."""
        try:
            done = subprocess.run(
                [*command, "-c", self._configuration],
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_COMMAND_SECONDS,
            )
        except subprocess.TimeoutExpired:
            if is_tried:
                return ""
            raise
        output = done.stdout.decode(errors="replace")
        if done.returncode == 0:
            return output
        if is_tried:
            return ""
        raise RuntimeError(f"{command[0]} failed: {output[-600:]}")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground; it is stopped by `stop`."""
        with (self._root / "log" / f"{command[0]}.out").open("wb") as log:
            # Where this process is killed itself, its daemons go with it.
            bound = ("setpriv", "--pdeathsig", "TERM", "--", *command)
            daemon = subprocess.Popen([*bound, "-c", self._configuration, "-f"], stdout=log, stderr=log)
        self._daemons[command[0]] = daemon
        return daemon

    def stop(self) -> None:
        """End what was started, the last first."""
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def radosgw_server(
    root: Path, *, store_bytes: int = 4 * 2**30, options: Mapping[str, str] | None = None
) -> Iterator[Radosgw]:
    """Run one in `root`, an absolute path that is made. RuntimeError where a part fails, TimeoutError where one does not start.

    `options` are more lines of the gateway's configuration. Start and stop come from one thread: the daemons end with it.
    """
    for name in ("mon", "mgr", "osd", "rgw", "log", "run", "crash"):
        (root / name).mkdir(parents=True)
    fsid, port, mon_port = str(uuid.uuid4()), free_port(), free_port()
    (root / "ceph.conf").write_text(
        _CONFIGURATION.format(
            fsid=fsid,
            root=root,
            port=port,
            mon_port=mon_port,
            store_bytes=store_bytes,
            options="\n".join(f"{name} = {value}" for name, value in (options or {}).items()),
        )
    )
    cluster = _Cluster(root)
    with ExitStack() as stack:
        stack.callback(cluster.stop)
        _start_store(cluster, root, fsid, mon_port)
        gateway = cluster.start("radosgw", "-n", "client.admin")
        wait_for_port(port, gateway, timeout_seconds=_START_SECONDS)
        pair = (f"--access-key={_KEY_PAIR.access_key}", f"--secret-key={_KEY_PAIR.secret_key}")
        cluster.run("radosgw-admin", "-n", "client.admin", "user", "create", "--uid=main", "--display-name=main", *pair)

        def admin(*arguments: str) -> str:
            return cluster.run("radosgw-admin", "-n", "client.admin", *arguments)

        yield Radosgw("127.0.0.1", port, _KEY_PAIR, admin)


def _start_store(cluster: _Cluster, root: Path, fsid: str, mon_port: int) -> None:
    """Monitor, manager and OSD, up to the moment when the OSD is in."""
    keyring, monmap, osd_id = str(root / "keyring"), str(root / "monmap"), str(uuid.uuid4())
    cluster.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    rights = [word for daemon in ("mon", "osd", "mgr") for word in ("--cap", daemon, "allow *")]
    cluster.run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *rights)
    cluster.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", monmap)
    cluster.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
    cluster.start("ceph-mon", "-i", "a")
    wait_until(
        lambda: bool(cluster.run("ceph", "--connect-timeout", "3", "-s", is_tried=True)),
        timeout_seconds=_START_SECONDS,
        what="the monitor",
        pause_seconds=0.3,
    )
    cluster.start("ceph-mgr", "-i", "x")
    number = cluster.run("ceph", "osd", "create", osd_id).split()[-1]
    cluster.run("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", osd_id)
    cluster.start("ceph-osd", "-i", number)
    wait_until(
        lambda: "1 up" in cluster.run("ceph", "osd", "stat", is_tried=True),
        timeout_seconds=_START_SECONDS,
        what="the OSD",
        pause_seconds=0.3,
    )
