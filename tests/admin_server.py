"""An admin port for tests: `AdminService` on a loop of its own thread, behind the standard library's HTTP server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import msgspec

from kvobj.api.admin_api import AdminService, Authenticate
from kvobj.api.admin_view import (
    BlobStatus,
    CatalogStatus,
    FlushOutcome,
    FrameStatus,
    StoreStatus,
    TierStatus,
    VerifiedObject,
)
from kvobj.api.message import Reply, RequestHead
from kvobj.arena import ArenaUsage
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, BucketUsage, ListPage, ObjectRow, UserRow
from kvobj.catalog.setting_rows import BucketUpdate, changes_of
from kvobj.clock import SystemClock
from kvobj.errors import BucketExistsError, ConflictError, NoSuchBucketError, NoSuchUserError, UserExistsError
from kvobj.gc.plan import GcPlan, GcReport, Reason, Victim
from kvobj.gc.recall import RecallQuery, RecallReport, RecallState
from kvobj.metrics import Metrics


class BytesBody:
    """A request body that is there already."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.length: int | None = len(content)

    async def read_some(self, limit: int) -> bytes:
        piece, self._content = self._content[:limit], self._content[limit:]
        return piece

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        buffer[:] = self._content[: len(buffer)]
        on_bytes(len(buffer))

    def take_whole(self) -> bytes | None:
        return None

    async def accept(self) -> None:
        """Nobody waits here."""


class FakeCatalog:
    """The verbs of `Catalog` that the admin API uses, over dicts."""

    def __init__(self) -> None:
        self.users_by_id: dict[str, UserRow] = {}
        self.buckets_by_name: dict[str, BucketRow] = {}
        self.rows: dict[tuple[str, str], ObjectRow] = {}

    async def users(self) -> tuple[UserRow, ...]:
        return tuple(user for _, user in sorted(self.users_by_id.items()))

    async def add_user(self, user: UserRow) -> None:
        if user.id in self.users_by_id or any(
            user.access_key == other.access_key for other in self.users_by_id.values()
        ):
            raise UserExistsError("a user with this id or access key exists", id=user.id)
        self.users_by_id[user.id] = user

    async def remove_user(self, user_id: str) -> None:
        if self.users_by_id.pop(user_id, None) is None:
            raise NoSuchUserError("no such user", id=user_id)

    async def buckets(self) -> tuple[BucketRow, ...]:
        return tuple(row for _, row in sorted(self.buckets_by_name.items()))

    async def bucket(self, name: str) -> BucketRow | None:
        return self.buckets_by_name.get(name)

    async def create_bucket(self, bucket: BucketRow) -> None:
        if bucket.name in self.buckets_by_name:
            raise BucketExistsError("the bucket exists", bucket=bucket.name)
        self.buckets_by_name[bucket.name] = bucket

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        there = self.buckets_by_name.get(name)
        if there is None or (made_ms is not None and there.created_ms != made_ms):
            raise NoSuchBucketError("no such bucket", bucket=name)
        row = self.buckets_by_name[name] = msgspec.structs.replace(self.buckets_by_name[name], **changes_of(update))
        return row

    async def bucket_usage(self, name: str) -> BucketUsage:
        if name not in self.buckets_by_name:
            raise NoSuchBucketError("no such bucket", bucket=name)
        sizes = [row.size_bytes for (bucket, _), row in self.rows.items() if bucket == name]
        return BucketUsage(objects=len(sizes), size_bytes=sum(sizes))

    async def lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        return [self.rows.get((bucket, key)) for key in keys]

    async def list_objects(self, bucket: str, *, key_prefix: str = "", after: str = "", limit: int = 1000) -> ListPage:
        await self.bucket_usage(bucket)
        keys = sorted(key for name, key in self.rows if name == bucket and key.startswith(key_prefix) and key > after)
        next_after = keys[limit - 1] if len(keys) > limit else None
        return ListPage(tuple(self.rows[bucket, key] for key in keys[:limit]), (), next_after)

    async def scan_objects(self) -> AsyncGenerator[ObjectRow, None]:
        for _, row in sorted(self.rows.items()):
            yield row


@dataclass
class FakeStore:
    """An `AdminView`: what it says is set by the test. `gate`, where set, holds each step of a verification back."""

    catalog: FakeCatalog
    ready: bool = True
    damaged: dict[tuple[str, str], str] = field(default_factory=dict)
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    recalled: list[tuple[RecallQuery, bool]] = field(default_factory=list)
    recall_steps: int = 2
    flush_steps: int = 1
    flushed: list[tuple[bool, float]] = field(default_factory=list)
    quiet: bool = False
    users_removed: int = 0

    def is_ready(self) -> bool:
        return self.ready

    async def status(self) -> StoreStatus:
        if self.failure is not None:
            raise self.failure
        return StoreStatus(
            version="0.0.0",
            store_id="00" * 16,
            uptime_seconds=3725.0,
            is_ready=self.ready,
            receive_mode="body hand-over",
            tiers=(
                TierStatus("dram", 2**30, 2**29, 7, mode="huge pages", hit_ratio=0.75),
                TierStatus("nvme", 2**34, 2**31, 9, mode="O_DIRECT", is_home=True, transfers="kernel"),
            ),
            arena=ArenaUsage(
                capacity_bytes=2**30,
                populated_bytes=2**30,
                reserved_bytes=2**29,
                requested_bytes=2**29,
                pinned=3,
                regions=4,
                dedicated_regions=0,
                huge_pages=True,
                location="/dev/shm/kvobj-00",
            ),
            catalog=CatalogStatus("lmdb", 1, 2, 30),
            queues={"delete": 0},
            gc={"held_bytes": 2**20, "reclaim_lag_seconds": 0.5},
            leases={"sessions": 3, "pins": 4},
            rates={"get_per_second": 1.5},
            notes=("the nvme tier does buffered I/O",),
        )

    async def inspect(self, row: ObjectRow) -> tuple[BlobStatus, ...]:
        return tuple(
            BlobStatus(("dram", "nvme"), FrameStatus("raw", ref.plain_bytes, ref.frame_bytes, 1, "ab" * 32))
            for ref in row.blobs
        )

    async def verify(self, bucket: str | None) -> AsyncGenerator[VerifiedObject, None]:
        async for row in self.catalog.scan_objects():
            if self.gate is not None:
                await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            if bucket in (None, row.bucket):
                yield VerifiedObject(row.bucket, row.key, row.size_bytes, self.damaged.get((row.bucket, row.key)))

    async def gc_plan(self, limit: int) -> GcPlan:
        victims = (
            Victim("cache", "a/[bold]2", Reason.EXPIRED, 2**20, 3725.0),
            Victim("cache", "b é", Reason.SPACE, 2**20),
        )
        return GcPlan(victims[:limit], 2, 2**21, self.quiet, 2**30, 2**29, 5, 1)

    async def collect(self) -> GcReport:
        return GcReport(condemned=3, claimed=2, claimed_bytes=2**21, rescued=1, quiet=self.quiet)

    async def start_recall(self, query: RecallQuery, *, dry_run: bool) -> RecallReport:
        await self.catalog.bucket_usage(query.bucket)
        if self.recalled and self.recall_steps:
            raise ConflictError("a recall is running already", bucket=query.bucket)
        self.recalled.append((query, dry_run))
        return RecallReport("running", dry_run=dry_run, bucket=query.bucket, total_chunks=3)

    def recall_report(self) -> RecallReport:
        self.recall_steps -= 1
        state: RecallState = "running" if self.recall_steps > 0 else "done"
        (_, dry_run) = self.recalled[-1]
        return RecallReport(state, dry_run=dry_run, bucket="cache", chunks=2, size_bytes=2**21, total_chunks=3)

    async def cancel_recall(self) -> RecallReport:
        self.recall_steps = 0
        return RecallReport("cancelled")

    async def user_removed(self) -> None:
        self.users_removed += 1

    async def flush(self, *, local: bool, timeout_seconds: float) -> FlushOutcome:
        self.flushed.append((local, timeout_seconds))
        steps_left = max(0, self.flush_steps - len(self.flushed))
        return FlushOutcome(
            blobs=3,
            size_bytes=3 * 2**20,
            uploaded_objects=0 if local else 1,
            is_done=not steps_left,
            left_to_upload=steps_left,
            left_to_upload_bytes=steps_left * 2**20,
            held_by="the remote is full" if steps_left else "",
        )


def admin_service(store: FakeStore, authenticate: Authenticate, *, has_remote: bool = False) -> AdminService:
    """The service over a fake store."""
    return AdminService(
        view=store,
        catalog=cast("Catalog", store.catalog),  # the verbs that are asked for
        authenticate=authenticate,
        metrics=Metrics(),
        clock=SystemClock(),
        region="us-east-1",
        logger=logging.getLogger("kvobj.test"),
        has_remote=has_remote,
    )


@contextmanager
def running_admin_server(make_service: Callable[[], AdminService]) -> Iterator[str]:
    """Serve on a free port; yields the endpoint."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    service = make_service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = BytesBody(self.rfile.read(int(self.headers.get("content-length") or 0)))
            headers = tuple((name.lower(), value) for name, value in self.headers.items())
            head = RequestHead(self.command, self.path, headers, "REQUEST-ID", self.client_address[0])
            reply: Reply = asyncio.run_coroutine_threadsafe(service.handle(head, body), loop).result(30)
            assert isinstance(reply.body, bytes)
            self.send_response(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - the names that the base class calls

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
        asyncio.run_coroutine_threadsafe(service.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
