import assert from "node:assert/strict";
import test from "node:test";

import { encode } from "@msgpack/msgpack";

import { DecodeError, decodeControl, decodeExperiences, decodeOutcome } from "../dist/index.js";
import { bodyOf, framed, packed, sample, sealed, storedZstd, tailOf } from "./support/body.mjs";
import { goldens } from "./support/golden.mjs";

const BODIES = goldens("experiences", ".tmqx").map(([name, body]) => [name, body]);
BODIES.push(["a stored zstd frame", Buffer.from(bodyOf(undefined, { zstd: storedZstd }))]);

/** Return whether `body` decodes; a DecodeError is the only other way out. */
function decodes(body) {
  try {
    for (const experience of decodeExperiences(body)) void experience;
    return true;
  } catch (error) {
    if (error instanceof DecodeError) return false;
    throw error;
  }
}

/** A generator of whole numbers below `limit`, the same in every run. */
function numbers(seed) {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

test("the samples decode", () => {
  const batch = decodeExperiences(bodyOf());
  assert.deepEqual(batch.reward, [0.5, null]);
  assert.deepEqual([...batch.at(1).tokens.data], [4, 5]);
  assert.deepEqual([...decodeExperiences(bodyOf(undefined, { zstd: storedZstd })).at(0).tokens.data], [1, 2, 3]);
});

for (const [name, body] of BODIES) {
  test(`${name}: cut short or longer anywhere, sealed or not`, () => {
    for (let size = 0; size < body.length; size++) {
      assert.equal(decodes(body.subarray(0, size)), false, `${size} bytes`);
      if (size >= 24) assert.equal(decodes(sealed(body.subarray(0, size))), false, `${size} bytes, sealed`);
    }
    assert.equal(decodes(Buffer.concat([body, Buffer.alloc(1)])), false);
  });

  test(`${name}: every single flipped bit is found by the checksum`, () => {
    for (let bit = 0; bit < 8 * body.length; bit++) {
      const flipped = Buffer.from(body);
      flipped[bit >> 3] ^= 1 << (bit & 7);
      assert.equal(decodes(flipped), false, `bit ${bit}`);
    }
  });

  test(`${name}: changed and sealed again, it decodes or is a DecodeError`, () => {
    const next = numbers(body.length);
    for (let round = 0; round < 3000; round++) {
      const changed = Buffer.from(body);
      for (let changes = 1 + next(4); changes > 0; changes--) {
        const at = 12 + next(body.length - 12);
        changed[at] = next(2) ? next(256) : changed[at] ^ (1 << next(8));
      }
      decodes(sealed(changed));
    }
  });
}

test("rubbish is a DecodeError", () => {
  const next = numbers(7);
  for (let round = 0; round < 2000; round++) {
    const head = Uint8Array.from({ length: next(60) }, () => next(256));
    const tail = Uint8Array.from({ length: next(60) }, () => next(256));
    assert.equal(decodes(framed(head, tail)), false);
    assert.equal(decodes(framed(head, tail, { zstd: (content) => content })), false);
  }
});

const { head: HEAD, tail: TAIL } = sample();
const lengths = (...values) => packed(Int32Array, ...values);
const rows = (...values) => packed(BigInt64Array, ...values);
const deep = (levels) => Buffer.concat([Buffer.alloc(levels, 0x91), Buffer.from([0xc0])]);
const infoOf = (document) => (parts) => {
  parts.head.columns.info = { d: document, l: lengths(document.length, -1) };
};

for (const [title, body, message] of [
  [
    "another magic",
    Buffer.concat([Buffer.from("TMQY"), bodyOf().subarray(4)]),
    /starts with 0x544d5159, wanted "TMQX"/,
  ],
  ["a later version", sealed(Buffer.from(bodyOf()).fill(2, 4, 5)), /version 2, this package reads version 1/],
  ["an unknown flag", sealed(Buffer.from(bodyOf()).fill(2, 5, 6)), /unknown flags 2/],
  ["a head longer than the body", sealed(Buffer.from(bodyOf()).fill(255, 12, 16)), /head of 4294967295/],
  ["a tail longer than any memory", sealed(Buffer.from(bodyOf()).fill(255, 16, 24)), /cut short/],
  ["a head that is a list", framed(encode([1]), tailOf([])), /the head is a list of 1, wanted a map/],
  ["a head without n", bodyOf(({ head }) => delete head.n), /wanted n, columns and tensors/],
  ["too many experiences", bodyOf(({ head }) => (head.n = 65537)), /claims 65537 experiences/],
  ["experiences without tokens", framed(encode({ ...HEAD, tensors: {} }), tailOf([])), /no tokens for 2/],
  ["a key twice in the head", framed(Buffer.from("82a16e00a16e00", "hex"), tailOf([])), /key "n" twice/],
  ["a key that is no text", framed(Buffer.from("810100", "hex"), tailOf([])), /has the key 1, wanted text/],
  ["a text that is not UTF-8", framed(Buffer.from("81a1ff00", "hex"), tailOf([])), /not UTF-8/],
  [
    "a list that claims too much",
    framed(Buffer.from("81a16edd7fffffff", "hex"), tailOf([])),
    /claims 2147483647 items/,
  ],
  ["deep nesting", bodyOf(infoOf(deep(65))), /nested deeper than 64/],
  [
    "too many lists",
    bodyOf(infoOf(Buffer.concat([Buffer.from("dd00040000", "hex"), Buffer.alloc(1 << 18, 0x90)]))),
    /262144 lists/,
  ],
  ["two documents in one", bodyOf(infoOf(Buffer.from("8080", "hex"))), /followed by more/],
  ["info that is a list", bodyOf(infoOf(Buffer.from("90", "hex"))), /info is a list of 0, wanted a map/],
  ["a key twice in info", bodyOf(infoOf(Buffer.from("82a16100a16100", "hex"))), /info: a map has the key "a" twice/],
  ["a tensor that is not there", bodyOf(infoOf(Buffer.from("81a161d60100000000", "hex"))), /refers to tensor 0 of 0/],
  [
    "a timestamp of more than a second",
    bodyOf(infoOf(Buffer.from("81a161d7ff" + "f".repeat(16), "hex"))),
    /wanted less than a second/,
  ],
  ["an unknown extension", bodyOf(infoOf(Buffer.from("81a161d40500", "hex"))), /extension 5 of 1 bytes/],
  [
    "a text column beyond its texts",
    bodyOf(({ head }) => (head.columns.taskset = { s: Buffer.from("a"), l: lengths(1), k: lengths(0, 1) })),
    /refers to text 1 of 1/,
  ],
  [
    "lengths beyond the texts",
    bodyOf(({ head }) => (head.columns.taskset = { s: Buffer.from("a"), l: lengths(1, 1) })),
    /2 bytes in all, wanted 1/,
  ],
  [
    "too few numbers",
    bodyOf(({ head }) => (head.columns.reward = { f: packed(Float64Array, 1) })),
    /reward: 1 values, wanted 2/,
  ],
  ["a missing id", bodyOf(({ head }) => delete head.columns["eid.task"]), /a part of its eid is missing/],
  [
    "an unknown type",
    bodyOf(({ head }) => (head.columns.experience_type = { c: "other" })),
    /experience_type is "other"/,
  ],
  [
    "a temperature below 0",
    bodyOf(({ head }) => (head.columns.temperature = { f: packed(Float64Array, 1, -1) })),
    /temperature is -1/,
  ],
  [
    "a prompt as long as all",
    bodyOf(({ head }) => (head.columns.prompt_length = { c: 3 })),
    /number of tokens is 3, wanted more/,
  ],
  [
    "versions that do not start at 0",
    bodyOf(({ head }) => (head.columns.versions = { i: rows(1n, 0n, 0n), l: lengths(1, -1) })),
    /row \(1, 0, 0\)/,
  ],
  [
    "versions left over",
    bodyOf(({ head }) => (head.columns.versions = { i: rows(0n, 0n, 0n), l: lengths(-1, -1) })),
    /leave 3 numbers/,
  ],
  [
    "lengths beyond the tensor",
    bodyOf(({ head }) => (head.tensors.tokens.lengths = lengths(3, 3))),
    /do not make up shape \[5\]/,
  ],
  ["a negative length", bodyOf(({ head }) => (head.tensors.tokens.lengths = lengths(7, -2))), /./],
  [
    "tokens of another type",
    bodyOf(({ tail }) => (tail[0] = ["tokens", "F32", [5], packed(Float32Array, 1, 2, 3, 4, 5)])),
    /float32 of shape \[5\]/,
  ],
  [
    "booleans of 2",
    bodyOf(({ tail }) => (tail[1] = ["action_mask", "BOOL", [3], Uint8Array.of(1, 2, 0)])),
    /other than 0 and 1/,
  ],
  [
    "an entry that only the tail has",
    bodyOf(({ tail }) => tail.push(["more", "U8", [0], new Uint8Array()])),
    /different tensors/,
  ],
  [
    "a second tensor for a field",
    bodyOf(({ head, tail }) => {
      head.tensors.again = { field: "tokens", lengths: lengths(1, -1) };
      tail.splice(1, 0, ["again", "I32", [1], packed(Int32Array, 1)]);
    }),
    /a second tensor/,
  ],
  ["a tail that is not JSON", framed(encode(HEAD), tailOf(TAIL, "{'tokens'")), /not JSON/],
  [
    "a name twice in the tail",
    framed(encode({ n: 0, columns: {}, tensors: {} }), tailOf([], '{"a":1,"\\u0061":1}')),
    /key "a" twice/,
  ],
  [
    "an offset in no tensor",
    framed(encode({ n: 0, columns: {}, tensors: {} }), Buffer.concat([tailOf([]), Buffer.alloc(8)])),
    /8 bytes belong to no tensor/,
  ],
  ["zstd that is none", framed(encode(HEAD), tailOf(TAIL), { zstd: (content) => content }), /no zstd frame/],
  [
    "zstd of another size",
    framed(encode(HEAD), tailOf(TAIL), { zstd: (content) => storedZstd(content.subarray(8)) }),
    /a zstd frame of \d+ bytes, wanted/,
  ],
  [
    "zstd that ends early",
    framed(encode(HEAD), tailOf(TAIL), { zstd: (content) => storedZstd(content).subarray(0, -9) }),
    /not one sound zstd frame/,
  ],
  [
    "zstd that claims to be far more",
    framed(Buffer.alloc(8 << 20), tailOf([]), { zstd: (content) => storedZstd(content).subarray(0, 100) }),
    /claim to be 83886\d\d, wanted at most/,
  ],
]) {
  test(`${title} says so`, () => {
    assert.throws(
      () => decodeExperiences(body),
      (error) => {
        assert.ok(error instanceof DecodeError, String(error.stack));
        assert.match(error.message, message);
        return true;
      },
    );
  });
}

test("what later versions may add is skipped", () => {
  const body = bodyOf(({ head, tail }) => {
    head.later = { list: [1, 2, { a: null }] };
    head.columns.later = { c: 1 };
    head.columns.also_later = "no column";
    head.tensors.later = { field: "later", lengths: lengths(1, 1) };
    tail.push(["later", "U8", [2], Uint8Array.of(1, 2)]);
  });
  assert.deepEqual(decodeExperiences(body).tensorFields, ["tokens", "action_mask"]);
});

test("names of JavaScript's own are names like any other", () => {
  const document = Buffer.from(encode({ constructor: 1, toString: 2 }));
  const proto = Buffer.concat([
    Buffer.from([0x81, 0xa9]),
    Buffer.from("__proto__"),
    Buffer.from([0x81, 0xa1, 0x61, 1]),
  ]);
  const body = bodyOf(({ head }) => {
    head.columns.info = { d: Buffer.concat([document, proto]), l: lengths(document.length, proto.length) };
  });
  const { info } = decodeExperiences(body);
  assert.equal(info[0].constructor, 1);
  assert.deepEqual(Object.keys(info[1]), ["__proto__"]);
  assert.equal({}.a, undefined);
});

test("control bodies", () => {
  for (const [body, type] of [
    [Buffer.from("c1", "hex")],
    [Buffer.from("90", "hex")],
    [Buffer.from("81a16b", "hex")],
    [Buffer.from("[1]"), "application/json"],
    [Buffer.from("{"), "application/json"],
    [Buffer.from([0xff]), "application/json"],
  ]) {
    assert.throws(() => decodeControl(body, type), DecodeError);
  }
  assert.throws(() => decodeOutcome(encode({ kind: "mark" })), /kind "mark", version 1, wanted submission_outcome/);
  assert.throws(() => decodeOutcome(encode({ version_number: 2 })), /version 2/);
  const wrong = { submission_id: "s", batch: 1, ticket: "t", outcome: "done" };
  assert.throws(() => decodeOutcome(encode(wrong)), /outcome is "done", wanted finished, partial/);
});
