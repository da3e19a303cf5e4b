/**
 * Submit one task to a running trinity-mq, wait for what becomes of it, print that as JSON.
 *
 *   trinity-mq run examples/arithmetic.yaml            # in one terminal
 *   npm run build && node examples/submit.mjs --broker "$(cat runs/arithmetic/broker.url)" --run arithmetic \
 *     --task '{"raw_task": {"question": "+372=", "answer": "7"}}' --experiences
 */
import { parseArgs } from "node:util";

import { Client, toFloat32 } from "trinity-mq-client";

const { values } = parseArgs({
  options: {
    broker: { type: "string" },
    run: { type: "string" },
    task: { type: "string", default: '{"raw_task": {"question": "+372=", "answer": "7"}}' },
    id: { type: "string" },
    experiences: { type: "boolean", default: false },
    wait: { type: "string", default: "120" },
  },
});

function described(experience) {
  const { eid, reward, experience_type, prompt_length, info, tokens, logprobs } = experience;
  const numbers = logprobs && Array.from(toFloat32(logprobs));
  return { eid, reward, experience_type, prompt_length, info, tokens: Array.from(tokens.data), logprobs: numbers };
}

try {
  const client = await Client.connect(values.broker, values.run);
  try {
    const { outcome, experiences, references } = await client.submit(JSON.parse(values.task), {
      submissionId: values.id,
      wantExperiences: values.experiences,
      timeoutMs: 1000 * Number(values.wait),
    });
    const batches = experiences?.map((batch) => Array.from(batch, described));
    const text = (_, value) => (typeof value === "bigint" ? String(value) : value);
    console.log(JSON.stringify({ outcome, experiences: batches, references }, text));
  } finally {
    await client.close();
  }
} catch (error) {
  console.error(`${error.name}: ${error.message}`);
  process.exitCode = 1;
}
