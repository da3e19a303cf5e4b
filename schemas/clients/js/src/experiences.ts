/** Experience bodies (`application/vnd.trinity-mq.experiences`, version 1) to typed arrays. */
import { assemble, type Parts, type Tensors } from "./assemble.js";
import { TrinityMQError } from "./errors.js";
import { TENSOR_FIELD_NAMES, type TensorField } from "./fields.js";
import { openFrame } from "./frame.js";
import { put, unpack } from "./msgpack.js";
import type { Plain } from "./plain.js";
import { readTail } from "./tail.js";
import type { Tensor, TensorColumn } from "./tensors.js";

export type { VersionRow } from "./columns.js";
export { DecodeError } from "./errors.js";
export type { ExperienceType, TensorField, TruncateStatus } from "./fields.js";
export { type Int, Timestamp } from "./msgpack.js";
export type { CustomField, Document, Eid, Plain } from "./plain.js";
export { type Dtype, Tensor, TensorColumn, toFloat32, type TypedArray } from "./tensors.js";

export const CONTENT_TYPE = "application/vnd.trinity-mq.experiences";

/** The plain fields of one experience: as those of {@link Plain}, one value each. */
export type PlainFields = { readonly [Name in keyof Plain]: Plain[Name][number] };

/**
 * One sampled sequence. Names are those of the wire, so what is written of them for any language holds here; what is
 * absent is null (`info` and `metrics`: an empty map, `custom_fields`: an empty list).
 */
export interface Experience extends PlainFields {
  /** int32 `[sequence]`: prompt and response; for dpo the prompt. */
  readonly tokens: Tensor;
  readonly chosen: Tensor | null;
  readonly rejected: Tensor | null;
  readonly logprobs: Tensor | null;
  readonly token_level_reward: Tensor | null;
  readonly advantages: Tensor | null;
  readonly returns: Tensor | null;
  readonly teacher_logprobs: Tensor | null;
  /** bool `[response]`, 1 where a token is trained on. */
  readonly action_mask: Tensor | null;
  /** uint8 `[sequence - 1, layers, top-k]`. */
  readonly routed_experts: Tensor | null;
  readonly multi_modal_inputs: Readonly<Record<string, Tensor>> | null;
}

/** The plain columns are properties of the batch: `batch.reward`, `batch.eid`, ... */
export interface ExperienceBatch extends Plain {}

/**
 * The experiences of one body as columns.
 *
 * Plain fields are arrays with one value per experience, tensor fields are {@link TensorColumn}s. Typed arrays are
 * views into the body where it was sent uncompressed and lies at a multiple of 8 in its buffer, else into one copy;
 * changing one changes all views of the same bytes, and each keeps all of them alive.
 */
export class ExperienceBatch implements Iterable<Experience> {
  readonly length: number;
  /** Multi-modal inputs by name. */
  readonly multi_modal_inputs: Tensors;
  readonly #fields: Tensors;
  readonly #plain: Plain;

  /** Made by {@link decodeExperiences}. */
  constructor(parts: Parts) {
    this.length = parts.count;
    this.multi_modal_inputs = parts.multiModal;
    this.#fields = parts.fields;
    this.#plain = parts.plain;
    Object.assign(this, parts.plain);
  }

  /** The tensor fields that any experience here has. */
  get tensorFields(): TensorField[] {
    return TENSOR_FIELD_NAMES.filter((name) => this.#fields.has(name));
  }

  /**
   * A tensor field of all experiences, null if none has it.
   *
   * @throws TrinityMQError if it comes in several element types or shapes; {@link columns} gives one column for each
   */
  column(field: TensorField): TensorColumn | null {
    const parts = this.columns(field);
    if (parts.length > 1) {
      const kinds = parts.map((part) => [part.dtype, ...part.trailing].join(" x ")).join(", ");
      throw new TrinityMQError(`${field} comes as ${kinds} in this batch; use columns("${field}")`);
    }
    return parts[0] ?? null;
  }

  /** A tensor field of all experiences, one column for each element type and trailing shape in it. */
  columns(field: TensorField): readonly TensorColumn[] {
    return this.#fields.get(field) ?? [];
  }

  /** Experience `index`, from the end if negative. Its typed arrays are views. */
  at(index: number): Experience {
    const at = index < 0 ? index + this.length : index;
    if (!Number.isInteger(at) || at < 0 || at >= this.length) {
      throw new RangeError(`no experience ${index} in a batch of ${this.length}`);
    }
    const found: Record<string, unknown> = {};
    for (const [name, values] of Object.entries(this.#plain)) found[name] = values[at];
    for (const name of TENSOR_FIELD_NAMES) found[name] = tensorAt(this.columns(name), at);
    const inputs: Record<string, Tensor> = {};
    for (const [name, parts] of this.multi_modal_inputs) {
      const tensor = tensorAt(parts, at);
      if (tensor) put(inputs, name, tensor);
    }
    found.multi_modal_inputs = Object.keys(inputs).length > 0 ? inputs : null;
    return found as unknown as Experience;
  }

  *[Symbol.iterator](): IterableIterator<Experience> {
    for (let index = 0; index < this.length; index++) yield this.at(index);
  }
}

function tensorAt(parts: readonly TensorColumn[], index: number): Tensor | null {
  return parts.find((part) => part.has(index))?.at(index) ?? null;
}

/**
 * Return the experiences in a body.
 *
 * @throws DecodeError if `body` is anything else than exactly one whole, undamaged experience body
 */
export function decodeExperiences(body: Uint8Array): ExperienceBatch {
  // A Buffer is a Uint8Array whose slice() is no copy: from here on there is only the plain kind.
  const { head, tail } = openFrame(new Uint8Array(body.buffer, body.byteOffset, body.byteLength));
  return new ExperienceBatch(assemble(unpack(head), readTail(tail)));
}
