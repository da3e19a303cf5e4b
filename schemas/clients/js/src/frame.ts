/** The outermost layer of an experience body: frame, checksum, compression. */
import { ZSTDDecoder } from "zstddec";

import { crc32c } from "./crc32c.js";
import { DecodeError } from "./errors.js";

const FRAME_BYTES = 24;
const CHECKED_FROM = 12;
const MAGIC = 0x58514d54; // "TMQX"
const VERSION = 1;
const FLAG_ZSTD = 1;

/** What a compressed body may grow to: this many times its size, and some more for very short ones. */
const MAX_GROWTH = 32;
const GROWTH_ALLOWANCE = 64 * 1024;
/** The decompressor's memory is 32 bit; a message of 16 MiB, a broker's limit, cannot grow to more. */
const MAX_CONTENT = 1 << 29;

const ZSTD_MAGIC = 0xfd2fb528;

const zstd = new ZSTDDecoder();
await zstd.init();

if (new Uint8Array(new Uint16Array([1]).buffer)[0] !== 1) {
  throw new Error("trinity-mq-client reads little-endian arrays in place and does not run on a big-endian machine");
}

export interface Content {
  /** The msgpack map. */
  readonly head: Uint8Array;
  /** The safetensors blob, which starts at a multiple of 8 in its buffer. */
  readonly tail: Uint8Array;
}

/** Return head and tail of a body, after all checks that need no parsing of them. */
export function openFrame(body: Uint8Array): Content {
  if (body.length < FRAME_BYTES) {
    throw new DecodeError(`${body.length} bytes, wanted an experience body of at least ${FRAME_BYTES}`);
  }
  const view = new DataView(body.buffer, body.byteOffset, body.byteLength);
  const flags = view.getUint8(5);
  if (view.getUint32(0, true) !== MAGIC) {
    throw new DecodeError(`the body starts with 0x${hex(view.getUint32(0))}, wanted "TMQX": not an experience body`);
  }
  if (view.getUint8(4) !== VERSION) {
    throw new DecodeError(`experience body of version ${view.getUint8(4)}, this package reads version ${VERSION}`);
  }
  if ((flags & ~FLAG_ZSTD) !== 0 || view.getUint16(6, true) !== 0) {
    throw new DecodeError(`unknown flags ${flags}, ${view.getUint16(6, true)}; a newer package may read this body`);
  }
  const headLength = view.getUint32(12, true);
  const tailStart = headLength + (-headLength & 7);
  const size = tailStart + Number(view.getBigUint64(16, true));
  if (flags === 0 && FRAME_BYTES + size !== body.length) {
    throw new DecodeError(
      `${body.length} bytes, wanted ${FRAME_BYTES + size}: head of ${headLength}, tail of ${size - tailStart}; ` +
        "cut short or followed by something else",
    );
  }
  const found = crc32c(body.subarray(CHECKED_FROM));
  if (found !== view.getUint32(8, true)) {
    const wanted = hex(view.getUint32(8, true));
    throw new DecodeError(`checksum 0x${hex(found)}, wanted 0x${wanted}: the body was damaged on its way`);
  }
  const sent = body.subarray(FRAME_BYTES);
  const content = flags === FLAG_ZSTD ? decompress(sent, size) : sent;
  return { head: content.subarray(0, headLength), tail: aligned(content.subarray(tailStart)) };
}

function hex(value: number): string {
  return value.toString(16).padStart(8, "0");
}

/** Return `bytes`, copied only if typed arrays cannot lie on them where they are. */
function aligned(bytes: Uint8Array): Uint8Array {
  return bytes.byteOffset % 8 === 0 ? bytes : new Uint8Array(bytes);
}

function decompress(sent: Uint8Array, size: number): Uint8Array {
  const limit = Math.min(MAX_GROWTH * sent.length + GROWTH_ALLOWANCE, MAX_CONTENT);
  if (size > limit) {
    throw new DecodeError(`${sent.length} compressed bytes claim to be ${size}, wanted at most ${limit}`);
  }
  const claimed = contentSize(sent);
  if (claimed !== size) {
    throw new DecodeError(`a zstd frame of ${claimed} bytes, wanted ${size}, what the lengths of head and tail make`);
  }
  const unsound = `${sent.length} bytes are not one sound zstd frame of ${size} bytes`;
  let content: Uint8Array;
  try {
    // writes at most `size` bytes; where the frame is unsound it returns fewer
    content = size === 0 ? new Uint8Array() : zstd.decode(sent, size);
  } catch (error) {
    throw new DecodeError(unsound, { cause: error });
  }
  if (content.length !== size) throw new DecodeError(unsound);
  return content;
}

/** Return the content size that the header of a zstd frame gives (RFC 8878, section 3.1.1.1). */
function contentSize(sent: Uint8Array): number {
  const view = new DataView(sent.buffer, sent.byteOffset, sent.byteLength);
  if (sent.length < 6 || view.getUint32(0, true) !== ZSTD_MAGIC) {
    throw new DecodeError(`${sent.length} bytes that are no zstd frame, though the flags say so`);
  }
  const descriptor = view.getUint8(4);
  const singleSegment = (descriptor >> 5) & 1;
  const at = 5 + (singleSegment ? 0 : 1) + [0, 1, 2, 4][descriptor & 3];
  const width = descriptor >> 6 === 0 ? singleSegment : 1 << (descriptor >> 6);
  if (width === 0) throw new DecodeError("the zstd frame does not say how long its content is");
  if (at + width > sent.length) throw new DecodeError(`a zstd frame cut short: ${sent.length} bytes`);
  if (width === 1) return view.getUint8(at);
  if (width === 2) return view.getUint16(at, true) + 256;
  return width === 4 ? view.getUint32(at, true) : Number(view.getBigUint64(at, true));
}
