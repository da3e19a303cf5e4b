/** Bodies written by hand from the layout, for what no sound writer makes. */
import { encode } from "@msgpack/msgpack";

import { crc32c } from "../../dist/crc32c.js";

/** Return a copy of `body` with the checksum that its bytes have. */
export function sealed(body) {
  const copy = Uint8Array.from(body);
  new DataView(copy.buffer).setUint32(8, crc32c(copy.subarray(12)), true);
  return copy;
}

/** Return the bytes of a row of numbers. */
export function packed(type, ...values) {
  return new Uint8Array(new type(values).buffer);
}

/** Return a body of the msgpack bytes `head` and the bytes `tail`; `zstd` wraps both in a zstd frame. */
export function framed(head, tail, { zstd = null } = {}) {
  const padding = -head.length & 7;
  const content = Buffer.concat([head, new Uint8Array(padding), tail]);
  const frame = Buffer.alloc(24);
  frame.write("TMQX");
  frame[4] = 1;
  frame[5] = zstd ? 1 : 0;
  frame.writeUInt32LE(head.length, 12);
  frame.writeBigUInt64LE(BigInt(tail.length), 16);
  return sealed(Buffer.concat([frame, zstd ? zstd(content) : content]));
}

/** Return a safetensors blob of `[name, dtype, shape, bytes]` entries; `text` overrides its header. */
export function tailOf(entries, text = null) {
  let offset = 0;
  const header = {};
  for (const [name, dtype, shape, bytes] of entries) {
    header[name] = { dtype, shape, data_offsets: [offset, offset + bytes.length] };
    offset += bytes.length;
  }
  const json = Buffer.from(text ?? JSON.stringify(header));
  const padded = Buffer.concat([json, Buffer.alloc(-json.length & 7, " ")]);
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(padded.length));
  return Buffer.concat([size, padded, ...entries.map((entry) => entry[3])]);
}

/** Return head and tail entries of two single-turn experiences of 3 and 2 tokens, to be changed before writing. */
export function sample() {
  const lengths = (...values) => packed(Int32Array, ...values);
  return {
    head: {
      n: 2,
      columns: {
        experience_type: { c: "single_turn" },
        prompt_length: { c: 1 },
        reward: { f: packed(Float64Array, 0.5, 0), n: Uint8Array.of(0, 1) },
        "eid.batch": { c: 1 },
        "eid.task": { c: "t" },
        "eid.run": { i: packed(BigInt64Array, 0n, 1n) },
        "eid.step": { c: 0 },
        "eid.suffix": { s: Buffer.from("ab"), l: lengths(1, 1) },
      },
      tensors: {
        tokens: { field: "tokens", lengths: lengths(3, 2) },
        action_mask: { field: "action_mask", lengths: lengths(2, 1) },
      },
    },
    tail: [
      ["tokens", "I32", [5], packed(Int32Array, 1, 2, 3, 4, 5)],
      ["action_mask", "BOOL", [3], Uint8Array.of(1, 0, 1)],
    ],
  };
}

/** Return {@link sample} as a body, after `change` has had its way with it. */
export function bodyOf(change = () => undefined, options = {}) {
  const parts = sample();
  change(parts);
  return framed(encode(parts.head), tailOf(parts.tail), options);
}

/** Return a zstd frame that holds `content` as it is, in blocks that are not compressed. */
export function storedZstd(content) {
  const blocks = [Buffer.from([0x28, 0xb5, 0x2f, 0xfd, 0xa0]), packed(Uint32Array, content.length)];
  for (let at = 0; at < content.length; at += 1 << 17) {
    const block = content.subarray(at, at + (1 << 17));
    const last = at + block.length === content.length ? 1 : 0;
    blocks.push(packed(Uint32Array, (block.length << 3) | last).subarray(0, 3), block);
  }
  return Buffer.concat(blocks);
}
