"""Users who share a bucket: Alice owns `data`, Bob has written an object into it, Carol is any other user, nobody signs nothing."""

from __future__ import annotations

import json

from s3_driver import ALICE, BOB, HOST, ROOT, Answer, Driver

from kvobj.api.sigv4 import ANONYMOUS
from kvobj.catalog.rows import UserRow

CAROL = UserRow("carol", "Carol", "AKCAROL", "carol secret")
NOBODY = ANONYMOUS
TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"


async def shared_bucket(driver: Driver) -> Driver:
    """The bucket with Alice's object `alices` and Bob's `bobs`, private."""
    await driver.store.catalog.put_user(CAROL)
    await expect(driver, ALICE, "PUT", "/data")
    await expect(driver, ALICE, "PUT", "/data/alices", b"of Alice")
    await expect(driver, ALICE, "PUT", "/data?acl", headers={"x-amz-grant-write": "id=bob"})
    await expect(driver, BOB, "PUT", "/data/bobs", b"of Bob")
    await expect(driver, ALICE, "PUT", "/data?acl", headers={"x-amz-acl": "private"})
    return driver


async def send(
    driver: Driver, user: UserRow, method: str, target: str, body: bytes = b"", *, headers: dict[str, str] | None = None
) -> Answer:
    """Send a request as this user; as nobody it is not signed."""
    if user is NOBODY:
        return await driver.send(method, target, [("host", HOST), *(headers or {}).items()], body)
    return await driver.request(method, target, body=body, headers=headers, user=user)


async def expect(
    driver: Driver,
    user: UserRow,
    method: str,
    target: str,
    body: bytes = b"",
    *,
    headers: dict[str, str] | None = None,
    status: int = 200,
) -> Answer:
    answer = await send(driver, user, method, target, body, headers=headers)
    assert answer.status == status, (user.id, method, target, answer.body)
    return answer


async def acl_of(driver: Driver, target: str) -> bytes:
    return (await expect(driver, ROOT, "GET", target)).body


async def set_policy(driver: Driver, *statements: dict[str, object], user: UserRow = ALICE) -> None:
    """Put the statements as the bucket's policy. An element that is None is left out."""
    listed = [{name: value for name, value in each.items() if value is not None} for each in statements]
    document = {"Version": "2012-10-17", "Statement": listed}
    await expect(driver, user, "PUT", "/data?policy", json.dumps(document).encode(), status=204)


def allow(
    *actions: str, to: object = "*", on: object = ("arn:aws:s3:::data", "arn:aws:s3:::data/*"), **more: object
) -> dict[str, object]:
    resources = list(on) if isinstance(on, tuple) else on
    return {"Effect": "Allow", "Principal": to, "Action": list(actions), "Resource": resources, **more}


def deny(*actions: str, **more: object) -> dict[str, object]:
    return {**allow(*actions), "Effect": "Deny", **more}
