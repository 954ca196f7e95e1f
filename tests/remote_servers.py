"""Remote S3 servers for the tests of the remote tier: another kvobj (a new server) and Ceph's radosgw 16 (an old one).

Each is started once in a test session, by the first test that wants it, and stopped with the session. A test is given a bucket
of its own, made empty and taken away afterwards, so that none sees what another left. `tests/conftest.py` names this file as
a plugin: the fixtures are there in every folder.
"""

from __future__ import annotations

import secrets
import xml.etree.ElementTree as ET
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import md5
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

import pytest
from raw_http import Credentials, RawReply, RawS3
from server_process import MIB, ServerProcess, ServerSettings

from kvobj.config.settings import RemoteSettings

if TYPE_CHECKING:
    from radosgw_server import Radosgw

_NVME_BYTES: Final = 2048 * MIB
_PREFIX: Final = "store/"
_DELETE_BATCH: Final = 1000
_EMPTIED_AT_MOST: Final = 20
# radosgw gives the room of a removed object back two hours later unless told otherwise.
# And it looks at what a user has used minutes late.
_GATEWAY_OPTIONS: Final = {
    "rgw_gc_obj_min_wait": "2",
    "rgw_gc_processor_period": "2",
    "rgw_gc_processor_max_time": "2",
    "rgw_bucket_quota_ttl": "1",
    "rgw_user_quota_bucket_sync_interval": "1",
    "rgw_user_quota_sync_interval": "1",
}


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """A bucket of one test's own on a remote S3 server, and the key prefix under which a store may lie there.

    `kind`: `kvobj` or `radosgw`. Every key of the bucket is the test's: nothing else is written there.
    """

    kind: str
    host: str
    port: int
    credentials: Credentials
    bucket: str
    prefix: str = _PREFIX

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"http://{self.host}:{self.port}"

    def tier(self, **more: str) -> dict[str, str]:
        """The lines of a `[[tiers]] kind = "remote"` entry that points here, for `ServerSettings.remote`; values are TOML."""
        return {
            "endpoint": f'"{self.endpoint}"',
            "bucket": f'"{self.bucket}"',
            "prefix": f'"{self.prefix}"',
            "access_key": f'"{self.credentials.access_key}"',
            "secret_key": f'"{self.credentials.secret_key}"',
            **more,
        }

    def settings(self) -> RemoteSettings:
        """What a `RemoteBucket` is opened with to work here; `dataclasses.replace` changes it."""
        pair = self.credentials
        return RemoteSettings(self.endpoint, self.bucket, pair.access_key, pair.secret_key, prefix=self.prefix)

    def behind(self, port: int) -> RemoteStore:
        """The same bucket through a proxy on another port of this machine."""
        return replace(self, host="127.0.0.1", port=port)

    def raw(self, *, timeout_seconds: float = 30.0) -> RawS3:
        """A raw client of the server, to be closed by the caller: what it says does not depend on what is tested."""
        return RawS3(self.host, self.port, self.credentials, timeout_seconds)

    def keys(self, prefix: str = "") -> list[str]:
        """The whole keys under a prefix, ascending."""
        with self.raw() as raw:
            return list(_listed(raw, self.bucket, prefix))

    def uploads(self) -> list[tuple[str, str]]:
        """The unfinished multipart uploads as (key, upload id), up to a thousand."""
        with self.raw() as raw:
            return _unfinished(raw, self.bucket)

    def read(self, key: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        with self.raw() as raw:
            reply = raw.request("GET", f"/{self.bucket}/{key}", payload=None)
        if reply.status == 404:
            return None
        return _expect(reply, 200).body

    def write(self, key: str, body: bytes) -> None:
        """Put an object there."""
        with self.raw() as raw:
            _expect(raw.request("PUT", f"/{self.bucket}/{key}", body, payload=body), 200)

    def remove(self, keys: Sequence[str]) -> None:
        """Delete objects; absent is fine."""
        with self.raw() as raw:
            _remove(raw, self.bucket, keys)


@pytest.fixture(scope="session")
def kvobj_remote_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The session's kvobj server that other kvobj nodes have as their remote."""
    settings = ServerSettings(
        dram_bytes=256 * MIB, nvme_bytes=_NVME_BYTES, sections={"log": {"requests": "false"}}, workers=1
    )
    with ServerProcess(tmp_path_factory.mktemp("kvobj-remote"), settings) as running:
        yield running


@pytest.fixture(scope="session")
def radosgw_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    """The session's radosgw: its objects are kept in memory. `admin` runs radosgw-admin on it."""
    from radosgw_server import PACKAGES, is_installed, radosgw_server  # noqa: PLC0415 - a tool: copies of the tests lack it

    if not is_installed():
        pytest.skip(f"radosgw is not installed; to run this test: apt-get install --no-install-recommends {PACKAGES}")
    root = tmp_path_factory.mktemp("radosgw") / "r"
    with radosgw_server(root, store_bytes=2 * 2**30, options=_GATEWAY_OPTIONS) as running:
        yield running


@pytest.fixture
def kvobj_remote(kvobj_remote_server: ServerProcess) -> Iterator[RemoteStore]:
    """An empty bucket on a real kvobj server."""
    server = kvobj_remote_server
    store = RemoteStore("kvobj", server.host, server.port, server.credentials(), _bucket_name())
    make_bucket(store)
    try:
        yield store
    finally:
        drop_bucket(store)


@pytest.fixture
def radosgw(radosgw_gateway: Radosgw) -> Iterator[RemoteStore]:
    """An empty bucket on radosgw 16: no checksum headers, no unsigned trailers, no conditional deletes."""
    server = radosgw_gateway
    store = RemoteStore("radosgw", server.host, server.port, server.credentials(), _bucket_name())
    make_bucket(store)
    try:
        yield store
    finally:
        drop_bucket(store)


@pytest.fixture(params=["kvobj", "radosgw"])
def remote_store(request: pytest.FixtureRequest) -> RemoteStore:
    """An empty bucket on each of the two servers in turn; the other server is not started for it."""
    store = request.getfixturevalue("kvobj_remote" if request.param == "kvobj" else "radosgw")
    assert isinstance(store, RemoteStore)
    return store


def make_bucket(store: RemoteStore) -> None:
    """Create the store's bucket."""
    with store.raw() as raw:
        _expect(raw.request("PUT", f"/{store.bucket}", payload=None), 200)


def drop_bucket(store: RemoteStore) -> None:
    """Empty the store's bucket and delete it; nothing where it is gone already.

    A node that stops ends its requests, but what the server has of them by then it may still store: behind the listing, for one. So
    a bucket that is not empty after all is emptied again."""
    with store.raw() as raw:
        if raw.request("HEAD", f"/{store.bucket}", payload=None).status == 404:
            return
        for _ in range(_EMPTIED_AT_MOST):
            _empty(raw, store.bucket)
            reply = raw.request("DELETE", f"/{store.bucket}", payload=None)
            if reply.status != 409:
                _expect(reply, 204)
                return
    raise RuntimeError(f"the bucket does not become empty bucket={store.bucket}")


def _empty(raw: RawS3, bucket: str) -> None:
    while uploads := _unfinished(raw, bucket):
        for key, upload_id in uploads:
            reply = raw.request("DELETE", f"/{bucket}/{key}", query={"uploadId": upload_id}, payload=None)
            _expect(reply, 204, 404)
    _remove(raw, bucket, list(_listed(raw, bucket, "")))


def _bucket_name() -> str:
    return f"test-{secrets.token_hex(6)}"


def _expect(reply: RawReply, *statuses: int) -> RawReply:
    if reply.status not in statuses:
        raise RuntimeError(f"the remote server answered {reply.status} {reply.body[:300]!r}")
    return reply


def _parsed(reply: RawReply) -> ET.Element:
    root = ET.fromstring(_expect(reply, 200).body)  # noqa: S314 - the answer of a server that the tests started
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _listed(raw: RawS3, bucket: str, prefix: str) -> Iterator[str]:
    after = ""
    while True:
        query = {"list-type": "2", "prefix": prefix} | ({"start-after": after} if after else {})
        page = _parsed(raw.request("GET", f"/{bucket}", query=query, payload=None))
        keys = [element.text or "" for element in page.findall("Contents/Key")]
        yield from keys
        if page.findtext("IsTruncated") != "true":
            return
        after = keys[-1]


def _unfinished(raw: RawS3, bucket: str) -> list[tuple[str, str]]:
    page = _parsed(raw.request("GET", f"/{bucket}", query={"uploads": ""}, payload=None))
    return [(upload.findtext("Key") or "", upload.findtext("UploadId") or "") for upload in page.findall("Upload")]


def _remove(raw: RawS3, bucket: str, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), _DELETE_BATCH):
        names = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys[start : start + _DELETE_BATCH])
        body = f"<Delete><Quiet>true</Quiet>{names}</Delete>".encode()
        digest = b64encode(md5(body, usedforsecurity=False).digest()).decode()
        reply = raw.request(
            "POST", f"/{bucket}", body, query={"delete": ""}, headers={"content-md5": digest}, payload=body
        )
        errors = _parsed(reply).findall("Error")
        if errors:
            raise RuntimeError(f"the remote server kept {len(errors)} of {len(keys)} objects")
