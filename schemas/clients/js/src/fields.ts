/** Which fields an experience has and in which kind of column each travels. */
import type { Dtype } from "./tensors.js";

const TOKENS: readonly Dtype[] = ["int32"];
const FLOATS: readonly Dtype[] = ["float32", "bfloat16", "float16"];

/** Tensor fields: the element types they may have and the number of dimensions. */
export const TENSOR_FIELDS = {
  tokens: [TOKENS, 1],
  chosen: [TOKENS, 1],
  rejected: [TOKENS, 1],
  logprobs: [FLOATS, 1],
  token_level_reward: [FLOATS, 1],
  advantages: [FLOATS, 1],
  returns: [FLOATS, 1],
  teacher_logprobs: [FLOATS, 1],
  action_mask: [["bool"], 1],
  routed_experts: [["uint8"], 3],
} as const satisfies Record<string, readonly [readonly Dtype[], number]>;

export type TensorField = keyof typeof TENSOR_FIELDS;

export const TENSOR_FIELD_NAMES = Object.keys(TENSOR_FIELDS) as readonly TensorField[];

export function isTensorField(name: string): name is TensorField {
  return Object.hasOwn(TENSOR_FIELDS, name);
}

export const EXPERIENCE_TYPES = ["single_turn", "multi_turn", "dpo"] as const;
export type ExperienceType = (typeof EXPERIENCE_TYPES)[number];

export const TRUNCATE_STATUSES = ["prompt_truncated", "response_truncated"] as const;
export type TruncateStatus = (typeof TRUNCATE_STATUSES)[number];
