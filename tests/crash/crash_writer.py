"""One writer of the crash loop: a process with one connection that works on keys of its own until the server dies.

Every operation is written to the journal before it is sent, its outcome after the reply; a line goes out in one write, so
the journal is right wherever the writer is when the connection breaks. Seeded: what it does depends on nothing else.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass

from crash_model import Version
from raw_http import Credentials, RawReply, RawS3

MIB = 1024 * 1024
SIZES = (1, 700, 4096, 40_000, 65_536, 65_537, 300_000, MIB, 2 * MIB + 13)
PART_BYTES = 5 * MIB


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a writer is told, as JSON on its command line."""

    host: str
    port: int
    access_key: str
    secret_key: str
    journal: str
    seed: int
    first_version: int
    bucket: str
    keys: tuple[str, ...]


class Writer:
    """Sends operations one after another and journals them."""

    def __init__(self, assignment: Assignment, client: RawS3, journal: int) -> None:
        self._bucket = assignment.bucket
        self._keys = assignment.keys
        self._client = client
        self._journal = journal
        self._chance = random.Random(assignment.seed)
        self._version = assignment.first_version

    def run(self) -> None:
        """Work until the connection breaks."""
        try:
            while True:
                self._one_operation()
        except OSError:
            return

    def _one_operation(self) -> None:
        key = self._chance.choice(self._keys)
        kind = self._chance.choices(("put", "delete", "multipart"), (70, 22, 8))[0]
        if kind == "delete":
            self._write("delete", key)
            self._end(key, self._client.request("DELETE", f"/{self._bucket}/{key}"))
        elif kind == "put":
            version = self._next_version(self._chance.choice(SIZES))
            body = version.content(key)
            self._write("put", key, version=version.number, size=version.size_bytes)
            self._end(key, self._client.request("PUT", f"/{self._bucket}/{key}", body))
        else:
            self._multipart(key)

    def _next_version(self, size_bytes: int) -> Version:
        self._version += 1
        return Version(self._version, size_bytes)

    def _multipart(self, key: str) -> None:
        """Create, upload one or two parts, now and then one of them twice, and complete, abort or forget the upload."""
        tail = self._chance.choice((1, 100_000))
        version = self._next_version(self._chance.choice((tail, PART_BYTES + tail)))
        body = version.content(key)
        path = f"/{self._bucket}/{key}"
        reply = self._client.request("POST", path, query={"uploads": ""})
        if reply.status != 200:
            return
        upload_id = reply.body.decode().partition("<UploadId>")[2].partition("</UploadId>")[0]
        pieces = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        tags: dict[int, str] = {}
        numbers = list(range(1, len(pieces) + 1)) + [1] * (self._chance.random() < 0.2)
        self._chance.shuffle(numbers)
        for number in numbers:
            query = {"partNumber": str(number), "uploadId": upload_id}
            reply = self._client.request("PUT", path, pieces[number - 1], query=query)
            if reply.status != 200:
                return
            tags[number] = reply.headers["etag"]
        fate = self._chance.choices(("complete", "abort", "forget"), (80, 10, 10))[0]
        if fate == "abort":
            self._client.request("DELETE", path, query={"uploadId": upload_id})
        if fate != "complete":
            return
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>" for number, tag in sorted(tags.items())
        )
        request = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self._write("put", key, version=version.number, size=version.size_bytes)
        reply = self._client.request("POST", path, request, query={"uploadId": upload_id}, payload=request)
        self._end(key, reply)

    def _write(self, what: str, key: str, **more: object) -> None:
        line = json.dumps({"what": what, "bucket": self._bucket, "key": key, **more}) + "\n"
        os.write(self._journal, line.encode())

    def _end(self, key: str, reply: RawReply) -> None:
        # Complete may answer 200 and say in its body that it failed.
        status = 500 if reply.status == 200 and reply.code else reply.status
        existed = reply.headers.get("x-kvobj-existed") == "true"
        self._write("end", key, status=status, existed=existed, code=reply.code)


def main() -> None:
    """Work off the assignment on the command line."""
    values = json.loads(sys.argv[1])
    assignment = Assignment(**{**values, "keys": tuple(values["keys"])})
    journal = os.open(assignment.journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    credentials = Credentials(assignment.access_key, assignment.secret_key)
    try:
        with RawS3(assignment.host, assignment.port, credentials, 30.0) as client:
            Writer(assignment, client, journal).run()
    finally:
        os.close(journal)


if __name__ == "__main__":
    main()
