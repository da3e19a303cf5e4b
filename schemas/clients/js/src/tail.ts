/** The tail of an experience body: a safetensors blob, read as views into it. */
import { DecodeError, short } from "./errors.js";
import { decodeUtf8 } from "./msgpack.js";
import { DTYPES, type Dtype, Tensor } from "./tensors.js";

const MAX_HEADER_BYTES = 1 << 20;
const MAX_DIMENSIONS = 16;
const LENGTH_BYTES = 8;

const NAMES: Readonly<Record<string, Dtype>> = {
  F64: "float64",
  F32: "float32",
  F16: "float16",
  BF16: "bfloat16",
  F8_E4M3: "float8_e4m3fn",
  F8_E5M2: "float8_e5m2",
  I64: "int64",
  I32: "int32",
  I16: "int16",
  I8: "int8",
  U64: "uint64",
  U32: "uint32",
  U16: "uint16",
  U8: "uint8",
  BOOL: "bool",
};

/** Return the tensors in `blob`, which starts at a multiple of 8 in its buffer. */
export function readTail(blob: Uint8Array): Map<string, Tensor> {
  if (blob.length < LENGTH_BYTES) throw new DecodeError(`tail: ${blob.length} bytes, wanted a safetensors blob`);
  const size = new DataView(blob.buffer, blob.byteOffset).getBigUint64(0, true);
  if (size > BigInt(Math.min(MAX_HEADER_BYTES, blob.length - LENGTH_BYTES)) || size % 8n !== 0n) {
    throw new DecodeError(
      `tail: a header of ${size} bytes in ${blob.length}, wanted at most ${MAX_HEADER_BYTES}, a multiple of 8`,
    );
  }
  const start = LENGTH_BYTES + Number(size);
  const header = readHeader(decodeUtf8(blob.subarray(LENGTH_BYTES, start), "tail: the safetensors header"));
  const data = blob.subarray(start);
  const tensors = new Map<string, Tensor>();
  let covered = 0;
  const inPlace = Object.entries(header).map(([name, entry]) => checked(name, entry));
  for (const { name, dtype, shape, begin, end } of inPlace.sort((a, b) => a.begin - b.begin || a.end - b.end)) {
    if (begin !== covered || end > data.length) {
      throw new DecodeError(
        `tail: ${short(name)} is at ${begin} to ${end} of ${data.length}, wanted from ${covered} on`,
      );
    }
    covered = end;
    tensors.set(name, view(name, dtype, shape, data, begin));
  }
  if (covered !== data.length) throw new DecodeError(`tail: ${data.length - covered} bytes belong to no tensor`);
  return tensors;
}

function readHeader(text: string): Record<string, unknown> {
  let header: unknown;
  try {
    header = JSON.parse(text);
  } catch (error) {
    throw new DecodeError("tail: the safetensors header is not JSON", { cause: error });
  }
  if (typeof header !== "object" || header === null || Array.isArray(header)) {
    throw new DecodeError(`tail: the safetensors header is ${short(header)}, wanted a map`);
  }
  refuseRepeatedKeys(text);
  return header as Record<string, unknown>;
}

/** JSON.parse takes the last of two equal keys without a word. `text` is known to be JSON. */
function refuseRepeatedKeys(text: string): void {
  const open: Set<string>[] = [];
  let string = "";
  for (const [token] of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*"|[{}:]/g)) {
    if (token === "{") {
      open.push(new Set());
    } else if (token === "}") {
      open.pop();
    } else if (token !== ":") {
      string = token;
    } else {
      const key: string = JSON.parse(string);
      const keys = open[open.length - 1];
      if (keys.has(key)) throw new DecodeError(`tail: the safetensors header has the key ${short(key)} twice`);
      keys.add(key);
    }
  }
}

interface Entry {
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly begin: number;
  readonly end: number;
}

function checked(name: string, value: unknown): Entry {
  const entry = (typeof value === "object" && value !== null ? value : {}) as Record<string, unknown>;
  const dtype = typeof entry.dtype === "string" && Object.hasOwn(NAMES, entry.dtype) ? NAMES[entry.dtype] : undefined;
  const { shape, data_offsets: offsets } = entry;
  if (!dtype || !areNaturals(shape) || shape.length > MAX_DIMENSIONS || !areNaturals(offsets) || offsets.length !== 2) {
    throw new DecodeError(`tail: entry ${short(name)} is ${short(value)}, wanted dtype, shape and data_offsets`);
  }
  const [begin, end] = offsets;
  const bytes = shape.reduce((count, dimension) => count * dimension, DTYPES[dtype].bytes);
  if (end - begin !== bytes || begin % DTYPES[dtype].bytes !== 0 || shape.some((dimension) => dimension >= 2 ** 31)) {
    throw new DecodeError(
      `tail: entry ${short(name)} of ${dtype} and shape [${shape.join(", ")}] is at ${begin} to ${end}, ` +
        `wanted ${bytes} aligned bytes`,
    );
  }
  return { name, dtype, shape, begin, end };
}

function areNaturals(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((item) => Number.isSafeInteger(item) && item >= 0);
}

function view(name: string, dtype: Dtype, shape: readonly number[], data: Uint8Array, begin: number): Tensor {
  const count = shape.reduce((product, dimension) => product * dimension, 1);
  const values = DTYPES[dtype].view(data.buffer, data.byteOffset + begin, count);
  if (dtype === "bool" && (values as Uint8Array).some((value) => value > 1)) {
    throw new DecodeError(`tail: entry ${short(name)} holds booleans other than 0 and 1`);
  }
  return new Tensor(dtype, shape, values);
}
