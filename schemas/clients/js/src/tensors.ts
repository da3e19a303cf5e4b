/** Tensors as typed arrays, and columns of them. */
import { DecodeError } from "./errors.js";

export type TypedArray =
  | Float64Array
  | Float32Array
  | BigInt64Array
  | BigUint64Array
  | Int32Array
  | Uint32Array
  | Int16Array
  | Uint16Array
  | Int8Array
  | Uint8Array;

interface Kind {
  readonly bytes: number;
  readonly view: (buffer: ArrayBufferLike, offset: number, count: number) => TypedArray;
}

function kind<T extends TypedArray>(type: {
  new (buffer: ArrayBufferLike, offset: number, count: number): T;
  readonly BYTES_PER_ELEMENT: number;
}): Kind {
  return { bytes: type.BYTES_PER_ELEMENT, view: (buffer, offset, count) => new type(buffer, offset, count) };
}

/** Element types by name. JavaScript has no arrays of 8 and 16 bit floats: they come as their raw bits. */
export const DTYPES = {
  float64: kind(Float64Array),
  float32: kind(Float32Array),
  float16: kind(Uint16Array),
  bfloat16: kind(Uint16Array),
  float8_e4m3fn: kind(Uint8Array),
  float8_e5m2: kind(Uint8Array),
  int64: kind(BigInt64Array),
  int32: kind(Int32Array),
  int16: kind(Int16Array),
  int8: kind(Int8Array),
  uint64: kind(BigUint64Array),
  uint32: kind(Uint32Array),
  uint16: kind(Uint16Array),
  uint8: kind(Uint8Array),
  bool: kind(Uint8Array),
} as const satisfies Record<string, Kind>;

export type Dtype = keyof typeof DTYPES;

/** A dense tensor in row-major order; `data` is a view into the received or decompressed bytes where they allow it. */
export class Tensor {
  constructor(
    readonly dtype: Dtype,
    readonly shape: readonly number[],
    readonly data: TypedArray,
    /** What the writer had in a document: a numpy array or a torch tensor. */
    readonly origin: "torch" | "numpy" = "torch",
  ) {}
}

/** One tensor per experience, those of one dtype and trailing shape in a row. */
export class TensorColumn {
  constructor(
    readonly dtype: Dtype,
    /** All elements, one experience after the other. */
    readonly data: TypedArray,
    /** Rows (the first dimension) of each experience, -1 where it has no such tensor. */
    readonly lengths: Int32Array,
    /** Where in `data` the elements of each experience start; one more entry says where the last ones end. */
    readonly offsets: Uint32Array,
    /** The dimensions after the first. */
    readonly trailing: readonly number[],
    /** True if each tensor has no dimension at all. */
    readonly scalar: boolean,
  ) {}

  /** Whether experience `index` has a tensor here. */
  has(index: number): boolean {
    return this.lengths[index] >= 0;
  }

  /** The tensor of experience `index`, a view; null if it has none. */
  at(index: number): Tensor | null {
    if (!this.has(index)) return null;
    const data = this.data.subarray(this.offsets[index], this.offsets[index + 1]);
    return new Tensor(this.dtype, this.scalar ? [] : [this.lengths[index], ...this.trailing], data);
  }
}

/** Cut a concatenated tensor into a column, after checking that the lengths make it up. */
export function column(name: string, flat: Tensor, lengths: Int32Array, scalar: boolean): TensorColumn {
  const [rows, ...trailing] = flat.shape;
  const width = trailing.reduce((size, dimension) => size * dimension, 1);
  const offsets = new Uint32Array(lengths.length + 1);
  let seen = 0;
  for (let index = 0; index < lengths.length; index++) {
    const length = lengths[index];
    if (length < -1 || (scalar && length > -1 && length !== 1)) {
      throw new DecodeError(
        `${name}: a length of ${length}, wanted ${scalar ? "1 for a scalar" : "0 or more"}, -1 for none`,
      );
    }
    if (length > 0) seen += length;
    if (seen > rows) break;
    offsets[index + 1] = seen * width;
  }
  if (flat.shape.length === 0 || seen !== rows || (scalar && flat.shape.length !== 1)) {
    throw new DecodeError(`${name}: the lengths do not make up shape [${flat.shape.join(", ")}]`);
  }
  return new TensorColumn(flat.dtype, flat.data, lengths, offsets, trailing, scalar);
}

/**
 * Return the elements of a tensor or column as 32 bit floats, whatever their type.
 *
 * float32 comes back as it is, a view; all others are converted (int64, uint64 and float64 lose what does not fit).
 */
export function toFloat32(tensor: { readonly dtype: Dtype; readonly data: TypedArray }): Float32Array {
  const { dtype, data } = tensor;
  if (data instanceof Float32Array) return data;
  if (data instanceof BigInt64Array || data instanceof BigUint64Array) return Float32Array.from(data, Number);
  if (dtype === "bfloat16") {
    const bits = new Uint32Array(data.length);
    for (let index = 0; index < bits.length; index++) bits[index] = data[index] << 16;
    return new Float32Array(bits.buffer);
  }
  const small = SMALL_FLOATS[dtype];
  if (small === undefined) return Float32Array.from(data);
  const result = new Float32Array(data.length);
  for (let index = 0; index < result.length; index++) result[index] = small(data[index]);
  return result;
}

/** Return a reader of floats with one sign bit, `exponent` and `mantissa` bits. */
function smallFloat(exponent: number, mantissa: number, finite: boolean): (bits: number) => number {
  const bias = (1 << (exponent - 1)) - 1;
  const highest = (1 << exponent) - 1;
  const one = 1 << mantissa;
  return (bits) => {
    const sign = bits >> (exponent + mantissa) ? -1 : 1;
    const power = (bits >> mantissa) & highest;
    const fraction = bits & (one - 1);
    if (power === highest && !finite) return fraction ? NaN : sign * Infinity;
    if (power === highest && fraction === one - 1) return NaN;
    return sign * (power === 0 ? fraction / one : 1 + fraction / one) * 2 ** (Math.max(power, 1) - bias);
  };
}

const SMALL_FLOATS: Partial<Record<Dtype, (bits: number) => number>> = {
  float16: smallFloat(5, 10, false),
  float8_e5m2: smallFloat(5, 2, false),
  float8_e4m3fn: smallFloat(4, 3, true), // no infinities: only all ones is special, and is NaN
};
