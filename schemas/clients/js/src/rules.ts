/** The rules that tie the fields of an experience together: who reads a body may rely on them. */
import type { VersionRow } from "./columns.js";
import { DecodeError, short } from "./errors.js";
import type { TensorField } from "./fields.js";

/** Fields with one value per response token. */
const RESPONSE_FIELDS = [
  "logprobs",
  "action_mask",
  "token_level_reward",
  "advantages",
  "returns",
  "teacher_logprobs",
] as const satisfies readonly TensorField[];

export interface Facts {
  readonly index: number;
  readonly type: string;
  readonly truncateStatus: string | null;
  readonly promptLength: number;
  readonly versions: readonly VersionRow[] | null;
  /** Rows of a tensor field, -1 where it is absent. */
  readonly rows: (field: TensorField) => number;
}

/** Check one experience. */
export function check(facts: Facts): void {
  const { index, promptLength, rows, type } = facts;
  const tokens = rows("tokens");
  const refuse = (field: string, seen: unknown, wanted: string): never => {
    throw new DecodeError(`experience ${index}, ${type}: ${field} is ${short(seen)}, wanted ${wanted}`);
  };
  if (promptLength < 1) refuse("prompt_length", promptLength, "at least 1");
  if (tokens < 1) refuse("the number of tokens", tokens, "at least 1");
  if (rows("routed_experts") >= 0 && rows("routed_experts") !== tokens - 1) {
    refuse("the number of rows of routed_experts", rows("routed_experts"), `one less than tokens, ${tokens - 1}`);
  }
  let response = -1;
  if (type === "dpo") {
    if (promptLength !== tokens) refuse("prompt_length", promptLength, `the number of tokens, ${tokens}`);
    if (rows("chosen") < 1) refuse("the length of chosen", rows("chosen"), "at least 1");
    if (rows("rejected") < 1) refuse("the length of rejected", rows("rejected"), "at least 1");
  } else {
    response = facts.truncateStatus === "prompt_truncated" ? rows("action_mask") : tokens - promptLength;
    if (rows("action_mask") < 0) refuse("action_mask", null, "one value per response token");
    if (facts.truncateStatus !== "prompt_truncated" && response < 1) {
      refuse("the number of tokens", tokens, `more than prompt_length, ${promptLength}`);
    }
  }
  for (const field of RESPONSE_FIELDS) {
    if (rows(field) < 0 || rows(field) === response) continue;
    refuse(`the length of ${field}`, rows(field), type === "dpo" ? "none: there are two responses" : String(response));
  }
  checkVersions(facts, response);
}

function checkVersions({ index, type, versions }: Facts, response: number): void {
  let previous: number | bigint = -1;
  for (const [first, generation, step] of versions ?? []) {
    const isOutside = type !== "dpo" && first >= Math.max(response, 1);
    if ((previous === -1 && first !== 0) || first <= previous || isOutside || generation < 0 || step < 0) {
      throw new DecodeError(
        `experience ${index}: versions has the row (${first}, ${generation}, ${step}) after one from ${previous}, ` +
          "wanted the first row at 0, rising starts inside the response, generation and step of at least 0",
      );
    }
    previous = first;
  }
}
