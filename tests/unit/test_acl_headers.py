"""ACLs that headers state: canned and granted one by one."""

import time

import pytest

from kvobj.api.access.grants import acl_allows
from kvobj.api.access.stated_acl import ACL_HEADERS, MAX_GRANTS, Acl, acl_of_headers, states_acl
from kvobj.api.errors import S3Error
from kvobj.api.sigv4 import ANONYMOUS
from kvobj.catalog.rows import UserRow
from kvobj.catalog.setting_rows import Grant, GranteeGroup, Permission

OWN = Grant("alice", None, Permission.FULL_CONTROL)
ALL, SIGNED = GranteeGroup.ALL_USERS, GranteeGroup.AUTHENTICATED_USERS
CAROL = UserRow("carol", "Carol", "AKC", "secret")


def canned(name: str, *, owner: str = "alice", bucket_owner: str = "bob", on_bucket: bool = False) -> Acl:
    return acl_of_headers({"x-amz-acl": name}, owner=owner, bucket_owner=bucket_owner, on_bucket=on_bucket)


def granted(**headers: str) -> Acl:
    fields = {f"x-amz-grant-{name.replace('_', '-')}": value for name, value in headers.items()}
    return acl_of_headers(fields, owner="alice", bucket_owner="bob", on_bucket=False)


def refused(fields: dict[str, str], *, on_bucket: bool = False) -> S3Error:
    with pytest.raises(S3Error) as caught:
        acl_of_headers(fields, owner="alice", bucket_owner="bob", on_bucket=on_bucket)
    return caught.value


@pytest.mark.parametrize(
    ("name", "acl"),
    [
        ("private", None),
        ("aws-exec-read", None),
        ("public-read", (Grant("", ALL, Permission.READ), OWN)),
        ("public-read-write", (Grant("", ALL, Permission.READ), Grant("", ALL, Permission.WRITE), OWN)),
        ("authenticated-read", (Grant("", SIGNED, Permission.READ), OWN)),
        ("bucket-owner-read", (OWN, Grant("bob", None, Permission.READ))),
        ("bucket-owner-full-control", (OWN, Grant("bob", None, Permission.FULL_CONTROL))),
    ],
)
def test_a_canned_acl_stands_for_its_grants(name: str, acl: Acl) -> None:
    assert canned(name) == acl


def test_what_is_granted_to_the_owner_alone_is_private() -> None:
    assert canned("bucket-owner-full-control", bucket_owner="alice") is None
    assert canned("bucket-owner-read", on_bucket=True) is None
    assert canned("log-delivery-write", on_bucket=True) is None
    assert granted(full_control='id="alice"') is None
    assert acl_of_headers({}, owner="alice", bucket_owner="bob", on_bucket=False) is None


def test_unknown_and_contradictory_acls_are_refused() -> None:
    assert refused({"x-amz-acl": "public"}).code == "InvalidArgument"
    assert refused({"x-amz-acl": "log-delivery-write"}).code == "InvalidArgument"
    assert refused({"x-amz-acl": "private", "x-amz-grant-read": "id=bob"}).code == "InvalidRequest"


def test_grants_are_read_in_order_with_and_without_quotes() -> None:
    uri = 'uri="http://acs.amazonaws.com/groups/global/AllUsers"'
    assert granted(read=f'id="bob", ID=carol ,{uri}', write_acp="id=bob") == (
        Grant("bob", None, Permission.READ),
        Grant("carol", None, Permission.READ),
        Grant("", ALL, Permission.READ),
        Grant("bob", None, Permission.WRITE_ACP),
    )
    assert granted(read='id="a,b=c"') == (Grant("a,b=c", None, Permission.READ),)


@pytest.mark.parametrize(
    "value", ["", " ", "bob", "id", "id=", 'id="bob', "id=bob;id=carol", "name=bob", '="bob"', 'id=b"ob"', ",id=b"]
)
def test_malformed_grants_are_refused(value: str) -> None:
    if value == "id=bob;id=carol":
        assert granted(read=value) == (Grant("bob;id=carol", None, Permission.READ),)  # a user that nobody is
        return
    assert refused({"x-amz-grant-read": value}).code == "InvalidArgument"


def test_groups_and_addresses_that_are_not_known_are_refused() -> None:
    assert refused({"x-amz-grant-read": "uri=http://acs.amazonaws.com/groups/global/Nobody"}).code == "InvalidArgument"
    assert refused({"x-amz-grant-read": "uri=http://acs.amazonaws.com/groups/s3/LogDelivery"}).code == "NotImplemented"
    assert refused({"x-amz-grant-write": "emailAddress=a@b.example"}).code == "UnresolvableGrantByEmailAddress"


def test_an_acl_is_bounded_and_read_in_linear_time() -> None:
    assert refused({"x-amz-grant-read": ",".join(["id=bob"] * (MAX_GRANTS + 1))}).code == "MalformedACLError"
    started = time.thread_time()
    for value in ("id=" + " " * 30_000 + '"', "," * 30_000, " " * 30_000, 'id="' * 8_000, "a" * 30_000):
        assert refused({"x-amz-grant-read": value}).code == "InvalidArgument"
    assert time.thread_time() - started < 0.5


def test_whether_headers_state_an_acl_at_all() -> None:
    assert not states_acl({"x-amz-date": "", "host": ""})
    assert all(states_acl({name: ""}) for name in ACL_HEADERS)


def test_an_acl_lets_in_whom_it_names_and_nobody_else() -> None:
    def allows(acl: Acl, user: UserRow, permission: Permission = Permission.READ) -> bool:
        return acl_allows(acl, "alice", permission, user)

    signed = (Grant("", SIGNED, Permission.READ), OWN)
    assert allows(signed, CAROL)
    assert not allows(signed, ANONYMOUS)
    assert not allows(signed, CAROL, Permission.WRITE)
    assert allows((Grant("", ALL, Permission.READ),), ANONYMOUS)
    assert allows((Grant("carol", None, Permission.FULL_CONTROL),), CAROL, Permission.WRITE_ACP)
    assert not allows((), CAROL)
    assert not allows(None, CAROL)
    # A row without an owner, and a grant without a grantee, are not those of who signs nothing.
    assert not acl_allows(None, "", Permission.READ, ANONYMOUS)
    assert not allows((Grant("", None, Permission.READ),), ANONYMOUS)
