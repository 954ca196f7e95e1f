"""ACLs as documents: what is written can be read, and nothing else is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobj.api.access.stated_acl import Acl
from kvobj.api.errors import S3Error
from kvobj.api.settings.acl_document import acl_document, parse_acl_document
from kvobj.catalog.setting_rows import Grant, GranteeGroup, Permission
from kvobj.errors import AccessDeniedError

USERS = st.text(
    alphabet=st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_categories=["Cs", "Zs", "Cc"]), min_size=1
)
GRANTS = st.one_of(
    st.builds(Grant, USERS, st.none(), st.sampled_from(Permission)),
    st.builds(Grant, st.just(""), st.sampled_from(GranteeGroup), st.sampled_from(Permission)),
)
GRANTEE = '<Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="{kind}">{inner}</Grantee>'


def document(grant: str, *, owner: str = "<Owner><ID>alice</ID></Owner>") -> bytes:
    return f"<AccessControlPolicy>{owner}<AccessControlList>{grant}</AccessControlList></AccessControlPolicy>".encode()


def grant(kind: str, inner: str, permission: str = "READ") -> str:
    return f"<Grant>{GRANTEE.format(kind=kind, inner=inner)}<Permission>{permission}</Permission></Grant>"


def code_of(data: bytes) -> str:
    with pytest.raises(S3Error) as caught:
        parse_acl_document(data, owner="alice")
    return caught.value.code


@settings(max_examples=150, deadline=None)
@given(st.lists(GRANTS, max_size=8).map(tuple))
def test_what_is_written_is_read_again(grants: tuple[Grant, ...]) -> None:
    own: Acl = (Grant("alice", None, Permission.FULL_CONTROL),)
    written = acl_document(grants, owner="alice", display_name=lambda user_id: f"The {user_id}")
    assert parse_acl_document(written, owner="alice") == (None if grants == own else grants)


def test_a_private_acl_is_told_as_the_owners_full_control() -> None:
    written = acl_document(None, owner="alice", display_name=str.title).decode()
    assert "<Owner><ID>alice</ID><DisplayName>Alice</DisplayName></Owner>" in written
    assert written.count("<Grant>") == 1
    assert 'xsi:type="CanonicalUser"><ID>alice</ID>' in written
    assert "<Permission>FULL_CONTROL</Permission>" in written


def test_another_owner_is_denied() -> None:
    with pytest.raises(AccessDeniedError):
        parse_acl_document(document("", owner="<Owner><ID>bob</ID></Owner>"), owner="alice")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<AccessControlPolicy/>",
        b"<Other/>",
        document("", owner=""),
        document("", owner="<Owner/>"),
        document("<Other/>"),
        document("<Grant/>"),
        document(grant("CanonicalUser", "<ID>bob</ID>", "READ_ALL")),
        document(grant("CanonicalUser", "<ID></ID>")),
        document(grant("CanonicalUser", "<URI>x</URI>")),
        document(grant("Group", "<ID>bob</ID>")),
        document(grant("Other", "<ID>bob</ID>")),
        document("<Grant><Grantee><ID>bob</ID></Grantee><Permission>READ</Permission></Grant>"),
        document(grant("CanonicalUser", "<ID>bob</ID>") * 101),
    ],
)
def test_a_malformed_document_is_refused(data: bytes) -> None:
    assert code_of(data) == "MalformedACLError"


def test_addresses_and_unknown_groups_have_their_own_refusals() -> None:
    address = grant("AmazonCustomerByEmail", "<EmailAddress>a@b.example</EmailAddress>")
    assert code_of(document(address)) == "UnresolvableGrantByEmailAddress"
    assert code_of(document(grant("Group", "<URI>http://nobody.example</URI>"))) == "InvalidArgument"
