/**
 * A strict msgpack reader.
 *
 * The usual library lets malformed UTF-8 and repeated keys pass and allocates what an array claims to hold; bodies come
 * from a network, so here each of these is a DecodeError. Whole numbers are `number` where that is exact, else
 * `bigint`.
 */
import { DecodeError, short } from "./errors.js";

/** A whole number: `bigint` only beyond 2^53 - 1 in size. */
export type Int = number | bigint;

/** A msgpack timestamp, kept whole: a Date would drop what is below a millisecond. */
export class Timestamp {
  constructor(
    readonly seconds: Int,
    readonly nanoseconds: number,
  ) {}
}

export const MAX_NESTING = 64;
export const MAX_CONTAINERS = 1 << 18;

/** How many lists and maps the documents of one body may still hold: each costs far more memory than its one byte. */
export class Budget {
  #left = MAX_CONTAINERS;

  spend(): void {
    if (--this.#left < 0) throw new DecodeError(`more than ${MAX_CONTAINERS} lists and maps in one body`);
  }
}

export type Extension = (code: number, payload: Uint8Array) => unknown;

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const LARGEST = BigInt(Number.MAX_SAFE_INTEGER);

/** Return `value` as a number where that is exact. */
export function toInt(value: bigint): Int {
  return value >= -LARGEST && value <= LARGEST ? Number(value) : value;
}

/** Return the text in `bytes`, `name` being what it is for errors. */
export function decodeUtf8(bytes: Uint8Array, name: string): string {
  try {
    return UTF8.decode(bytes);
  } catch (error) {
    throw new DecodeError(`${name}: ${bytes.length} bytes that are not UTF-8`, { cause: error });
  }
}

function noExtension(code: number, payload: Uint8Array): never {
  throw new DecodeError(`unknown msgpack extension ${code} of ${payload.length} bytes`);
}

/**
 * Return the value in exactly one msgpack document. Binary values are views into `data`.
 *
 * @throws DecodeError for anything else than one well-formed document of text-keyed maps, at most 64 levels deep
 */
export function unpack(data: Uint8Array, budget = new Budget(), extension: Extension = noExtension): unknown {
  const reader = new Reader(data, budget, extension);
  const value = reader.value(0);
  if (reader.position !== data.length) {
    throw new DecodeError(`a msgpack document of ${reader.position} bytes is followed by more: ${data.length} in all`);
  }
  return value;
}

class Reader {
  position = 0;
  readonly #view: DataView;

  constructor(
    readonly data: Uint8Array,
    readonly budget: Budget,
    readonly extension: Extension,
  ) {
    this.#view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  value(depth: number): unknown {
    const byte = this.#view.getUint8(this.#take(1));
    if (byte < 0x80) return byte;
    if (byte < 0x90) return this.#map(byte & 0x0f, depth);
    if (byte < 0xa0) return this.#array(byte & 0x0f, depth);
    if (byte < 0xc0) return this.#text(byte & 0x1f);
    if (byte >= 0xe0) return byte - 0x100;
    switch (byte) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return this.#bytes(this.#length(byte - 0xc4));
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return this.#extended(this.#length(byte - 0xc7));
      case 0xca:
        return this.#view.getFloat32(this.#take(4));
      case 0xcb:
        return this.#view.getFloat64(this.#take(8));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return this.#length(byte - 0xcc);
      case 0xcf:
        return toInt(this.#view.getBigUint64(this.#take(8)));
      case 0xd0:
        return this.#view.getInt8(this.#take(1));
      case 0xd1:
        return this.#view.getInt16(this.#take(2));
      case 0xd2:
        return this.#view.getInt32(this.#take(4));
      case 0xd3:
        return toInt(this.#view.getBigInt64(this.#take(8)));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return this.#extended(1 << (byte - 0xd4));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.#text(this.#length(byte - 0xd9));
      case 0xdc:
      case 0xdd:
        return this.#array(this.#length(byte - 0xdb), depth);
      case 0xde:
      case 0xdf:
        return this.#map(this.#length(byte - 0xdd), depth);
      default:
        throw new DecodeError(`byte 0xc1 at ${this.position - 1}, which no msgpack document has`);
    }
  }

  /** Return where the next `count` bytes start and step over them. */
  #take(count: number): number {
    const start = this.position;
    if (count > this.data.length - start) {
      throw new DecodeError(
        `a msgpack document is cut short: ${count} bytes wanted at ${start} of ${this.data.length}`,
      );
    }
    this.position = start + count;
    return start;
  }

  /** Return an unsigned number of 1, 2 or 4 bytes. */
  #length(width: number): number {
    if (width === 0) return this.#view.getUint8(this.#take(1));
    return width === 1 ? this.#view.getUint16(this.#take(2)) : this.#view.getUint32(this.#take(4));
  }

  #bytes(count: number): Uint8Array {
    const start = this.#take(count);
    return this.data.subarray(start, start + count);
  }

  #text(count: number): string {
    return decodeUtf8(this.#bytes(count), "a text");
  }

  /** Check what a container claims before anything is made for it. */
  #enter(items: number, depth: number): void {
    if (depth >= MAX_NESTING) throw new DecodeError(`nested deeper than ${MAX_NESTING} levels`);
    if (items > this.data.length - this.position) {
      const left = this.data.length - this.position;
      throw new DecodeError(`a list or map claims ${items} items where ${left} bytes are left`);
    }
    this.budget.spend();
  }

  #array(count: number, depth: number): unknown[] {
    this.#enter(count, depth);
    const items: unknown[] = [];
    for (let number = 0; number < count; number++) items.push(this.value(depth + 1));
    return items;
  }

  #map(count: number, depth: number): Record<string, unknown> {
    this.#enter(2 * count, depth);
    const map: Record<string, unknown> = {};
    for (let number = 0; number < count; number++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw new DecodeError(`a map has the key ${short(key)}, wanted text`);
      if (Object.hasOwn(map, key)) throw new DecodeError(`a map has the key ${short(key)} twice`);
      put(map, key, this.value(depth + 1));
    }
    return map;
  }

  #extended(count: number): unknown {
    const code = this.#view.getInt8(this.#take(1));
    const payload = this.#bytes(count);
    return code === -1 ? timestamp(payload) : this.extension(code, payload);
  }
}

/** Set a key of a map that came from outside: `__proto__` is a key like any other. */
export function put<T>(map: Record<string, T>, key: string, value: T): void {
  if (key === "__proto__") {
    Object.defineProperty(map, key, { value, enumerable: true, configurable: true, writable: true });
  } else {
    map[key] = value;
  }
}

function timestamp(payload: Uint8Array): Timestamp {
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  if (payload.length === 4) return new Timestamp(view.getUint32(0), 0);
  if (payload.length === 8) {
    const both = view.getBigUint64(0);
    return checkedTime(Number(both & 0x3ffffffffn), Number(both >> 34n));
  }
  if (payload.length === 12) return checkedTime(toInt(view.getBigInt64(4)), view.getUint32(0));
  throw new DecodeError(`a timestamp of ${payload.length} bytes, wanted 4, 8 or 12`);
}

function checkedTime(seconds: Int, nanoseconds: number): Timestamp {
  if (nanoseconds >= 1e9)
    throw new DecodeError(`a timestamp with ${nanoseconds} nanoseconds, wanted less than a second`);
  return new Timestamp(seconds, nanoseconds);
}
