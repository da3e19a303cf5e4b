// An agent in Node that is trained through the gateway: OpenAI's client as it is, and a request that says what it was worth.
//
//   trinity-mq serve examples/serve.yaml
//   npm install openai && node examples/agents/openai_node.mjs --sessions 4000

import { parseArgs } from "node:util";
import OpenAI from "openai";

const AT_ONCE = 12; // more, and it asks faster than two cores can train
const { values } = parseArgs({
  options: {
    url: { type: "string", default: "http://127.0.0.1:8710" },
    sessions: { type: "string", default: "4000" },
  },
});

async function send(path, body) {
  const response = await fetch(values.url + path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response.json();
}

// Asks one question in a session of its own and returns what the answer was worth.
async function session() {
  const digits = Array.from({ length: 3 }, () => String(Math.floor(Math.random() * 10)));
  const right = digits.toSorted().at(-1);
  const made = await send("/sessions", {});
  const client = new OpenAI({ baseURL: made.base_url, apiKey: made.key });
  const answer = await client.chat.completions.create({
    model: "any",
    messages: [{ role: "user", content: `${digits.join(",")}=` }],
  });
  const said = answer.choices[0].message.content ?? "";
  const ended = answer.choices[0].finish_reason === "stop";
  const near = (said.startsWith(right) ? 0.4 : 0) + (ended && said.length === 1 ? 0.1 : 0);
  const worth = ended && said === right ? 1 : near;
  await send(`/s/${made.id}/end`, { reward: worth });
  return worth;
}

const rewards = [];
let left = Number(values.sessions);
async function work() {
  while (left-- > 0) {
    rewards.push(await session());
    if (rewards.length % 500 === 0) {
      const sum = rewards.slice(-500).reduce((total, one) => total + one, 0);
      console.log(`${rewards.length} sessions, reward of the last 500: ${(sum / 500).toFixed(3)}`);
    }
  }
}
await Promise.all(Array.from({ length: AT_ONCE }, work));
