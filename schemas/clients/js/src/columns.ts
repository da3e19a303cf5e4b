/** Columns of numbers, texts and documents in the head of an experience body. */
import { DecodeError, short } from "./errors.js";
import { Budget, decodeUtf8, type Extension, type Int, toInt, unpack } from "./msgpack.js";

/** A column as the head has it; which keys there are says how its values are packed. */
export type Column = Readonly<Record<string, unknown>>;

/** Row of {@link unpackVersions}: first token in the response, generation, step. */
export type VersionRow = [first: Int, generation: Int, step: Int];

function packed(data: unknown, width: number, count: number | null, name: string): ArrayBuffer {
  if (!(data instanceof Uint8Array) || data.length % width !== 0) {
    throw new DecodeError(`${name}: ${short(data)}, wanted packed values of ${width} bytes`);
  }
  if (count !== null && data.length !== count * width) {
    throw new DecodeError(`${name}: ${data.length / width} values, wanted ${count}`);
  }
  // A copy: arrays in the head lie at any address.
  return new Uint8Array(data).buffer;
}

/** Return packed int32 values, `count` of them or for null any number. */
export function unpackInt32(data: unknown, count: number | null, name: string): Int32Array {
  return new Int32Array(packed(data, 4, count, name));
}

function unpackInt64(data: unknown, count: number | null, name: string): Int[] {
  return Array.from(new BigInt64Array(packed(data, 8, count, name)), toInt);
}

function absent<T>(values: T[], flags: unknown, name: string): (T | null)[] {
  if (flags === undefined) return values;
  const gone = new Uint8Array(packed(flags, 1, values.length, name));
  return values.map((value, index) => (gone[index] ? null : value));
}

/** Return a column of whole numbers. */
export function unpackInts(column: Column, count: number, name: string): (Int | null)[] {
  if ("c" in column) {
    const { c } = column;
    if (typeof c !== "bigint" && !Number.isSafeInteger(c)) {
      throw new DecodeError(`${name}: the constant is ${short(c)}, wanted a whole number`);
    }
    return new Array(count).fill(c);
  }
  return absent(unpackInt64(column.i, count, name), column.n, name);
}

/** Return a column of numbers. */
export function unpackFloats(column: Column, count: number, name: string): (number | null)[] {
  return absent(Array.from(new Float64Array(packed(column.f, 8, count, name))), column.n, name);
}

/** Return the byte strings that lie in a row under `key`, null where the length is -1. */
function parts(column: Column, key: string, count: number | null, name: string): (Uint8Array | null)[] {
  const data = column[key];
  if (!(data instanceof Uint8Array)) throw new DecodeError(`${name}: ${short(data)}, wanted bytes in a row`);
  let end = 0;
  const result = Array.from(unpackInt32(column.l, count, name), (length) => {
    if (length < -1) throw new DecodeError(`${name}: a length of ${length}, wanted 0 or more, -1 for none`);
    const start = end;
    end += Math.max(length, 0);
    return length < 0 ? null : data.subarray(start, end);
  });
  if (end !== data.length) throw new DecodeError(`${name}: lengths of ${end} bytes in all, wanted ${data.length}`);
  return result;
}

/** Return a column of texts. */
export function unpackTexts(column: Column, count: number, name: string): (string | null)[] {
  if ("c" in column) {
    if (typeof column.c !== "string") throw new DecodeError(`${name}: the constant is ${short(column.c)}, wanted text`);
    return new Array(count).fill(column.c);
  }
  const coded = column.k !== undefined;
  const texts = parts(column, "s", coded ? null : count, name).map((part) => part && decodeUtf8(part, name));
  if (!coded) return texts;
  return Array.from(unpackInt32(column.k, count, name), (code) => {
    if (code < -1 || code >= texts.length) throw new DecodeError(`${name}: refers to text ${code} of ${texts.length}`);
    return code < 0 ? null : texts[code];
  });
}

/** Return a column of free-form values, null where absent. */
export function unpackDocuments(
  column: Column,
  count: number,
  name: string,
  budget: Budget,
  extension?: Extension,
): unknown[] {
  const documents = parts(column, "d", count, name);
  try {
    return documents.map((part) => (part === null ? null : unpack(part, budget, extension)));
  } catch (error) {
    throw error instanceof DecodeError ? new DecodeError(`${name}: ${error.message}`, { cause: error }) : error;
  }
}

/** Return a column of ids that are each a whole number or a text. */
export function unpackIds(column: Column, count: number, name: string): (Int | string | null)[] {
  if ("d" in column) {
    const values = unpackDocuments(column, count, name, new Budget());
    const wrong = values.find(
      (value) => typeof value !== "string" && typeof value !== "bigint" && !Number.isSafeInteger(value),
    );
    if (wrong !== undefined) throw new DecodeError(`${name} holds ${short(wrong)}, wanted whole numbers and texts`);
    return values as (Int | string)[];
  }
  return "s" in column || typeof column.c === "string"
    ? unpackTexts(column, count, name)
    : unpackInts(column, count, name);
}

/** Return a column of run-length columns of policy versions. */
export function unpackVersions(column: Column, count: number, name: string): (VersionRow[] | null)[] {
  const lengths = unpackInt32(column.l, count, name);
  const flat = unpackInt64(column.i, null, name);
  let at = 0;
  const result = Array.from(lengths, (length) => {
    if (length < -1 || 3 * length > flat.length - at) {
      throw new DecodeError(`${name}: a length of ${length} where ${flat.length - at} numbers are left`);
    }
    if (length < 0) return null;
    const rows: VersionRow[] = [];
    for (let row = 0; row < length; row++, at += 3) rows.push([flat[at], flat[at + 1], flat[at + 2]]);
    return rows;
  });
  if (at !== flat.length) throw new DecodeError(`${name}: the lengths leave ${flat.length - at} numbers over`);
  return result;
}
