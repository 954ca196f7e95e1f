// The AWS SDK for JavaScript: objects and streams, an upload in parts, listings by page, deletions of many, presigned URLs.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createRequire } from "node:module";
import { Readable } from "node:stream";

const require = createRequire(`${process.env.KVOBJ_NODE_ENVIRONMENT}/`);
const {
  S3Client,
  CopyObjectCommand,
  CreateBucketCommand,
  DeleteBucketCommand,
  DeleteObjectCommand,
  DeleteObjectsCommand,
  GetObjectCommand,
  HeadObjectCommand,
  ListBucketsCommand,
  PutObjectCommand,
  NoSuchKey,
  NotFound,
  S3ServiceException,
  paginateListObjectsV2,
  waitUntilObjectExists,
} = require("@aws-sdk/client-s3");
const { Upload } = require("@aws-sdk/lib-storage");
const { getSignedUrl } = require("@aws-sdk/s3-request-presigner");

const MIB = 1024 * 1024;
const PART_BYTES = 5 * MIB;
const NAMES = [
  "plain.bin",
  "with space and + plus.bin",
  "ünïcödé/ключ/鍵/🔑.bin",
  "percent%2Fslash%20.bin",
  "quote'(!)*;=&$@,~^[].bin",
];
const Bucket = process.env.KVOBJ_BUCKET;
const prefix = `${process.env.KVOBJ_PREFIX}/`;
const client = new S3Client({
  endpoint: `http://${process.env.KVOBJ_HOST}`,
  region: process.env.AWS_DEFAULT_REGION,
  forcePathStyle: process.env.KVOBJ_ADDRESSING !== "virtual",
  credentials: { accessKeyId: process.env.AWS_ACCESS_KEY_ID, secretAccessKey: process.env.AWS_SECRET_ACCESS_KEY },
});

// Bytes that look random and are the same each time.
function bodyOf(size, seed = 1) {
  const blocks = [];
  for (let number = 0; number * 64 < size; number++) {
    blocks.push(createHash("sha512").update(`${seed}:${number}`).digest());
  }
  return Buffer.concat(blocks).subarray(0, size);
}

async function read(Key, more = {}) {
  const reply = await client.send(new GetObjectCommand({ Bucket, Key: prefix + Key, ...more }));
  return Buffer.from(await reply.Body.transformToByteArray());
}

async function listed() {
  const keys = [];
  for await (const page of paginateListObjectsV2({ client, pageSize: 3 }, { Bucket, Prefix: prefix })) {
    keys.push(...(page.Contents ?? []).map((item) => item.Key.slice(prefix.length)));
  }
  return keys;
}

for (const [seed, name] of NAMES.entries()) {
  const body = bodyOf([0, 1, 65_537, 3 * MIB + 17][seed % 4], seed);
  const Metadata = { number: String(seed) };
  await client.send(new PutObjectCommand({ Bucket, Key: prefix + name, Body: body, Metadata, ContentType: "text/plain" }));
  assert.ok((await read(name)).equals(body), name);
  const head = await client.send(new HeadObjectCommand({ Bucket, Key: prefix + name, ChecksumMode: "ENABLED" }));
  assert.deepEqual([head.ContentLength, head.ContentType, head.Metadata], [body.length, "text/plain", Metadata]);
  assert.ok(head.ChecksumCRC32, "the SDK sends a CRC32 by default");
}
assert.deepEqual((await listed()).sort(), [...NAMES].sort());

// A stream of known length, then one of unknown length in parts.
const body = bodyOf(3 * PART_BYTES + 77, 7);
const pieces = () => Readable.from(Array.from({ length: Math.ceil(body.length / MIB) }, (_, i) => body.subarray(i * MIB, (i + 1) * MIB)), { objectMode: false });
await client.send(new PutObjectCommand({ Bucket, Key: `${prefix}streamed`, Body: pieces(), ContentLength: body.length }));
assert.ok((await read("streamed")).equals(body));
for (const ChecksumAlgorithm of ["CRC32", "CRC64NVME", "SHA256"]) {
  const Key = `${prefix}uploaded ${ChecksumAlgorithm}`;
  const upload = new Upload({
    client,
    params: { Bucket, Key, Body: pieces(), ChecksumAlgorithm, Metadata: { colour: "blue" } },
    partSize: PART_BYTES,
    queueSize: 3,
  });
  const done = await upload.done();
  assert.match(done.ETag, /-4"$/);
  const reply = await client.send(new GetObjectCommand({ Bucket, Key, ChecksumMode: "ENABLED" }));
  assert.equal(reply.Metadata.colour, "blue");
  assert.ok(Buffer.from(await reply.Body.transformToByteArray()).equals(body));
}
assert.ok((await read("streamed", { Range: `bytes=${PART_BYTES - 5}-${PART_BYTES + 4}` })).equals(body.subarray(PART_BYTES - 5, PART_BYTES + 5)));
assert.ok((await read("uploaded CRC32", { PartNumber: 4 })).equals(body.subarray(3 * PART_BYTES)));

// Conditions, copies, errors that are told apart by their class.
await assert.rejects(
  client.send(new PutObjectCommand({ Bucket, Key: `${prefix}streamed`, Body: "second", IfNoneMatch: "*" })),
  (error) => error instanceof S3ServiceException && error.name === "PreconditionFailed" && error.$metadata.httpStatusCode === 412,
);
await client.send(new CopyObjectCommand({ Bucket, Key: `${prefix}copied`, CopySource: encodeURI(`${Bucket}/${prefix}streamed`) }));
await waitUntilObjectExists({ client, maxWaitTime: 10 }, { Bucket, Key: `${prefix}copied` });
assert.ok((await read("copied")).equals(body));
await assert.rejects(read("absent"), (error) => error instanceof NoSuchKey);
await assert.rejects(client.send(new HeadObjectCommand({ Bucket, Key: `${prefix}absent` })), (error) => error instanceof NotFound);

// URLs that anybody may use for a while.
const place = { Bucket, Key: `${prefix}by url + ü` };
const put = await fetch(await getSignedUrl(client, new PutObjectCommand(place), { expiresIn: 60 }), { method: "PUT", body: "put" });
assert.equal(put.status, 200, await put.text());
const got = await fetch(await getSignedUrl(client, new GetObjectCommand(place), { expiresIn: 60 }));
assert.deepEqual([got.status, await got.text()], [200, "put"]);

await client.send(new DeleteObjectCommand(place));
const rest = await listed();
assert.equal(rest.length, NAMES.length + 5);
const Objects = rest.map((name) => ({ Key: prefix + name }));
const gone = await client.send(new DeleteObjectsCommand({ Bucket, Delete: { Objects } }));
assert.deepEqual([gone.Deleted.length, gone.Errors], [rest.length, undefined]);
assert.deepEqual(await listed(), []);
await client.send(new CreateBucketCommand({ Bucket: "made-by-javascript" }));
assert.ok((await client.send(new ListBucketsCommand({}))).Buckets.some((bucket) => bucket.Name === "made-by-javascript"));
await client.send(new DeleteBucketCommand({ Bucket: "made-by-javascript" }));
client.destroy();
console.log(JSON.stringify({ "@aws-sdk/client-s3": require("@aws-sdk/client-s3/package.json").version, node: process.versions.node }));
