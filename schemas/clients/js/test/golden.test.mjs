import assert from "node:assert/strict";
import test from "node:test";

import { decodeControl, decodeExperiences, decodeOutcome, decodeReference, encodeSubmission } from "../dist/index.js";
import { described, goldens, plain } from "./support/golden.mjs";

const EXPERIENCES = goldens("experiences", ".tmqx");
const CONTROL = goldens("control", ".msgpack");

test("there are golden bodies", () => {
  assert.ok(EXPERIENCES.length >= 10 && CONTROL.length >= 20, `${EXPERIENCES.length} and ${CONTROL.length}`);
});

for (const [name, body, wanted] of EXPERIENCES) {
  test(`experiences/${name}`, () => {
    const batch = decodeExperiences(body);
    assert.equal(batch.length, wanted.n);
    assert.deepEqual([...batch].map(described), wanted.experiences);
  });

  test(`experiences/${name} at any address`, () => {
    for (let shift = 0; shift < 8; shift++) {
      const buffer = Buffer.alloc(body.length + shift);
      body.copy(buffer, shift);
      assert.deepEqual([...decodeExperiences(buffer.subarray(shift))].map(described), wanted.experiences);
    }
  });
}

for (const [name, body, wanted] of CONTROL) {
  test(`control/${name}`, () => {
    assert.deepEqual(plain(decodeControl(body)), wanted);
  });
}

for (const [name, body, wanted] of CONTROL.filter(([name]) => name.startsWith("submission_outcome."))) {
  test(`the outcome in ${name}`, () => {
    const { kind, version_number, ...given } = wanted;
    const defaults = { completed_runs: 0, total_runs: 0, metrics: {}, message: null, experiences: 0 };
    assert.deepEqual(decodeOutcome(body), { ...defaults, ...given });
    assert.deepEqual(decodeOutcome(Buffer.from(JSON.stringify(wanted)), "application/json"), { ...defaults, ...given });
  });
}

for (const [name, body, wanted] of CONTROL.filter(([name]) => name.startsWith("experience_reference."))) {
  test(`the reference in ${name}`, () => {
    const { kind, version_number, ...given } = wanted;
    assert.deepEqual(decodeReference(body), { experiences: 1, ...given });
  });
}

for (const [name, , wanted] of CONTROL.filter(([name]) => name.startsWith("task_submission."))) {
  test(`what ${name} holds goes out and comes back`, () => {
    assert.deepEqual(plain(decodeControl(encodeSubmission(wanted))), wanted);
  });
}
