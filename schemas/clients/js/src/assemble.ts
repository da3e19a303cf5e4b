/** Head and tail of a body to the columns of a batch. */
import { unpackInt32 } from "./columns.js";
import { DecodeError, short } from "./errors.js";
import { isTensorField, TENSOR_FIELDS, type TensorField } from "./fields.js";
import type { Extension } from "./msgpack.js";
import { isMap, type MapValue, type Plain, PlainReader } from "./plain.js";
import { check } from "./rules.js";
import { column, Tensor, type TensorColumn } from "./tensors.js";

export const MAX_EXPERIENCES = 1 << 16;

const DOCUMENT_TENSOR = 1;
const DOCUMENT_ARRAY = 2;

export type Tensors = ReadonlyMap<string, readonly TensorColumn[]>;

export interface Parts {
  readonly count: number;
  readonly plain: Plain;
  readonly fields: Tensors;
  readonly multiModal: Tensors;
}

/** Return what a head and a tail describe, checked. Head keys, columns and tensor fields not known here are skipped. */
export function assemble(head: unknown, tail: ReadonlyMap<string, Tensor>): Parts {
  if (!isMap(head)) throw new DecodeError(`the head is ${short(head)}, wanted a map`);
  const { n: count, columns, tensors } = head;
  if (typeof count !== "number" || !Number.isSafeInteger(count) || !isMap(columns) || !isMap(tensors)) {
    throw new DecodeError(`the head is ${short(head)}, wanted n, columns and tensors`);
  }
  if (count < 0 || count > MAX_EXPERIENCES) {
    throw new DecodeError(`the head claims ${count} experiences, wanted at most ${MAX_EXPERIENCES}`);
  }
  const found = sort(tensors, tail, count);
  // Every experience has tokens: this also bounds what a short body can claim in constant columns.
  if (count > 0 && !found.fields.has("tokens")) throw new DecodeError(`no tokens for ${count} experiences`);
  const plain = new PlainReader(columns, count, documentTensors(found.documents)).read();
  checkAll(plain, found.fields, count);
  return { count, plain, fields: found.fields, multiModal: found.multiModal };
}

interface Sorted {
  readonly fields: Map<string, TensorColumn[]>;
  readonly multiModal: Map<string, TensorColumn[]>;
  readonly documents: TensorColumn[];
}

/** Cut the tensors of the tail into columns, by the field that the head says they belong to. */
function sort(entries: MapValue, tail: ReadonlyMap<string, Tensor>, count: number): Sorted {
  const names = Object.keys(entries);
  if (names.length !== tail.size || names.some((name) => !tail.has(name))) {
    throw new DecodeError(`head and tail name different tensors: ${short(names)}, ${short([...tail.keys()])}`);
  }
  const sorted: Sorted = { fields: new Map(), multiModal: new Map(), documents: [] };
  for (const [name, flat] of tail) {
    const entry = entries[name];
    if (!isMap(entry) || typeof entry.field !== "string") {
      throw new DecodeError(`tensors: entry ${short(name)} is ${short(entry)}, wanted field and lengths`);
    }
    const { field, key, scalar } = entry;
    const cut = (items: number | null) =>
      column(
        `tensors: ${short(name)}`,
        flat,
        unpackInt32(entry.lengths, items, `lengths of ${short(name)}`),
        Boolean(scalar),
      );
    if (field === "documents") {
      add(sorted.documents, cut(sorted.documents.length > 0 ? sorted.documents[0].lengths.length : null), name);
    } else if (field === "multi_modal_inputs") {
      if (typeof key !== "string")
        throw new DecodeError(`tensors: ${short(name)} has the key ${short(key)}, wanted text`);
      add(listOf(sorted.multiModal, key), cut(count), name);
    } else if (isTensorField(field)) {
      const [dtypes, dimensions] = TENSOR_FIELDS[field];
      if (!(dtypes as readonly string[]).includes(flat.dtype) || flat.shape.length !== dimensions || scalar) {
        throw new DecodeError(
          `tensors: ${short(name)} is ${flat.dtype} of shape [${flat.shape.join(", ")}], ` +
            `wanted ${dtypes.join(" or ")} of ${dimensions} dimensions`,
        );
      }
      add(listOf(sorted.fields, field), cut(count), name);
    }
  }
  return sorted;
}

function listOf(columns: Map<string, TensorColumn[]>, key: string): TensorColumn[] {
  const list = columns.get(key) ?? [];
  columns.set(key, list);
  return list;
}

function add(known: TensorColumn[], more: TensorColumn, name: string): void {
  for (const other of known) {
    if (more.lengths.some((length, index) => length >= 0 && other.has(index))) {
      throw new DecodeError(`tensors: ${short(name)} gives an experience a second tensor for the same field`);
    }
  }
  known.push(more);
}

/** Return what turns the extension types of documents into tensors. */
function documentTensors(columns: readonly TensorColumn[]): Extension {
  const count = columns.length > 0 ? columns[0].lengths.length : 0;
  for (let number = 0; number < count; number++) {
    if (!columns.some((part) => part.has(number)))
      throw new DecodeError(`tensor ${number} of the documents is missing`);
  }
  return (code, payload) => {
    if ((code !== DOCUMENT_TENSOR && code !== DOCUMENT_ARRAY) || payload.length !== 4) {
      throw new DecodeError(`unknown msgpack extension ${code} of ${payload.length} bytes`);
    }
    const number = new DataView(payload.buffer, payload.byteOffset, 4).getUint32(0, true);
    const tensor = columns.find((part) => number < count && part.has(number))?.at(number);
    if (!tensor) throw new DecodeError(`a document refers to tensor ${number} of ${count}`);
    return code === DOCUMENT_TENSOR ? tensor : new Tensor(tensor.dtype, tensor.shape, tensor.data, "numpy");
  };
}

function checkAll(plain: Plain, fields: Tensors, count: number): void {
  for (let index = 0; index < count; index++) {
    const heat = plain.temperature[index];
    if (heat !== null && !(Number.isFinite(heat) && heat >= 0)) {
      throw new DecodeError(`experience ${index}: temperature is ${heat}, wanted a finite number of at least 0`);
    }
    check({
      index,
      type: plain.experience_type[index],
      truncateStatus: plain.truncate_status[index],
      promptLength: plain.prompt_length[index],
      versions: plain.versions[index],
      rows: (field: TensorField) => fields.get(field)?.find((part) => part.has(index))?.lengths[index] ?? -1,
    });
  }
}
