"""The servers that the tests of the remote tier stand on: each test has an empty bucket, and the next one has none of it."""

from __future__ import annotations

from remote_servers import RemoteStore


def test_what_is_written_is_listed_read_and_removed(remote_store: RemoteStore) -> None:
    assert remote_store.keys() == []
    remote_store.write("store/a b", b"one")
    remote_store.write("other", b"two")
    assert remote_store.keys() == ["other", "store/a b"]
    assert remote_store.keys("store/") == ["store/a b"]
    assert remote_store.read("store/a b") == b"one"
    remote_store.remove(["store/a b", "other"])
    assert remote_store.read("other") is None
    assert remote_store.keys() == []


def test_an_unfinished_upload_is_seen(remote_store: RemoteStore) -> None:
    with remote_store.raw() as raw:
        reply = raw.request("POST", f"/{remote_store.bucket}/big", query={"uploads": ""}, payload=None)
        upload_id = reply.body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
    assert remote_store.uploads() == [("big", upload_id)]
