"""Fuzz target for the settings of buckets and objects: documents of ACLs, CORS, lifecycle and tags in XML, of policies in JSON.

A case's first line names the document, the rest is the body. What must hold: only typed refusals; what was taken is the same when it
is told and read again; a policy that was taken answers every request, in bounded time, and never lets in whom none of it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
from fakes import ManualClock
from fuzz_documents import XML_TOKENS
from fuzz_fields import BUCKET, ROW
from fuzz_framing import require_refusal
from fuzz_message import Message, recorded_messages
from fuzz_mutation import MAX_CASE_BYTES, NAMES, Mutator, change_json, change_xml
from fuzz_signatures import Door, head_of, signed
from fuzz_signing import NOW_MS

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.access.policy import judge
from kvobj.api.access.policy_document import Effect, parse_policy
from kvobj.api.access.request_facts import RequestFacts
from kvobj.api.header_text import is_plain
from kvobj.api.settings.acl_document import acl_document, parse_acl_document
from kvobj.api.settings.cors import cors_document, parse_cors
from kvobj.api.settings.lifecycle_document import lifecycle_document, parse_lifecycle
from kvobj.api.settings.lifecycle_headers import abort_headers, expiration_headers
from kvobj.api.settings.tags import parse_tagging, tagging_document
from kvobj.catalog.rows import Durability, UploadRow
from kvobj.errors import KvobjError

UPLOAD: Final = UploadRow("bucket", "a/key", "UP", NOW_MS, "alice", Durability.LOCAL)

_CONDITIONS: Final = (
    b'"StringLike":{"s3:prefix":["a*","${aws:username}/*"]}', b'"Null":{"aws:Referer":true}', b'"IpAddress":{"aws:SourceIp":["127.0.0.0/8","::1/128"]}',
    b'"NotIpAddress":{"aws:SourceIp":"10.0.0.0/33"}', b'"DateLessThan":{"aws:CurrentTime":"2026-01-01T00:00:00Z"}', b'"NumericLessThan":{"s3:max-keys":"10"}',
    b'"NumericEquals":{"s3:max-keys":"1e999"}', b'"Bool":{"aws:SecureTransport":"false"}', b'"ArnLike":{"aws:PrincipalArn":"arn:aws:iam:::user/*"}',
    b'"StringEqualsIfExists":{"s3:x-amz-acl":"private"}', b'"ForAllValues:StringEquals":{"s3:RequestObjectTagKeys":["a"]}', b'"x":{}', b'"StringEquals":{"x":"y"}',
    b'"DateEquals":{"aws:EpochTime":"99999999999999999999"}', b'"StringNotLike":{"aws:UserAgent":"' + b"*a" * 60 + b'"}', b'"BinaryEquals":{"aws:Referer":"QQ=="}',
)  # fmt: skip
_TOKENS: Final = (
    *XML_TOKENS,
    b"<Grant>", b"<Grantee xmlns:xsi='http://www.w3.org/2001/XMLSchema-instance' xsi:type='Group'><URI>http://acs.amazonaws.com/groups/global/AllUsers</URI></Grantee>",
    b"<Permission>FULL_CONTROL</Permission>", b"<ID>bob</ID>", b"<EmailAddress>x</EmailAddress>", b"<Tag><Key>a</Key><Value>b</Value></Tag>", b"<Rule>",
    b"<Filter>", b"<Filter/>", b"<And>", b"</And>", b"<Prefix>", b"<Days>1</Days>", b"<Date>2026-01-02T00:00:00Z</Date>", b"<Date>9999-12-31T00:00:00+23:59</Date>",
    b"<Date>0001-01-01</Date>", b"<Status>Enabled</Status>", b"<Status>Disabled</Status>", b"<ObjectSizeGreaterThan>1</ObjectSizeGreaterThan>",
    b"<ObjectSizeLessThan>9</ObjectSizeLessThan>", b"<Expiration><Days>1</Days></Expiration>", b"<ID>i</ID>", b"<ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker>",
    b"<AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload>", b"<Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition>",
    b"<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>", b"<AllowedOrigin>*</AllowedOrigin>", b"<AllowedOrigin>https://*.a</AllowedOrigin>",
    b"<AllowedMethod>GET</AllowedMethod>", b"<AllowedHeader>*</AllowedHeader>", b"<ExposeHeader>etag</ExposeHeader>", b"<MaxAgeSeconds>5</MaxAgeSeconds>",
    b'{"a":', b'"Effect":"Deny"', b'"Effect":"Allow"', b'"Principal":"*"', b'"Principal":{"AWS":"arn:aws:iam:::user/bob"}', b'"NotPrincipal":{"AWS":"*"}', b'"NotAction":"s3:*"',
    b'"Action":["s3:GetObject"]', b'"Action":"s3:?et*"', b'"Resource":"arn:aws:s3:::bucket/*"', b'"Resource":"arn:aws:s3:::bucket"', b'"NotResource":"arn:aws:s3:::bucket/${aws:username}/*"',
    b"[" * 2000, b'{"a":' * 1500, b"1e999", b"NaN", b"\\ud800", b"\\u0000", b"${aws:username}", b"${aws:username, 'x'}", b"${*}", b"${", b"*" * 500, b"?*" * 100, b"9" * 5000,
    *(b'"Condition":{' + condition + b"}" for condition in _CONDITIONS), *_CONDITIONS,
)  # fmt: skip
_VALUES: Final[tuple[Any, ...]] = (
    "", "*", "x", "s3:*", "s3:Get*", "s3:ListBucket", "s3:NoSuchAction", "arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*", "arn:aws:s3:::other/*", "arn:aws:s3:::bucket/${aws:username}",
    "${aws:username, 'nobody'}", "${x}", "${s3:prefix}", "${*}", "${", "arn:aws:iam:::user/bob", "arn:aws:iam::123456789012:root", "bob", "Allow", "Deny", "2012-10-17", "2008-10-17",
    "127.0.0.1", "10.0.0.0/8", "::/0", "2026-01-02T03:04:05Z", "1767323045", "9" * 400, "-1", "1e5", "inf", "nan", "true", "false", "a" * 300, "*" * 300, "?*" * 150, "ü", "\ud800",
    True, False, None, 0, 7, -1, 1.5, 10**30, [], {}, [[]], ["a", "b"], {"AWS": "*"}, {"AWS": ["bob", "alice"]}, {"CanonicalUser": "bob"}, {"Service": "x"}, ["*", "s3:PutObject"],
    {"StringEquals": {"s3:prefix": ["a", "b"]}}, {"IpAddress": {"aws:SourceIp": "::1"}}, {"StringLike": {"aws:Referer": []}}, {"Null": {"aws:Referer": "maybe"}},
    {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::bucket"},
)  # fmt: skip
_QUANTIFIERS: Final = ("", "", "", "ForAnyValue:", "ForAllValues:")
_OPERATORS: Final = (
    *(
        f"String{name}"
        for name in ("Equals", "NotEquals", "Like", "NotLike", "EqualsIgnoreCase", "NotEqualsIgnoreCase")
    ),
    *(
        f"{kind}{name}"
        for kind in ("Numeric", "Date")
        for name in ("Equals", "NotEquals", "LessThan", "GreaterThanEquals")
    ),
    *("Bool", "Null", "IpAddress", "NotIpAddress", "ArnEquals", "ArnLike", "ArnNotLike", "BinaryEquals"),
)
_GRANTS: Final = (
    b"<AccessControlPolicy><Owner><ID>alice</ID></Owner><AccessControlList><Grant><Grantee xmlns:xsi='http://www.w3.org/2001/XMLSchema-instance' "
    b"xsi:type='CanonicalUser'><ID>alice</ID></Grantee><Permission>FULL_CONTROL</Permission></Grant><Grant><Grantee xmlns:xsi='http://www.w3.org/2001/XMLSchema-instance' "
    b"xsi:type='Group'><URI>http://acs.amazonaws.com/groups/global/AllUsers</URI></Grantee><Permission>READ</Permission></Grant></AccessControlList></AccessControlPolicy>"
)
_POLICY: Final = (
    b'{"Version":"2012-10-17","Id":"i","Statement":[{"Sid":"a","Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::bucket/*","Condition":{%s}},'
    b'{"Sid":"b","Effect":"Deny","NotPrincipal":{"AWS":["arn:aws:iam:::user/alice"]},"Action":["s3:Put*","s3:DeleteObject"],"NotResource":"arn:aws:s3:::bucket/${aws:username}/*"},'
    b'{"Effect":"Allow","Principal":{"AWS":"bob"},"NotAction":"s3:*Acl","Resource":["arn:aws:s3:::bucket","arn:aws:s3:::bucket/a*b?c"]}]}'
)
_EXPIRES: Final = b"<Expiration><Days>1</Days></Expiration>"
_LIFECYCLE_RULES: Final = (
    b"<Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter><AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload>",
    b"<Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>",
    b"<Filter><And>" + b"<Tag><Key>k</Key><Value>v</Value></Tag>" * 2 + b"</And></Filter>" + _EXPIRES,
    b"<Filter><And><ObjectSizeGreaterThan>5</ObjectSizeGreaterThan><ObjectSizeLessThan>5</ObjectSizeLessThan></And></Filter>" + _EXPIRES,
    b"<Filter><Prefix>" + b"p" * 1025 + b"</Prefix></Filter>" + _EXPIRES,
    b"<ID>" + b"i" * 256 + b"</ID><Prefix/>" + _EXPIRES,
    b"<Prefix/><NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays><NewerNoncurrentVersions>1</NewerNoncurrentVersions></NoncurrentVersionExpiration>",
    b"<Prefix/><NoncurrentVersionExpiration/>",
    b"<Filter/><Transition><Days>-1</Days><StorageClass>GLACIER</StorageClass></Transition>",
    b"<Filter/><Transition><StorageClass>x</StorageClass></Transition>",
    b"<Filter/><Expiration><Date>2026-01-02T03:04:05Z</Date></Expiration>",
    b"<Filter/><Expiration><Days>0</Days></Expiration>",
    b"<Filter/>",
    b"<Filter/><Prefix/>" + _EXPIRES,
    _EXPIRES,
    b"<Prefix>a</Prefix>" + _EXPIRES + b"</Rule><Rule><Status>Enabled</Status><Filter/>" + _EXPIRES,
    b"<Filter/>" + _EXPIRES + b"</Rule><Rule><Status>Enabled</Status><Filter><Prefix/></Filter><Expiration><Date>2026-01-02T00:00:00Z</Date></Expiration>",
)  # fmt: skip
_STATEMENT: Final = b'{"Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::bucket/*"%s}'
_STATEMENTS: Final = (
    b",".join([_STATEMENT % b',"Sid":"s"'] * 2),
    _STATEMENT % b',"Sid":7',
    _STATEMENT % b',"Condition":[]',
    _STATEMENT % b',"Condition":{"StringEquals":[]}',
    _STATEMENT % b',"Condition":{"StringEquals":{"aws:Referer":{}}}',
    _STATEMENT % b',"NotAction":"s3:*"',
    _STATEMENT.replace(b'"Action":"s3:GetObject",', b"") % b"",
    _STATEMENT.replace(b'"Principal"', b'"NotPrincipal"') % b"",
    _STATEMENT.replace(b'"*"', b'{"AWS":"arn:aws:iam::x:user/"}') % b"",
    _STATEMENT.replace(b'"*"', b'{"CanonicalUser":"bob"}') % b"",
    _STATEMENT.replace(b'"*"', b'{"AWS":["*","bob"]}') % b"",
    _STATEMENT.replace(b"GetObject", b"ListBucket") % b"",
    _STATEMENT.replace(b"bucket/*", b"bucket/${aws:username, 'all'}/${*}") % b"",
    _STATEMENT.replace(b"bucket/*", b"bucket/${no such}") % b"",
    _STATEMENT.replace(b"bucket/*", b"bucket/a*${aws:username}*?c") % b"",
    b"7",
)  # fmt: skip
SETTINGS: Final = {
    b"acl": (_GRANTS, _GRANTS.replace(b"<ID>alice</ID></Grantee>", b"<ID>bob</ID><DisplayName>B</DisplayName></Grantee>")),
    b"tagging": (b"<Tagging><TagSet><Tag><Key>a</Key><Value>b c</Value></Tag><Tag><Key>\xc3\xbc</Key><Value/></Tag></TagSet></Tagging>",),
    b"cors": (
        b"<CORSConfiguration><CORSRule><ID>i</ID><AllowedOrigin>https://*.a</AllowedOrigin><AllowedMethod>GET</AllowedMethod><AllowedHeader>*</AllowedHeader><ExposeHeader>etag</ExposeHeader><MaxAgeSeconds>5</MaxAgeSeconds></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration><CORSRule><AllowedOrigin>**</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>PATCH</AllowedMethod></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod><ExposeHeader>*</ExposeHeader></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod><ExposeHeader>\xc3\xbc</ExposeHeader></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration><CORSRule><ID>" + b"i" * 256 + b"</ID><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule></CORSConfiguration>",
        b"<CORSConfiguration>" + b"<CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>PUT</AllowedMethod></CORSRule>" * 101 + b"</CORSConfiguration>",
    ),
    b"lifecycle": (
        b"<LifecycleConfiguration><Rule><ID>i</ID><Status>Enabled</Status><Filter><And><Prefix>a</Prefix><Tag><Key>k</Key><Value>v</Value></Tag><ObjectSizeGreaterThan>1</ObjectSizeGreaterThan><ObjectSizeLessThan>9</ObjectSizeLessThan></And></Filter><Expiration><Days>3</Days></Expiration></Rule><Rule><Status>Disabled</Status><Filter><Prefix/></Filter><AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>",
        b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Prefix>p</Prefix><Expiration><Date>2026-01-02T00:00:00.000Z</Date></Expiration></Rule></LifecycleConfiguration>",
        b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter><NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays><NewerNoncurrentVersions>2</NewerNoncurrentVersions></NoncurrentVersionExpiration></Rule></LifecycleConfiguration>",
        b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Filter><ObjectSizeLessThan>9</ObjectSizeLessThan></Filter><Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition><Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration></Rule></LifecycleConfiguration>",
        *(b"<LifecycleConfiguration><Rule><Status>Enabled</Status>%s</Rule></LifecycleConfiguration>" % rule for rule in _LIFECYCLE_RULES),
        b"<LifecycleConfiguration>" + b"<Rule><ID>same</ID><Status>Enabled</Status><Prefix/><Expiration><Days>1</Days></Expiration></Rule>" * 2 + b"</LifecycleConfiguration>",
    ),
    b"policy": (*(_POLICY % condition for condition in _CONDITIONS),
        *(b'{"Version":"2012-10-17","Statement":[%s]}' % statements for statements in _STATEMENTS),
        b"{}", b"[]", b'{"Statement":{}}', b'{"Statement":[]}', b'{"Statement":7}', b'{"Id":7,"Statement":{}}', b'{"Version":"2020-01-01","Statement":{}}',
        b'{"a":1,"a":2}', b'{"Version":NaN}', b'{"Version":' + b" " * 20_500 + b"1}",
    ),
}  # fmt: skip
_BY_ROOT: Final = {
    b"<AccessControlPolicy": b"acl",
    b"<Tagging": b"tagging",
    b"<CORSConfiguration": b"cors",
    b"<LifecycleConfiguration": b"lifecycle",
    b'{"Version"': b"policy",
}


def _requests() -> list[RequestFacts]:
    """A signed request with everything that conditions ask for, and an anonymous one with nothing."""
    fields = ((b"host", b"a"), (b"referer", b"r"), (b"user-agent", b"a" * 200), (b"x-amz-acl", b"private"))
    message = Message(b"GET", b"/bucket?prefix=alice/&delimiter=/&max-keys=7", fields, b"")
    door = Door()
    found = []
    for sent in (signed(message, b"header"), Message(b"GET", b"/bucket", ((b"host", b"a"),), b"")):
        head = head_of(sent)
        authentication, target, headers = door.enter(head)
        facts = SimpleNamespace(
            authentication=authentication, head=head, fields=headers, overrides=target.parameters, clock=ManualClock(now_ms=NOW_MS),
            source_address="127.0.0.1", is_secure=False,
        )  # fmt: skip
        found.append(cast("RequestFacts", facts))
    return found


_REQUESTS: Final = _requests()
_ACTIONS: Final = (
    Action.GET_OBJECT, Action.PUT_OBJECT, Action.DELETE_OBJECT, Action.LIST_BUCKET, Action.PUT_BUCKET_ACL, Action.PUT_OBJECT_TAGGING, Action.PUT_BUCKET_POLICY,
)  # fmt: skip


def _read_policy(body: bytes) -> str:
    policy = parse_policy(body, "bucket")
    assert isinstance(policy.is_public, bool)
    bucket = msgspec.structs.replace(BUCKET, policy=body)
    for request in _REQUESTS:
        is_anonymous = not request.authentication.user.id
        for action in _ACTIONS:
            for key in ("", "alice/key", "a" + "xb" * 40 + "c"):
                effect = judge(bucket, action, key=key, row=ROW, request=request, request_tags=lambda: {"a": "b"})
                speakers = [statement for statement in policy.statements if statement.effect is effect]
                assert effect is None or any(action in statement.actions for statement in speakers)
                if effect is Effect.ALLOW and is_anonymous:
                    assert any(statement.principals.everybody for statement in speakers), "let in by what names users"
    assert b'*"' in body or b"\\u" in body or not policy.is_public
    return "read"


def _read_acl(body: bytes) -> str:
    acl = parse_acl_document(body, owner="alice")
    told = acl_document(acl, owner="alice", display_name=lambda user_id: f"<{user_id}>")
    assert parse_acl_document(told, owner="alice") == acl
    return "read"


def _read_cors(body: bytes) -> str:
    rules = parse_cors(body)
    told = xml.document("CORSConfiguration", cors_document(rules))
    if b"&#x" not in told:
        assert parse_cors(told) == rules
    return "read"


def _read_lifecycle(body: bytes) -> str:
    rules = parse_lifecycle(body)
    told = xml.document("LifecycleConfiguration", lifecycle_document(rules))
    if b"&#x" not in told:
        assert parse_lifecycle(told) == rules
    bucket = msgspec.structs.replace(BUCKET, lifecycle=rules)
    for _, value in (*expiration_headers(bucket, ROW), *abort_headers(bucket, UPLOAD)):
        value.encode("latin-1")
        assert is_plain(value), value
    return "read"


def _read_tagging(body: bytes) -> str:
    tags = parse_tagging(body, tags_max=10 if len(body) % 2 else 50)
    told = tagging_document(tags)
    if b"&#x" not in told:
        assert parse_tagging(told, tags_max=50) == tags
    return "read"


_READERS: Final[dict[bytes, Callable[[bytes], str]]] = {
    b"acl": _read_acl,
    b"tagging": _read_tagging,
    b"cors": _read_cors,
    b"lifecycle": _read_lifecycle,
    b"policy": _read_policy,
}


class SettingsTarget:
    """Every document that sets something of a bucket or an object."""

    name = "settings"
    modules = (
        "kvobj/api/settings/acl_document.py",
        "kvobj/api/settings/tags.py",
        "kvobj/api/settings/lifecycle_document.py",
        "kvobj/api/settings/cors.py:parse_cors",
        "kvobj/api/settings/cors.py:_parse_rule",
        "kvobj/api/settings/cors.py:_check_lists",
        "kvobj/api/settings/cors.py:_parse_max_age",
        "kvobj/api/access/policy_document.py",
        "kvobj/api/access/policy_conditions.py",
        "kvobj/api/access/wildcards.py",
    )

    def __init__(self) -> None:
        self._seeds = [(name, body) for name, bodies in SETTINGS.items() for body in bodies]
        for message in recorded_messages():
            for root, name in _BY_ROOT.items():
                if message.body.startswith(root):
                    self._seeds.append(
                        (
                            name,
                            message.body.replace(b"<ID>root</ID>", b"<ID>alice</ID>").replace(
                                b":::recorded", b":::bucket"
                            ),
                        )
                    )
        self._bodies = {name: [body for kind, body in self._seeds if kind == name] for name in _READERS}

    def seeds(self) -> list[bytes]:
        return [name + b"\n" + body for name, body in self._seeds]

    def make(self, random: Random) -> bytes:
        name = random.choice(tuple(_READERS))
        bodies = self._bodies[name]
        if name == b"policy" and random.random() < 0.4:
            return name + b"\n" + self._composed_policy(random)
        body = random.choice(bodies)
        if random.random() < 0.75:
            for _ in range(1 + int(random.random() ** 2 * 4)):
                body = self._change_policy(random, body) if name == b"policy" else change_xml(random, body, _TOKENS)
            if random.random() < 0.8:
                return name + b"\n" + body[:MAX_CASE_BYTES]
        return name + b"\n" + Mutator(random, _TOKENS).change(body, bodies, most=3)

    @staticmethod
    def _composed_policy(random: Random) -> bytes:
        """A policy whose conditions are made of operators, keys and values that there are."""
        texts = [value for value in _VALUES if isinstance(value, str)]
        conditions = {
            random.choice(_QUANTIFIERS) + random.choice(_OPERATORS) + random.choice(("", "", "IfExists")): {
                random.choice([name for name in NAMES if ":" in name]): [
                    random.choice(texts) for _ in range(random.randrange(3))
                ]
                if random.random() < 0.3
                else random.choice(texts)
            }
            for _ in range(random.randint(1, 3))
        }
        policy = {
            "Version": random.choice(("2012-10-17", "2012-10-17", "2008-10-17")),
            "Statement": [
                {
                    "Effect": effect,
                    "Principal": random.choice(("*", {"AWS": "*"}, {"AWS": ["arn:aws:iam:::user/alice", "bob"]})),
                    "Action": random.choice(("s3:*", "s3:GetObject", ["s3:PutObject", "s3:Delete*"])),
                    "Resource": random.choice(("arn:aws:s3:::bucket/*", "arn:aws:s3:::bucket/" + random.choice(texts))),
                    "Condition": conditions,
                }
                for effect in ("Allow", "Deny")[: random.randint(1, 2)]
            ],
        }
        return json.dumps(policy).encode()

    @staticmethod
    def _change_policy(random: Random, body: bytes) -> bytes:
        try:
            return json.dumps(change_json(random, json.loads(body), _VALUES)).encode()
        except ValueError:  # a seed that is no JSON
            return body

    def run(self, case: bytes) -> str:
        name, _, body = case.partition(b"\n")
        reader = _READERS.get(name)
        if reader is None:
            return "no case"
        try:
            return f"{name.decode()} {reader(body)}"
        except KvobjError as error:
            require_refusal(error)
            return f"{name.decode()} refused"
