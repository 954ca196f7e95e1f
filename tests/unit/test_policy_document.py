"""Policies as documents: what they let in and keep out, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_requests import ALICE, BOB, NOBODY, ROOT, Request, ask, bucket_with, statement

from kvobj.api.access.actions import Action
from kvobj.api.access.policy import Effect, policy_of
from kvobj.api.access.policy_actions import actions_of
from kvobj.api.access.policy_document import MAX_POLICY_BYTES, parse_policy
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import UserRow

ALLOW, DENY = Effect.ALLOW, Effect.DENY


def refusal(document: object) -> str:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    with pytest.raises(S3Error) as caught:
        parse_policy(data, "data")
    assert caught.value.status == 400
    return f"{caught.value.code}: {caught.value.message}"


def parsed_or_refused(data: bytes) -> str | None:
    """None, or the code of the refusal; anything else goes through."""
    try:
        parse_policy(data, "data")
    except S3Error as error:
        return error.code
    return None


def refused(**elements: object) -> str:
    return refusal({"Version": "2012-10-17", "Statement": [statement(**elements)]})


def users_of(principal: object, *, effect: str = "Allow", name: str = "Principal") -> set[str]:
    """Which of alice, bob, root and "" the statement speaks of."""
    policy = [statement(**{"Effect": effect, "Principal": None, name: principal})]
    return {user.id for user in (ALICE, BOB, ROOT, NOBODY) if ask(policy, request=Request(user)) is not None}


def test_a_statement_speaks_of_whom_it_names() -> None:
    everybody = {"alice", "bob", "root", ""}
    assert users_of("*") == everybody
    assert users_of({"AWS": "*"}) == everybody
    assert users_of({"AWS": ["bob", "*"]}) == everybody
    assert users_of({"AWS": "bob"}) == {"bob"}
    assert users_of({"AWS": ["arn:aws:iam:::user/bob", "arn:aws:iam::123456789012:user/alice"]}) == {"alice", "bob"}
    assert users_of({"AWS": "arn:aws:iam::bob:root"}) == {"bob"}
    assert users_of({"AWS": "arn:aws:iam::nobody-here:root"}) == set()
    assert users_of({"CanonicalUser": "bob"}) == {"bob"}
    assert users_of({"AWS": "bob"}, effect="Deny", name="NotPrincipal") == everybody - {"bob"}


def test_users_that_a_policy_names_are_told_so_that_they_can_be_looked_up() -> None:
    named = statement(
        Principal={"AWS": ["arn:aws:iam:::user/bob", "arn:aws:iam::x:root", "*"], "CanonicalUser": "carol"}
    )
    assert parse_policy(bucket_with([named]).policy, "data").named_users == {"bob", "carol"}


@pytest.mark.parametrize(
    "principal",
    [
        "bob", {}, {"AWS": []}, {"AWS": 1}, {"AWS": ""}, {"AWS": "bo*"}, {"Service": "s3.amazonaws.com"}, [],
        {"Federated": "x"}, {"AWS": "arn:aws:iam:::role/x"}, {"AWS": "arn:aws:iam:::user/"}, {"AWS": "arn:aws:iam:::root"},
        {"CanonicalUser": "*"}, {"AWS": ["*", 1]},
    ],
)  # fmt: skip
def test_an_invalid_principal_is_refused(principal: object) -> None:
    assert refused(Principal=principal) == "MalformedPolicy: Invalid principal in policy"


def test_who_is_left_out_of_an_allow_would_be_everybody_else() -> None:
    assert "NotPrincipal" in refused(Principal=None, NotPrincipal={"AWS": "bob"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("s3:GetObject", {"s3:GetObject"}),
        ("S3:getobject", {"s3:GetObject"}),
        ("s3:PutObjectT*", {"s3:PutObjectTagging"}),
        ("s3:GetBucket?cl", {"s3:GetBucketAcl"}),
        ("s3:Nothing", set()),
        ("ec2:*", set()),
        ("", set()),
        ("s3:ListObjects", set()),
        ("s3:", set()),
    ],
)
def test_actions_are_named_with_wildcards_and_without_case(text: str, found: set[str]) -> None:
    assert actions_of(text) == found


@pytest.mark.parametrize("everything", ["*", "s3:*", "s?:*"])
def test_every_action_of_ours_is_one_of_s3s(everything: str) -> None:
    assert {action.value for action in Action} <= actions_of(everything)


def test_actions_that_are_not_named_are_not_spoken_of() -> None:
    policy = [
        statement(Action=["s3:GetObject*", "s3:PutObject"], Resource=["arn:aws:s3:::data", "arn:aws:s3:::data/*"])
    ]
    spoken = {action for action in Action if ask(policy, action) is ALLOW}
    assert spoken == {
        Action.GET_OBJECT, Action.GET_OBJECT_ACL, Action.GET_OBJECT_ATTRIBUTES, Action.GET_OBJECT_TAGGING, Action.PUT_OBJECT,
    }  # fmt: skip
    denied = [statement(Effect="Deny", Action=None, NotAction="s3:GetObject")]
    assert {action for action in Action if ask(denied, action) is None} == {Action.GET_OBJECT}


@pytest.mark.parametrize(
    ("resource", "keys"),
    [
        ("arn:aws:s3:::data/*", {"a", "a/b", "a/bc"}),
        ("arn:aws:s3:::data/a/?", {"a/b"}),
        ("arn:aws:s3:::data/a", {"a"}),
        ("arn:aws:s3:::data*", {"", "a", "a/b", "a/bc"}),
        ("arn:aws:s3:::*/a/*", {"a/b", "a/bc"}),
        ("arn:aws:s3:::d?ta/${aws:username}", set()),
        (["arn:aws:s3:::data/a", "arn:aws:s3:::data/a/b"], {"a", "a/b"}),
    ],
)
def test_resources_are_matched_as_patterns(resource: object, keys: set[str]) -> None:
    policy = [statement(Action=["s3:GetObject", "s3:ListBucket"], Resource=resource)]
    assert {key for key in ("", "a", "a/b", "a/bc") if ask(policy, key=key) is ALLOW} == keys
    others = [statement(Action=["s3:GetObject", "s3:ListBucket"], Resource=None, NotResource=resource)]
    if "${" not in str(resource):
        assert {key for key in ("", "a", "a/b", "a/bc") if ask(others, key=key) is None} == keys


@pytest.mark.parametrize(
    "resource",
    [
        "*", "data/*", "arn:aws:s3:::other/*", "arn:aws:s3:::", "arn:aws:s3:::data/", "arn:aws:s3:::/key", "arn:aws:s3::x:data/*",
        "arn:aws:s3:us-east-1::data/*", [], 1, {}, ["arn:aws:s3:::data/*", "arn:aws:s3:::dat"], "arn:aws:s3:::${aws:username}/*",
    ],
)  # fmt: skip
def test_a_resource_that_is_not_this_buckets_is_refused(resource: object) -> None:
    assert refused(Resource=resource) == "MalformedPolicy: Policy has invalid resource"


def test_an_action_that_no_resource_has_is_refused() -> None:
    problem = "MalformedPolicy: Action does not apply to any resource(s) in statement"
    assert refused(Resource="arn:aws:s3:::data") == problem
    assert refused(Action="s3:ListBucket") == problem
    assert ask([statement(Action="s3:*")]) is ALLOW


def test_a_deny_beats_every_allow() -> None:
    policy = [statement(), statement(Effect="Deny", Principal={"AWS": "bob"}, Resource="arn:aws:s3:::data/secret*")]
    assert ask(policy, key="open") is ALLOW
    assert ask(policy, key="secret/1") is DENY
    assert ask(policy, key="secret/1", request=Request(NOBODY)) is ALLOW
    assert ask(policy, Action.PUT_OBJECT) is None


def test_variables_are_of_the_version_that_has_them() -> None:
    home = statement(Resource="arn:aws:s3:::data/${aws:username}/*")
    assert ask([home], key="bob/file") is ALLOW
    assert ask([home], key="alice/file") is None
    assert ask([home], key="/file", request=Request(NOBODY)) is None
    older = json.dumps({"Version": "2008-10-17", "Statement": home}).encode()
    assert ask(older, key="bob/file") is None
    assert ask(older, key="${aws:username}/file") is ALLOW


def test_an_unknown_variable_lets_nobody_in_whatever_is_negated() -> None:
    policy = [statement(Condition={"StringNotEquals": {"aws:UserAgent": "${aws:username}"}})]
    request = Request(NOBODY, fields={"user-agent": "curl"})
    assert ask(policy, request=request) is None
    assert ask([{**policy[0], "Effect": "Deny"}], request=request) is DENY


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"", "first byte must be '{'"),
        (b"[]", "first byte must be '{'"),
        (b"{", "invalid Json"),
        (b'{"Statement": NaN}', "invalid Json"),
        (b'{"Statement": ' + b"[" * 5000, "invalid Json"),
        (b'{"Id": "a", "Id": "b", "Statement": []}', "invalid Json"),
        (b'{"Id": "\xff"}', "invalid Json"),
        ({"Version": "2012-10-17"}, "Missing required field Statement"),
        ({"Statement": []}, "Statement is empty!"),
        ({"Statement": "all"}, "Statement is empty!"),
        ({"Statement": [1]}, "Statement is not an object"),
        ({"Version": "2020-01-01", "Statement": [statement()]}, "valid version string"),
        ({"Version": 1, "Statement": [statement()]}, "valid version string"),
        ({"Id": 1, "Statement": [statement()]}, "invalid Id"),
        ({"Other": 1, "Statement": [statement()]}, "Unknown field Other"),
        ({"Statement": [statement(Sid="a"), statement(Sid="a")]}, "must be unique"),
    ],
)
def test_a_document_that_is_not_understood_is_refused(document: object, problem: str) -> None:
    told = refusal(document)
    assert told.startswith("MalformedPolicy: ")
    assert problem in told


@pytest.mark.parametrize(
    ("elements", "problem"),
    [
        ({"Effect": None}, "Missing required field Effect"),
        ({"Effect": "allow"}, "Invalid effect: allow"),
        ({"Principal": None}, "Missing required field Principal"),
        ({"NotPrincipal": "*"}, "both Principal and NotPrincipal"),
        ({"Action": None}, "Missing required field Action"),
        ({"Action": []}, "invalid action"),
        ({"Action": ["s3:GetObject", "s3:Nothing"]}, "invalid action"),
        ({"NotAction": "s3:*"}, "both Action and NotAction"),
        ({"Resource": None}, "Missing required field Resource"),
        ({"Resources": "x"}, "Unknown field Resources"),
        ({"Sid": 1}, "invalid Sid"),
        ({"Resource": "arn:aws:s3:::data/${nothing}"}, "invalid variable"),
        ({"Resource": "arn:aws:s3:::data/${}"}, "invalid variable"),
        ({"Condition": []}, "invalid condition"),
        ({"Condition": {"StringEquals": {}}}, "invalid condition"),
        ({"Condition": {"StringEquals": "x"}}, "invalid condition"),
        ({"Condition": {"StringEquals": {"aws:Nothing": "x"}}}, "invalid condition key"),
        ({"Condition": {"StringEquals": {"s3:ExistingObjectTag/": "x"}}}, "invalid condition key"),
        ({"Condition": {"StringEquals": {"s3:ExistingObjectTag": "x"}}}, "invalid condition key"),
        ({"Condition": {"StringAlmost": {"aws:Referer": "x"}}}, "Invalid Condition type"),
        ({"Condition": {"ForSome:StringEquals": {"aws:Referer": "x"}}}, "Invalid Condition type"),
        ({"Condition": {"StringEquals": {"aws:Referer": []}}}, "without a value"),
        ({"Condition": {"StringEquals": {"aws:Referer": {}}}}, "invalid condition value"),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/40"}}}, "invalid condition value"),
        ({"Condition": {"NumericLessThan": {"s3:max-keys": "ten"}}}, "invalid condition value"),
        ({"Condition": {"NumericLessThan": {"s3:max-keys": "inf"}}}, "invalid condition value"),
        ({"Condition": {"DateLessThan": {"aws:CurrentTime": "soon"}}}, "invalid condition value"),
        ({"Condition": {"Bool": {"aws:SecureTransport": "yes"}}}, "invalid condition value"),
        ({"Condition": {"Null": {"aws:Referer": "yes"}}}, "invalid condition value"),
        ({"Condition": {"ArnLike": {"aws:PrincipalArn": "bob"}}}, "invalid condition value"),
        ({"Condition": {"StringEquals": {"aws:Referer": "${nothing}"}}}, "invalid variable"),
    ],
)
def test_a_statement_that_is_not_understood_is_refused(elements: dict[str, Any], problem: str) -> None:
    assert problem in refused(**elements)


def test_a_policy_is_bounded() -> None:
    fitting = bucket_with([statement()]).policy
    assert parse_policy(fitting + b" " * (MAX_POLICY_BYTES - len(fitting)), "data").statements
    assert refusal(fitting + b" " * MAX_POLICY_BYTES).startswith("PolicyTooLarge")


def test_a_stored_policy_that_is_no_longer_understood_keeps_everybody_out() -> None:
    assert policy_of(bucket_with(b"{}")) is None
    assert ask(b"{}") is DENY


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=6)
    | st.sampled_from(["*", "Allow", "s3:*", "arn:aws:s3:::data/*"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "AWS",
                    "Statement",
                    "Effect",
                    "Principal",
                    "Action",
                    "Resource",
                    "Condition",
                    "StringLike",
                    "aws:Referer",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(
    JSON,
    st.sampled_from(["Effect", "Principal", "Action", "Resource", "Condition", "Sid", "NotPrincipal", "NotResource"]),
)
def test_nothing_but_a_refusal_comes_of_a_strange_document(value: object, element: str) -> None:
    for document in (value, {"Statement": value}, {"Statement": [{**statement(), element: value}]}):
        assert parsed_or_refused(json.dumps(document).encode()) in (None, "MalformedPolicy")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_are_parsed_or_refused(data: bytes) -> None:
    assert parsed_or_refused(data) in (None, "MalformedPolicy")


@pytest.mark.parametrize(
    ("elements", "is_public"),
    [
        ({}, True),
        ({"Effect": "Deny"}, False),
        ({"Principal": {"AWS": "bob"}}, False),
        ({"Principal": {"AWS": ["bob", "*"]}}, True),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}, False),
        ({"Condition": {"IpAddress": {"aws:SourceIp": ["10.0.0.0/8", "0.0.0.0/1"]}}}, True),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "2001:db8::/31"}}}, True),
        ({"Condition": {"NotIpAddress": {"aws:SourceIp": "10.0.0.0/8"}}}, True),
        ({"Condition": {"StringEquals": {"aws:SourceVpc": "vpc-1"}}}, False),
        ({"Condition": {"StringLike": {"aws:SourceVpc": "vpc-*"}}}, True),
        ({"Condition": {"StringEqualsIfExists": {"aws:SourceVpc": "vpc-1"}}}, True),
        ({"Condition": {"StringEquals": {"aws:Referer": "https://x.example"}}}, True),
        ({"Condition": {"ArnEquals": {"aws:PrincipalArn": "arn:aws:iam:::user/bob"}}}, False),
    ],
)
def test_what_lets_the_public_in_is_known(elements: dict[str, Any], is_public: bool) -> None:  # noqa: FBT001 - a case
    policy = policy_of(bucket_with([statement(**elements)]))
    assert policy is not None
    assert policy.is_public is is_public


def test_who_has_no_name_is_nobodys_principal() -> None:
    nameless = UserRow("", "", "", "")
    assert ask([statement(Principal={"AWS": "bob"})], request=Request(nameless)) is None
