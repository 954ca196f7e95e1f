"""The shortest way through: a bucket, an object, a listing, a deletion."""

from s3_driver import Driver


async def test_an_object_is_put_read_listed_and_deleted() -> None:
    driver = Driver()
    assert (await driver.put("/bucket", b"")).status == 200
    put = await driver.put("/bucket/a%20key", b"some bytes", x_amz_meta_colour="red")
    assert (put.status, put.headers["etag"]) == (200, '"9d0568469d206c1aedf1b71f12f474bc"'), put.body
    got = await driver.get("/bucket/a%20key")
    assert (got.status, got.body) == (200, b"some bytes")
    assert got.headers["x-amz-meta-colour"] == "red"
    listed = await driver.get("/bucket?list-type=2")
    assert listed.texts("Contents/Key") == ["a key"]
    assert (await driver.request("DELETE", "/bucket/a%20key")).status == 204
    assert (await driver.get("/bucket/a%20key")).status == 404
