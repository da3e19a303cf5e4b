import assert from "node:assert/strict";
import test from "node:test";

import { encode } from "@msgpack/msgpack";

import { crc32c } from "../dist/crc32c.js";
import { Client, ConnectionError, decodeExperiences, DecodeError, toFloat32, TrinityMQError } from "../dist/index.js";
import { Submission } from "../dist/submission.js";
import { bodyOf, packed, storedZstd } from "./support/body.mjs";

test("CRC-32C, of known values and in any piece size", () => {
  assert.equal(crc32c(Buffer.from("123456789")), 0xe3069283);
  assert.equal(crc32c(Buffer.alloc(32)), 0x8a9136aa); // RFC 3720, appendix B.4
  assert.equal(crc32c(Buffer.alloc(32, 0xff)), 0x62a8ab43);
  assert.equal(crc32c(Uint8Array.from({ length: 32 }, (_, index) => index)), 0x46dd794e);
});

test("typed arrays are views where the body allows it", () => {
  const body = bodyOf();
  assert.equal(decodeExperiences(body).column("tokens").data.buffer, body.buffer);
  const shifted = Buffer.alloc(body.length + 1);
  shifted.set(body, 1);
  const { data } = decodeExperiences(shifted.subarray(1)).column("tokens");
  assert.notEqual(data.buffer, shifted.buffer);
  assert.deepEqual([...data], [1, 2, 3, 4, 5]);
});

test("columns and experiences are the same values", () => {
  const batch = decodeExperiences(bodyOf(undefined, { zstd: storedZstd }));
  const tokens = batch.column("tokens");
  assert.equal(tokens.dtype, "int32");
  assert.deepEqual([...tokens.lengths], [3, 2]);
  assert.deepEqual([...tokens.offsets], [0, 3, 5]);
  assert.equal(batch.at(-1).tokens.data.buffer, tokens.data.buffer);
  assert.deepEqual(
    [...batch].map((experience) => experience.eid.suffix),
    ["a", "b"],
  );
  assert.equal(batch.column("logprobs"), null);
  assert.equal(batch.at(0).logprobs, null);
  for (const index of [2, -3, 0.5]) assert.throws(() => batch.at(index), RangeError);
});

test("a field of two types is two columns", () => {
  const lengths = (...values) => packed(Int32Array, ...values);
  const batch = decodeExperiences(
    bodyOf(({ head, tail }) => {
      head.tensors.logprobs = { field: "logprobs", lengths: lengths(2, -1) };
      head.tensors["logprobs#1"] = { field: "logprobs", lengths: lengths(-1, 1) };
      tail.splice(1, 0, ["logprobs", "F32", [2], packed(Float32Array, -1, -2)]);
      tail.splice(2, 0, ["logprobs#1", "BF16", [1], packed(Uint16Array, 0xbf80)]);
    }),
  );
  assert.throws(
    () => batch.column("logprobs"),
    (error) => error instanceof TrinityMQError && /float32, bfloat16/.test(error.message),
  );
  assert.deepEqual(
    batch.columns("logprobs").map(({ dtype }) => dtype),
    ["float32", "bfloat16"],
  );
  assert.deepEqual([...toFloat32(batch.at(0).logprobs)], [-1, -2]);
  assert.deepEqual([...toFloat32(batch.at(1).logprobs)], [-1]);
});

test("small floats", () => {
  const f16 = (...bits) => [...toFloat32({ dtype: "float16", data: Uint16Array.from(bits) })];
  assert.deepEqual(f16(0x3c00, 0xc000, 0x7bff, 0x0001, 0x8000, 0x7c00, 0xfc00, 0x7e00), [
    1,
    -2,
    65504,
    2 ** -24,
    -0,
    Infinity,
    -Infinity,
    NaN,
  ]);
  const e4m3 = (...bits) => [...toFloat32({ dtype: "float8_e4m3fn", data: Uint8Array.from(bits) })];
  assert.deepEqual(e4m3(0x38, 0x7e, 0xfe, 0x7f, 0x01), [1, 448, -448, NaN, 2 ** -9]);
  const e5m2 = (...bits) => [...toFloat32({ dtype: "float8_e5m2", data: Uint8Array.from(bits) })];
  assert.deepEqual(e5m2(0x3c, 0x7b, 0xfc, 0x7d, 0x01), [1, 57344, -Infinity, NaN, 2 ** -16]);
  assert.deepEqual([...toFloat32({ dtype: "int64", data: BigInt64Array.of(-3n) })], [-3]);
  assert.deepEqual([...toFloat32({ dtype: "bool", data: Uint8Array.of(1, 0) })], [1, 0]);
  const same = Float32Array.of(1);
  assert.equal(toFloat32({ dtype: "float32", data: same }), same);
});

const EXPERIENCES = "application/vnd.trinity-mq.experiences";
const REFERENCE = "application/vnd.trinity-mq.reference";
const OUTCOME = { submission_id: "s", batch: 1, ticket: "t", outcome: "finished" };
const outcome = (more = {}) => ({ body: encode({ ...OUTCOME, ...more }), contentType: "application/msgpack" });
const part = (attempt, number) => ({
  body: bodyOf(({ head }) => (head.columns["eid.batch"] = { c: `${attempt}-${number}` })),
  contentType: EXPERIENCES,
  messageId: `wanted-${attempt}-${number}`,
  attempt,
  part: number,
});
const batches = ({ experiences }) => experiences.map((batch) => batch.eid[0].batch);

test("parts may come before the outcome, in any order and twice", async () => {
  const submission = new Submission("s", true);
  for (const answer of [part("b", 1), part("b", 1), part("a", 0), outcome({ experiences: 3 }), outcome(), part("b", 1)])
    submission.take(answer);
  assert.match(submission.missing, /finished, has come with 2 of 3/);
  submission.take(part("b", 0));
  assert.deepEqual(batches(await submission.result), ["b-0", "b-1", "a-0"]);
});

test("no parts are waited for where none are sent or none are wanted", async () => {
  const wanting = new Submission("s", true);
  wanting.take(outcome({ outcome: "failed", message: "no" }));
  assert.deepEqual(await wanting.result, {
    outcome: { ...(await wanting.result).outcome, message: "no" },
    experiences: [],
    references: [],
  });
  const other = new Submission("s", false);
  other.take(outcome({ experiences: 3 }));
  assert.equal((await other.result).experiences, undefined);
});

test("a part too large for a message comes as a reference", async () => {
  const submission = new Submission("s", true);
  submission.take(outcome({ experiences: 2 }));
  submission.take(part("a", 0));
  const body = encode({
    kind: "experience_reference",
    version_number: 1,
    url: "s3://b/x",
    bytes: 9,
    sha256: "0".repeat(64),
  });
  submission.take({ body, contentType: REFERENCE, messageId: "wanted-a-1", attempt: "a", part: 1 });
  const result = await submission.result;
  assert.deepEqual(batches(result), ["a-0"]);
  assert.deepEqual(result.references, [{ url: "s3://b/x", bytes: 9, sha256: "0".repeat(64), experiences: 1 }]);
});

test("an answer that does not decode fails the submission", async () => {
  for (const answer of [
    { ...part("a", 0), body: bodyOf().subarray(1) },
    { body: Buffer.from("no"), contentType: "application/json" },
  ]) {
    const submission = new Submission("s7", true);
    submission.take(answer);
    await assert.rejects(
      submission.result,
      (error) => error instanceof DecodeError && /submission s7 does not decode/.test(error.message),
    );
  }
});

test("a broker that cannot be reached, an address or a run name that is none", async () => {
  await assert.rejects(Client.connect("amqp://u:s3cr3t@127.0.0.1:1/%2F", "r"), (error) => {
    assert.ok(error instanceof ConnectionError);
    assert.match(error.message, /broker 127\.0\.0\.1:1: .*ECONNREFUSED/);
    assert.doesNotMatch(error.message, /s3cr3t/);
    return true;
  });
  await assert.rejects(Client.connect("broker", "r"), /no URL, wanted amqp:\/\//);
  await assert.rejects(Client.connect("http://broker", "r"), /starts with http:, wanted amqp/);
  await assert.rejects(Client.connect("amqp://broker", "My Run"), /run name "My Run", wanted 1 to 40/);
});
