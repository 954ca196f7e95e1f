"""Lifecycle rules: put, got and deleted, what S3 refuses, what expires and what stays, uploads that nobody completes, and headers.

The server's lifecycle day is a second. What shall expire is set up for all tests at once and waited for together.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any, Final

import pytest
from s3_worlds import S3Client, World, put_keys, refused, status_of
from server_process import wait_until

WAIT_SECONDS: Final = 30.0
Rule = dict[str, Any]


def rule(rule_id: str = "rule1", /, **elements: object) -> Rule:
    """An enabled rule that expires what stands under `test1/` after 1 day; `elements` replace or, where None, take away."""
    whole: Rule = {"ID": rule_id, "Status": "Enabled", "Filter": {"Prefix": "test1/"}, "Expiration": {"Days": 1}}
    whole |= elements
    if "Prefix" in elements:
        del whole["Filter"]
    return {name: value for name, value in whole.items() if value is not None}


def put_rules(client: S3Client, bucket: str, *rules: Rule) -> None:
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": list(rules)})


def keys_of(client: S3Client, bucket: str) -> list[str]:
    return [row["Key"] for row in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


# -- documents ---------------------------------------------------------------------------------------------------------
def test_rules_are_put_got_and_deleted(world: World, bucket: str) -> None:
    client = world.main
    with refused(404, "NoSuchLifecycleConfiguration"):
        client.get_bucket_lifecycle_configuration(Bucket=bucket)
    assert status_of(client.delete_bucket_lifecycle(Bucket=bucket)) == 204
    wanted = [
        rule("test1/", Expiration={"Days": 31}),
        rule("test2/", Expiration={"Days": 120}, Filter={"Prefix": "test2/"}, Status="Disabled"),
    ]
    put_rules(client, bucket, *wanted)
    assert client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == wanted
    for _ in range(2):
        assert status_of(client.delete_bucket_lifecycle(Bucket=bucket)) == 204
    with refused(404, "NoSuchLifecycleConfiguration"):
        client.get_bucket_lifecycle_configuration(Bucket=bucket)


def test_the_older_form_of_rules_is_told_as_it_came(world: World, bucket: str) -> None:
    wanted = [
        rule("test1/", Expiration={"Days": 31}, Prefix="test1/"),
        rule("test2/", Expiration={"Days": 120}, Prefix="test2/"),
    ]
    put_rules(world.main, bucket, *wanted)
    assert world.main.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == wanted


def test_rules_without_an_id_get_one_each(world: World, bucket: str) -> None:
    put_rules(
        world.main, bucket, *(rule(ID=None, Filter={"Prefix": each}, Expiration={"Days": 31}) for each in ("a/", "b/"))
    )
    told = world.main.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert [each["Filter"]["Prefix"] for each in told] == ["a/", "b/"]
    assert len({each["ID"] for each in told} - {""}) == 2


@pytest.mark.parametrize(
    "elements",
    [
        {"Expiration": {"Date": dt.datetime(2017, 9, 27, tzinfo=dt.UTC)}},
        {"Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"Expiration": {"ExpiredObjectDeleteMarker": True}, "Filter": {"Prefix": "foo"}},
        {"Expiration": {"ExpiredObjectDeleteMarker": True}, "Filter": {}},
        {"Expiration": None, "NoncurrentVersionExpiration": {"NoncurrentDays": 2}},
        {"Expiration": None, "NoncurrentVersionExpiration": {"NoncurrentDays": 2, "NewerNoncurrentVersions": 5}},
        {"Expiration": None, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}},
        {"Filter": {"Tag": {"Key": "a", "Value": "b"}}},
        {"Filter": {"And": {"Prefix": "p/", "Tags": [{"Key": "a", "Value": "b"}], "ObjectSizeGreaterThan": 5}}},
        {"Filter": {"ObjectSizeLessThan": 2000}},
    ],
)
def test_every_form_of_a_rule_is_kept(world: World, bucket: str, elements: dict[str, Any]) -> None:
    wanted = rule(**elements)
    put_rules(world.main, bucket, wanted)
    assert world.main.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == [wanted]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([rule("a" * 256)], "InvalidArgument"),
        ([rule(), rule(Filter={"Prefix": "test2/"})], "InvalidArgument"),
        ([rule(Status="enabled")], "MalformedXML"),
        ([rule(Status="disabled")], "MalformedXML"),
        ([rule(Status="invalid")], "MalformedXML"),
        ([rule(Expiration={"Days": 0})], "InvalidArgument"),
        ([rule(Expiration={"Days": -1})], "InvalidArgument"),
        ([rule(Expiration={"Date": dt.datetime(2030, 1, 1, 13, tzinfo=dt.UTC)})], "InvalidArgument"),
        ([rule(Expiration=None)], "InvalidRequest"),
        ([rule(Filter=None)], "MalformedXML"),
        ([rule(Prefix="test1/"), rule("rule2", Prefix="test1/a")], "InvalidRequest"),
        (
            [rule(Filter={"Tag": {"Key": "a", "Value": "b"}}, Expiration={"ExpiredObjectDeleteMarker": True})],
            "InvalidRequest",
        ),
    ],
)
def test_rules_that_s3_does_not_take_are_refused(world: World, bucket: str, rules: list[Rule], code: str) -> None:
    with refused(400, code):
        put_rules(world.main, bucket, *rules)
    with refused(404, "NoSuchLifecycleConfiguration"):
        world.main.get_bucket_lifecycle_configuration(Bucket=bucket)


@pytest.mark.parametrize("date", ["20200101", "27.9.2017", "2017-13-01"])
def test_what_is_no_date_is_refused(world: World, bucket: str, date: str) -> None:
    body = (
        f"<LifecycleConfiguration><Rule><ID>a</ID><Status>Enabled</Status><Prefix>p/</Prefix><Expiration><Date>{date}</Date>"
        "</Expiration></Rule></LifecycleConfiguration>"
    )
    reply = world.raw("PUT", f"/{bucket}", body.encode(), query={"lifecycle": ""})
    assert (reply.status, reply.code) == (400, "MalformedXML")


def test_a_move_to_another_class_is_not_built(world: World, bucket: str) -> None:
    with refused(501, "NotImplemented"):
        put_rules(world.main, bucket, rule(Transitions=[{"Days": 1, "StorageClass": "GLACIER"}]))


# -- what the rules do -------------------------------------------------------------------------------------------------
class Expiring:
    """Buckets in which rules are at work, by what they show."""

    def __init__(self, world: World) -> None:
        self.client = client = world.main
        self.by_age, self.by_date, self.by_tag, self.by_two_tags = (world.bucket() for _ in range(4))
        self.over_size, self.under_size, self.uploads, self.unversioned = (world.bucket() for _ in range(4))
        put_keys(client, self.by_age, ("expire1/a", "expire1/b", "keep2/a", "off/a", "expire3/a", "later/a"))
        put_rules(
            client,
            self.by_age,
            rule("1", Filter={"Prefix": "expire1/"}),
            rule("3", Filter={"Prefix": "expire3/"}, Expiration={"Days": 3}),
            rule("off", Filter={"Prefix": "off/"}, Status="Disabled"),
            rule("later", Filter={"Prefix": "later/"}, Expiration={"Days": 5000}),
        )
        put_keys(client, self.by_date, ("past/foo", "future/bar"))
        put_rules(
            client,
            self.by_date,
            rule("1", Prefix="past/", Expiration={"Date": dt.datetime(2015, 1, 1, tzinfo=dt.UTC)}),
            rule("2", Prefix="future/", Expiration={"Date": dt.datetime(2100, 1, 1, tzinfo=dt.UTC)}),
        )
        for bucket in (self.by_tag, self.by_two_tags):
            put_keys(client, bucket, ("days1/none",))
            client.put_object(Bucket=bucket, Key="days1/tom", Body=b"", Tagging="tom=sawyer")
            client.put_object(Bucket=bucket, Key="days1/huck", Body=b"", Tagging="tom=sawyer&huck=finn")
        tom, huck = ({"Key": name, "Value": value} for name, value in (("tom", "sawyer"), ("huck", "finn")))
        put_rules(client, self.by_tag, rule(Filter={"Tag": tom}))
        put_rules(client, self.by_two_tags, rule(Filter={"And": {"Prefix": "days1/", "Tags": [tom, huck]}}))
        for bucket, name in ((self.over_size, "ObjectSizeGreaterThan"), (self.under_size, "ObjectSizeLessThan")):
            for key, size in (("small", 1000), ("even", 2000), ("big", 3000)):
                client.put_object(Bucket=bucket, Key=key, Body=b"b" * size)
            put_rules(client, bucket, rule(Filter={name: 2000}))
        for key in ("test1/a", "test2/a"):
            client.create_multipart_upload(Bucket=self.uploads, Key=key)
        abort = {"DaysAfterInitiation": 2}
        put_rules(client, self.uploads, rule(Expiration=None, AbortIncompleteMultipartUpload=abort))
        put_keys(client, self.unversioned, ("test1/a",))
        put_rules(
            client,
            self.unversioned,
            rule("1", Expiration={"ExpiredObjectDeleteMarker": True}),
            rule("2", Expiration=None, NoncurrentVersionExpiration={"NoncurrentDays": 1}),
        )

    def wait_for(self, bucket: str, *keys: str) -> None:
        """Wait until the bucket holds these objects and no others."""

        def is_so() -> bool:
            return keys_of(self.client, bucket) == sorted(keys)

        wait_until(is_so, timeout_seconds=WAIT_SECONDS, what=f"{keys}", pause_seconds=0.1)


@pytest.fixture(scope="module")
def expiring(world: World) -> Expiring:
    return Expiring(world)


def test_objects_expire_by_age_and_others_stay(expiring: Expiring) -> None:
    expiring.wait_for(expiring.by_age, "keep2/a", "off/a", "later/a")


def test_objects_expire_by_date(expiring: Expiring) -> None:
    expiring.wait_for(expiring.by_date, "future/bar")


def test_objects_expire_by_a_tag(expiring: Expiring) -> None:
    expiring.wait_for(expiring.by_tag, "days1/none")


def test_objects_expire_by_all_of_several_tags(expiring: Expiring) -> None:
    expiring.wait_for(expiring.by_two_tags, "days1/none", "days1/tom")


def test_objects_expire_above_a_size(expiring: Expiring) -> None:
    expiring.wait_for(expiring.over_size, "small", "even")


def test_objects_expire_below_a_size(expiring: Expiring) -> None:
    expiring.wait_for(expiring.under_size, "big", "even")


def test_uploads_that_nobody_completes_are_ended(expiring: Expiring) -> None:
    def is_so() -> bool:
        listed = expiring.client.list_multipart_uploads(Bucket=expiring.uploads)
        return [row["Key"] for row in listed.get("Uploads", [])] == ["test2/a"]

    wait_until(is_so, timeout_seconds=WAIT_SECONDS, what="one upload", pause_seconds=0.1)


def test_rules_about_versions_do_nothing_where_there_are_none(expiring: Expiring) -> None:
    # Its rules have had their day by the time that those of the same moment have been kept.
    expiring.wait_for(expiring.by_age, "keep2/a", "off/a", "later/a")
    assert keys_of(expiring.client, expiring.unversioned) == ["test1/a"]


def test_an_object_that_expired_is_missing_and_can_be_written_again(expiring: Expiring) -> None:
    expiring.wait_for(expiring.by_date, "future/bar")
    with refused(404, "NoSuchKey"):
        expiring.client.get_object(Bucket=expiring.by_date, Key="past/foo")


# -- what replies tell -------------------------------------------------------------------------------------------------
def told_expiry(reply: dict[str, Any]) -> tuple[dt.timedelta, str]:
    """From now to when the object expires, and the rule that says so."""
    found = re.fullmatch(r'expiry-date="(.+)", rule-id="(.+)"', reply["Expiration"])
    assert found is not None
    at = dt.datetime.strptime(found[1], "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=dt.UTC)
    assert at.time() == dt.time()
    return at - dt.datetime.now(dt.UTC), found[2]


def test_replies_tell_when_an_object_expires(world: World, bucket: str) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "test1/foo"}
    put_rules(client, bucket, rule(Expiration={"Days": 10}))
    for reply in (client.put_object(**place, Body=b"bar"), client.head_object(**place), client.get_object(**place)):
        left, rule_id = told_expiry(reply)
        assert (left.days, rule_id) == (10, "rule1")
    assert "Expiration" not in client.put_object(Bucket=bucket, Key="else/foo", Body=b"bar")


@pytest.mark.parametrize(
    ("condition", "applies"),
    [
        ({"Tag": {"Key": "key1", "Value": "tag1"}}, True),
        ({"Tag": {"Key": "key2", "Value": "tag1"}}, False),
        ({"And": {"Tags": [{"Key": "key1", "Value": "tag1"}, {"Key": "key5", "Value": "tag6"}]}}, False),
        ({"And": {"Tags": [{"Key": "key1", "Value": "tag1"}, {"Key": "key5", "Value": "tag5"}]}}, True),
    ],
)
def test_replies_tell_of_rules_about_tags(
    world: World, bucket: str, condition: dict[str, Any], *, applies: bool
) -> None:
    client, place = world.main, {"Bucket": bucket, "Key": "obj_key1"}
    client.put_object(**place, Body=b"bar")
    tags = [{"Key": "key1", "Value": "tag1"}, {"Key": "key5", "Value": "tag5"}]
    client.put_object_tagging(**place, Tagging={"TagSet": tags})
    put_rules(client, bucket, rule(Filter=condition, Expiration={"Days": 10}))
    assert ("Expiration" in client.head_object(**place)) is applies


def test_an_upload_tells_when_it_is_ended(world: World, bucket: str) -> None:
    abort = {"DaysAfterInitiation": 10}
    put_rules(world.main, bucket, rule(Expiration=None, AbortIncompleteMultipartUpload=abort))
    begun = world.main.create_multipart_upload(Bucket=bucket, Key="test1/a")
    listed = world.main.list_parts(Bucket=bucket, Key="test1/a", UploadId=begun["UploadId"])
    for reply in (begun, listed):
        assert reply["AbortRuleId"] == "rule1"
        assert (reply["AbortDate"] - dt.datetime.now(dt.UTC)).days == 10
