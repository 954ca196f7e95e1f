import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api import operations as ops
from kvobj.api.errors import S3Error
from kvobj.api.message import RequestHead
from kvobj.api.request import HostRules, encode_key, parse_fields, parse_target
from kvobj.api.routing import decode_token, encode_token, parse_operation

RULES = HostRules(
    hosts={"cache.example": "cache"},
    domains=("s3.example.com", "localhost"),
    path_style=frozenset({"store.internal"}),
    default_bucket="fallback",
)

NOT_ENCODED = WITHOUT_OWNER = False


def names(target: str, host: str = "127.0.0.1:9000", rules: HostRules = RULES) -> tuple[str, str]:
    parsed = parse_target(target, host, rules)
    return parsed.bucket, parsed.key


@pytest.mark.parametrize(
    ("host", "target", "expected"),
    [
        ("cache.example:9000", "/some/key", ("cache", "some/key")),
        ("CACHE.example", "/", ("cache", "")),
        ("photos.s3.example.com", "/key", ("photos", "key")),
        ("a.b.s3.example.com:80", "/key", ("a.b", "key")),
        ("s3.example.com", "/bucket/key", ("bucket", "key")),
        ("chunks.localhost:9000", "/key", ("chunks", "key")),
        ("127.0.0.1:9000", "/bucket/key", ("bucket", "key")),
        ("[::1]:9000", "/bucket/key", ("bucket", "key")),
        ("store.internal", "/bucket/key", ("bucket", "key")),
        ("unknown.example", "/some/key", ("fallback", "some/key")),
        ("nots3.example.com", "/some/key", ("fallback", "some/key")),
    ],
)
def test_the_host_leads_where_the_rules_say(host: str, target: str, expected: tuple[str, str]) -> None:
    assert names(target, host) == expected


def test_an_unknown_host_is_path_style_without_a_default_bucket() -> None:
    assert names("/bucket/key", "unknown.example", HostRules()) == ("bucket", "key")


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/bucket/a%2Fb", "a/b"),
        ("/bucket//a//b", "/a//b"),
        ("/bucket/a+b", "a+b"),
        ("/bucket/a%2bb", "a+b"),
        ("/bucket/./a", "./a"),
        ("/bucket/a/../b", "a/../b"),
        ("/bucket/%C3%A9", "é"),
        ("/bucket/%252F", "%2F"),
        ("/bucket/a~b", "a~b"),
        ("/bucket/", ""),
        ("/bucket/?location", ""),
    ],
)
def test_a_path_is_decoded_once_and_never_normalised(target: str, key: str) -> None:
    assert names(target) == ("bucket", key)


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("/bucket/../evil/key", "InvalidURI"),
        ("/bucket/a/../../evil", "InvalidURI"),
        ("/bucket/%2e%2e/evil", "InvalidURI"),
        ("/bucket/a%00b", "InvalidURI"),
        ("/bucket/%ff", "InvalidURI"),
        ("/bucket/%zz", "InvalidURI"),
        ("/bucket/%", "InvalidURI"),
        ("/bucket/key?a=%ff", "InvalidURI"),
        ("bucket/key", "InvalidURI"),
        ("http://host/bucket", "InvalidURI"),
        ("//bucket/key", "InvalidBucketName"),
        ("/BUCKET/key", "InvalidBucketName"),
        ("/b/key", "InvalidBucketName"),
        ("/../key", "InvalidBucketName"),
        ("/bucket/" + "k" * 1025, "KeyTooLongError"),
        ("/bucket/" + "%C3%A9" * 513, "KeyTooLongError"),
    ],
)
def test_a_target_that_leaves_its_bucket_or_is_malformed_is_refused(target: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        names(target)
    assert caught.value.code == code


def test_too_many_query_fields_are_refused() -> None:
    with pytest.raises(S3Error):
        names("/bucket?" + "&".join(["a=1"] * 65))


@pytest.mark.parametrize("name", ["host", "authorization", "content-length", "x-amz-date", "x-amz-content-sha256"])
def test_a_header_that_must_be_single_is_refused_twice(name: str) -> None:
    with pytest.raises(S3Error):
        parse_fields(RequestHead("GET", "/", ((name, "1"), (name, "1")), "ID", ""))


def test_repeated_headers_are_joined_in_order() -> None:
    assert parse_fields(RequestHead("GET", "/", (("a", "1"), ("b", "x"), ("a", "2")), "ID", "")) == {
        "a": "1,2",
        "b": "x",
    }


def operation(method: str, target: str, **fields: str) -> ops.Operation:
    parsed = parse_target(target, "127.0.0.1", HostRules())
    return parse_operation(method, parsed, {name.replace("_", "-"): value for name, value in fields.items()})


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/", ops.ListBuckets()),
        ("PUT", "/bucket", ops.CreateBucket("bucket")),
        ("HEAD", "/bucket", ops.HeadBucket("bucket")),
        ("DELETE", "/bucket/", ops.DeleteBucket("bucket")),
        ("GET", "/bucket?location", ops.GetBucketLocation("bucket")),
        ("GET", "/bucket?versioning=", ops.GetBucketVersioning("bucket")),
        ("GET", "/bucket?acl", ops.GetBucketAcl("bucket")),
        ("POST", "/bucket?delete", ops.DeleteObjects("bucket")),
        ("GET", "/bucket?prefix=a&max-keys=5000", ops.ListObjectsV1("bucket", "a", "", 1000, NOT_ENCODED, "")),
        (
            "GET",
            "/bucket?list-type=2&start-after=k",
            ops.ListObjectsV2("bucket", "", "", 1000, NOT_ENCODED, "k", None, "k", WITHOUT_OWNER),
        ),
        ("GET", "/bucket?versions", ops.ListObjectVersions("bucket", "", "", 1000, NOT_ENCODED, "", "")),
        ("GET", "/bucket?uploads", ops.ListMultipartUploads("bucket", "", "", 1000, NOT_ENCODED, "", "")),
        ("GET", "/bucket/key?x-id=GetObject", ops.GetObject("bucket", "key")),
        ("HEAD", "/bucket/key?partNumber=2", ops.GetObject("bucket", "key", 2)),
        ("PUT", "/bucket/key", ops.PutObject("bucket", "key")),
        ("DELETE", "/bucket/key?versionId=null", ops.DeleteObject("bucket", "key")),
        ("POST", "/bucket/key?uploads=", ops.CreateMultipartUpload("bucket", "key")),
        ("POST", "/bucket/key?uploadId=a%7Eb", ops.CompleteMultipartUpload("bucket", "key", "a~b")),
        ("DELETE", "/bucket/key?uploadId=u", ops.AbortMultipartUpload("bucket", "key", "u")),
        ("GET", "/bucket/key?uploadId=u&max-parts=5", ops.ListParts("bucket", "key", "u", 0, 5)),
        ("PUT", "/bucket/key?partNumber=7&uploadId=u", ops.UploadPart("bucket", "key", "u", 7)),
    ],
)
def test_a_request_becomes_its_operation(method: str, target: str, expected: ops.Operation) -> None:
    assert operation(method, target) == expected


@pytest.mark.parametrize(
    "source",
    ["/src-bucket/a%20key", "src-bucket/a%20key", "src-bucket/a key?versionId=null", "%2Fsrc-bucket%2Fa%20key"],
)
def test_a_copy_source_is_decoded_under_the_rules_of_a_path(source: str) -> None:
    assert operation("PUT", "/bucket/key", x_amz_copy_source=source) == ops.CopyObject(
        "bucket", "key", "src-bucket", "a key"
    )


@pytest.mark.parametrize(
    "source",
    [
        "src-bucket",
        "/src-bucket/",
        "src-bucket/../evil/key",
        "src-bucket/%2e%2e/key",
        "SRC/key",
        "src-bucket/k?versionId=abc",
        "src-bucket/k?x=y",
        "src-bucket/%ff",
    ],
)
def test_a_copy_source_that_climbs_or_is_malformed_is_refused(source: str) -> None:
    with pytest.raises(S3Error):
        operation("PUT", "/bucket/key", x_amz_copy_source=source)


@pytest.mark.parametrize(
    ("method", "target", "feature"),
    [
        ("PUT", "/bucket?versioning", "versioning"),
        ("GET", "/bucket?session", "session"),
        ("PUT", "/bucket?website", "website"),
        ("GET", "/bucket?publicAccessBlock", "publicAccessBlock"),
        ("PUT", "/bucket?ownershipControls", "ownershipControls"),
        ("GET", "/bucket?inventory&id=1", "inventory"),
        ("POST", "/bucket", "POST object forms"),
        ("PUT", "/bucket/key?retention", "retention"),
        ("PUT", "/bucket?abac", "abac"),
        ("GET", "/bucket?metadataConfiguration", "metadataConfiguration"),
        ("DELETE", "/bucket/key?annotation&annotationName=a", "annotation"),
        ("GET", "/bucket/key?annotation", "annotation"),
        ("PUT", "/bucket/key?encryption", "encryption"),
    ],
)
def test_a_known_feature_that_is_not_built_is_refused_by_name(method: str, target: str, feature: str) -> None:
    with pytest.raises(S3Error) as caught:
        operation(method, target)
    assert (caught.value.code, caught.value.data["Feature"]) == ("NotImplemented", feature)


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
@pytest.mark.parametrize("target", ["/bucket?tomorrows", "/bucket/key?tomorrows=", "/bucket/key?tomorrows&id=7"])
def test_a_write_to_a_sub_resource_that_nobody_knows_is_refused(method: str, target: str) -> None:
    with pytest.raises(S3Error) as caught:
        operation(method, target)
    assert (caught.value.code, caught.value.data["Feature"]) == ("NotImplemented", "tomorrows")


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", "/bucket/key?1732752000", ops.GetObject("bucket", "key")),
        ("PUT", "/bucket/key?x-id=PutObject&x-amz-meta-a=", ops.PutObject("bucket", "key")),
        ("PUT", "/bucket/key?nobodys=1", ops.PutObject("bucket", "key")),
        ("DELETE", "/bucket/key?versionId=", ops.DeleteObject("bucket", "key")),
    ],
)
def test_a_parameter_that_is_no_sub_resource_is_ignored(method: str, target: str, expected: ops.Operation) -> None:
    assert operation(method, target) == expected


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("DELETE", "/bucket?uploads", "GET"),
        ("DELETE", "/bucket?location", "GET"),
        ("PUT", "/bucket?versions", "GET"),
        ("PUT", "/bucket?delete", "POST"),
        ("PUT", "/bucket/key?uploads", "POST"),
        ("DELETE", "/bucket/key?uploads", "POST"),
        ("DELETE", "/bucket/key?attributes", "GET"),
    ],
)
def test_a_sub_resource_is_not_written_to_by_a_method_that_it_has_not(method: str, target: str, allowed: str) -> None:
    with pytest.raises(S3Error) as caught:
        operation(method, target)
    assert (caught.value.code, caught.value.data["Allow"]) == ("MethodNotAllowed", allowed)


def test_a_setting_is_an_operation_by_its_name_and_method() -> None:
    assert operation("PUT", "/bucket?acl") == ops.PutBucketAcl("bucket")
    assert operation("GET", "/bucket/key?tagging") == ops.GetObjectTagging("bucket", "key")
    assert operation("DELETE", "/bucket?policy") == ops.DeleteBucketPolicy("bucket")
    with pytest.raises(S3Error) as caught:
        operation("POST", "/bucket?tagging")
    assert (caught.value.code, caught.value.data["Allow"]) == ("MethodNotAllowed", "GET, PUT, DELETE")
    with pytest.raises(S3Error) as caught:
        operation("GET", "/bucket/key?tagging&acl")
    assert caught.value.code == "InvalidArgument"


@pytest.mark.parametrize(
    "header", ["x-amz-server-side-encryption", "x-amz-object-lock-mode", "x-amz-website-redirect-location"]
)
def test_a_header_of_a_feature_that_is_not_built_is_refused(header: str) -> None:
    with pytest.raises(S3Error) as caught:
        operation("PUT", "/bucket/key", **{header: "x"})
    assert caught.value.code == "NotImplemented"


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("PATCH", "/bucket/key", "MethodNotAllowed"),
        ("POST", "/bucket/key", "MethodNotAllowed"),
        ("DELETE", "/", "MethodNotAllowed"),
        ("PUT", "/bucket/key?partNumber=0&uploadId=u", "InvalidArgument"),
        ("PUT", "/bucket/key?partNumber=10001&uploadId=u", "InvalidArgument"),
        ("PUT", "/bucket/key?partNumber=1", "InvalidArgument"),
        ("GET", "/bucket?max-keys=-1", "InvalidArgument"),
        ("GET", "/bucket?max-keys=blah", "InvalidArgument"),
        ("GET", "/bucket?encoding-type=xml", "InvalidArgument"),
        ("GET", "/bucket?list-type=2&continuation-token=never%20made", "InvalidArgument"),
        ("GET", "/bucket/key?versionId=abc", "NoSuchVersion"),
        ("GET", "/bucket?match", "MethodNotAllowed"),
        ("POST", "/bucket?namespace=n", "MethodNotAllowed"),
        ("POST", "/bucket?match&pins", "InvalidArgument"),
        ("PUT", "/bucket?namespace=", "InvalidArgument"),
        ("PUT", "/bucket?sessions=1234", "NoSuchSession"),
        ("DELETE", "/bucket?sessions=" + "G" * 32, "NoSuchSession"),
        ("GET", "/bucket?events&after=-1", "InvalidArgument"),
        ("GET", "/bucket?events&after=9223372036854775808", "InvalidArgument"),
        ("GET", "/bucket/key?layers=3-1", "InvalidArgument"),
        ("GET", "/bucket/key?layers=3", "InvalidArgument"),
        ("GET", "/bucket/key?part=10000", "InvalidArgument"),
        ("GET", "/bucket/key?part=1&layers=1-2", "InvalidArgument"),
        ("GET", "/bucket/key?part=1&follow", "InvalidArgument"),
        ("GET", "/bucket/key?partNumber=1&follow", "InvalidArgument"),
    ],
)
def test_a_wrong_parameter_is_refused(method: str, target: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        operation(method, target)
    assert caught.value.code == code


SESSION = "0f" * 16


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("POST", "/bucket?match", ops.MatchChunks("bucket")),
        ("POST", "/bucket?match=", ops.MatchChunks("bucket")),
        ("POST", "/bucket?pins", ops.PinChunks("bucket")),
        ("POST", "/bucket?mget", ops.GetChunks("bucket")),
        ("POST", "/bucket?mput", ops.PutChunks("bucket")),
        ("POST", "/bucket?sessions", ops.OpenSession("bucket")),
        ("POST", "/bucket?same-host", ops.OpenSameHost("bucket")),
        ("POST", f"/bucket?same-host={'ab' * 16}", ops.RenewSameHost("bucket", b"\xab" * 16)),
        ("PUT", f"/bucket?sessions={SESSION}", ops.RenewSession("bucket", bytes.fromhex(SESSION))),
        ("DELETE", f"/bucket?sessions={SESSION}", ops.CloseSession("bucket", bytes.fromhex(SESSION))),
        ("PUT", "/bucket?namespace=n", ops.DeclareNamespace("bucket", "n")),
        ("GET", "/bucket?namespace=n", ops.GetNamespace("bucket", "n")),
        ("DELETE", "/bucket?namespace=n", ops.RemoveNamespace("bucket", "n")),
        ("GET", "/bucket?namespaces", ops.ListNamespaces("bucket", "", 1000)),
        ("GET", "/bucket?namespaces&start-after=m&max-keys=5", ops.ListNamespaces("bucket", "m", 5)),
        ("GET", "/bucket?events", ops.ReadEvents("bucket", None, follow=False)),
        ("GET", "/bucket?events&after=9&follow", ops.ReadEvents("bucket", 9, follow=True)),
        ("GET", "/bucket/key?layers=2-11", ops.GetObject("bucket", "key", layers=(2, 11))),
        ("GET", "/bucket/key?follow", ops.GetObject("bucket", "key", follow=True)),
        ("GET", "/bucket/key?follow&layers=0-1", ops.GetObject("bucket", "key", layers=(0, 1), follow=True)),
        ("HEAD", "/bucket/key?follow", ops.GetObject("bucket", "key")),
        ("GET", "/bucket/key?part=0", ops.GetObject("bucket", "key", part=0)),
    ],
)
def test_the_calls_of_the_kv_api_are_parsed(method: str, target: str, expected: ops.Operation) -> None:
    assert operation(method, target) == expected


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200))
def test_a_continuation_token_gives_its_key_back(key: str) -> None:
    assert decode_token(encode_token(key)) == key


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100))
def test_an_encoded_key_reads_back_as_the_same_key(key: str) -> None:
    try:
        assert names(f"/bucket/{encode_key(key)}") == ("bucket", key)
    except S3Error as error:
        assert error.code in ("InvalidURI", "KeyTooLongError")  # noqa: PT017 - which refusals there are is the point
        assert "\0" in key or ".." in key


@given(
    st.text(alphabet=st.characters(max_codepoint=255), max_size=120),
    st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
)
def test_any_target_is_an_operation_or_a_refusal(tail: str, method: str) -> None:
    try:
        target = parse_target("/" + tail, "127.0.0.1", HostRules())
        target.canonical_query()
        parse_operation(method, target, {})
    except S3Error:
        pass
