"""The calls of `/api/v1`, one method each. Documents are as the server sends them (`docs/operations.md`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from kvobj.client.connection import SignedConnection
from kvobj.errors import InvalidRequestError, NotFoundError, UnavailableError

Document = dict[str, object]

_NO_SUCH_METHOD: Final = "MethodNotAllowed"


class AdminClient:
    """Administers one server over its admin port. Synchronous; errors are those of `SignedConnection.request`."""

    def __init__(self, connection: SignedConnection) -> None:
        self._connection = connection

    def status(self) -> Document:
        """Tiers, arena, catalog, queues and rates."""
        return self._get("status")

    def inspect(self, bucket: str, key: str) -> Document:
        """One object: its row, its blobs, the tiers that hold them, their frames."""
        return self._get("inspect", ("bucket", bucket), ("key", key))

    def buckets(self) -> list[Document]:
        """All buckets with their usage."""
        return _documents(self._get("buckets"), "buckets")

    def objects(self, bucket: str, key_prefix: str = "") -> Iterator[Document]:
        """The objects of a bucket in key order, page by page. `UnavailableError` where the list does not go on."""
        yield from self._listed("objects", ("bucket", bucket), ("key_prefix", key_prefix))

    def create_bucket(
        self,
        name: str,
        *,
        kind: str = "ordinary",
        durability: str | None = None,
        codec: str = "raw",
        owner: str | None = None,
        remote: str | None = None,
    ) -> Document:
        """Create a bucket, root's unless `owner` is another user's id. `BucketExistsError` if the name is taken,
        `NotFoundError` if nobody has that id. `remote`: its rule, as in `set_remote_rule`."""
        asked: Document = {"name": name, "kind": kind, "codec": codec}
        if durability is not None:
            asked["durability"] = durability
        if owner is not None:
            asked["owner"] = owner
        if remote is not None:
            asked["remote"] = remote
        return self._post("buckets", asked)

    def set_remote_rule(self, bucket: str, rule: str) -> Document:
        """What of the bucket goes to the remote tier beside class shared: `never`, `reused`, `evicted` or `always`."""
        return self._send("PUT", "buckets", {"name": bucket, "remote": rule})

    def flush(self, *, local: bool = False, timeout_seconds: float | None = None) -> Document:
        """Write down what is only in memory and, unless `local`, upload what waits for that; returns once it is done. With
        `timeout_seconds` also when that is over: then `is_done` says whether it was enough, and `left_…` what is left."""
        asked: Document = {"local": local}
        if timeout_seconds is not None:
            asked["timeout_seconds"] = timeout_seconds
        return self._post("flush", asked)

    def start_verification(self, bucket: str | None = None) -> Document:
        """Begin to re-hash a bucket, or all. `ConflictError` while a verification is running."""
        return self._post("verify", {"bucket": bucket})

    def verification(self) -> Document:
        """How far the last verification is."""
        return self._get("verify")

    def cancel_verification(self) -> Document:
        """Stop the running verification, if any."""
        return self._connection.request("DELETE", "/api/v1/verify").document()

    def gc_plan(self) -> Document:
        """What the collector would remove now, and why."""
        return self._get("gc")

    def collect(self) -> Document:
        """Run one cycle of the collector now."""
        return self._post("gc", {})

    def start_recall(
        self,
        bucket: str,
        *,
        namespace: str | None = None,
        writer: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        dry_run: bool = False,
    ) -> Document:
        """Begin to remove every chunk that all given conditions fit, with its descendants. `ConflictError` while one is running."""
        asked: Document = {"bucket": bucket, "dry_run": dry_run}
        conditions = {"namespace": namespace, "writer": writer, "from_ms": from_ms, "to_ms": to_ms}
        asked.update({name: value for name, value in conditions.items() if value is not None})
        return self._post("recall", asked)

    def recall(self) -> Document:
        """How far the last recall is."""
        return self._get("recall")

    def cancel_recall(self) -> Document:
        """Stop the running recall, if any; what it removed stays removed."""
        return self._connection.request("DELETE", "/api/v1/recall").document()

    def namespaces(self, bucket: str) -> list[Document]:
        """The namespaces of a KV bucket with their usage, without their keys. `UnavailableError` where the list does not go on."""
        return list(self._listed("namespaces", ("bucket", bucket)))

    def namespace(self, bucket: str, name: str) -> Document:
        """One namespace with its declaration and settings, without its key. `NotFoundError`."""
        return self._get("namespace", ("bucket", bucket), ("name", name))

    def export_namespace(self, bucket: str, name: str) -> Document:
        """One namespace with its key: `name`, `declaration`, `fingerprint`, `root`, `key`. The key is a secret."""
        return self._get("namespace-export", ("bucket", bucket), ("name", name))

    def import_namespace(self, bucket: str, exported: Document) -> Document:
        """Declare in this store what `export_namespace` gave in another. `ConflictError` where the namespace stands declared
        otherwise or with another key."""
        asked = {name: exported[name] for name in ("name", "declaration", "fingerprint", "key")}
        return self._post("namespace-import", {"bucket": bucket, **asked})

    def users(self) -> list[Document]:
        """All users, without their secrets."""
        return _documents(self._get("users"), "users")

    def add_user(self, user_id: str, *, display_name: str = "", access_key: str = "", secret_key: str = "") -> Document:
        """Add a user; keys that are not given are made, and stand in this answer and in none after it."""
        asked = {"id": user_id, "display_name": display_name, "access_key": access_key, "secret_key": secret_key}
        return self._post("users", {name: value for name, value in asked.items() if value})

    def remove_user(self, user_id: str) -> Document:
        """Remove a user, who is refused from then on."""
        return self._asked("DELETE", "users", query=(("id", user_id),))

    def _get(self, name: str, *query: tuple[str, str]) -> Document:
        return self._asked("GET", name, query=query)

    def _listed(self, name: str, *query: tuple[str, str]) -> Iterator[Document]:
        """A list that comes page by page, as it comes."""
        after = ""
        while True:
            page = self._get(name, *query, ("after", after))
            yield from _documents(page, name)
            next_after = page.get("next_after")
            if not isinstance(next_after, str):
                return
            if next_after <= after:
                raise UnavailableError(f"the list of {name} does not go on", after=next_after)
            after = next_after

    def _post(self, name: str, document: Document) -> Document:
        return self._send("POST", name, document)

    def _send(self, method: str, name: str, document: Document) -> Document:
        return self._asked(method, name, body=json.dumps(document).encode())

    def _asked(self, method: str, name: str, *, query: Sequence[tuple[str, str]] = (), body: bytes = b"") -> Document:
        headers = {"content-type": "application/json"} if body else {}
        try:
            return self._connection.request(
                method, f"/api/v1/{name}", query=query, headers=headers, body=body
            ).document()
        except (NotFoundError, InvalidRequestError) as error:
            is_absent = isinstance(error, NotFoundError) and not error.data.keys() - {"code", "status"}
            if not is_absent and error.data.get("code") != _NO_SUCH_METHOD:
                raise
            # An admin port says what it has not found, and knows all of these methods; an S3 port takes the path for a bucket and a
            # key.
            endpoint = self._connection.endpoint.host_header
            raise UnavailableError("an S3 port answers: name the admin port", endpoint=endpoint) from error


def _documents(page: Document, name: str) -> list[Document]:
    values = page.get(name)
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
