"""Requests as policies see them, for tests that ask a policy without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fakes import ManualClock

from kvobj.api.access.actions import Action
from kvobj.api.access.policy import Effect, judge
from kvobj.api.message import RequestHead
from kvobj.api.sigv4 import ANONYMOUS, Authentication, PayloadMode
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow, UserRow
from kvobj.clock import Clock

ALICE = UserRow("alice", "Alice", "AKALICE", "secret")
BOB = UserRow("bob", "Bob", "AKBOB", "secret")
ROOT = UserRow("root", "Root", "AKROOT", "secret", is_root=True)
NOBODY = ANONYMOUS


@dataclass
class Request:
    """`RequestFacts` with everything settable."""

    user: UserRow = BOB
    fields: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    source_address: str = "192.0.2.7"
    is_secure: bool = False
    is_presigned: bool = False
    stamp: str | None = None
    clock: Clock = field(default_factory=ManualClock)

    @property
    def authentication(self) -> Authentication:
        return Authentication(
            self.user, PayloadMode.UNSIGNED, None, None, is_presigned=self.is_presigned, stamp=self.stamp
        )

    @property
    def head(self) -> RequestHead:
        return RequestHead("GET", "/", (), "id", self.source_address, self.is_secure)


def bucket_with(policy: object) -> BucketRow:
    """Alice's bucket `data` under a policy: a document, or statements."""
    if not isinstance(policy, bytes):
        policy = json.dumps({"Version": "2012-10-17", "Statement": policy}).encode()
    return BucketRow("data", BucketKind.ORDINARY, "alice", 0, Durability.LOCAL, policy=policy)


def statement(**elements: object) -> dict[str, object]:
    """Allows everybody to read every object; `elements` replace what is so, None leaves one out."""
    whole: dict[str, object] = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::data/*",
        **elements,
    }
    return {name: value for name, value in whole.items() if value is not None}


def ask(
    policy: object,
    action: Action = Action.GET_OBJECT,
    *,
    key: str = "key",
    row: ObjectRow | None = None,
    tags: Mapping[str, str] | None = None,
    request: Request | None = None,
) -> Effect | None:
    """What the policy says."""
    return judge(
        bucket_with(policy), action, key=key, row=row, request=request or Request(), request_tags=lambda: tags or {}
    )
